"""The fused path (on its kernels' references) and the prepacked path against transformers."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.kernels import compile_ahead
from draftlab.kernels.cpu_prepacked_linear import why_no_prepacking
from draftlab.kernels.linear import MAX_ROWS
from draftlab.target_model import known_layers
from draftlab.target_model.fused_decoder import (
    FusedDecoder,
    FusedLayer,
    fused_decoder,
    has_known_layers,
)
from draftlab.target_model.hidden_states import HiddenStates
from draftlab.target_model.known_layers import check_decode_path
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import PagedCache
from draftlab.target_model.prepacked_decoder import (
    PrepackedDecoder,
    describe_products,
    prepacked_decoder,
    why_not_prepacked,
)
from tests.helpers.head_toys import LLAMA3
from tests.helpers.ragged import paged_cache, run_ragged
from tests.helpers.zoo import assert_close, random_texts, zoo_target

# Windows of 8 matter: the sequences below are longer.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True}),
    "llama3 rope": (
        "llama",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
}
CPU = torch.device("cpu")
needs_prepacked = pytest.mark.skipif(
    why_no_prepacking(CPU, torch.float32) is not None, reason="no packed products here"
)
PATHS = [
    pytest.param(FusedDecoder, id="fused"),
    pytest.param(PrepackedDecoder, id="prepacked", marks=needs_prepacked),
]
SEQUENCES = torch.stack(random_texts((20, 20)))


def load(path: Path, kind: str) -> Target:
    name, changes = KINDS[kind]
    return zoo_target(path, name, **({"tie_word_embeddings": False} | changes))


@pytest.fixture(scope="module", params=list(KINDS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Target:
    return load(tmp_path, "llama")


@pytest.mark.parametrize("path_class", PATHS)
def test_states_and_logits_equal_transformers(path_class: Any, target: Target) -> None:
    """Ragged chunks in several blocks, and one block a row, as a CPU engine has it."""
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    assert has_known_layers(target)
    path = path_class(target)
    for table, block_size, passes in (
        ([[3, 1, 8, 5, 0], [2, 7, 4, 6, 0]], 4, [(6, 3), (1, 5), (0, 2), (5, 1), (4, 4)]),
        ([[2], [1]], 32, [(12, 12), (1, 1), (5, 5)]),
    ):
        blocks = torch.tensor(table, dtype=torch.int32)
        states, expected = (
            run_ragged(run, paged_cache(target, blocks, block_size), SEQUENCES, passes, (0, 2, 4))
            for run in (path, target)
        )
        for row, expected_row in zip(states, expected, strict=True):
            for one, other in zip(row, expected_row, strict=True):
                assert_close(one, other, 2e-5)
    last = expected[0][1]
    assert_close(path.logits(last), target.logits(last), 2e-5)
    check_decode_path(target, path, "the path")
    after = target.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_fused_path_shares_the_models_memory(target: Target) -> None:
    fused, attention = FusedDecoder(target), target.layers[0].self_attn
    storages = {
        p.weight.untyped_storage().data_ptr()
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    }
    assert storages == {fused.layers[0].weights.qkv.untyped_storage().data_ptr()}


def test_one_layer_of_each_kind_asks_for_its_kernels(
    llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer has a norm before it of its own, and all others are alike."""
    fused, asked, run = FusedDecoder(llama), list[int](), FusedLayer.write_cache

    def recorded(layer: FusedLayer, *rest: Any, **options: Any) -> Tensor:
        if compile_ahead.is_fake():
            asked.append(fused.layers.index(layer))
        return run(layer, *rest, **options)

    monkeypatch.setattr(FusedLayer, "write_cache", recorded)

    def compile_kernels(work: Any) -> None:
        token = compile_ahead._fake.set(True)
        work()
        compile_ahead._fake.reset(token)

    monkeypatch.setattr(known_layers, "CompileAhead", lambda _: compile_kernels)
    check_decode_path(llama, fused, "the path")
    assert asked == [0, 1] * 4
    fused.layers[2].window = 6
    asked.clear()
    with pytest.raises(UserError, match="differ in their states"):
        check_decode_path(llama, fused, "the path")
    assert asked[:3] == [0, 1, 2]


class QuantisedTensor(Tensor):
    """A tensor class of a quantisation library."""


def test_modified_layers_are_not_known(llama: Target) -> None:
    assert fused_decoder(llama) is None  # a CPU
    assert has_known_layers(llama)
    handle = llama.layers[2].mlp.register_forward_hook(lambda *_: None)
    assert not has_known_layers(llama)
    handle.remove()
    llama.layers[1].self_attn.forward = llama.layers[1].self_attn.forward
    assert not has_known_layers(llama)
    del llama.layers[1].self_attn.forward
    llama.decoder.rotary_emb.rope_type = "dynamic"
    assert not has_known_layers(llama)
    llama.decoder.rotary_emb.rope_type = "default"
    for module in (llama.layers[2], llama.layers[2].self_attn, llama.layers[2].mlp):
        cls = type(module)
        module.__class__ = type("Positioned", (cls,), {})
        assert not has_known_layers(llama)
        module.__class__ = type(cls.__name__, (cls,), {})  # the same name, another module
        assert not has_known_layers(llama)
        module.__class__ = cls
    product = llama.layers[1].mlp.up_proj
    plain = product.weight
    quantised = plain.data.as_subclass(QuantisedTensor)
    product.weight = nn.Parameter(quantised, requires_grad=False)
    assert not has_known_layers(llama)
    product.weight = plain
    assert has_known_layers(llama)
    gate = llama.layers[3].mlp.gate_proj
    gate.bias = nn.Parameter(torch.zeros(gate.out_features))
    assert not has_known_layers(llama)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "llama4_text"])
