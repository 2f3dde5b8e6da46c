"""Triton kernel of `linear/`: y = x Wᵀ for few rows, bound by reading W once.

A program owns TILE rows of W and loops along size_in in steps of DEPTH; Triton keeps `num_stages`
tiles in flight. W is the first operand of the product and x, padded to ROWS, the second: tensor
cores need 16 or 64 rows of the first, and of the second as few as 8.

The RMS norm needs no pass of its own. The product that computes y also writes y times the weight of
the norm that follows, and each tile's part of Σ y². The next product adds the parts and multiplies
its accumulator by 1 / rms at the end (`DeferredNorm` in linear/). For any other x, one product
does all of it: it sums x² beside the product and multiplies x by the norm's weight after loading.

Where W has too few rows to fill the device, SPLIT programs share a tile of rows (split-K). Each
writes its partial sums. The last program to arrive adds them in a fixed order, so that results
never depend on timing, and resets the arrival counter to 0 for the next launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(256)
"""16-bit elements (512 bytes) of one prefetch instruction."""


@triton.jit
def prefetch(addresses):
    """Prefetch CHUNK 16-bit elements at each address to L2; no result changes."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_share(weights, num_chunks, program, SHARE: tl.constexpr):
    """Prefetch the `program`-th SHARE (a power of two) of `num_chunks` chunks."""
    at = tl.minimum(program * SHARE + tl.arange(0, SHARE), num_chunks - 1)
    prefetch(weights + at.to(tl.int64) * CHUNK)


