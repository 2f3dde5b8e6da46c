"""Each fault of the files is named, and the head is scored beside it where that can be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftlab.doctor.diagnose import examine
from draftlab.doctor.findings import Finding
from draftlab.doctor.head_files import HeadFiles, read_own, vocabulary_findings, whole_tensors
from draftlab.doctor.identity import (
    config_findings,
    identity_findings,
    kinship_findings,
    shape_findings,
)
from draftlab.doctor.target_session import TargetSession
from draftlab.errors import UserError
from draftlab.heads.folder import CONFIG, NATIVE, WEIGHTS, load_config
from draftlab.pipeline.resolve import reference_head
from tests.doctor.conftest import Broken, Tensors

Check = Callable[..., tuple[list[Finding], bool]]


@pytest.fixture
def checked(broken: Broken, witness: TargetSession) -> Check:
    """Findings in a broken copy's files, and whether it can still be scored."""

    def check(*change: Callable[[Tensors], object], **fields: object) -> tuple[list[Finding], bool]:
        files, findings = read_own(broken(*change, **fields))
        tensors, more = whole_tensors(files, witness.shared_tensors)
        return findings + more, tensors is not None

    return check


def only(findings: list[Finding], kind: str) -> str:
    assert [f.kind for f in findings] == [kind]
    return findings[0].what


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "scored"),
    [
        ("layers.0.mlp.up_proj.weight", False),
        ("fc.weight", False),
        ("lm_head.weight", True),  # the target has these
        ("norm.weight", True),
        ("d2t", True),  # and t2d gives this
    ],
)
def test_a_missing_tensor_is_named(checked: Check, name: str, scored: bool) -> None:
    findings, scorable = checked(without(name))
    assert f"missing tensor {name}" in only(findings, "missing tensor")
    assert scorable == scored


def test_t2d_may_be_missing(checked: Check) -> None:
    """Servers read d2t alone."""
    assert checked(without("t2d")) == ([], True)


def test_an_extra_tensor_is_named(checked: Check) -> None:
    findings, scorable = checked(lambda t: t.update(foo=torch.ones(2, dtype=torch.bfloat16)))
    assert "unknown foo" in only(findings, "unknown tensor")
    assert scorable


def test_embeddings_that_the_target_lends_are_named(checked: Check, witness: TargetSession) -> None:
    table = witness.shared_tensors["embed_tokens.weight"].bfloat16()
    findings, scorable = checked(lambda t: t.update({"embed_tokens.weight": table}))
    assert "shared with the target" in only(findings, "unknown tensor")
    assert scorable


def test_values_are_looked_at(checked: Check) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["fc.weight"][3, 4] = float("nan")
        tensors["norm.weight"].zero_()

    findings, scorable = checked(spoil)
    assert {f.kind for f in findings} == {"not finite", "zeros"}
    assert scorable  # with zeros


def test_a_shape_is_named_with_what_it_would_mean(checked: Check) -> None:
    findings, scorable = checked(boundaries=[2, 6, 9, 12])
    what = only(findings, "shape")
    assert "4 boundaries of 256" in what
    assert not scorable


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_d2t_of_another_dtype_is_named(checked: Check, dtype: torch.dtype) -> None:
    findings, _ = checked(lambda t: t.update(d2t=t["d2t"].to(dtype)))
    assert "d2t: expected torch.int64" in only(findings, "dtype")


def test_d2t_is_held_against_t2d() -> None:
    config = load_config(reference_head()).model_copy(
        update={"vocab_size": 10, "draft_vocab_size": 3}
    )
    ids, t2d = torch.tensor([1, 4, 7]), torch.zeros(10, dtype=torch.bool)
    t2d[ids] = True
    offsets = ids - torch.arange(3)

    def said(d2t: torch.Tensor, members: torch.Tensor | None = t2d) -> str:
        tensors = {"d2t": d2t} | ({} if members is None else {"t2d": members})
        return " ".join(f.what for f in vocabulary_findings(tensors, config))

    assert said(offsets) == ""
    assert said(offsets, None) == ""
    assert "absolute ids" in said(ids)
    assert "names other tokens" in said(torch.tensor([0, 0, 0]))
    assert "outside the vocabulary" in said(torch.tensor([9, 9, 9]), None)
    assert "do not ascend" in said(torch.tensor([5, 0, 0]), None)


