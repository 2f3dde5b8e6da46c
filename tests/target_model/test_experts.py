"""draftlab's experts function against transformers' loop over experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftlab.target_model import experts
from draftlab.target_model.experts import EXPERTS, grouped_products, use_experts
from tests.helpers.zoo import (
    MIXTURES,
    SHAPE,
    assert_close,
    eager_model,
    load_on_cpu,
    zoo_folder,
    zoo_target,
)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("kind", [*MIXTURES, "llama4_text"])
def test_logits_equal_the_loop_over_experts(
    kind: str, grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token, a verify step, and a prompt with more pairs than experts."""
    monkeypatch.setattr(experts, "grouped_products", lambda dtype, device: grouped)
    folder = zoo_folder(tmp_path, kind)
    target = load_on_cpu(folder)
    replaced = target.model.config._experts_implementation == EXPERTS
    assert replaced == (kind in MIXTURES)  # Llama 4 has batched products of its own
    loop = eager_model(folder)
    generator = torch.Generator().manual_seed(1)
    for shape in ((1, 1), (2, 4), (1, 37)):
        ids = torch.randint(3, SHAPE["vocab_size"], shape, generator=generator)
        with torch.inference_mode():
            expected = loop(input_ids=ids, use_cache=False).logits
        assert_close(target.logits(target.states(ids).last), expected)


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
    target = zoo_target(tmp_path, "qwen3_moe")
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
def test_grouped_products_need_their_kernel(
    dtype: torch.dtype,
    capability: tuple[int, int],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped_products(dtype, torch.device("cuda:0")) == expected


def test_quantised_and_dense_models_do_not_change(tmp_path: Path) -> None:
    dense = zoo_target(tmp_path / "a", "llama")
    assert dense.model.config._experts_implementation != EXPERTS
    model = eager_model(zoo_folder(tmp_path / "b", "mixtral"))
    model.config.quantization_config = {"quant_method": "fp8"}
    use_experts(model)
    assert model.config._experts_implementation == "eager"
    del model.config.quantization_config
    use_experts(model)
    assert model.config._experts_implementation == EXPERTS
