"""Choice of the training forward: reference or fast, compiled or eager."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic

from draftlab.errors import UserError
from draftlab.formatting import count_text
from draftlab.heads.config import HeadConfig
from draftlab.heads.head import DraftHead
from draftlab.kernels.compile_ahead import CompileAhead
from draftlab.kernels.fp8_linear import SIZE_MULTIPLE, linear, quantise_weight
from draftlab.store.store import Record
from draftlab.target_model.recurrent_layer import copy_function
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.fast.fused_ops import FP8_OPS, FUSED_OPS, FusedOps
from draftlab.train.objectives.objective import Forward, Objective
from draftlab.train.settings import TrainSettings

NO_FP8 = "train.precision=fp8 means bfloat16 on such heads"
NO_COMPILE = "train.compile has no effect on such heads"
NOT_COMPILED = "not compiled"
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_FP8_TOLERANCE = 0.35
"""Relative difference allowed between compiled and eager steps. In bfloat16 they round at different
places, and the differences add up over steps. In fp8 such a difference can move a number by a whole
step of three bits; five layers differ by 0.16. A mistake gives a difference of about 1."""
_GPU_CHECK_TOKENS, _GPU_CHECK_NUMBERS = 2048, 2**23
"""The batch that is compared on a GPU has so many tokens, or so many numbers in their hidden states
if that takes more tokens. It is the first batch that torch.compile sees, which chooses tile sizes,
and how sums over rows are split into parts, for its number of rows."""


class _CompiledOp:
    """An operation of `fast/fused_ops.py`, compiled for any number of rows."""

    def __init__(self, op: FunctionType, backend: str) -> None:
        self.compiled = torch.compile(_own_copy(op), backend=backend, options=_options(backend))

    def __call__(self, rows: tuple[Tensor | None, ...], *rest: Any) -> Any:
        return self.compiled(tuple(None if x is None else _uniform(x) for x in rows), *rest)


def _uniform(rows: Tensor) -> Tensor:
    """Return rows without the properties for which torch.compile makes another variant, in 3 s on a
    GPU: their number, a gradient that nothing asks for, and a place in a larger tensor.
    """
    if not torch.is_grad_enabled():  # otherwise it is an operation with autograd's gradient
        rows = rows.data
    if rows.storage_offset() or not rows.is_contiguous():
        rows = rows.clone(memory_format=torch.contiguous_format)
    maybe_mark_dynamic(rows, 0)
    return rows


def _options(backend: str) -> dict[str, Any] | None:
    """Return options of torch.compile; None: its defaults.

    Inductor may compute sums over rows and over columns in one kernel if there are many rows. That
    saves a read of the hidden states, but few rows and many then need a variant each.
    """
    if backend != "inductor":
        return None
    option = "triton.mix_order_reduction"  # since torch 2.10
    return {option: False} if option in torch._inductor.list_options() else None


def _own_copy(op: FunctionType) -> FunctionType:
    """Return a copy of a function for one head: variants are limited for each code object."""
    return copy_function(op, op.__globals__, op.__code__.replace())


def compiled_ops(ops: FusedOps = FUSED_OPS, backend: str = "inductor") -> FusedOps:
    """Return compiled `FusedOps`, which run norms, rotations and quantisation in few kernels."""
    # An operation is compiled for queries, keys or both; with and without a norm and a context; for
    # one row; and for thousands of rows.
    # The limit is the process's: a higher one only lets other functions have more variants, too.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 32)
    *row_ops, quantise = ops
    if quantise is not None:  # for the shape of each matrix
        quantise = torch.compile(_own_copy(quantise), backend=backend, dynamic=False)
    return FusedOps(*(_CompiledOp(op, backend) for op in row_ops), quantise)


def choose_forward(
    head: DraftHead, objective: Objective, settings: TrainSettings, dtype: torch.dtype
) -> tuple[Forward, str]:
    """Return the forward pass of a head on its device, and a description of it; raise a `UserError`
    if the GPU or a size of the layers does not allow train.precision=fp8.
    """
    fast = objective.fast_forward
    on_gpu, fp8 = head.fc.weight.is_cuda, settings.precision == "fp8"
    if fast is None or not fast.supports(head):
        notes = [NO_COMPILE] * (settings.compile is True) + [NO_FP8] * fp8
        return objective.forward, ", ".join(["the reference forward", *notes])
    description = [fast.description]
    if fp8 and not fast.supports_fp8(head):
        description.append(NO_FP8)
        fp8 = False
    ops = FP8_OPS if fp8 else FUSED_OPS
    if fp8:
        check_fp8_sizes(head)
        check_fp8_device(head.fc.weight.device)
        steps = settings.steps - settings.decay_steps
        whose = "layers' and lm_head's" if head.lm_head.weight.requires_grad else "layers'"
        description.append(f"{whose} products are in fp8 in the first {count_text(steps, 'step')}")
    eager = fast(dtype, ops=ops)
    if not (settings.compile is True or (settings.compile == "auto" and on_gpu)):
        return eager, ", ".join(description)
    compiled = fast(dtype, ops=compiled_ops(ops))
    num_tokens = gpu_check_tokens(head.config, settings) if on_gpu else 32
    try:
        check_compiled(head, compiled, eager, num_tokens)
    except Exception as error:  # compilers raise many types
        reason = " ".join(str(error).split())[:200]
        failure = f"torch.compile failed: {type(error).__name__}: {reason}"
        description.append(f"{NOT_COMPILED}: {failure}")
        return eager, ", ".join(description)
    return compiled, ", ".join([*description, "small operations are compiled"])


def gpu_check_tokens(config: HeadConfig, settings: TrainSettings) -> int:
    """Return how many tokens the batch of `check_compiled` has on a GPU."""
    largest = settings.row_tokens * (settings.micro_rows or settings.batch_rows)
    return min(max(_GPU_CHECK_TOKENS, _GPU_CHECK_NUMBERS // config.hidden_size), largest)


def check_compiled(head: DraftHead, compiled: Any, eager: Any, num_tokens: int) -> None:
    """Compare a random batch's outputs and gradients, compiled and eager; raise a ValueError if
    they differ by more than rounding.
    """
    batch = random_batch(head, num_tokens).to(head.fc.weight.device)
    trained = [
        p
        for name, p in head.named_parameters()
        if name.startswith(("fc.", "layers.", "mask_")) and p.requires_grad
    ]
    tolerance = _FP8_TOLERANCE if eager.in_fp8 else _TOLERANCE[eager.dtype]

    def run(forward: Any) -> list[Tensor]:
        outputs = forward(head, batch)
        total = sum(o.output.float().square().mean() for o in outputs)
        return [*(o.output.detach() for o in outputs), *torch.autograd.grad(total, trained)]

    CompileAhead(head.fc.weight.device)(lambda: run(eager))
    results = run(compiled), run(eager)
    for actual, expected in zip(*results, strict=True):
        error = (actual - expected).float().norm() / expected.float().norm().clamp(min=1e-6)
        if not float(error) <= tolerance:  # refuses NaN too
            raise ValueError(f"compiled and eager steps differ by {float(error):.2g} (relative)")


def random_batch(
    head: DraftHead, length: int, num_steps: int = 3, dtype: torch.dtype = torch.float32
) -> Batch:
    """Return a batch of random conversations, whose second halves are answers; their states are in
    `dtype`.
    """
    config, count = head.config, -(-length // _GPU_CHECK_TOKENS)
    length //= count
    generator = torch.Generator().manual_seed(0)
    spans = (torch.arange(length) >= length // 2).long()
    record = Record(
        "random",
        torch.randint(config.vocab_size, (length,), generator=generator),
        spans,
        torch.randn(length, config.feature_size, generator=generator).to(dtype),
        torch.zeros(length, config.target_hidden_size, dtype=dtype),
        torch.zeros(length),
        torch.zeros(length, dtype=torch.int64),
        None,
    )
    return pack([[record] * count], length * count, num_steps)


_DO = "set train.precision=bfloat16"


def check_fp8_sizes(head: DraftHead) -> None:
    """Raise a `UserError` that names the weight if a size of a head's layers is no multiple of
    `SIZE_MULTIPLE`; the head may be on the meta device.
    """
    for name, weight in head.layers.named_parameters(prefix="layers"):
        if weight.ndim == 2 and any(size % SIZE_MULTIPLE for size in weight.shape):
            raise UserError(
                f"train.precision=fp8 expects sizes that are multiples of {SIZE_MULTIPLE}, found "
                f"{list(weight.shape)}",
                where=name,
                do=_DO,
            )


def check_fp8_device(device: torch.device) -> None:
    """Raise a `UserError` with torch's reason if a device does not multiply in fp8, by a small
    product.
    """
    x = torch.ones(SIZE_MULTIPLE, SIZE_MULTIPLE, dtype=torch.bfloat16, device=device)
    try:
        linear(x, quantise_weight(x))
    except RuntimeError as error:
        raise UserError(
            "train.precision=fp8 expects a GPU that multiplies e4m3 numbers with a scale for each "
            f"row, as Hopper GPUs and later ones do; torch says: {error}",
            where=str(device),
            do=_DO,
        ) from error
