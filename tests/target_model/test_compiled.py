"""Small operations compiled: the same states, few graphs, and a way back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model import compiled
from draftlab.target_model.compiled import compile_layers, compile_small
from draftlab.target_model.fused_decoder import knows
from draftlab.target_model.model import Target, TargetSettings, load_target
from tests.helpers.zoo import SHAPE, zoo_folder

# With the modules that get a compiled method in four layers.
KINDS = {
    "llama": 4 * 4,  # two norms, a feed-forward, attention
    "gpt_oss": 4 * 4,  # experts instead
    "gemma3_text": 4 * 8,  # six norms
    "phi3": 4 * 4,
    "llama4_text": 4 * 2 + 2 * 1 + 4 * 1,  # complex rotations stay; norms of queries with RoPE
    "olmo3": 4 * 6,
    "glm4_moe": 4 * 3 + 1 + 2 * 3,  # experts and shared ones on three layers
}


def load(path: Path, kind: str, dtype: Any = "bfloat16") -> Target:
    return load_target(TargetSettings(path=str(zoo_folder(path, kind)), device="cpu", dtype=dtype))


def placed(target: Target) -> list[torch.nn.Module]:
    """Modules of the layers with a method of their own."""
    return [m for m in target.layers.modules() if {"forward", "_apply_gate"} & vars(m).keys()]


def fed(target: Target, rows: int, width: int) -> list[Tensor]:
    """States with a cache of pages and without, fresh tokens each time the shape differs."""
    ids = torch.randint(
        3, SHAPE["vocab_size"], (rows, width), generator=torch.Generator().manual_seed(width)
    )
    cache = target.new_paged_cache(4 * rows + 1, 8)
    table = torch.arange(1, 4 * rows + 1, dtype=torch.int32).view(rows, 4)
    positions = torch.arange(width).repeat(rows, 1)
    aimed = cache.at(table, positions, slot_mapping(table, positions, 8))
    alone = target.states(ids, (1, 3))
    return [
        alone.features,
        target.states(ids, positions=positions, cache=aimed).last,
        target.logits(alone.last),
    ]


class Graphs:
    """A backend that counts what it is given and runs it as it is, or changed by `mend`."""

    def __init__(self, mend: Callable[[Callable], Callable] = lambda run: run) -> None:
        self.count, self.mend = 0, mend

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable:
        self.count += 1
        return self.mend(graph.forward)


@pytest.mark.parametrize("kind", KINDS)
def test_states_stay_and_graphs_are_few(kind: str, tmp_path: Path) -> None:
    target, shapes = load(tmp_path, kind), [(1, 5), (3, 4), (2, 1), (1, 1), (5, 5)]
    expected = [fed(target, *shape) for shape in shapes]
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    graphs = Graphs()
    assert compile_layers(target, graphs)
    assert len(placed(target)) == KINDS[kind]
    kinds = {(type(m), *(p.shape for p in m.parameters())) for m in placed(target)}
    assert 0 < graphs.count <= 2 * len(kinds)  # one row, and any number; not one a layer
    compiled_for = graphs.count
    found = [fed(target, *shape) for shape in shapes]
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # Angles come in two more layouts: shared by rows of one token without a cache, and, from some
    # releases of gpt-oss in transformers, transposed.
    assert graphs.count <= compiled_for + 2
    after = target.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_pieces_leave_each_other_their_variants() -> None:
    """torch.compile allows a function eight; targets of one architecture share functions."""

    def double(x: Tensor) -> Tensor:
        return x * 2

    graphs = Graphs()
    for width in range(3, 9):
        piece = compiled._Piece(double, graphs)
        for rows in (1, 4, 7):
            assert torch.equal(piece(torch.ones(rows, width)), torch.full((rows, width), 2.0))
    assert graphs.count == 2 * 6


def test_a_copied_layer_uses_its_own_weights(tmp_path: Path) -> None:
    target = load(tmp_path, "llama", "float32")
    compile_layers(target, Graphs())
    layer = target.layers[0]
    other = copy.deepcopy(layer)
    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    for parameter in layer.parameters():
        parameter.zero_()
    assert not layer.mlp(layer.input_layernorm(x)).any()
    assert other.mlp(other.input_layernorm(x)).any()


def _broken(_: Callable) -> Callable:
    raise RuntimeError("no compiler here\nand more lines")


def _wrong(run: Callable) -> Callable:
    """5 % more: what a wrong eps or a forgotten rounding would be too small for."""
    return lambda *inputs: tuple(output * 1.05 for output in run(*inputs))


@pytest.mark.parametrize(
    ("mend", "message"),
    [
        (_broken, "LlamaModel run uncompiled: .*no compiler here"),
        (_wrong, r"LlamaModel run uncompiled: .*LlamaRMSNorm.forward differs by 0.05"),
    ],
)
def test_failures_are_told_and_taken_back(
    mend: Callable[[Callable], Callable], message: str, tmp_path: Path
) -> None:
    target = load(tmp_path, "llama")
    expected = fed(target, 2, 3)
    with pytest.warns(RuntimeWarning, match=message):
        assert not compile_layers(target, Graphs(mend))
    assert not placed(target)
    assert all(torch.equal(a, b) for a, b in zip(fed(target, 2, 3), expected, strict=True))


def test_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA in 16 bit what has no kernels of our own; never what somebody else has replaced."""
    done: list[Target] = []
    monkeypatch.setattr(compiled, "compile_layers", done.append)
    gemma, llama = load(tmp_path / "a", "gemma2"), load(tmp_path / "b", "llama")
    single = load(tmp_path / "c", "gemma2", "float32")
    compile_small(gemma)
    assert not done  # a CPU
    monkeypatch.setattr(Target, "device", torch.device("cuda"))
    monkeypatch.setattr(Target, "spread", False)
    for target in (gemma, llama, single):
        compile_small(target)
    assert done == [gemma]
    monkeypatch.undo()
    norm = gemma.layers[0].input_layernorm
    norm.forward = norm.forward
    kept = norm.forward
    compile_layers(gemma, Graphs())
    assert norm.forward is kept
    compile_layers(llama, Graphs())
    assert not knows(llama)  # one or the other


def test_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Target] = []
    monkeypatch.setattr(compiled, "compile_small", done.append)
    folder = str(zoo_folder(tmp_path, "llama"))
    load_target(TargetSettings(path=folder, device="cpu", compile=False))
    assert not done
    target = load_target(TargetSettings(path=folder, device="cpu"))
    assert done == [target]
