"""Choice of the training forward: reference or fast, compiled or eager, with or without
recomputation."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic

from draftlab.errors import UserError
from draftlab.heads.head import DraftHead
from draftlab.kernels.fp8_linear import SIZE_MULTIPLE, linear, quantise_weight
from draftlab.store.store import Record
from draftlab.target_model.recurrent_layer import copy_function
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.fast.fused_ops import FP8_OPS, FUSED_OPS, FusedOps
from draftlab.train.flops import kept_bytes
from draftlab.train.objectives.objective import Forward, Objective
from draftlab.train.settings import TrainSettings

NO_FP8 = "train.precision=fp8 means bfloat16 on such heads"
NO_COMPILE, NO_RECOMPUTE = (
    f"train.{name} has no effect on such heads" for name in ("compile", "recompute")
)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_FP8_TOLERANCE = 0.35
"""Relative difference allowed between compiled and eager steps. In bfloat16 they round at different
places, and the differences add up over steps. In fp8 such a difference can move a number by a whole
step of three bits; five layers differ by 0.16. A mistake gives a difference of about 1."""
_GPU_CHECK_TOKENS = 2048
"""Most tokens of the batch that is compared on a GPU, the first that torch.compile sees. It chooses
tile sizes for those numbers of rows, and does not split sums over few rows into parts."""
_USABLE_MEMORY = 0.8
"""Share of the memory beside weights, gradients and moments that activations may take."""


class _CompiledOp:
    """An operation of `fast/fused_ops.py`, compiled for any number of rows."""

    def __init__(self, op: FunctionType, backend: str) -> None:
        self.compiled = torch.compile(_own_copy(op), backend=backend)

    def __call__(self, rows: tuple[Tensor | None, ...], *rest: Any) -> Any:
        for tensor in rows:
            if tensor is not None:
                maybe_mark_dynamic(tensor, 0)
        return self.compiled(rows, *rest)


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
    """Return the forward pass of a head on its device, and a description of it.

    Raises:
        UserError: with train.precision=fp8, if the GPU or a size of the layers does not allow it.
    """
    fast = objective.fast_forward
    on_gpu, recompute, fp8 = head.fc.weight.is_cuda, settings.recompute, settings.precision == "fp8"
    if fast is None or not fast.supports(head):
        notes = ["the reference forward"] + [NO_COMPILE] * (settings.compile is True)
        notes += [NO_RECOMPUTE] * (recompute is True) + [NO_FP8] * fp8
        return objective.forward, ", ".join(notes)
    description = [fast.description]
    if fp8 and not fast.supports_fp8(head):
        description.append(NO_FP8)
        fp8 = False
    options: dict[str, Any] = {"ops": FP8_OPS if fp8 else FUSED_OPS}
    if fp8:
        check_fp8_sizes(head)
        check_fp8_device(head.fc.weight.device)
        description.append("layers' products are in fp8")
    if fast.can_recompute:
        if recompute == "auto":
            recompute = on_gpu and not fits_in_memory(head, settings, dtype)
        options["recompute"] = recompute
        description += ["steps are recomputed in the backward pass"] * bool(recompute)
    else:
        description += [NO_RECOMPUTE] * (recompute is True)
    eager = fast(dtype, **options)
    if not (settings.compile is True or (settings.compile == "auto" and on_gpu)):
        return eager, ", ".join(description)
    compiled = fast(dtype, **options | {"ops": compiled_ops(options["ops"])})
    num_tokens = min(_GPU_CHECK_TOKENS, _pass_tokens(settings)) if on_gpu else 32
    try:
        check_compiled(head, compiled, eager, num_tokens)
    except Exception as error:  # compilers raise many types
        reason = " ".join(str(error).split())[:200]
        description.append(f"not compiled: torch.compile failed: {type(error).__name__}: {reason}")
        return eager, ", ".join(description)
    return compiled, ", ".join([*description, "small operations are compiled"])


def fits_in_memory(
    head: DraftHead, settings: TrainSettings, dtype: torch.dtype, *, steps: int = 1
) -> bool:
    """Return whether the activations that all steps of the largest batch save fit on the GPU, for
    so many optimizer steps at a time.
    """
    rows = _pass_tokens(settings) / settings.anchor_parts
    saved = steps * rows * settings.ttt_steps * kept_bytes(head.config, dtype)
    # Gradients and two moments, each as large as the weights, are allocated later.
    later = 3 * sum(p.numel() * p.element_size() for p in head.parameters() if p.requires_grad)
    free, _ = torch.cuda.mem_get_info(head.fc.weight.device)
    return saved < _USABLE_MEMORY * (free - later)


def _pass_tokens(settings: TrainSettings) -> int:
    """Return the number of tokens of the largest pass, with padding."""
    return settings.row_tokens * (settings.micro_rows or settings.batch_rows)


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
    tolerance = _FP8_TOLERANCE if eager.ops.quantise_weight else _TOLERANCE[eager.dtype]
    results = []
    for forward in (compiled, eager):
        outputs = forward(head, batch)
        total = sum(o.output.float().square().mean() for o in outputs)
        gradients = torch.autograd.grad(total, trained)
        results.append([*(o.output.detach() for o in outputs), *gradients])
    for actual, expected in zip(*results, strict=True):
        error = (actual - expected).float().norm() / expected.float().norm().clamp(min=1e-6)
        if not float(error) <= tolerance:  # refuses NaN too
            raise ValueError(f"compiled and eager steps differ by {float(error):.2g} (relative)")


def random_batch(head: DraftHead, length: int) -> Batch:
    """Return a batch of one random conversation, whose second half is an answer."""
    config = head.config
    generator = torch.Generator().manual_seed(0)
    spans = (torch.arange(length) >= length // 2).long()
    record = Record(
        "random",
        torch.randint(config.vocab_size, (length,), generator=generator),
        spans,
        torch.randn(length, config.feature_size, generator=generator),
        torch.zeros(length, config.target_hidden_size),
        torch.zeros(length),
        torch.zeros(length, dtype=torch.int64),
        None,
    )
    return pack([[record]], length, 3)


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
