"""`parallel_outputs` with less work; the same outputs and gradients (methods §4).

Depth 0 at every position and all masked slots lie side by side as rows of one tensor, so a layer
runs each product once. All masked slots are one row until the first layer's attention tells them
apart. Rows that only fill a batch up are run by nothing but attention. Products, and what is
between them, are those of `train/fast/layers.py`.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from draftlab.heads.eagle3 import Eagle3Layer
from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.heads.layers import Attention
from draftlab.heads.peagle import PeagleHead
from draftlab.kernels.ttt_attention import document_starts, ttt_attention
from draftlab.kernels.ttt_attention_types import StepKeyValues
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.fast.layers import PIECES, LayerWeights, Pieces, Rows, of_norm, padded, real
from draftlab.train.fast.shared_gradients import Shared, branch
from draftlab.train.objectives.loss import StepOutput, row_starts


class FastParallel:
    """Callable as `parallel_outputs`.

    Args:
        dtype: of products, of norms and of what is kept for the backward pass.
        pieces: `PIECES`, or the same compiled.
    """

    description = "all depths run side by side"
    can_recompute = False

    @staticmethod
    def supports(head: DraftHead) -> bool:
        """Return whether the head is a parallel one whose layers have plain attention."""
        return (
            type(head) is PeagleHead
            and type(head.layer) is Eagle3Layer
            and all(type(layer) is DecoderLayer for layer in head.layers[1:])
            and all(type(layer.self_attn) is Attention for layer in head.layers)
        )

    def __init__(self, dtype: torch.dtype, *, pieces: Pieces = PIECES) -> None:
        self.dtype, self.pieces = dtype, pieces

    def __call__(self, head: PeagleHead, batch: Batch) -> list[StepOutput]:
        """Each depth's output."""
        steps = [rows for rows in batch.steps if rows.index.shape[1]]
        if not steps:
            return []
        # All is of one dtype already. Autocast would widen norms, and cast again what reads them.
        with torch.autocast(batch.tokens.device.type, enabled=False):
            made = _Parallel(head, batch, steps, self.dtype, self.pieces).run()
        outputs = made.split([len(rows.valid_rows) for rows in steps])
        return [StepOutput(o, rows.teacher_index) for o, rows in zip(outputs, steps, strict=True)]


