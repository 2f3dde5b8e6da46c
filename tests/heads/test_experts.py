"""Experts of a head's layer: routing, products and gradients equal transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from draftlab.families.mtp import expert_fields
from draftlab.heads import experts as module
from draftlab.heads.experts import Experts, ExpertsConfig
from tests.helpers.gpu import on_gpu
from tests.helpers.zoo import zoo_config

GLM = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 2,
}
CASES = {
    "glm4_moe": (Glm4MoeMoE, GLM),
    "qwen3_next": (Qwen3NextSparseMoeBlock, {"num_experts": 16, "num_experts_per_tok": 5}),
}


def pair(kind: str) -> tuple[Experts, nn.Module]:
    """Return random experts, and transformers' with the same weights; float32."""
    block, fields = CASES[kind]
    config = zoo_config(kind, **fields)
    theirs, generator = block(config), torch.Generator().manual_seed(0)
    ours = Experts(config.hidden_size, ExpertsConfig(**expert_fields(config)))
    gate, shared = theirs.gate, getattr(theirs, "shared_experts", None) or theirs.shared_expert
    copied: dict[str, Any] = {
        "router.weight": gate.weight,
        "gate_up": theirs.experts.gate_up_proj,
        "down": theirs.experts.down_proj,
        **{f"shared.{name}": value for name, value in shared.named_parameters()},
    }
    if kind == "qwen3_next":
        copied["shared_gate.weight"] = theirs.shared_expert_gate.weight
    with torch.no_grad():
        if kind == "glm4_moe":
            gate.e_score_correction_bias.uniform_(3.7, 4.3, generator=generator)
            ours.set_correction(gate.e_score_correction_bias)
        for name, value in copied.items():
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
            ours.get_parameter(name).copy_(value)
    assert copied.keys() == dict(ours.named_parameters()).keys()
    return ours, theirs


@pytest.mark.parametrize("kind", CASES)
def test_outputs_and_gradients_are_transformers(kind: str) -> None:
    ours, theirs = pair(kind)
    x = torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(1))
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    for output in (found, expected):
        (output * weight).sum().backward()
    for mine, other in (
        (ours.router.weight, theirs.gate.weight),
        (ours.gate_up, theirs.experts.gate_up_proj),
        (ours.down, theirs.experts.down_proj),
    ):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-3)


def test_no_dtype_rounds_the_bias_of_a_choice() -> None:
    ours, theirs = pair("glm4_moe")
    for dtype in (torch.bfloat16, torch.float32):
        ours.to(dtype)
        assert torch.equal(ours.correction.float().sum(0), theirs.gate.e_score_correction_bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_by_expert_are_equal_in_every_way(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((10, 16), (4, 24, 16))
    )
    ends = torch.tensor([3, 3, 9, 10])
    parts = zip([0, 3, 3, 9], ends.tolist(), weight, strict=True)
    expected = torch.cat([rows[start:end] @ one.T for start, end, one in parts])
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for product in (module.product_by_expert, module.copied_product):
        torch.testing.assert_close(product(rows, weight, ends), expected, **tolerance)


@pytest.mark.parametrize("size", [16, 20])  # with a grouped product, and one for each expert
def test_autocast_keeps_no_copy_of_the_experts(size: int) -> None:
    generator, kept = torch.Generator().manual_seed(0), list[torch.Size]()
    rows, weight = (
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((10, size), (4, 8, size))
    )
    ends, factor = torch.tensor([3, 3, 9, 10]), torch.randn(10, 8, generator=generator)
    cast = [one.detach().bfloat16().requires_grad_() for one in (rows, weight)]
    (module.product_by_expert(*cast, ends) * factor.bfloat16()).sum().backward()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.extend([tensor.shape] * (tensor.dtype == torch.bfloat16))
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with saved, torch.autocast("cpu", torch.bfloat16):
        product = module.product_by_expert(rows, weight, ends)
    assert kept == [(10, size)]
    (product * factor.bfloat16()).sum().backward()
    for wide, narrow in zip((rows, weight), cast, strict=True):
        torch.testing.assert_close(wide.grad, narrow.grad.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("rows", [0, 3])
def test_steps_without_rows_and_odd_sizes_have_gradients(kind: str, rows: int) -> None:
    fields = expert_fields(zoo_config(kind, **CASES[kind][1])) | {"intermediate_size": 7}
    ours = Experts(20, ExpertsConfig(**fields)).bfloat16()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    output = ours(torch.ones(1, rows, 20, dtype=torch.bfloat16))
    assert output.shape == (1, rows, 20)
    output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_captures_the_experts(dtype: torch.dtype, device: str) -> None:
    ours, _ = pair("glm4_moe")
    ours = ours.to(device, dtype).requires_grad_(False)
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    expected, graph = ours(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ours(x)
    graph.replay()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "change", [{"per_token": 9}, {"groups": 3}, {"chosen_groups": 5}, {"groups": 16}]
)
def test_choices_that_cannot_be_made_are_refused(change: dict[str, int]) -> None:
    fields = expert_fields(zoo_config("glm4_moe", **GLM))
    with pytest.raises(ValidationError):
        ExpertsConfig(**(fields | change))
