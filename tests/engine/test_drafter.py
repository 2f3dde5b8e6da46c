"""The chain drafter's cache against the whole sequence run anew for every draft."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.drafter import ChainDrafter, Observed
from draftlab.engine.fused_head import FusedHead
from draftlab.engine.sampling import Request, Sampling, row_keys
from draftlab.heads.eagle3 import Eagle3Head

K = 4


def dense(head: Eagle3Head, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Pre-norm output [H] of the last of n pairs at positions 0 … n − 1, causal attention."""
    layer = head.layer
    x, residual = layer.inputs(head.embed_tokens(tokens), hidden)
    angles = head.rope.angles(torch.arange(len(tokens)))
    query = layer.self_attn.query(x, angles).transpose(0, 1)
    key, value = (t.transpose(0, 1) for t in layer.self_attn.key_value(x, angles))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return layer.output(attended.transpose(0, 1), residual)[-1]


@pytest.mark.parametrize("fused", [False, True])
def test_probabilities_of_every_draft(fused: bool, head: Eagle3Head) -> None:
    """Ragged rows over three steps; guesses of one step must not be seen by the next.

    Fused: the passes that run on a GPU's kernels, here on their references.
    """
    generator = torch.Generator().manual_seed(0)
    counts = [[5, 9, 2], [1, 4, 3], [3, 1, 5]]
    total = torch.tensor(counts).sum(0)
    tokens = [torch.randint(0, 289, (int(n),), generator=generator) for n in total]
    features = [torch.randn(int(n), 96, generator=generator) for n in total]
    keys = row_keys(
        [Request(str(i), (1,), 1, Sampling(temperature=1.0)) for i in range(3)], torch.device("cpu")
    )
    drafter = ChainDrafter(head, K)
    drafter.start(4, 24)  # a block a row; block 0 is nobody's
    if fused:
        drafter.passes = FusedHead(head)
    done = [0, 0, 0]
    for step in counts:
        width = max(step)
        shown = torch.zeros(3, width, dtype=torch.int64)
        given = torch.zeros(3, width, 96)
        positions = torch.full((3, width), -1)
        for row, n in enumerate(step):
            part = slice(done[row], done[row] + n)
            shown[row, :n], given[row, :n] = tokens[row][part], features[row][part]
            positions[row, :n] = torch.arange(part.start, part.stop)
            done[row] += n
        table = torch.tensor([[2], [3], [1]], dtype=torch.int32)
        found = drafter.propose(Observed(shown, given, positions, torch.tensor(step), table, keys))
        assert found.distribution is not None
        q = found.distribution.probabilities()
        for row in range(3):
            seen, hidden = tokens[row][: done[row]], head.fuse(features[row][: done[row]])
            for depth in range(K):
                output = dense(head, seen, hidden)
                expected = head.logits(output).softmax(-1)
                torch.testing.assert_close(q[row, depth], expected, rtol=1e-3, atol=1e-5)
                seen = torch.cat([seen, found.tokens[row, depth : depth + 1]])
                hidden = torch.cat([hidden, output[None]])


@pytest.mark.parametrize("draft_probs", [False, True])
def test_a_prompt_in_chunks_is_one_observation(draft_probs: bool, head: Eagle3Head) -> None:
    """`observe` chunk by chunk, then `propose`: what that says of everything at once."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 289, (2, 9), generator=generator)
    features = torch.randn(2, 9, 96, generator=generator)
    asked = [Request(str(i), (1,), 1, Sampling(temperature=1.0)) for i in range(2)]
    keys, table = row_keys(asked, torch.device("cpu")), torch.tensor([[1], [2]]).int()
    positions = torch.arange(9).expand(2, -1)

    def part(start: int, end: int) -> Observed:
        cut = tokens[:, start:end], features[:, start:end], positions[:, start:end]
        return Observed(*cut, torch.tensor([end - start] * 2), table, keys)

    drafter = ChainDrafter(head, K, draft_probs=draft_probs)
    drafter.start(3, 24)
    expected = drafter.propose(part(0, 9))
    drafter.start(3, 24)
    for start, end in ((0, 4), (4, 8)):
        drafter.observe(part(start, end))
    found = drafter.propose(part(8, 9))
    assert torch.equal(found.tokens, expected.tokens)
    assert (found.distribution is None) == (not draft_probs)
    if found.distribution is not None and expected.distribution is not None:
        torch.testing.assert_close(found.distribution.logits, expected.distribution.logits)
        torch.testing.assert_close(found.distribution.log_sum, expected.distribution.log_sum)
