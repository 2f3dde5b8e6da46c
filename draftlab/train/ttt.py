"""The objective: training-time test of an EAGLE3 head on a packed batch (METHODS §2).

Step k runs only rows that still carry loss. Its row at position t reads token x_{t+1+k} and the
row's own previous output, attends to the step-0 keys of positions ≤ t of its conversation and to
its own keys of steps 1..k, at RoPE position t + k: what a server's cache would hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.data.packing import Batch
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.distill import distill
from draftlab.kernels.ttt_attention import ttt_attention
from draftlab.target.parts import TargetParts


@dataclass(frozen=True)
class StepOutput:
    """Step k of the unroll, at the n rows that carry loss there.

    Attributes:
        logits: [n, D], the head's.
        teacher: int64 [n], flat positions b·S + t + 1 + k of their teachers.
    """

    logits: Tensor
    teacher: Tensor


def unroll(head: Eagle3Head, batch: Batch) -> Iterator[StepOutput]:
    """Yields each step's output; gradients flow through all earlier steps."""
    layer = head.layer
    following = batch.tokens.roll(-1, dims=1)
    hidden = head.fuse(batch.features.to(head.fc.weight.dtype))
    x, residual = layer.inputs(head.embed_tokens(following), hidden)
    key, value = layer.self_attn.key_value(x, head.rope.angles(batch.positions))
    own_keys = own_values = None
    output = hidden  # of the step before; step 0 has none
    for k, rows in enumerate(batch.steps):
        if rows.index.shape[1] == 0:
            return
        index = rows.index
        positions = batch.positions.gather(1, index) + k
        if k == 0:
            x, residual = _rows(x, index), _rows(residual, index)
        else:
            width = batch.tokens.shape[1]
            token = batch.tokens.gather(1, (index + 1 + k).clamp(max=width - 1))
            x, residual = layer.inputs(head.embed_tokens(token), _rows(output, rows.select))
        angles = head.rope.angles(positions)
        query = layer.self_attn.query(x, angles)
        if k > 0:
            new_key, new_value = layer.self_attn.key_value(x, angles)
            own_keys = _extend(own_keys, new_key, rows.select)
            own_values = _extend(own_values, new_value, rows.select)
        visible = _visible(batch.documents, index)
        attended = ttt_attention(query, key, value, visible, own_keys, own_values)
        output = layer.output(attended, residual)
        yield StepOutput(head.logits(output.flatten(0, 1)[rows.loss]), rows.teacher)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, H] at positions index [B, R]: [B, R, H]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _extend(own: Tensor | None, new: Tensor, select: Tensor) -> Tensor:
    """Keeps the surviving rows' own keys [B, R, k − 1, …] and appends this step's [B, R, …]."""
    if own is None:
        return new[:, :, None]
    kept = own.gather(1, select[:, :, None, None, None].expand(-1, -1, *own.shape[2:]))
    return torch.cat([kept, new[:, :, None]], 2)


def _visible(documents: Tensor, index: Tensor) -> Tensor:
    """bool [B, R, S]: the step-0 keys of the same document at or before each row's position."""
    slots = torch.arange(documents.shape[1], device=documents.device)
    same = documents.gather(1, index)[:, :, None] == documents[:, None]
    return same & (slots <= index[:, :, None])


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at every position that teaches, over the draft vocabulary.

    Attributes:
        logits: float32 [J, D]. row: int64 [B·S], which row a flat position has.
        logsumexp: float32 [B·S]. argmax: int64 [B·S], target ids.
    """

    logits: Tensor
    row: Tensor
    logsumexp: Tensor
    argmax: Tensor


@torch.no_grad()
def teach(parts: TargetParts, target_ids: Tensor, batch: Batch) -> Teacher:
    """Computes each needed teacher once; all steps that share a position share it."""
    flat = batch.tokens.numel()
    needed = torch.zeros(flat, dtype=torch.bool, device=batch.tokens.device)
    for step in batch.steps:
        needed[step.teacher] = True
    positions = needed.nonzero()[:, 0]
    row = needed.cumsum(0) - 1
    logits = parts.logits(batch.last.flatten(0, 1)[positions], target_ids)
    return Teacher(logits, row, batch.logsumexp.flatten(), batch.argmax.flatten())


@dataclass
class Sums:
    """Sums over rows, per step [L]: loss, α, top-1 hits of the target's argmax, and their count."""

    loss: Tensor
    alpha: Tensor
    hits: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, num_steps: int, device: torch.device) -> Sums:
        """Nothing summed yet."""
        return cls(*(torch.zeros(num_steps, device=device) for _ in range(4)))

    def add(self, other: Sums) -> None:
        """Adds another batch's."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine += theirs

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four of them."""
        return self.loss, self.alpha, self.hits, self.count


def ttt_loss(
    head: Eagle3Head, parts: TargetParts, batch: Batch, *, gamma: float
) -> tuple[Tensor, Sums]:
    """Σ_k γ^k Σ ℓ over the rows that carry loss, not yet divided by N_0, and the sums to report.

    A token outside the draft vocabulary stays in every denominator as a miss.
    """
    target_ids = head.target_ids(torch.arange(len(head.d2t), device=head.d2t.device))
    teacher = teach(parts, target_ids, batch)
    sums = Sums.zeros(len(batch.steps), batch.tokens.device)
    total = torch.zeros((), device=batch.tokens.device)
    for k, step in enumerate(unroll(head, batch)):
        out = distill(
            step.logits, teacher.logits[teacher.row[step.teacher]], teacher.logsumexp[step.teacher]
        )
        total = total + gamma**k * out.loss.sum()
        sums.loss[k] = out.loss.detach().sum()
        sums.alpha[k] = out.alpha.sum()
        sums.hits[k] = (target_ids[out.best] == teacher.argmax[step.teacher]).sum()
        sums.count[k] = len(step.teacher)
    return total, sums
