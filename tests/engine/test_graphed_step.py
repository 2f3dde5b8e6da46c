"""`GraphedStep`: the batch sizes that it captures, when it frees memory, which code it compiles."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from draftlab.engine import graphed_step
from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.graphed_step import GraphedStep
from draftlab.kernels.compile_ahead import is_fake
from tests.helpers.bigrams import BigramDrafter


def test_graphs_of_large_batches_waste_little_and_are_few() -> None:
    sizes = {n: GraphedStep.padded_size(n) for n in range(1, 4097)}
    assert [sizes[n] for n in (1, 3, 33, 64, 65, 97, 129, 257, 513, 1024)] == [
        1, 4, 48, 64, 96, 128, 160, 320, 640, 1024
    ]  # fmt: skip
    assert all(n <= size for n, size in sizes.items())
    assert all(size < 1.25 * n + 32 for n, size in sizes.items())
    assert len({sizes[n] for n in range(65, 1025)}) == 14


def test_a_size_that_a_shrinking_batch_passes_is_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    model = type("Model", (), {"__module__": "a"})()
    target = SimpleNamespace(device=torch.device("cpu"), model=model)
    step: Any = SimpleNamespace(target=target, drafter=None)
    graphs = GraphedStep(step)

    def sizes(*counts: int, limited: bool = False) -> list[int]:
        used = []
        for count in counts:
            used.append(graphs._size(count, limited))
            graphs._graphs[used[-1], limited] = cast(Any, None)
        return used

    assert sizes(3, 1, 60, 60) == [4, 4, 64, 64]  # a larger one is captured at once
    few = 4096 // (64 - 16) + 1
    assert sizes(30, *[10] * few, 9, 9, 4, 1) == [64, *[64] * few, 16, 16, 4, 4]
    assert sizes(9, limited=True) == [16]
    graphs.patience = 0
    assert sizes(30, 1) == [32, 1]


@pytest.mark.parametrize(("free", "emptied"), [(2.5, False), (1.5, True)])
def test_a_capture_gives_memory_back_if_it_may_need_it(
    free: float, emptied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before it leaves 1 GiB unused here, and another 1 GiB must stay free."""
    calls: list[str] = []
    numbers = {
        "mem_get_info": (int(free * 2**30), 2**40),
        "memory_reserved": 3 * 2**30,
        "memory_allocated": 2 * 2**30,
        "graph_pool_handle": "pool",
        "stream": nullcontext(),
    }
    monkeypatch.setattr(graphed_step, "_capture_stream", str)  # which keeps real streams
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))

    class Graph:
        def capture_begin(self, pool: str) -> None:
            calls.append(f"begin in {pool}")

        def capture_end(self) -> None:
            calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    model = type("Model", (), {"__module__": "a"})()
    target = SimpleNamespace(device=torch.device("cuda"), model=model)
    graphs = GraphedStep(cast(Any, SimpleNamespace(target=target, drafter=None)))
    graphs.capture(lambda: calls.append("run"))
    expected = ["run", *["empty_cache"] * emptied, "synchronize", "begin in pool", "run", "end"]
    assert calls == expected
    assert graphs.emptied == emptied

    def fail() -> torch.Tensor:
        if calls[-1].startswith("begin"):
            raise ZeroDivisionError
        return torch.empty(0)

    with pytest.raises(ZeroDivisionError):
        graphs.capture(fail)
    assert calls[-1] == "end"


@pytest.mark.parametrize("drafter", [None, "ours", "a user's"])
@pytest.mark.parametrize("module", ["transformers.models.llama", "transformers_modules.llama"])
def test_code_that_may_keep_tensors_gets_no_fake_ones(
    drafter: str | None, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graph() -> None:
        raise StopIteration  # behind the compilation; there may be no GPU

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    drafters = {"ours": ChainDrafter.__new__(ChainDrafter), "a user's": BigramDrafter([], 2)}
    model = type("Model", (), {"__module__": module})()
    target = SimpleNamespace(device=torch.device("cuda"), model=model, asked_kernels=set())
    step: Any = SimpleNamespace(target=target, drafter=drafters.get(drafter or ""))
    calls: list[bool] = []
    for kernels in (None, None, "the same", "the same"):
        with pytest.raises(StopIteration):
            GraphedStep(step).capture(lambda: calls.append(is_fake()) or torch.empty(0), kernels)
    known = drafter != "a user's" and module.startswith("transformers.")
    assert calls.count(True) == 3 * known  # engines ask once for the same
    assert calls.count(False) == 4
