"""Mistakes that only scores show: the diagnosis names them, and the variant that corrects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftlab.doctor.diagnose import diagnose
from draftlab.doctor.diagnosis import Diagnosis
from draftlab.doctor.head_files import unproject_mask
from draftlab.doctor.hypotheses import (
    HeadVariant,
    HypothesisContext,
    boundaries,
    inputs,
    layouts,
    sorted_blocks,
)
from draftlab.doctor.score import Score
from draftlab.doctor.search import VariantResult
from draftlab.doctor.target_session import TargetSession
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import WEIGHTS, load_config
from draftlab.run.resolve import reference_head
from tests.helpers.diagnosis import (
    CopyHead,
    DiagnoseCopy,
    Tensors,
    fault_kinds,
    initial_tensors,
    reference_config,
)
from tests.helpers.head_toys import LLAMA4_HEAD, make_head
from tests.helpers.llama4_reader import half_split, pairs


def lengths(diagnosis: Diagnosis) -> dict[str, float]:
    return {v.name: v.acceptance_length or 1.0 for v in diagnosis.readings}


def test_a_good_head_is_healthy(diagnose_copy: DiagnoseCopy) -> None:
    diagnosis = diagnose_copy()
    assert diagnosis.healthy
    assert diagnosis.state == "healthy"
    assert not diagnosis.findings
    assert "none of" in diagnosis.verdict
    assert lengths(diagnosis)["as stored"] > 1.9
    assert not any(r.better for r in diagnosis.readings)
    assert len(diagnosis.readings) > 12  # many were scored


def test_an_untrained_head_is_weak(session: TargetSession, copy_head: CopyHead) -> None:
    initial = initial_tensors(reference_config(), session.target.parts)
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in initial.items()}
    diagnosis = diagnose(copy_head(lambda t: t.update(tensors), provenance={}), session)
    assert diagnosis.state == "weak"
    assert not diagnosis.healthy
    assert fault_kinds(diagnosis) == ["weak"]
    stored = diagnosis.readings[0]
    assert stored.accepted_at[0] / stored.drafts < 0.05
    assert diagnosis.verdict.startswith(f"{stored.accepted_at[0] / stored.drafts:.0%} [0%, ")
    assert f"] of {stored.drafts:,} first drafts" in diagnosis.verdict


def interleave(tensors: Tensors) -> None:
    for name in [f"layers.0.self_attn.{x}_proj.weight" for x in "qk"]:
        halves = tensors[name].unflatten(0, (-1, 2, 16))
        tensors[name] = halves.transpose(1, 2).reshape(tensors[name].shape).contiguous()


def make_absolute(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


@pytest.mark.parametrize(
    ("change", "fields", "kind", "name", "message"),
    [
        # Boundaries nearer to the right ones cost less: tests/doctor/test_number_of_prompts.py.
        (None, {"boundaries": [0, 4, 11]}, "boundaries", "default boundaries", "the default"),
        (
            None,
            {"norm_before_residual": False},
            "norm flags",
            "norm_before_residual: true",
            "norm_before_residual is",
        ),
        (
            None,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            "rope",
            "the target's RoPE",
            "RoPE",
        ),
        (interleave, {}, "rope layout", "q and k in interleaved RoPE layout", "interleaved"),
        (make_absolute, {}, "d2t", "d2t as absolute ids", "absolute"),
    ],
)
def test_a_mistake_is_named_with_the_variant_that_corrects_it(
    diagnose_copy: DiagnoseCopy,
    change: Callable[[Tensors], None] | None,
    fields: dict[str, Any],
    kind: str,
    name: str,
    message: str,
) -> None:
    diagnosis = diagnose_copy(change, **fields)
    assert fault_kinds(diagnosis) == [kind]
    assert message in diagnosis.verdict
    al = lengths(diagnosis)
    assert f"AL {al['as stored']:.2f} as stored, {al[name]:.2f}" in diagnosis.verdict
    assert diagnosis.readings[1].name == name
    assert diagnosis.readings[1].better


def test_two_mistakes_are_both_named(diagnose_copy: DiagnoseCopy) -> None:
    diagnosis = diagnose_copy(boundaries=[0, 4, 11], norm_before_residual=False)
    assert fault_kinds(diagnosis) == ["norm flags", "boundaries"]
    assert "more)" not in diagnosis.verdict  # the verdict names both
    al = lengths(diagnosis)
    assert al["norm_before_residual: true, default boundaries"] > al["norm_before_residual: true"]


def test_boundaries_that_are_one_too_high_are_supposed() -> None:
    """Few answers do not show this mistake, which costs the reference head little."""
    head = make_head(boundaries=(3, 4, 5))
    context = HypothesisContext(6, None, {}, frozenset(), frozenset(), ())
    supposed = {h.name: h for h in boundaries(HeadVariant(head.config, {}), context)}
    lower = supposed["boundaries − 1"]
    assert lower.variant.config.boundaries == (2, 3, 4)
    assert "one too high" in lower.mistake


@pytest.mark.parametrize(
    ("shape", "order", "wrong"),
    [({}, pairs, "interleaved"), (LLAMA4_HEAD, half_split, "half-split")],
)
def test_rows_of_queries_and_keys_are_permuted_to_the_familys_rope_layout(
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
    proposed = layouts(HeadVariant(config, stored), None)  # type: ignore[arg-type]
    (hypothesis,) = (h for h in proposed if h.kind == "rope layout")
    assert hypothesis.name == f"q and k in {wrong} RoPE layout"
    for name, tensor in tensors.items():
        assert torch.equal(hypothesis.variant.tensors[name], tensor), name


def fit_fc(session: TargetSession, boundaries: tuple[int, ...], norm: str) -> torch.Tensor:
    """Fit fc of normed features to the outputs of the reference head's fc."""
    config = load_config(reference_head())
    scoring_set = session.scoring_set(True, 2)
    tensors = load_file(reference_head() / WEIGHTS)
    features = scoring_set.batch_for(HeadVariant(config, {})).features.flatten(0, 1)
    outputs = features @ tensors["fc.weight"].float().T
    other = config.model_copy(update={"boundaries": boundaries})
    normed = scoring_set.batch_for(HeadVariant(other, {}, norm=norm)).features.flatten(0, 1)  # type: ignore[arg-type]
    fc = torch.linalg.lstsq(normed.double(), outputs.double()).solution.T
    return fc.to(torch.bfloat16).contiguous()


