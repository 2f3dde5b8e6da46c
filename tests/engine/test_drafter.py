"""The chain drafter's cache against a pass over the whole sequence for every draft."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.drafter import ChainDrafter, HeadDrafter
from draftlab.engine.fused_head import FusedHead
from draftlab.engine.parallel_drafter import ParallelDrafter
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.peagle import PeagleHead
from tests.helpers.engines import RaggedPairs

K = 4


def dense(head: Eagle3Head, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Return the output [H] before the norm of the last of n pairs, by dense causal attention."""
    layer = head.layer
    x, residual = layer.inputs(head.embed_tokens(tokens), hidden)
    angles = head.rope.angles(torch.arange(len(tokens)))
    query = layer.self_attn.query(x, angles).transpose(0, 1)
    key, value = (t.transpose(0, 1) for t in layer.self_attn.key_value(x, angles))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return layer.output(attended.transpose(0, 1), residual)[-1]


@pytest.mark.parametrize("fused", [False, True])
def test_draft_probabilities_equal_dense_passes(fused: bool, head: Eagle3Head) -> None:
    """Ragged rows over three steps; later steps must not see the drafts of earlier ones.

    Fused: the passes of a GPU, on their kernels' references.
    """
    counts = [[5, 9, 2], [1, 4, 3], [3, 1, 5]]
    pairs = RaggedPairs([sum(row) for row in zip(*counts, strict=True)])
    drafter = ChainDrafter(head, K)
    drafter.start(4, 24)  # one block a row; block 0 belongs to no row
    if fused:
        drafter.runner = FusedHead(head)
    table = torch.tensor([[2], [3], [1]], dtype=torch.int32)
    for step in counts:
        proposal = drafter.propose(pairs.next(step, table))
        assert proposal.distribution is not None
        q = proposal.distribution.probabilities()
        for row, done in enumerate(pairs.done):
            tokens = pairs.tokens[row][:done]
            hidden = head.project_features(pairs.features[row][:done])
            for depth in range(K):
                output = dense(head, tokens, hidden)
                expected = head.logits(output).softmax(-1)
                torch.testing.assert_close(q[row, depth], expected, rtol=1e-3, atol=1e-5)
                tokens = torch.cat([tokens, proposal.tokens[row, depth : depth + 1]])
                hidden = torch.cat([hidden, output[None]])


@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize(("kind", "k"), [("chain", K), ("parallel", 1), ("parallel", K)])
def test_a_prompt_in_chunks_equals_the_whole_prompt(
    kind: str, k: int, draft_probs: bool, head: Eagle3Head, parallel_head: PeagleHead
) -> None:
    """`extend_cache` chunk by chunk, then `propose`, against one `propose` with everything."""
    drafter: HeadDrafter
    if kind == "chain":
        drafter = ChainDrafter(head, k, draft_probs=draft_probs)
    else:
        drafter = ParallelDrafter(parallel_head, k, draft_probs=draft_probs)
    table = torch.tensor([[2], [3], [1]], dtype=torch.int32)
    drafter.start(4, 24)
    expected = drafter.propose(RaggedPairs([9] * 3).next([9] * 3, table))
    drafter.start(4, 24)
    pairs = RaggedPairs([9] * 3)
    for count in (4, 4):
        drafter.extend_cache(pairs.next([count] * 3, table))
    actual = drafter.propose(pairs.next([1] * 3, table))
    assert torch.equal(actual.tokens, expected.tokens)
    assert (actual.distribution is None) == (not draft_probs)
    if actual.distribution is not None and expected.distribution is not None:
        torch.testing.assert_close(actual.distribution.logits, expected.distribution.logits)
        torch.testing.assert_close(actual.distribution.log_sum, expected.distribution.log_sum)
