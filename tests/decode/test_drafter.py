"""The chain drafter's cache against the whole sequence run anew for every draft."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.decode.drafter import ChainDrafter, Observed
from draftlab.decode.sampling import Request, Sampling, row_keys
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


def test_probabilities_of_every_draft(head: Eagle3Head) -> None:
    """Ragged rows over three steps; guesses of one step must not be seen by the next."""
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
