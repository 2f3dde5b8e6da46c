"""Triton kernel of `head_inputs/`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.launching import launch_options


@triton.jit(do_not_specialize=["eps"])
def head_inputs_kernel(
    tokens, row_stride, column_stride, hidden, embeddings, embedding_norm, hidden_norm,
    x_out, residual_out, counts, is_mask, mask_hidden, width, hidden_width, residual_width, eps,
    NORMED: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Compute one column's normed embedding, or its normed hidden state; grid (B · M, 2).

    The first `hidden_width` of a row's M = `width` columns have hidden states; the others are
    masks or padding, whose result is not read. is_mask: None if all columns have hidden states.
    residual_out: None if no residual is needed. counts: None for residuals of all columns, else of
    `residual_width` columns from counts − 1 on.
    """
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
    pair, is_hidden = tl.program_id(0).to(tl.int64), tl.program_id(1) == 1
    at = tl.arange(0, PADDED)
    inside = at < SIZE
    norm = embedding_norm
    if is_hidden:
        norm = hidden_norm
    weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    if GDC:
        tl.extra.cuda.gdc_wait()
    row = pair // width
    column = pair - row * width
    source = hidden + pair * SIZE
    if is_mask is not None:
        source = hidden + (row * hidden_width + tl.minimum(column, hidden_width - 1)) * SIZE
        if tl.load(is_mask + pair):
            source = mask_hidden
    if not is_hidden:
        token = tl.load(tokens + row * row_stride + column * column_stride)
        source = embeddings + token * SIZE
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    target = x_out + pair * (2 * SIZE) + tl.where(is_hidden, SIZE, 0) + at
    tl.store(target, normed.to(x_out.dtype.element_ty), mask=inside)
    if residual_out is not None:
        first = 0
        if counts is not None:
            first = tl.load(counts + row) - 1
        if is_hidden & (column >= first) & (column < first + residual_width):
            residual = x
            if NORMED:
                residual = normed
            target = residual_out + (row * residual_width + column - first) * SIZE + at
            tl.store(target, residual.to(residual_out.dtype.element_ty), mask=inside)


def head_inputs(
    tokens, hidden, embeddings, embedding_norm, hidden_norm, eps, *, norm_before_residual,
    counts=None, num_columns=1, masks=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch `head_inputs.head_inputs`."""
    hidden, embeddings = hidden.contiguous(), embeddings.contiguous()
    (rows, width), (hidden_width, size) = tokens.shape, hidden.shape[1:]
    x = hidden.new_empty(rows, width, 2 * size)
    # If all columns have hidden states, these themselves can be the residual.
    copies = norm_before_residual or counts is not None or masks is not None
    residual_width = width if counts is None else num_columns
    residual = hidden.new_empty(rows, residual_width, size) if copies else hidden
    padded = triton.next_power_of_2(size)
    head_inputs_kernel[(rows * width, 2)](
        tokens,
        *tokens.stride(),
        hidden,
        embeddings,
        embedding_norm,
        hidden_norm,
        x,
        residual if copies else None,
        counts,
        *((None, None) if masks is None else (masks.is_mask.contiguous(), masks.hidden)),
        width,
        hidden_width,
        residual_width,
        eps,
        NORMED=norm_before_residual,
        SIZE=size,
        PADDED=padded,
        num_warps=max(1, min(16, padded // 512)),
        **launch_options(hidden.device),
    )
    return x, residual
