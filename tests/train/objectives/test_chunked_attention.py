"""An unroll in layers of chunks equals a server run position by position (methods §2, §3)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.train.batch.packing import pack
from draftlab.train.objectives.ttt import unroll
from tests.helpers.dense_attention import dense_chain
from tests.helpers.synthetic import HIDDEN, VOCAB, assert_same, head, parts, record

STEPS = 4
KIND = {
    "attention_chunk_size": 4,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 3,
    "attn_scale": 0.5,
}


def llama4_head(*no_rope_layers: int, **kind: object) -> DraftHead:
    return head(
        parts(),
        family="eagle_llama4",
        boundaries=(4,),
        draft_vocab_size=VOCAB,
        num_layers=len(no_rope_layers),
        llama4=KIND | {"no_rope_layers": no_rope_layers} | kind,
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("layers", [(1,), (0,), (1, 0), (0, 1)])
def test_an_unroll_over_borders_is_a_server(layers: tuple[int, ...]) -> None:
    """Outputs and gradients, of two conversations in a row; unrolls cross up to two borders."""
    model = llama4_head(*layers)
    spans = [0, 0, *[1] * 7, 0, *[2] * 4], [0, *[1] * 10]
    answers = [record(torch.tensor(s), parts(), seed) for seed, s in enumerate(spans)]
    batch = pack([answers], 40, STEPS)
    offsets = [0, len(spans[0])]
    compared, actual, expected = 0, torch.zeros(()), torch.zeros(())
    chains: dict[int, list[Tensor]] = {}
    probe = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    for k, step in enumerate(unroll(model, batch)):
        for row, teacher in zip(step.output, step.teacher_index.tolist(), strict=True):
            at = teacher - 1 - k
            which = at >= offsets[1]
            if at not in chains:
                chains[at] = dense_chain(
                    model, answers[which].tokens, answers[which].last, at - offsets[which]
                )
            torch.testing.assert_close(row, chains[at][k], rtol=0, atol=1e-12)
            actual, expected = actual + probe @ row, expected + probe @ chains[at][k]
            compared += 1
    assert compared == sum(batch.counts) > 40
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    one, other = (
        dict(zip(weights, torch.autograd.grad(total, [*weights.values()]), strict=True))
        for total in (actual, expected)
    )
    assert_same(one, other)
