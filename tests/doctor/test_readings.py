"""Each mistake that only scores give away is named, and what undoes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftlab.doctor.diagnose import examine
from draftlab.doctor.findings import Diagnosis
from draftlab.doctor.head_variant import Reading
from draftlab.doctor.hypothesis import About
from draftlab.doctor.input_hypotheses import features
from draftlab.doctor.score import Score, Scorer
from draftlab.doctor.search import Trial
from draftlab.doctor.target_session import TargetSession
from draftlab.doctor.weight_hypotheses import layouts, lifted_mask, masks, sorted_blocks
from draftlab.heads.config import HeadConfig, make_head_config
from draftlab.heads.folder import WEIGHTS, load_config
from draftlab.heads.head import initialise_head
from draftlab.heads.peagle import PeagleHead
from draftlab.pipeline.resolve import reference_head
from tests.doctor.conftest import Broken, Tensors, kinds
from tests.heads.test_llama4_head import SHAPE as LLAMA4
from tests.helpers.head_toys import make_head
from tests.helpers.llama4_reader import half_split, pairs

Examined = Callable[..., Diagnosis]


def lengths(diagnosis: Diagnosis) -> dict[str, float]:
    return {r.name: r.acceptance_length or 1.0 for r in diagnosis.readings}


def test_a_good_head_is_healthy(examined: Examined) -> None:
    diagnosis = examined()
    assert diagnosis.healthy
    assert not diagnosis.findings
    assert "none of" in diagnosis.verdict
    assert lengths(diagnosis)["as stored"] > 1.9
    assert not any(r.better for r in diagnosis.readings)
    assert len(diagnosis.readings) > 12  # and many were tried


@pytest.mark.parametrize(
    ("fields", "kind", "name", "says"),
    [
        ({"boundaries": [3, 7, 10]}, "boundaries", "boundaries − 1", "one too high"),
        (
            {"norm_before_residual": True},
            "norm flags",
            "norm_before_residual: false",
            "norm_before_residual is not",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            "rope",
            "the target's RoPE",
            "RoPE",
        ),
    ],
)
def test_a_wrong_key_is_named(
    examined: Examined, fields: dict[str, Any], kind: str, name: str, says: str
) -> None:
    diagnosis = examined(**fields)
    assert kinds(diagnosis) == [kind]
    assert says in diagnosis.verdict
    al = lengths(diagnosis)
    # The verdict's figures are the table's.
    assert f"AL {al['as stored']:.2f} as stored, {al[name]:.2f}" in diagnosis.verdict
    assert diagnosis.readings[1].name == name
    assert diagnosis.readings[1].better


def interleaved(tensors: Tensors) -> None:
    for name in [f"layers.0.self_attn.{x}_proj.weight" for x in "qk"]:
        halves = tensors[name].unflatten(0, (-1, 2, 16))
        tensors[name] = halves.transpose(1, 2).reshape(tensors[name].shape).contiguous()


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (interleaved, "rope layout", "q and k in interleaved RoPE layout"),
        (absolute, "d2t", "d2t as absolute ids"),
    ],
)
def test_weights_in_another_order_are_named(
    examined: Examined, change: Callable[[Tensors], None], kind: str, name: str
) -> None:
    diagnosis = examined(change)
    assert kinds(diagnosis) == [kind]
    assert diagnosis.readings[1].name == name
    assert lengths(diagnosis)[name] > lengths(diagnosis)["as stored"] + 0.5


def test_two_mistakes_are_both_named(examined: Examined) -> None:
    diagnosis = examined(boundaries=[1, 5, 8], norm_before_residual=True)
    assert kinds(diagnosis) == ["norm flags", "boundaries"]
    assert "more)" not in diagnosis.verdict  # both are told
    al = lengths(diagnosis)
    assert al["norm_before_residual: false, boundaries + 1"] > al["norm_before_residual: false"]


@pytest.mark.parametrize(
    ("shape", "order", "wrong"),
    [({}, pairs, "interleaved"), (LLAMA4, half_split, "half-split")],
)
def test_rows_of_queries_and_keys_are_sorted_as_the_family_rotates_them(
    shape: dict[str, Any], order: Callable[[torch.Tensor, int], torch.Tensor], wrong: str
) -> None:
    head = make_head(**shape)
    tensors, config = dict(head.tensors()), head.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    stored = dict(tensors)
    for name in tensors:
        kind = name.removesuffix(".weight").split(".")[-1]
        if kind in heads:
            stored[name] = order(tensors[name], heads[kind])
    found = [h for h in layouts(Reading(config, stored), None) if h.kind == "rope layout"]  # type: ignore[arg-type]
    assert [h.name for h in found] == [f"q and k in {wrong} RoPE layout"]
    for name, tensor in tensors.items():
        assert torch.equal(found[0].reading.tensors[name], tensor), name


def refitted(witness: TargetSession, boundaries: tuple[int, ...], norm: str) -> torch.Tensor:
    """fc that makes of normed features what the reference head's makes of its own."""
    own = load_config(reference_head())
    evidence = witness.evidence(True, 2)
    tensors = load_file(reference_head() / WEIGHTS)
    wanted = evidence.seen_by(Reading(own, {})).features.flatten(0, 1) @ (
        tensors["fc.weight"].float().T
    )
    other = own.model_copy(update={"boundaries": boundaries})
    fed = evidence.seen_by(Reading(other, {}, norm=norm)).features.flatten(0, 1)  # type: ignore[arg-type]
    fc = torch.linalg.lstsq(fed.double(), wanted.double()).solution.T
    return fc.to(torch.bfloat16).contiguous()


