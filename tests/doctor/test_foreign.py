"""Heads in other programs' layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftlab.doctor.diagnose import diagnose
from draftlab.doctor.head_files import read_foreign_head
from draftlab.doctor.target_session import TargetSession
from draftlab.run.resolve import reference_head
from tests.helpers.diagnosis import fault_kinds
from tests.helpers.export_toys import export


@pytest.fixture
def exported(tmp_path: Path, session: TargetSession) -> Path:
    return export(
        reference_head(),
        session.target.folder,
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


def test_good_exports_have_no_findings(
    exported: Path, untrained_eagle: Path, session: TargetSession, tmp_path: Path
) -> None:
    """A head of the first generation needs no flags of EAGLE3."""
    eagle = tmp_path / "vllm"
    export(untrained_eagle, session.target.folder, eagle, "vllm", target_name="embedded")
    for folder, shape in ((exported, ("eagle3", (2, 6, 9))), (eagle, ("eagle", (12,)))):
        files, findings = read_foreign_head(folder, session)
        assert not findings
        assert files is not None
        assert (files.config.family, files.config.boundaries) == shape


def test_missing_and_small_values_of_a_config_are_named(
    exported: Path, session: TargetSession
) -> None:
    change(exported, max_position_embeddings=512, vocab_size=6144)
    config = json.loads((exported / "config.json").read_text())
    del config["norm_before_residual"]
    inner = config["transformer_layer_config"]
    for key in ("rope_theta", "rope_parameters"):
        del inner[key]
    (exported / "config.json").write_text(json.dumps(config))
    _, findings = read_foreign_head(exported, session)
    assert [f.kind for f in findings] == ["max_position_embeddings", "norm flags", "rope"]

    change(exported, vocab_size=32000)
    diagnosis = diagnose(exported, session)
    assert "vocab_size 32000, this one has 6144" in diagnosis.verdict
    assert diagnosis.layout == "speculators"  # whatever the target is


def test_an_unknown_key_is_named(exported: Path, session: TargetSession) -> None:
    change(exported, hidden_pooling="mean")
    diagnosis = diagnose(exported, session)
    assert fault_kinds(diagnosis) == ["unreadable"]
    assert "hidden_pooling" in diagnosis.verdict
