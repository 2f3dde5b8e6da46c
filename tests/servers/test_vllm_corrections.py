"""The client program corrects what a vLLM for CPUs gets wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.servers.vllm_client import corrections
from draftlab.servers.vllm_client.loading import RequestError
from draftlab.servers.vllm_process import VllmProcess
from draftlab.target_model.settings import VllmSettings


@pytest.fixture
def loaded_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ModuleType]]:
    """Return a function that puts empty modules in place of imported ones, and returns them."""

    def load(*names: str) -> list[ModuleType]:
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                full = ".".join(parts[:end])
                if not isinstance(sys.modules.get(full), _Empty):
                    monkeypatch.setitem(sys.modules, full, _Empty(full))
                if end > 1:
                    setattr(
                        sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[full]
                    )
        return [sys.modules[name] for name in names]

    return load


class _Empty(ModuleType):
    """A module without content."""


def test_the_correction_expands_a_row_for_each_of_its_tokens(
    loaded_modules: Callable[..., list[ModuleType]],
) -> None:
    (sampler,) = loaded_modules("vllm.v1.sample.rejection_sampler")
    with pytest.raises(RequestError, match="expand_batch_to_tokens"):
        corrections.correct_expansion()
    sampler.expand_batch_to_tokens = None
    corrections.correct_expansion()
    rows, ends = torch.tensor([0.7, 0.0, 1.5]), torch.tensor([2, 2, 5], dtype=torch.int32)
    expanded = sampler.expand_batch_to_tokens(rows, ends, 5)
    assert torch.equal(expanded, torch.tensor([0.7, 0.7, 1.5, 1.5, 1.5]))
    ends = torch.tensor([1, 3, 4], dtype=torch.int32)
    expanded = sampler.expand_batch_to_tokens(rows, ends, 4, replace_from=0, replace_to=1)
    assert torch.equal(expanded, torch.tensor([0.7, 1.0, 1.0, 1.5]))


def test_the_context_keys_of_each_layer_are_normed_with_its_own_weights(
    loaded_modules: Callable[..., list[ModuleType]],
) -> None:
    """rms_norm here applies the first weights to all rows, as that of vLLM's CPU build does."""

    def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        out.copy_(F.rms_norm(x, x.shape[-1:], weight.reshape(-1)[: x.shape[-1]], eps))

    ops, models = loaded_modules("vllm._custom_ops", "vllm.model_executor.models.qwen3_dflash")
    ops.rms_norm, models.DFlashQwen3Model = rms_norm, SimpleNamespace()
    with pytest.raises(RequestError, match="_normalize_context_k"):
        corrections.correct_context_norms()
    models.DFlashQwen3Model._normalize_context_k = None
    corrections.correct_context_norms()
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 5, 2, 8, generator=generator)
    weights = torch.randn(3, 8, generator=generator)
    model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-5)
    normed = models.DFlashQwen3Model._normalize_context_k(model, keys)
    for layer, weight in enumerate(weights):
        torch.testing.assert_close(normed[layer], F.rms_norm(keys[layer], (8,), weight, 1e-5))


@pytest.mark.parametrize(
    ("method", "runner", "expected"),
    [
        ("eagle3", None, ["EXPANSION"]),
        ("eagle3", "1", ["INTERPRETER"]),
        ("dflash", None, ["EXPANSION", "CONTEXT_NORMS"]),
        ("dspark", None, ["INTERPRETER", "CONTEXT_NORMS"]),
    ],
)
def test_method_and_runner_decide_the_corrections(
    method: str,
    runner: str | None,
    expected: list[str],
    folder: Path,
    install_fake: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_fake()
    if runner:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    setup = {"target": str(folder), "draft": str(folder), "k": 2, "method": method}
    with closing(VllmProcess(setup, VllmSettings())) as process:
        assert process.info["corrections"] == [getattr(corrections, name) for name in expected]


def test_triton_is_interpreted_and_has_a_backend_for_cpus(
    loaded_modules: Callable[..., list[ModuleType]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (triton,) = loaded_modules("triton.backends")
    triton.backends = {}
    corrections.interpret_triton()
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert not triton.backends["cpu"].driver.is_active()
    del triton.backends
    with pytest.raises(RequestError, match="Triton"):
        corrections.interpret_triton()