def test_other_architectures_run_through_transformers(kind: str, tmp_path: Path) -> None:
    target = zoo_target(tmp_path, kind)
    assert not has_known_layers(target)
    assert prepacked_decoder(target) is None
    if why_no_prepacking(CPU, torch.float32) is None:
        line = describe_products(target, cpu_prepacked=True)
        assert f"layers of {type(target.decoder).__name__} run as transformers writes them" in line


def test_the_check_runs_a_prompt_of_more_rows_than_small_kernels_take(
    llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = FusedDecoder(llama)
    states = fused.states

    def wrong(token_ids: Tensor, *rest: Any, **options: Any) -> HiddenStates:
        right = states(token_ids, *rest, **options)
        factor = 1.1 if token_ids.numel() > MAX_ROWS else 1
        return HiddenStates(right.features * factor, right.last)

    monkeypatch.setattr(fused, "states", wrong)
    with pytest.raises(UserError, match="differ in their states"):
        check_decode_path(llama, fused, "the fused path")


@pytest.mark.parametrize(("positions", "enough"), [(18, False), (19, True)])
def test_the_check_needs_some_positions(positions: int, enough: bool, tmp_path: Path) -> None:
    target = zoo_target(tmp_path, "llama", max_position_embeddings=positions)
    with nullcontext() if enough else pytest.raises(UserError, match="at least 19 positions"):
        check_decode_path(target, FusedDecoder(target), "the path")


@pytest.mark.parametrize("row", [0, 1])
def test_the_check_reads_later_blocks_of_both_rows(row: int, llama: Target) -> None:
    class OtherBlocks:
        logits = llama.logits

        def states(self, *rest: Any, cache: PagedCache, **options: Any) -> HiddenStates:
            table = cache.block_table.clone()
            table[row, 1:] = cache.block_table[1 - row, 1:]
            cache.block_table = table
            return llama.states(*rest, cache=cache, **options)

    with pytest.raises(UserError, match="differ in their states"):
        check_decode_path(llama, OtherBlocks(), "the path")


@pytest.mark.parametrize(
    ("path_class", "fault"),
    [
        *((FusedDecoder, fault) for fault in ("scale", "window", "eps", "rope", "fused norm")),
        *(
            pytest.param(PrepackedDecoder, fault, marks=needs_prepacked)
            for fault in ("scale", "packed norm", "weight")
        ),
    ],
)
def test_the_check_finds_faults(path_class: Any, fault: str, llama: Target) -> None:
    """Each is a way in which a layer could differ from fused_decoder.py or prepacked_decoder.py."""
    path = path_class(llama)
    check_decode_path(llama, path, "the path")
    if fault == "scale":
        llama.layers[1].self_attn.scaling *= 1.1
    elif fault == "window":
        path.layers[1].window = 6
    elif fault == "eps":
        path.eps += 0.05
    elif fault == "rope":
        path.scaling = 1.05
    elif fault == "fused norm":
        weights = path.layers[3].weights
        weights.mlp_norm = weights.mlp_norm + 0.02
    elif fault == "packed norm":
        path.norm.scaled = path.norm.scaled * 1.001
    else:
        llama.layers[1].mlp.up_proj.weight.data[3] *= 1.5
    with pytest.raises(UserError, match=r"the path and transformers differ in their .* by"):
        check_decode_path(llama, path, "the path")


@needs_prepacked
def test_prepacked_weights_are_shared_and_freed_with_the_target(llama: Target) -> None:
    path = weakref.ref(prepacked_decoder(llama))
    assert path() is not None
    assert prepacked_decoder(llama) is path()
    assert describe_products(llama, cpu_prepacked=False) == (
        "float32 weights as they are (packing is off)"
    )
    line = describe_products(llama, cpu_prepacked=True)
    assert line.startswith("float32 weights packed for this CPU (a copy of")
    llama.decode_paths.clear()
    gc.collect()
    assert path() is None


def test_a_fused_path_does_not_keep_its_target_alive(tmp_path: Path) -> None:
    target = load(tmp_path, "llama")
    target.decode_paths["fused"] = FusedDecoder(target)
    reference = weakref.ref(target)
    del target
    gc.collect()
    assert reference() is None


def test_bfloat16_is_prepacked_too(tmp_path: Path) -> None:
    if (reason := why_no_prepacking(CPU, torch.bfloat16)) is not None:
        pytest.skip(reason)
    target = zoo_target(tmp_path, "llama", dtype="bfloat16", tie_word_embeddings=True)
    assert prepacked_decoder(target) is not None  # it has been compared with transformers
    assert "bfloat16 weights packed" in describe_products(target, cpu_prepacked=True)


def test_nothing_is_prepacked_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("packed on a GPU")

    monkeypatch.setattr("draftlab.target_model.prepacked_decoder.PrepackedDecoder", fail)
    for dtype in (torch.float32, torch.bfloat16):
        target: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
        assert prepacked_decoder(target) is None
        assert "not for cuda" in str(why_not_prepacked(target))
