"""Compiled small operations give the same states, from few graphs, or are undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftlab.target_model import compiled, loading
from draftlab.target_model.compiled import compile_layers, compile_target
from draftlab.target_model.fused_decoder import has_known_layers
from draftlab.target_model.model import Target
from tests.helpers.ragged import paged_cache, run_ragged
from tests.helpers.zoo import load_on_cpu, random_texts, zoo_folder, zoo_target

# The number of modules in four layers whose method is compiled.
KINDS = {
    "llama": 4 * 4,  # two norms, a feed-forward, attention
    "gpt_oss": 4 * 4,  # experts instead
    "gemma3_text": 4 * 8,  # six norms
    "phi3": 4 * 4,
    "llama4_text": 4 * 2 + 2 * 1 + 4 * 1,  # complex rotations stay; norms of queries with RoPE
    "olmo3": 4 * 6,
    "glm4_moe": 4 * 3 + 1 + 2 * 3,  # experts and shared ones on three layers
}


def compiled_modules(target: Target) -> list[torch.nn.Module]:
    return [m for m in target.layers.modules() if {"forward", "_apply_gate"} & vars(m).keys()]


def run(target: Target, rows: int, width: int) -> list[Tensor]:
    """Return states without a cache, with a paged cache, and logits, of random tokens."""
    ids = torch.stack(random_texts((width,) * rows, seed=width))
    table = torch.arange(1, 4 * rows + 1, dtype=torch.int32).view(rows, 4)
    alone = target.states(ids, (1, 3))
    cached = run_ragged(target, paged_cache(target, table, 8), ids, [(width,) * rows])
    return [alone.features, *(last for _, last in cached), target.logits(alone.last)]


class Backend:
    """A backend that counts graphs and runs them, changed by `wrap`."""

    def __init__(self, wrap: Callable[[Callable], Callable] = lambda run: run) -> None:
        self.count, self.wrap = 0, wrap

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable:
        self.count += 1
        return self.wrap(graph.forward)


@pytest.mark.parametrize("kind", KINDS)
def test_states_stay_and_graphs_are_few(kind: str, tmp_path: Path) -> None:
    target, shapes = (
        zoo_target(tmp_path, kind, dtype="bfloat16"),
        [(1, 5), (3, 4), (2, 1), (1, 1), (5, 5)],
    )
    expected = [run(target, *shape) for shape in shapes]
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    backend = Backend()
    assert compile_layers(target, backend)
    assert len(compiled_modules(target)) == KINDS[kind]
    kinds = {(type(m), *(p.shape for p in m.parameters())) for m in compiled_modules(target)}
    assert 0 < backend.count <= 2 * len(kinds)  # for one row and for any number; not for each layer
    before_running = backend.count
    results = [run(target, *shape) for shape in shapes]
    for one, other in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # Angles have two more layouts: shared by rows of one token without a cache, and transposed in
    # some releases of gpt-oss in transformers.
    assert backend.count <= before_running + 2
    after = target.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_functions_do_not_share_their_variants() -> None:
    """torch.compile allows eight for each code object; targets of one architecture share code."""

    def double(x: Tensor) -> Tensor:
        return x * 2

    backend = Backend()
    for width in range(3, 9):
        function = compiled._CompiledFunction(double, backend)
        for rows in (1, 4, 7):
            assert torch.equal(function(torch.ones(rows, width)), torch.full((rows, width), 2.0))
    assert backend.count == 2 * 6


def test_a_copied_layer_uses_its_own_weights(tmp_path: Path) -> None:
    target = zoo_target(tmp_path, "llama", dtype="float32")
    compile_layers(target, Backend())
    layer = target.layers[0]
    other = copy.deepcopy(layer)
    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    for parameter in layer.parameters():
        parameter.zero_()
    assert not layer.mlp(layer.input_layernorm(x)).any()
    assert other.mlp(other.input_layernorm(x)).any()


def _fail(_: Callable) -> Callable:
    raise RuntimeError("no compiler here\nand more lines")


def _scale(run: Callable) -> Callable:
    """Return 5 % more: a wrong eps or a missing rounding has a smaller effect."""
    return lambda *inputs: tuple(output * 1.05 for output in run(*inputs))


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (_fail, "LlamaModel run uncompiled: .*no compiler here"),
        (_scale, r"LlamaModel run uncompiled: .*LlamaRMSNorm.forward differs by 0.05"),
    ],
)
def test_failures_are_undone_with_a_warning(
    wrap: Callable[[Callable], Callable], message: str, tmp_path: Path
) -> None:
    target = zoo_target(tmp_path, "llama", dtype="bfloat16")
    expected = run(target, 2, 3)
    with pytest.warns(RuntimeWarning, match=message):
        assert not compile_layers(target, Backend(wrap))
    assert not compiled_modules(target)
    assert all(torch.equal(a, b) for a, b in zip(run(target, 2, 3), expected, strict=True))


def test_only_targets_without_a_fast_path_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, in 16 bit; replaced methods are left alone."""
    done: list[Target] = []
    monkeypatch.setattr(compiled, "compile_layers", done.append)
    gemma = zoo_target(tmp_path / "a", "gemma2", dtype="bfloat16")
    llama = zoo_target(tmp_path / "b", "llama", dtype="bfloat16")
    single = zoo_target(tmp_path / "c", "gemma2", dtype="float32")
    compile_target(gemma)
    assert not done  # a CPU
    monkeypatch.setattr(Target, "device", torch.device("cuda"))
    monkeypatch.setattr(Target, "pipeline_parallel", False)
    for target in (gemma, llama, single):
        compile_target(target)
    assert done == [gemma]
    monkeypatch.undo()
    norm = gemma.layers[0].input_layernorm
    norm.forward = replaced = norm.forward
    compile_layers(gemma, Backend())
    assert norm.forward is replaced
    compile_layers(llama, Backend())
    assert not has_known_layers(llama)  # compiled layers have no fast path


def test_the_compile_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Target] = []
    monkeypatch.setattr(loading, "compile_target", done.append)
    folder = zoo_folder(tmp_path, "llama")
    load_on_cpu(folder, compile=False)
    assert not done
    target = load_on_cpu(folder)
    assert done == [target]
