"""The Triton kernel of `head_inputs.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["eps"])
def head_inputs_kernel(
    tokens, row_stride, column_stride, hidden, embeddings, embedding_norm, hidden_norm,
    x_out, residual_out, counts, masked, mask_state, width, given, asked, eps,
    NORMED: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Grid (B · M, 2): one pair's embedding, or its hidden state and residual.

    Of a row's M = `width` columns the first `given` have hidden states; what is neither masked nor
    given is padding, which nobody looks at. `masked` None: all are given. `residual_out` None:
    nobody asks for it. `counts` None: residuals of all columns, else of `asked` from counts − 1 on.
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
    if masked is not None:
        source = hidden + (row * given + tl.minimum(column, given - 1)) * SIZE
        if tl.load(masked + pair):
            source = mask_state
    if not is_hidden:
        token = tl.load(tokens + row * row_stride + column * column_stride)
        source = embeddings + token * SIZE
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    to = x_out + pair * (2 * SIZE) + tl.where(is_hidden, SIZE, 0) + at
    tl.store(to, normed.to(x_out.dtype.element_ty), mask=inside)
    if residual_out is not None:
        first = 0
        if counts is not None:
            first = tl.load(counts + row) - 1
        if is_hidden & (column >= first) & (column < first + asked):
            kept = x
            if NORMED:
                kept = normed
            to = residual_out + (row * asked + column - first) * SIZE + at
            tl.store(to, kept.to(residual_out.dtype.element_ty), mask=inside)