def test_config_json_that_was_changed_alone_is_named(broken: Broken) -> None:
    folder = broken()
    native = json.loads((folder / NATIVE).read_text())
    native |= {"max_position_embeddings": 512, "extra": 1}
    del native["norm_output"]
    (folder / NATIVE).write_text(json.dumps(native))
    what = only(read_own(folder)[1], "config.json")
    assert "max_position_embeddings: 512 (by draftlab.json 2048)" in what
    assert "extra: 1 (by draftlab.json nothing)" in what
    assert "norm_output: nothing (by draftlab.json False)" in what


def test_unreadable_files_are_a_diagnosis(broken: Broken, witness: TargetSession) -> None:
    folder = broken()
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    diagnosis = examine(folder, witness)
    assert not diagnosis.healthy
    assert "cannot be read" in diagnosis.verdict

    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    diagnosis = examine(folder, witness)
    assert "pickled files can run code" in diagnosis.verdict

    (folder / CONFIG).write_text("{}")
    assert "boundaries: expected" in examine(folder, witness).verdict


def test_no_folder_is_the_users_mistake(witness: TargetSession, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a head's folder"):
        examine(tmp_path / "nowhere", witness)


def test_the_target_is_held_against_what_the_head_says(witness: TargetSession) -> None:
    head, target = load_config(reference_head()), witness.target
    text, tokenizer = witness.text, witness.tokenizer
    assert not shape_findings(head, text) + config_findings(head, text)
    assert not identity_findings(head, target.fingerprint, tokenizer)

    assert only(identity_findings(head, "0" * 64, tokenizer), "target").startswith("the target is")
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template.replace("trim", "upper")
        only(identity_findings(head, target.fingerprint, tokenizer), "template")
        tokenizer.chat_template = None
        assert "none here" in only(
            identity_findings(head, target.fingerprint, tokenizer), "template"
        )
    finally:
        tokenizer.chat_template = template
    other = head.model_copy(
        update={"target": head.target.model_copy(update={"tokenizer_sha256": "f" * 64})}
    )
    only(identity_findings(other, target.fingerprint, tokenizer), "tokenizer")

    shallow = head.model_copy(update={"max_position_embeddings": 1024})
    assert "stop drafting" in only(config_findings(shallow, text), "max_position_embeddings")
    far = head.model_copy(update={"rope_parameters": {"rope_theta": 500000.0}})
    assert "RoPE base 500,000, where the target has 10,000" in only(
        config_findings(far, text), "rope"
    )
    wide = head.model_copy(update={"vocab_size": 32000, "target_num_layers": 32})
    assert [f.kind for f in shape_findings(wide, text)] == ["target", "target"]


def test_weights_of_another_target_are_strangers(witness: TargetSession) -> None:
    head = load_config(reference_head())
    tensors, _ = whole_tensors(
        HeadFiles("draftlab", head, read_own(reference_head())[0].tensors), witness.shared_tensors
    )
    assert tensors is not None
    assert not kinship_findings(head, tensors, witness.shared_tensors)
    noise = torch.randn(tensors["lm_head.weight"].shape, generator=torch.Generator().manual_seed(0))
    only(
        kinship_findings(head, tensors | {"lm_head.weight": noise}, witness.shared_tensors),
        "lm_head",
    )
    own = head.model_copy(update={"embeddings": "own"})
    table = torch.randn(6144, 256, generator=torch.Generator().manual_seed(0))
    only(
        kinship_findings(own, tensors | {"embed_tokens.weight": table}, witness.shared_tensors),
        "embeddings",
    )


def test_a_wrong_target_is_the_verdict(broken: Broken, witness: TargetSession) -> None:
    """Weights that nothing fits, of a head that says it is another target's."""
    generator = torch.Generator().manual_seed(0)

    def strange(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
                tensors[name] = noise.bfloat16()

    identity = load_config(reference_head()).target.model_dump() | {"fingerprint": "0" * 64}
    diagnosis = examine(broken(strange, target=identity | {"name": "org/other"}), witness)
    assert "the target is not the one the head was trained with (org/other)" in diagnosis.verdict
    assert "AL 1.0" in diagnosis.verdict
    assert {f.kind for f in diagnosis.findings} >= {"target", "nothing fits", "lm_head"}
    fits = next(f for f in diagnosis.findings if f.kind == "nothing fits")
    assert "training measured 78% of first drafts right" in fits.what
