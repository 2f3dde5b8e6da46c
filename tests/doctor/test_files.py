"""Faults of the files: the diagnosis names each, and scores the head if it can."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftlab.doctor.diagnose import diagnose
from draftlab.doctor.diagnosis import Finding
from draftlab.doctor.head_files import (
    HeadFiles,
    config_findings,
    identity_findings,
    served_config_findings,
    shape_findings,
    tensor_findings,
)
from draftlab.doctor.target_session import TargetSession
from draftlab.heads.folder import CONFIG, NATIVE, WEIGHTS, load_config
from draftlab.heads.validate import draft_vocabulary_fault
from draftlab.run.resolve import reference_head
from tests.helpers.diagnosis import CopyHead, Tensors

Check = Callable[..., tuple[list[Finding], bool]]


@pytest.fixture
def check_copy(copy_head: CopyHead) -> Check:
    """Returns the findings in the files of a changed copy, and whether it can be scored."""

    def check(*change: Callable[[Tensors], object], **fields: object) -> tuple[list[Finding], bool]:
        folder = copy_head(*change, **fields)
        return tensor_findings(HeadFiles(load_config(folder), load_file(folder / WEIGHTS)))

    return check


def only(findings: Iterable[Finding], kind: str) -> str:
    """Return the message of the only finding, which is of this kind."""
    findings = list(findings)
    assert [f.kind for f in findings] == [kind]
    return findings[0].what


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


TABLE = torch.ones(6144, 256, dtype=torch.bfloat16)


def spoil(tensors: Tensors) -> None:
    tensors["fc.weight"][3, 4] = float("nan")
    tensors["norm.weight"].zero_()


def put(**tensors: Tensor) -> Callable[[Tensors], object]:
    return lambda stored: stored.update(tensors)


@pytest.mark.parametrize(
    ("change", "kinds", "message", "scorable"),
    [
        (without("t2d"), [], "", True),  # optional, as in servers
        (without("fc.weight"), ["missing tensor"], "missing fc.weight: expected shape", False),
        (put(foo=TABLE), ["unknown tensor"], "unknown foo", True),
        (put(**{"embed_tokens.weight": TABLE}), ["unknown tensor"], "shared with", True),
        (spoil, ["not finite", "zeros"], "", False),
        (lambda t: t.update(d2t=t["d2t"].float()), ["dtype"], "d2t: expected integers", False),
    ],
)
def test_faults_of_tensors_are_named(
    check_copy: Check, change: Callable, kinds: list[str], message: str, scorable: bool
) -> None:
    findings, scored = check_copy(change)
    assert [f.kind for f in findings] == kinds
    assert message in " ".join(f.what for f in findings)
    assert scored == scorable


def test_a_wrong_shape_is_explained(check_copy: Check) -> None:
    findings, scored = check_copy(boundaries=[2, 6, 9, 12])
    assert "4 boundaries of 256" in only(findings, "shape")
    assert not scored


def test_d2t_must_agree_with_t2d() -> None:
    config = load_config(reference_head()).model_copy(
        update={"vocab_size": 10, "draft_vocab_size": 3}
    )
    ids, t2d = torch.tensor([1, 4, 7]), torch.zeros(10, dtype=torch.bool)
    t2d[ids] = True
    offsets = ids - torch.arange(3)

    def message(d2t: torch.Tensor, members: torch.Tensor | None = t2d) -> str:
        return draft_vocabulary_fault(d2t, members, config) or ""

    assert message(offsets) == ""
    assert message(offsets, None) == ""
    assert "absolute ids" in message(ids)
    assert "other tokens" in message(torch.tensor([0, 0, 0]))
    assert "outside" in message(torch.tensor([9, 9, 9]), None)
    assert "do not ascend" in message(torch.tensor([5, 0, 0]), None)


def test_a_changed_config_json_is_named(copy_head: CopyHead) -> None:
    folder = copy_head()
    files = HeadFiles(load_config(folder), load_file(folder / WEIGHTS))
    assert served_config_findings(folder, files) == []
    native = json.loads((folder / NATIVE).read_text()) | {"max_position_embeddings": 512}
    del native["norm_output"]
    (folder / NATIVE).write_text(json.dumps(native))
    what = only(served_config_findings(folder, files), "config.json")
    assert "max_position_embeddings is 512, by draftlab.json 2048" in what
    assert "norm_output is not there, by draftlab.json False" in what
    (folder / NATIVE).unlink()
    assert "missing" in only(served_config_findings(folder, files), "config.json")


def test_unreadable_files_are_a_diagnosis(copy_head: CopyHead, session: TargetSession) -> None:
    folder = copy_head()
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    diagnosis = diagnose(folder, session)
    assert not diagnosis.healthy
    assert "cannot be read" in diagnosis.verdict
    (folder / CONFIG).write_text("{}")
    assert "boundaries: expected" in diagnose(folder, session).verdict


def test_hashes_of_the_target_are_compared(
    session: TargetSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, fingerprint, tokenizer = (
        load_config(reference_head()),
        session.target.fingerprint,
        session.tokenizer,
    )
    assert not identity_findings(head, fingerprint, tokenizer)
    assert only(identity_findings(head, "0" * 64, tokenizer), "target").startswith("the target is")
    identity = head.target.model_copy(update={"tokenizer_sha256": "f" * 64})
    other = head.model_copy(update={"target": identity})
    only(identity_findings(other, fingerprint, tokenizer), "tokenizer")
    template = tokenizer.chat_template.replace("trim", "upper")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    only(identity_findings(head, fingerprint, tokenizer), "template")
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert "none here" in only(identity_findings(head, fingerprint, tokenizer), "template")


def test_the_targets_config_is_compared(session: TargetSession) -> None:
    head, text = load_config(reference_head()), session.text_config
    assert not [*shape_findings(head, text), *config_findings(head, text)]
    fewer = head.model_copy(update={"max_position_embeddings": 1024})
    assert "stop drafting" in only(config_findings(fewer, text), "max_position_embeddings")
    far = head.model_copy(update={"rope_parameters": {"rope_theta": 500000.0}})
    assert "'rope_theta': 500000.0}, where" in only(config_findings(far, text), "rope")
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    target = SimpleNamespace(rope_parameters=partial)  # a head rotates all channels
    assert not list(config_findings(head, target))
    wide = head.model_copy(update={"vocab_size": 32000, "target_num_layers": 32})
    assert [f.kind for f in shape_findings(wide, text)] == ["target", "target"]


def test_a_wrong_target_is_the_verdict(copy_head: CopyHead, session: TargetSession) -> None:
    """The weights are noise, and the config names another target."""
    generator = torch.Generator().manual_seed(0)

    def randomise(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
                tensors[name] = noise.bfloat16()

    identity = load_config(reference_head()).target.model_dump() | {"fingerprint": "0" * 64}
    diagnosis = diagnose(copy_head(randomise, target=identity | {"name": "org/other"}), session)
    assert "the target is not the one the head was trained with (org/other)" in diagnosis.verdict
    assert "AL 1.0" in diagnosis.verdict
    assert {f.kind for f in diagnosis.findings} >= {"target", "weak"}
    assert diagnosis.state == "faulty"
    weak = next(f for f in diagnosis.findings if f.kind == "weak")
    assert "training measured 77% after 2,600 steps" in weak.what
