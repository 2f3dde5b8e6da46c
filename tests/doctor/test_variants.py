"""Mistakes that only scores show: the diagnosis names them, and the variant that corrects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftlab.doctor.diagnose import diagnose
from draftlab.doctor.diagnosis import Diagnosis
from draftlab.doctor.hypotheses import (
    HeadVariant,
    HypothesisContext,
    hypotheses,
    sorted_blocks,
)
from draftlab.doctor.target_session import TargetSession
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
from tests.helpers.head_toys import LLAMA4_HEAD, half_split, interleaved, make_head
from tests.helpers.synthetic import random_norms_head


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
    assert {"boundaries + 1", "boundaries − 1"} <= lengths(diagnosis).keys()


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
        (None, {"boundaries": [0, 4, 11]}, "boundaries", "the default boundaries", "it was"),
        (
            None,
            {"norm_before_residual": False},
            "norm flags",
            "norm_before_residual: true",
            "it was trained with norm_before_residual: true",
        ),
        (
            None,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            "rope",
            "the target's RoPE",
            "it was trained with the target's RoPE",
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


@pytest.mark.parametrize(
    ("shape", "order", "wrong"),
    [({}, interleaved, "interleaved"), (LLAMA4_HEAD, half_split, "half-split")],
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
    proposed = hypotheses(HeadVariant(config, stored), HypothesisContext(12))
    (hypothesis,) = (h for h in proposed if h.kind == "rope layout")
    assert hypothesis.name == f"q and k in {wrong} RoPE layout"
    for name, tensor in tensors.items():
        assert torch.equal(hypothesis.variant.tensors[name], tensor), name


@pytest.mark.parametrize("mistake", ["codebooks", "sides", "taps"])
def test_exchanged_parts_of_a_selecting_head_are_put_right(mistake: str) -> None:
    head = random_norms_head(family="dflash2", num_layers=2)
    torch.nn.init.normal_(head.layers[1].mlp_conv.kernel_projection.weight)
    tensors, config = dict(head.tensors()), head.config
    groups, stored = config.hidden_size // config.conv_group_size, dict(tensors)
    first, second = (f"candidate_selector.{n}_codebook" for n in ("predecessor", "successor"))
    if mistake == "codebooks":
        stored |= {first: tensors[second], second: tensors[first]}
    other = {"sides": lambda side, tap: (1 - side, tap), "taps": lambda side, tap: (side, 1 - tap)}
    for name in tensors if mistake in other else ():
        if "_conv." in name:
            rows = groups if name.endswith("kernel_projection.weight") else 1
            parts = tensors[name].reshape(2, 2, rows, -1)
            wrong = torch.stack(
                [parts[other[mistake](side, tap)] for side in (0, 1) for tap in (0, 1)]
            )
            stored[name] = wrong.reshape(tensors[name].shape)
    proposed = hypotheses(HeadVariant(config, stored), HypothesisContext(12))
    (hypothesis,) = (h for h in proposed if mistake in h.name)
    assert any(not torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        assert torch.equal(hypothesis.variant.tensors[name], tensor), name


def fit_fc(session: TargetSession, boundaries: tuple[int, ...], norm: str) -> torch.Tensor:
    """Fit fc of normed features to the outputs of the reference head's fc."""
    config = load_config(reference_head())
    scoring_set = session.scoring_set(2)
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


def test_features_of_another_position_are_named(
    diagnose_copy: DiagnoseCopy, session: TargetSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scoring set's states come a position late."""
    real = session.scoring_set(2)
    real.compute_states((2, 6, 9))
    late = {boundary: state.roll(1, dims=1) for boundary, state in real.states.items()}
    monkeypatch.setattr(session, "scoring_set", lambda *_: replace(real, states=dict(late)))
    diagnosis = diagnose_copy()
    assert fault_kinds(diagnosis) == ["alignment"]
    assert diagnosis.readings[1].name == "features of the next position"


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
    names = {r.name for r in diagnosis.readings}
    assert "features before the final norm" in names
    assert not any(name.startswith(("boundaries", "features in")) for name in names)
