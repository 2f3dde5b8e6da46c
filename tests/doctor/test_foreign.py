"""Heads in other programs' layouts are read as those programs read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftlab.doctor.diagnose import examine
from draftlab.doctor.foreign_head import read_other
from draftlab.doctor.target_session import TargetSession
from draftlab.export import write_export
from draftlab.pipeline.resolve import reference_head
from tests.doctor.conftest import kinds


@pytest.fixture
def exported(tmp_path: Path, witness: TargetSession) -> Path:
    return write_export(
        reference_head(),
        witness.target.folder,
        tmp_path / "speculators",
        "speculators",
        target_name="embedded",
    )


def change(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key, value in fields.items():
        inner = config["transformer_layer_config"]
        (inner if key in inner else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def test_ids_that_count_outputs_are_named(exported: Path, witness: TargetSession) -> None:
    change(exported, eagle_aux_hidden_state_layer_ids=[1, 5, 8])
    diagnosis = examine(exported, witness)
    assert diagnosis.layout == "speculators"
    assert kinds(diagnosis) == ["boundaries"]
    assert diagnosis.verdict.startswith("the boundary ids look like outputs of layers; AL ")
    assert diagnosis.verdict.endswith("shifted by one")


def test_a_good_export_has_no_findings(exported: Path, witness: TargetSession) -> None:
    files, findings = read_other(exported, witness)
    assert not findings
    assert files is not None
    assert files.config.boundaries == (2, 6, 9)


def test_what_only_other_families_have_is_not_missed(
    untrained_eagle: Path, witness: TargetSession, tmp_path: Path
) -> None:
    out = tmp_path / "vllm"
    write_export(untrained_eagle, witness.target.folder, out, "vllm", target_name="embedded")
    files, findings = read_other(out, witness)
    assert not findings
    assert files is not None
    assert files.config.family == "eagle"


def test_what_a_config_leaves_out_or_cuts_is_named(exported: Path, witness: TargetSession) -> None:
    change(exported, max_position_embeddings=512, vocab_size=6144)
    config = json.loads((exported / "config.json").read_text())
    del config["norm_before_residual"]
    inner = config["transformer_layer_config"]
    for key in ("rope_theta", "rope_parameters"):
        del inner[key]
    (exported / "config.json").write_text(json.dumps(config))
    _, findings = read_other(exported, witness)
    assert [f.kind for f in findings] == ["max_position_embeddings", "norm flags", "rope"]

    change(exported, vocab_size=32000)
    files, findings = read_other(exported, witness)
    assert files is None
    assert [f.kind for f in findings] == ["target"]


def test_an_unknown_key_is_named(exported: Path, witness: TargetSession) -> None:
    change(exported, hidden_pooling="mean")
    diagnosis = examine(exported, witness)
    assert kinds(diagnosis) == ["unreadable"]
    assert "hidden_pooling" in diagnosis.verdict
