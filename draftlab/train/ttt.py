"""The objective of EAGLE3: training-time test of a head on a packed batch (METHODS §2).

Step k runs only rows that still carry loss. Its row at position t reads token x_{t+1+k} and the
row's own previous output, attends to the step-0 keys of positions ≤ t of its conversation and to
its own keys of steps 1..k, at RoPE position t + k: what a server's cache would hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from draftlab.data.packing import Batch
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.ttt_attention import OwnKeys, document_starts, ttt_attention
from draftlab.target.parts import TargetParts
from draftlab.train.objective import StepOutput, Sums, row_starts, take_rows, weighted_loss


def unroll(head: Eagle3Head, batch: Batch) -> Iterator[StepOutput]:
    """Yields each step's output; gradients flow through all earlier steps."""
    layer = head.layer
    following = batch.tokens.roll(-1, dims=1)
    hidden = head.fuse(batch.features.to(head.fc.weight.dtype))
    x, residual = layer.inputs(head.embed_tokens(following), hidden)
    key, value = layer.self_attn.key_value(x, head.rope.angles(batch.positions))
    starts, own = document_starts(batch.documents), None
    output = hidden  # of the step before; step 0 has none
    for k, rows in enumerate(batch.steps):
        if rows.index.shape[1] == 0:
            return
        index = rows.index
        positions = batch.positions.gather(1, index) + k
        if k == 0:
            x, residual = take_rows(x, index), take_rows(residual, index)
        else:
            width = batch.tokens.shape[1]
            token = batch.tokens.gather(1, (index + 1 + k).clamp(max=width - 1))
            x, residual = layer.inputs(head.embed_tokens(token), take_rows(output, rows.select))
        angles = head.rope.angles(positions)
        query = layer.self_attn.query(x, angles)
        if k > 0:
            new_key, new_value = layer.self_attn.key_value(x, angles)
            own = OwnKeys.extended(own, new_key, new_value, rows.select)
        attended = ttt_attention(query, key, value, index, row_starts(starts, rows), own)
        output = layer.output(attended, residual)
        yield StepOutput(output.flatten(0, 1)[rows.loss], rows.teacher)


def ttt_weights(gamma: float, counts: Sequence[int]) -> list[float]:
    """γ^k: every step's sum is divided by N_0, so later steps also count less for being fewer."""
    return [gamma**k for k in range(len(counts))]


def ttt_loss(
    head: Eagle3Head, parts: TargetParts, batch: Batch, *, gamma: float
) -> tuple[Tensor, Sums]:
    """Σ_k γ^k Σ ℓ, not yet divided by N_0, and the sums to report."""
    weights = ttt_weights(gamma, batch.counts)
    return weighted_loss(unroll(head, batch), head, parts, batch, weights)