class _Parallel:
    """A batch's rows: first T = B · S positions at depth 0, then M masked slots, depth by depth."""

    def __init__(
        self,
        head: PeagleHead,
        batch: Batch,
        steps: list[StepRows],
        dtype: torch.dtype,
        pieces: Pieces,
    ) -> None:
        self.head, self.batch, self.steps, self.dtype = head, batch, steps, dtype
        self.pieces, self.eps = pieces, head.config.rms_norm_eps
        positions = batch.positions.flatten()
        self.size, self.widths = len(positions), [len(rows.valid_rows) for rows in steps[1:]]
        self.num_masked = sum(self.widths)
        places = [positions[rows.teacher_index] - 1 for rows in steps[1:]]
        self.angles = head.rope.angles(torch.cat([positions, *places]))
        self.starts = document_starts(batch.documents)
        self.step_starts = [row_starts(self.starts, rows) for rows in steps]

    def run(self) -> Tensor:
        """The last layer's outputs where there is loss, depth by depth: [N_0 + M, H]."""
        layers = self.head.layers
        hidden = self.layer(layers[0], *self.inputs(), last=len(layers) == 1)
        for number, layer in enumerate(layers[1:], 2):
            kept, read = hidden, of_norm(layer.input_layernorm, self.dtype)
            read = self.pieces.normed((kept,), read, self.eps)
            hidden = self.layer(layer, read, kept, last=number == len(layers))
        return hidden

    def inputs(self) -> Rows:
        """What the first layer's attention reads [T + 1, 2 H], and its residual [T + 1, H].

        The last row is that of every masked slot.
        """
        head, layer, dtype = self.head, self.head.layer, self.dtype
        fc, features = Shared(head.fc.weight.to(dtype)), self.batch.features.flatten(0, 1)
        hidden = torch.cat(
            [fc.product(head.normed_features(x.to(dtype))) for x in (features, head.mask_hidden)]
        )
        following = self.batch.tokens.roll(-1, dims=1).flatten()
        embeddings = head.embed(following), head.mask_embedding[None]
        embeddings = torch.cat([part.to(dtype) for part in embeddings])
        norms = (of_norm(norm, dtype) for norm in (layer.input_layernorm, layer.hidden_norm))
        read = [
            self.pieces.normed((rows,), norm, self.eps)
            for rows, norm in zip((embeddings, hidden), norms, strict=True)
        ]
        return torch.cat(read, -1), read[1] if layer.norm_before_residual else hidden

    def layer(self, layer: DecoderLayer, read: Tensor, residual: Tensor, *, last: bool) -> Tensor:
        """Outputs [T + M, H]; of the last layer [N_0 + M, H], at depth 0 where there is loss.

        Args:
            read, residual: of T + M rows, or of T + 1 where masked slots are still one.
        """
        weights, pieces, asked = LayerWeights(layer, self.dtype), self.pieces, read
        first, angles, rows = self.size, self.angles, None
        if last:  # depth 0 is asked for nothing else, but everybody reads its keys
            rows = self.steps[0]
            first = len(rows.origin)
            masked = torch.arange(self.size, len(read), device=read.device)
            index = torch.cat([rows.origin, masked])
            read, asked = branch(read, index)
            residual = branch(residual, index)[1]
            angles = tuple(torch.cat([x[rows.origin], x[self.size :]]) for x in angles)
        keys_values = self.spread(weights.key_value.product(read), self.size)
        query = self.spread(weights.query.product(asked), first)
        made = pieces.keys_values((keys_values, *self.angles), weights.key_norm, self.eps)
        query = pieces.queries((query, *angles), weights.query_norm, self.eps)
        attended = self.attend(query, *made, rows)
        return weights.run_output(pieces, attended, self.spread(residual, first), self.eps)

    def spread(self, x: Tensor, first: int) -> Tensor:
        """x [first + M, …]; where masked slots are still one, each is given its row."""
        if len(x) - first == self.num_masked:
            return x
        rows, slot = x.split([first, len(x) - first])
        return torch.cat([rows, slot.expand(self.num_masked, -1)])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: StepRows | None) -> Tensor:
        """Attended values [n, Q] of queries [n, heads, head_dim].

        Args:
            key, value: [T + M, kv heads, head_dim].
            rows: of depth 0 that ask; None: all.
        """
        shape = self.batch.tokens.shape
        # One split of each: its gradient is put together once.
        cut = [x.split([len(x) - self.num_masked, *self.widths]) for x in (query, key, value)]
        first, of_keys, of_values = (parts[0] for parts in cut)
        of_keys, of_values = of_keys.unflatten(0, shape), of_values.unflatten(0, shape)
        if rows is None:
            index = torch.arange(shape[1], device=query.device).expand(shape)
            asks, starts = first.unflatten(0, shape), self.starts
        else:
            index, starts, asks = rows.index, self.step_starts[0], padded(first, rows)
        made = ttt_attention(asks, of_keys, of_values, index, starts).flatten(2)
        attended, own = [made.flatten(0, 1) if rows is None else real(made, rows)], None
        depths = zip(self.steps, self.step_starts, *cut, strict=True)
        for rows, starts, asks, *mine in islice(depths, 1, None):
            own = StepKeyValues.extend(own, *(padded(x, rows) for x in mine), rows.select)
            made = ttt_attention(padded(asks, rows), of_keys, of_values, rows.index, starts, own)
            attended.append(real(made.flatten(2), rows))
        return torch.cat(attended)
