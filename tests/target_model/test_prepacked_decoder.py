"""The packed decode path: transformers' states, on a CPU, and nowhere else."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftlab.errors import UserError
from draftlab.kernels.packed_linear import why_not_packed
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model.model import Target, TargetSettings, load_target
from draftlab.target_model.path_check import check_agreement
from draftlab.target_model.prepacked_decoder import PackedDecoder, packed_decoder, products, why_not
from tests.helpers.zoo import SHAPE, zoo_folder
from tests.target_model.test_fused_decoder import KINDS, feed, load

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    why_not_packed(CPU, torch.float32) is not None, reason="no packed products here"
)


@pytest.fixture(scope="module", params=list(KINDS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(tmp_path_factory.mktemp("target"), request.param)


def sequences() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, SHAPE["vocab_size"], (2, 20), generator=generator)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().amax() <= 2e-5 * expected.abs().amax())


def test_states_and_logits_are_transformers(target: Target) -> None:
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    packed = packed_decoder(target)
    assert packed is not None
    assert packed_decoder(target) is packed  # packed once, whatever the number of engines
    found, expected = feed(packed, target, sequences()), feed(target, target, sequences())
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert close(one, other)
    last = expected[-1]
    assert close(packed.logits(last), target.logits(last))
    after = target.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_one_block_a_row_is_read_in_place(target: Target) -> None:
    """The usual cache of a CPU: a prompt, then one token and five."""
    packed, table = PackedDecoder(target), torch.tensor([[2], [1]], dtype=torch.int32)
    runs = {run: target.new_paged_cache(3, 32) for run in (packed, target)}
    for start, end in ((0, 12), (12, 13), (13, 18)):
        positions = torch.arange(start, end).repeat(2, 1)
        slots = slot_mapping(table, positions, 32)
        one, other = (
            run.states(
                sequences()[:, start:end],
                (0, 4),
                positions=positions,
                cache=cache.at(table, positions, slots),
            )
            for run, cache in runs.items()
        )
        assert close(one.features, other.features)
        assert close(one.last, other.last)


def test_bfloat16_is_packed_too(tmp_path: Path) -> None:
    if (reason := why_not_packed(CPU, torch.bfloat16)) is not None:
        pytest.skip(reason)
    folder = zoo_folder(tmp_path, "llama", tie_word_embeddings=True)
    target = load_target(TargetSettings(path=str(folder), device="cpu", dtype="bfloat16"))
    assert packed_decoder(target) is not None  # it is compared with transformers when it is made
    assert "bfloat16 products packed" in products(target, packed=True)


@pytest.mark.parametrize("fault", ["scale", "norm", "weight"])
def test_another_computation_is_found_out(fault: str, tmp_path: Path) -> None:
    target = load(tmp_path, "llama")
    packed = PackedDecoder(target)
    check_agreement(target, packed, "the path")
    layer: Any = packed.layers[2]
    if fault == "scale":
        object.__setattr__(layer, "scale", layer.scale * 1.1)
    elif fault == "norm":
        packed.norm.scaled = packed.norm.scaled * 1.001
    else:
        target.layers[1].mlp.up_proj.weight.data[3] *= 1.5
    with pytest.raises(UserError, match=r"the path and transformers differ in their .* by"):
        check_agreement(target, packed, "the path")


def test_the_copies_go_with_the_target(tmp_path: Path) -> None:
    target = load(tmp_path, "llama")
    gone = weakref.ref(packed_decoder(target))
    assert gone() is not None
    del target
    gc.collect()
    assert gone() is None


def test_what_is_not_known_keeps_to_transformers(tmp_path: Path) -> None:
    target = load_target(TargetSettings(path=str(zoo_folder(tmp_path, "gemma2")), device="cpu"))
    assert packed_decoder(target) is None
    assert products(target, packed=True) == (
        "plain float32 products (layers of Gemma2Model run as transformers writes them)"
    )


def test_nothing_is_packed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("packed on a GPU")

    monkeypatch.setattr("draftlab.target_model.prepacked_decoder.PackedDecoder", fail)
    for dtype in (torch.float32, torch.bfloat16):
        target: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
        assert packed_decoder(target) is None
        assert why_not(target) == "packing is for CPUs, not for cuda"


def test_the_line_says_which_products_run(target: Target) -> None:
    assert products(target, packed=False) == "plain float32 products (packing is off)"
    assert products(target, packed=True).startswith("float32 products packed for oneDNN (a copy of")