@pytest.mark.parametrize(
    ("boundaries", "norm", "name"),
    [
        ((2, 6, 9), "entered", "features through the norms they enter"),
        ((2, 6, 12), "last", "boundary 12 through the final norm"),
    ],
)
def test_features_of_training_behind_a_norm_are_named(
    examined: Examined, witness: TargetSession, boundaries: tuple[int, ...], norm: str, name: str
) -> None:
    fc = refitted(witness, boundaries, norm)
    diagnosis = examined(lambda t: t.update({"fc.weight": fc}), boundaries=list(boundaries))
    assert kinds(diagnosis)[0] == "features"
    assert diagnosis.readings[1].name == name
    assert "norm" in diagnosis.verdict


def test_a_head_of_plain_text_is_named(
    examined: Examined, witness: TargetSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the head knows stands under "plain text", and chats are answered with noise."""
    known = witness.evidence(True, 2)
    tokens = known.batch.tokens.clone()
    for row, spans in zip(tokens, known.spans, strict=True):
        answer = row[: len(spans)][spans > 0]
        row[: len(spans)][spans > 0] = answer.flip(0)
    noise = replace(known, batch=replace(known.batch, tokens=tokens), states={})
    monkeypatch.setattr(witness, "evidence", lambda template, k: noise if template else known)
    diagnosis = examined()
    assert "template" in kinds(diagnosis)
    assert "plain text" in diagnosis.verdict


def test_features_of_another_position_are_named(
    examined: Examined, witness: TargetSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is right where states are handed over a position late."""
    known = witness.evidence(True, 2)
    known.take((2, 6, 9))
    late = {boundary: state.roll(1, dims=1) for boundary, state in known.states.items()}
    monkeypatch.setattr(witness, "evidence", lambda *asked: replace(known, states=dict(late)))
    diagnosis = examined()
    assert kinds(diagnosis) == ["alignment"]
    assert diagnosis.readings[1].name == "features of the next position"


def test_what_foretells_a_draft_has_to_gain_more() -> None:
    """The last state of the next position all but names the draft: any head likes it a little."""
    stored = score(0.10, -2.0)
    for gain, better in ((0.1, False), (0.6, True)):
        found = score(0.10 + gain, -1.0)
        about = About(12, None, {}, frozenset(), frozenset({True}))
        for hypothesis in features(Reading(parallel(), {}), about):
            trial = Trial(hypothesis.reading, (hypothesis,), found, stored)
            assert trial.better == (better or "next" not in hypothesis.name), hypothesis.name


def score(accepted: float, likelihood: float) -> Score:
    """Of 8 prompts that are all alike."""
    ones = np.ones(8)
    return Score((), 100 * accepted * ones, 200 * likelihood * ones, 100 * ones, k=2)


def parallel(**changed: Any) -> HeadConfig:
    fields = load_config(reference_head()).model_dump(by_alias=True)
    more = {"family": "peagle", "embeddings": "own", "mask_token_id": 6143, "provenance": {}}
    return make_head_config(**(fields | more | changed))


def parallel_tensors(config: HeadConfig, witness: TargetSession) -> Tensors:
    head = PeagleHead(config)
    parts = witness.target.parts
    initialise_head(
        head,
        embeddings=parts.embeddings,
        final_norm=next(parts.norm.parameters()),
        lm_head=parts.lm_head,
        target_ids=torch.arange(config.draft_vocab_size),
        seed=0,
    )
    return {name: tensor.detach().clone() for name, tensor in head.tensors().items()}


def test_a_projected_mask_is_named(witness: TargetSession, broken: Broken) -> None:
    config = parallel()
    tensors = parallel_tensors(config, witness)

    def change(stored: Tensors) -> None:
        stored.clear()
        stored.update(tensors | {"mask_hidden": tensors["mask_hidden"] @ tensors["fc.weight"].T})

    folder = broken(change, **config.model_dump(mode="json", by_alias=True))
    diagnosis = examine(folder, witness)
    assert "mask_hidden" in kinds(diagnosis)
    found = next(f for f in diagnosis.findings if f.kind == "mask_hidden")
    assert "256 values" in found.what
    assert "768" in found.what
    # It is scored as the vector before fc would be.
    lifted = lifted_mask(tensors["mask_hidden"] @ tensors["fc.weight"].T, tensors["fc.weight"])
    torch.testing.assert_close(
        lifted @ tensors["fc.weight"].T, tensors["mask_hidden"] @ tensors["fc.weight"].T
    )


def test_a_mask_of_either_width_is_tried_both_ways(witness: TargetSession) -> None:
    """With one boundary a projected vector has the shape of a raw one."""
    config = parallel(boundaries=[9])
    tensors = parallel_tensors(config, witness)
    raw = Reading(config, tensors)
    projected = {"mask_hidden": tensors["mask_hidden"] @ tensors["fc.weight"].T}
    (hypothesis,) = masks(Reading(config, tensors | projected), None)  # type: ignore[arg-type]
    scorer = Scorer(witness.target, lambda template: witness.evidence(template, 2), 2)
    found, wanted, wrong = (
        scorer(reading).likelihood
        for reading in (hypothesis.reading, raw, Reading(config, tensors | projected))
    )
    assert found == pytest.approx(wanted, rel=1e-3)
    assert wrong != pytest.approx(wanted, rel=1e-3)


def test_blocks_of_features_are_sorted_by_boundary() -> None:
    """fc of features in the order 9, 2, 6, read ascending."""
    blocks = {n: torch.full((4, 2), float(n)) for n in (2, 6, 9)}
    stored = torch.cat([blocks[9], blocks[2], blocks[6]], 1)
    found = sorted_blocks({"fc.weight": stored}, (2, 0, 1))
    assert torch.equal(found["fc.weight"], torch.cat([blocks[2], blocks[6], blocks[9]], 1))


def test_a_first_generation_head_is_fed_its_state_before_the_norm_too(
    witness: TargetSession, untrained_eagle: Path
) -> None:
    """Of this family other shapes are left alone, and the norm is the target's own."""
    diagnosis = examine(untrained_eagle, witness)
    assert kinds(diagnosis) == ["nothing fits"]  # it was never trained
    names = {r.name: r for r in diagnosis.readings}
    assert names["features before the final norm"].likelier != 0
    assert not any(name.startswith(("boundaries", "features in")) for name in names)
