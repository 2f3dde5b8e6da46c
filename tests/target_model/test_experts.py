"""Experts multiplied in our way against transformers' loop over them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftlab.target_model import experts
from draftlab.target_model.experts import EXPERTS, grouped_products, use_experts
from draftlab.target_model.model import TargetSettings, load_target
from tests.helpers.zoo import MIXTURES, SHAPE, eager_model, zoo_folder


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("kind", [*MIXTURES, "llama4_text"])
def test_logits_equal_the_loop_over_experts(
    kind: str, grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token, a verified step, and a prompt with more pairs than there are experts."""
    monkeypatch.setattr(experts, "grouped_products", lambda dtype, device: grouped)
    folder = zoo_folder(tmp_path, kind)
    target = load_target(TargetSettings(path=str(folder), device="cpu"))
    ours = target.model.config._experts_implementation == EXPERTS
    assert ours == (kind in MIXTURES)  # Llama 4 writes out batched products itself
    loop = eager_model(folder)
    generator = torch.Generator().manual_seed(1)
    for shape in ((1, 1), (2, 4), (1, 37)):
        ids = torch.randint(3, SHAPE["vocab_size"], shape, generator=generator)
        with torch.inference_mode():
            expected = loop(input_ids=ids, use_cache=False).logits
        found = target.logits(target.states(ids).last)
        scale = float(expected.abs().max())
        torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-5)


def test_batched_products_copy_no_more_than_all_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[int] = []
    original = experts.batched_mm_experts_forward

    def spy(module: torch.nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        pairs.append(index.numel())
        return original(module, hidden, index, weights)

    monkeypatch.setattr(experts, "grouped_products", lambda dtype, device: False)
    monkeypatch.setattr(experts, "batched_mm_experts_forward", spy)
    target = load_target(TargetSettings(path=str(zoo_folder(tmp_path, "qwen3_moe")), device="cpu"))
    pairs.clear()
    target.states(torch.ones(1, 37, dtype=torch.int64))
    assert max(pairs) <= target.config.num_experts
    assert sum(pairs) == SHAPE["num_hidden_layers"] * 37 * target.config.num_experts_per_tok


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 0), True),
        (torch.bfloat16, (8, 0), False),
        (torch.float16, (9, 0), False),
        (torch.float32, (9, 0), False),
    ],
)
def test_grouped_products_where_they_are_one_kernel(
    dtype: torch.dtype,
    capability: tuple[int, int],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped_products(dtype, torch.device("cuda:0")) == expected


def test_quantised_and_dense_models_keep_what_they_have(tmp_path: Path) -> None:
    dense = load_target(TargetSettings(path=str(zoo_folder(tmp_path / "a", "llama")), device="cpu"))
    assert dense.model.config._experts_implementation != EXPERTS
    model = eager_model(zoo_folder(tmp_path / "b", "mixtral"))
    model.config.quantization_config = {"quant_method": "fp8"}
    use_experts(model)
    assert model.config._experts_implementation == "eager"
    del model.config.quantization_config
    use_experts(model)
    assert model.config._experts_implementation == EXPERTS
