"""A target's pass never waits for the device, so that a CUDA graph can capture it.

Passes run on torch's meta device, whose tensors have shapes and no values, so reading a value fails
as it would during capture. A dispatch mode makes copies from the host fail, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model import attention, check_capabilities, experts
from draftlab.target_model import paged_cache as paged
from draftlab.target_model.model import Target
from draftlab.target_model.packed_rows import PackedRow
from draftlab.target_model.paged_cache import PagedCache
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.zoo import MIXTURES, ZOO, zoo_target

META = torch.device("meta")


class _NoCopies(TorchDispatchMode):
    """Refuses operations between host and device tensors, except for scalars."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        if len({t.device for t in tensors if t.ndim}) > 1:
            raise RuntimeError(f"{func} moves a tensor between host and device")
        return result


@contextmanager
def _no_tensors_from_lists() -> Iterator[None]:
    """Refuse `torch.tensor(…, device=…)`, whose copy no dispatch mode sees."""
    original = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is not None and torch.device(device) == META:
            raise RuntimeError("torch.tensor copies from the host and waits for it")
        return original(*args, device=device, **kwargs)

    torch.tensor = tensor
    try:
        yield
    finally:
        torch.tensor = original


@torch.inference_mode()
def pass_on_meta(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a pass of three rows of four tokens, and that of a packed row, which recording launches.

    draftlab's kernels are replaced by empty results.
    """
    monkeypatch.setattr(attention, "attend_paged", lambda query, *_, **__: torch.empty_like(query))
    monkeypatch.setattr(paged, "write_paged", lambda *_: None)
    target = Target(target.model.to(META), target.folder, target.name)
    rows, width = 3, 4
    cache = PagedCache(target.num_layers, 9, 4, rows * target.recurrent, gathers=target.latent)
    tokens, positions = torch.zeros(2, rows, width, dtype=torch.int64, device=META)
    table = torch.zeros(rows, 5, dtype=torch.int32, device=META)

    row, ids = PackedRow.of((5, 30, 1), META), torch.zeros(1, 36, dtype=torch.int64, device=META)
    index = torch.arange(rows, device=META)

    def run(lengths: list[int] | None = None) -> tuple[Tensor, Tensor]:
        cache.at(table, positions, slot_mapping(table, positions, 4), index, lengths)
        states = target.states(tokens, (0, 2, 4), positions=positions, cache=cache)
        if cache.states is not None and lengths is None:
            cache.states.keep(index)
        return states.features, target.logits(states.last)

    run([2, 4, 3])  # allocates the pools, as a warm-up does
    with _no_tensors_from_lists(), _NoCopies():
        features, logits = run()
    assert features.shape == (rows, width, 3 * target.hidden_size)
    assert logits.shape == (rows, width, target.vocab_size)
    assert {features.device, logits.device} == {META}
    if target.recurrent:  # transformers reads the mask of a packed row of recurrent layers
        return
    with _no_tensors_from_lists(), _NoCopies():
        packed = target.states(ids, (0, 2, 4), packed_row=row)
        packed_logits = target.logits(packed.last)
    assert packed.features.shape == (1, 36, 3 * target.hidden_size)
    assert {packed.features.device, packed_logits.device} == {META}


@pytest.mark.parametrize(
    ("kind", "grouped"),
    [(kind, True) for kind in (*ZOO, *HYBRID)] + [(kind, False) for kind in (*MIXTURES, *HYBRID)],
)
def test_a_pass_never_waits(
    kind: str, grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "grouped_products", lambda dtype, device: grouped)
    dtype = "bfloat16" if grouped else "float32"  # as on a GPU
    pass_on_meta(zoo_target(tmp_path, kind, dtype=dtype), monkeypatch)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("number", "meta"), ("list", "copies from the host"), ("copy", "between host and device")],
)
def test_waiting_passes_are_found_on_meta(
    fault: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = zoo_target(tmp_path, "llama")
    mlp = target.layers[1].mlp
    forward = mlp.forward
    host = torch.ones(32)

    def waiting(x: Tensor) -> Tensor:
        if fault == "number" and float(x[0, 0, 0]) > 3:
            return x
        if fault == "list":
            x = x * torch.tensor([2.0], device=x.device)
        if fault == "copy":
            x = x + host.to(x.device)
        return forward(x)

    mlp.forward = waiting
    with pytest.raises(RuntimeError, match=message):
        pass_on_meta(target, monkeypatch)


def test_a_pass_that_waits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torch's debug mode; test_on_gpu.py uses the real one."""
    mode: list[Any] = [1]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)
    target = zoo_target(tmp_path, "llama")
    assert check_capabilities.synchronisation_error(target) is None
    assert mode == [1, "error", 1]
    mlp = target.layers[1].mlp
    forward = mlp.forward

    def wait(x: Tensor) -> Tensor:
        if mode[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation\nfrom somewhere")
        return forward(x)

    mlp.forward = wait
    assert (
        check_capabilities.synchronisation_error(target) == "called a synchronizing CUDA operation"
    )
    assert mode[-1] == 1


def test_a_target_that_waits_is_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = zoo_target(tmp_path, "llama")
    assert not check_capabilities.can_capture(target)  # no GPU, no graphs, no warning
    monkeypatch.setattr(Target, "device", torch.device("cuda"))
    monkeypatch.setattr(Target, "pipeline_parallel", False)
    monkeypatch.setattr(check_capabilities, "synchronisation_error", lambda _: None)
    assert check_capabilities.can_capture(target)
    monkeypatch.setattr(check_capabilities, "synchronisation_error", lambda _: "a value was read")
    message = "LlamaModel decodes without CUDA graphs.*a value was read"
    with pytest.warns(RuntimeWarning, match=message):
        assert not check_capabilities.can_capture(target)