@triton.jit
def _write(
    total, second, squares, bias, residual, out, next_norm, scaled, next_squares,
    tile, n, m, num_rows, num_out, size_in, eps,
    SWIGLU: tl.constexpr, DIVIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scale final sums [TILE, ROWS], apply the epilogue and store them as out [M, N].

    With `next_norm` also store out · next_norm, and this tile's Σ out² of each row.
    """
    if DIVIDE:
        scale = tl.rsqrt(squares / size_in + eps)[None, :]
        total *= scale
        if SWIGLU:
            second *= scale
    if SWIGLU:
        total = total * tl.sigmoid(total) * second
    if bias is not None:
        total += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)[:, None]
    at = m[None, :].to(tl.int64) * num_out + n[:, None]
    inside = (m[None, :] < num_rows) & (n[:, None] < num_out)
    if residual is not None:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if next_norm is not None:
        y = tl.where(inside, rounded.to(tl.float32), 0.0)
        weight = tl.load(next_norm + n, mask=n < num_out, other=0.0).to(tl.float32)[:, None]
        tl.store(scaled + at, (y * weight).to(scaled.dtype.element_ty), mask=inside)
        tl.store(next_squares + tile * ROWS + m, tl.sum(y * y, 0))


@triton.jit(do_not_specialize=["num_rows", "eps"])
def skinny_kernel(
    x, weight, up, norm_weight, x_squares, bias, residual, out, next_norm, scaled, next_squares,
    partial, arrivals, num_rows, num_out, size_in, x_stride, eps,
    PARTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of rows of W (or its SPLIT-th part) with all rows of x.

    What is absent is None. With `up` the result is SwiGLU's, with `norm_weight` x is still to be
    normed. PARTS: x is a norm before the division by the rms, and x_squares has Σ x² in PARTS parts
    (PADDED to a power of two), [PARTS, ROWS]; 0: it is not. EVEN: size_in is a multiple of
    DEPTH · SPLIT. PREFETCH: elements of each row prefetched before the previous kernel is done.
    WIDE: multiply in float32 (the interpreter lacks bfloat16). PRECISION: of products of float32:
    "tf32x3" adds three products of tensor cores, which leaves float32's error.
    """
    program = tl.program_id(0)
    tile, part = program // SPLIT, program % SPLIT
    n = tile * TILE + tl.arange(0, TILE)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    steps = tl.cdiv(size_in, DEPTH * SPLIT)
    start = part * steps * DEPTH
    # Rows past the end read the last row again; their sums are never stored.
    row = tl.minimum(n, num_out - 1).to(tl.int64)[:, None] * size_in + start
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            offset = row + CHUNK * tl.arange(0, PREFETCH // CHUNK)[None, :]
            prefetch(weight + offset)
            if up is not None:
                prefetch(up + offset)
        tl.extra.cuda.gdc_wait()

    if PARTS:
        # Loaded now and added after the products, so that nothing waits for them.
        at = tl.arange(0, PADDED)[:, None]
        squares_in = tl.load(x_squares + at * ROWS + m[None, :], mask=at < PARTS, other=0.0)
    weights = weight + row + k[None, :]
    if up is not None:
        ups = up + row + k[None, :]
    xs = x + m[:, None] * x_stride + start + k[None, :]
    if norm_weight is not None:
        norms = norm_weight + start + k
    here = m[:, None] < num_rows
    total = tl.zeros((TILE, ROWS), tl.float32)
    second = tl.zeros((TILE, ROWS), tl.float32)
    squared = tl.zeros((ROWS, DEPTH), tl.float32)
    for step in range(steps):
        left = size_in - start - step * DEPTH
        if EVEN:
            w = tl.load(weights, eviction_policy="evict_first")
            x_tile = tl.load(xs, mask=here, other=0.0)
        else:
            w = tl.load(weights, mask=k[None, :] < left, other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(xs, mask=here & (k[None, :] < left), other=0.0)
        if norm_weight is not None:
            x_wide = x_tile.to(tl.float32)
            squared += x_wide * x_wide
            scale = tl.load(norms) if EVEN else tl.load(norms, mask=k < left, other=0.0)
            x_tile = (x_wide * scale.to(tl.float32)[None, :]).to(x_tile.dtype)
            norms += DEPTH
        if WIDE:
            w, x_tile = w.to(tl.float32), x_tile.to(tl.float32)
        total = tl.dot(w, tl.trans(x_tile), total, input_precision=PRECISION)
        if up is not None:
            if EVEN:
                v = tl.load(ups, eviction_policy="evict_first")
            else:
                v = tl.load(ups, mask=k[None, :] < left, other=0.0, eviction_policy="evict_first")
            if WIDE:
                v = v.to(tl.float32)
            second = tl.dot(v, tl.trans(x_tile), second, input_precision=PRECISION)
            ups += DEPTH
        weights += DEPTH
        xs += DEPTH
    squares = tl.sum(squared, 1)
    if PARTS:
        squares = tl.sum(squares_in, 0)

    if SPLIT == 1:
        _write(
            total, second, squares, bias, residual, out, next_norm, scaled, next_squares,
            tile, n, m, num_rows, num_out, size_in, eps,
            up is not None, norm_weight is not None or PARTS > 0, ROWS,
        )  # fmt: skip
    else:
        # A program writes TILE · ROWS sums and ROWS sums of squares.
        SIZE: tl.constexpr = TILE * ROWS + ROWS
        at = tl.arange(0, TILE)[:, None] * ROWS + m[None, :]
        tl.store(partial + program * SIZE + at, total)
        if norm_weight is not None:
            tl.store(partial + program * SIZE + TILE * ROWS + m, squares)
        tl.debug_barrier()  # all threads have stored before the counter is incremented
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            total = tl.zeros((TILE, ROWS), tl.float32)
            if norm_weight is not None:
                squares = tl.zeros((ROWS,), tl.float32)
            for other in tl.static_range(SPLIT):  # unrolled: the loads do not wait for each other
                base = partial + (tile * SPLIT + other) * SIZE
                # Other multiprocessors wrote these, so loads bypass the L1 cache.
                total += tl.load(base + at, cache_modifier=".cg")
                if norm_weight is not None:
                    squares += tl.load(base + TILE * ROWS + m, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            _write(
                total, second, squares, bias, residual, out, next_norm, scaled, next_squares,
                tile, n, m, num_rows, num_out, size_in, eps,
                up is not None, norm_weight is not None or PARTS > 0, ROWS,
            )  # fmt: skip