@pytest.mark.parametrize(
    ("boundaries", "norm", "name"),
    [
        ((2, 6, 9), "input", "features through the norms they enter"),
        ((2, 6, 12), "final", "boundary 12 through the final norm"),
    ],
)
def test_training_on_normed_features_is_named(
    diagnose_copy: DiagnoseCopy,
    session: TargetSession,
    boundaries: tuple[int, ...],
    norm: str,
    name: str,
) -> None:
    fc = fit_fc(session, boundaries, norm)
    diagnosis = diagnose_copy(lambda t: t.update({"fc.weight": fc}), boundaries=list(boundaries))
    assert fault_kinds(diagnosis)[0] == "features"
    assert diagnosis.readings[1].name == name
    assert "norm" in diagnosis.verdict


def test_a_head_of_plain_text_is_named(
    diagnose_copy: DiagnoseCopy, session: TargetSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real answers are those to plain text, and the answers to chats are noise."""
    real = session.scoring_set(True, 2)
    tokens = real.batch.tokens.clone()
    for row, spans in zip(tokens, real.spans, strict=True):
        answer = row[: len(spans)][spans > 0]
        row[: len(spans)][spans > 0] = answer.flip(0)
    noise = replace(real, batch=replace(real.batch, tokens=tokens), states={})
    monkeypatch.setattr(session, "scoring_set", lambda template, k: noise if template else real)
    diagnosis = diagnose_copy()
    assert "template" in fault_kinds(diagnosis)
    assert "plain text" in diagnosis.verdict


def test_features_of_another_position_are_named(
    diagnose_copy: DiagnoseCopy, session: TargetSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scoring set's states come a position late."""
    real = session.scoring_set(True, 2)
    real.compute_states((2, 6, 9))
    late = {boundary: state.roll(1, dims=1) for boundary, state in real.states.items()}
    monkeypatch.setattr(session, "scoring_set", lambda *_: replace(real, states=dict(late)))
    diagnosis = diagnose_copy()
    assert fault_kinds(diagnosis) == ["alignment"]
    assert diagnosis.readings[1].name == "features of the next position"


def test_features_of_the_next_position_must_gain_more() -> None:
    """The next position's last state nearly determines the draft, so that any head gains."""
    stored = score(0.10)
    for gain, better in ((0.1, False), (0.6, True)):
        changed = score(0.10 + gain).compare(stored, tried=20)
        context = HypothesisContext(12, None, {}, frozenset(), frozenset({True}))
        for hypothesis in inputs(HeadVariant(parallel_config(), {}), context):
            result = VariantResult(hypothesis.variant, (hypothesis,), stored, changed)
            assert result.better == (better or "next" not in hypothesis.name), hypothesis.name


def score(accepted: float) -> Score:
    """Return the score of 12 equal prompts."""
    ones, names = np.ones(12), tuple(map(str, range(12)))
    return Score(names, (), 100 * accepted * ones, ones, 100 * ones, k=2)


def parallel_config(**changes: Any) -> HeadConfig:
    return reference_config(family="peagle", embeddings="own", mask_token_id=6143, **changes)


def test_a_projected_mask_is_named(session: TargetSession, copy_head: CopyHead) -> None:
    config = parallel_config()
    tensors = initial_tensors(config, session.target.parts)
    projected = tensors["mask_hidden"] @ tensors["fc.weight"].T
    folder = copy_head(
        lambda stored: (stored.clear(), stored.update(tensors | {"mask_hidden": projected})),
        **config.model_dump(mode="json", by_alias=True),
    )
    findings = diagnose(folder, session).findings
    (finding,) = (f for f in findings if f.kind == "mask_hidden" and f.severity == "fault")
    assert "256 values" in finding.what
    assert "768" in finding.what
    unprojected = unproject_mask(projected, tensors["fc.weight"])
    torch.testing.assert_close(unprojected @ tensors["fc.weight"].T, projected)


def test_blocks_of_features_are_sorted_by_boundary() -> None:
    """fc was trained on features in the order 9, 2, 6."""
    blocks = {n: torch.full((4, 2), float(n)) for n in (2, 6, 9)}
    stored = torch.cat([blocks[9], blocks[2], blocks[6]], 1)
    changed = sorted_blocks({"fc.weight": stored}, (2, 0, 1))
    assert torch.equal(changed["fc.weight"], torch.cat([blocks[2], blocks[6], blocks[9]], 1))


def test_a_first_generation_head_is_also_scored_on_the_state_before_the_norm(
    session: TargetSession, untrained_eagle: Path
) -> None:
    """No variants of boundaries are proposed for this family."""
    diagnosis = diagnose(untrained_eagle, session)
    assert fault_kinds(diagnosis) == ["weak"]  # it was never trained
    names = {r.name: r for r in diagnosis.readings}
    assert names["features before the final norm"].likelier != 0
    assert not any(name.startswith(("boundaries", "features in")) for name in names)
