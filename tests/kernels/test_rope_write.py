"""Rotation and paged writing: the reference against transformers, kernels against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from draftlab.kernels.rope_write import rope_angles, rope_write
from tests.helpers.interpreter import interpreter_test, kernel_cases, on_kernels

test_in_the_interpreter = interpreter_test(__file__)


class Case:
    """Random operands of six tokens; slots of −1 and all others must stay as they are."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        heads: int = 10,
        kv_heads: int = 3,
        head_dim: int = 12,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.num_heads = heads, kv_heads, kv_heads
        width = (heads + 2 * kv_heads) * head_dim
        # Rows of a wider buffer, as a product with padded columns would leave them.
        self.qkv = random(6, width + 8)[:, :width]
        self.norms = {name: 1 + 0.3 * random(head_dim) for name in ("q_norm", "k_norm")}
        self.positions = torch.tensor([7, 0, 4095, 131_071, 1_000_000, -1], device=device)
        exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
        self.inv_freq = 10_000.0**-exponents
        self.slots = torch.tensor([5, 17, 1, -1, 9, -1], device=device)
        self.pools = random(3, 8, kv_heads, head_dim), random(3, 8, kv_heads, head_dim)

    def run(self, operation: Any, norms: bool, dtype: torch.dtype) -> list[Tensor]:
        """Return the queries and copies of the pools after the operation in `dtype`."""
        angles = rope_angles.reference(self.positions, self.inv_freq, 1.2, self.qkv.dtype)
        weights = {name: w.to(dtype) for name, w in self.norms.items()} if norms else {}
        pools = [pool.to(dtype, copy=True) for pool in self.pools]
        if operation is rope_write.triton:  # keys in the order [P, kv heads, S, head_dim] in memory
            pools[0] = pools[0].transpose(1, 2).contiguous().transpose(1, 2)
        rotation = tuple(half.to(dtype) for half in angles)
        query = operation(self.qkv.to(dtype), rotation, *pools, self.slots, **weights, eps=1e-3)
        return [query, *pools]


@pytest.mark.parametrize("norms", [False, True])
def test_the_reference_equals_transformers(norms: bool) -> None:
    case = Case()
    query, *pools = case.run(rope_write.reference, norms, torch.float32)
    head_dim = len(case.norms["q_norm"])
    heads = case.qkv.unflatten(-1, (-1, head_dim)).transpose(0, 1)[None]  # [1, heads, T, head_dim]
    q, k, v = heads.split(case.num_heads, 1)
    if norms:
        normed = []
        for x, weight in ((q, case.norms["q_norm"]), (k, case.norms["k_norm"])):
            norm = Qwen3RMSNorm(head_dim, eps=1e-3)
            norm.weight.data = weight
            normed.append(norm(x))
        q, k = normed
    angle = case.positions.clamp(min=0)[:, None] * case.inv_freq
    angle = torch.cat([angle, angle], -1)[None]
    q, k = apply_rotary_pos_emb(q, k, angle.cos() * 1.2, angle.sin() * 1.2)
    torch.testing.assert_close(query, q[0].transpose(0, 1))
    for pool, before, new in zip(pools, case.pools, (k, v), strict=True):
        expected = before.clone().flatten(0, 1)
        for token, slot in enumerate(case.slots.tolist()):
            if slot >= 0:
                expected[slot] = new[0, :, token]
        torch.testing.assert_close(pool.flatten(0, 1), expected)


TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


@kernel_cases(
    "shape, dtype",
    [((10, 3, 12), dtype) for dtype in (torch.float32, torch.float16)],
    [(shape, dtype) for shape in ((10, 3, 80), (32, 8, 128)) for dtype in TOLERANCES],
)
@pytest.mark.parametrize("norms", [False, True])
def test_the_kernel_equals_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, norms: bool, device: str
) -> None:
    """Heads that fill no program, a head_dim that is no power of two, pools with strides."""
    case, tolerance = Case(dtype, device, *shape), TOLERANCES[dtype]
    outputs = case.run(rope_write.triton, norms, dtype)
    expected = case.run(rope_write.reference, norms, torch.float32)
    for output, exact in zip(outputs, expected, strict=True):
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), exact, atol=tolerance, rtol=tolerance)
    others = torch.ones(24, dtype=torch.bool)
    others[case.slots[case.slots >= 0].cpu()] = False
    for pool, before in zip(outputs[1:], case.pools, strict=True):
        assert torch.equal(pool.flatten(0, 1)[others], before.flatten(0, 1)[others])


@on_kernels
def test_angles_of_far_positions(device: str) -> None:
    case = Case(device=device, head_dim=80)
    angle = case.positions.clamp(min=0)[:, None].float() * case.inv_freq
    tolerance = 1e-5 if device == "cpu" else 1e-6
    for operation in (rope_angles.triton, rope_angles.reference):
        angles = operation(case.positions, case.inv_freq, 1.2, torch.float32)
        for half, expected in zip(angles, (angle.cos(), angle.sin()), strict=True):
            torch.testing.assert_close(half, expected * 1.2, atol=tolerance, rtol=0)
