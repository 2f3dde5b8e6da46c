"""Rotation and paged writing: the reference against transformers, kernels against it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from draftlab.kernels.rope_write import rope_angles, rope_write
from tests.helpers.gpu import on_gpu
from tests.helpers.interpreter import inside, run_in_the_interpreter, runs_the_others

HEADS, KV_HEADS, HEAD_DIM, TOKENS, BLOCK = 10, 3, 12, 5, 4


@runs_the_others
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


class Case:
    """Random operands; block 0 and every slot that is not written must stay as they are."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        # Rows of a wider buffer, as a product with padded columns would leave them.
        self.qkv = random(TOKENS, width + 8)[:, :width]
        self.q_norm, self.k_norm = (1 + 0.3 * random(HEAD_DIM) for _ in range(2))
        self.positions = torch.tensor([7, 8, 0, 70_000, -1])
        self.inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        self.slots = torch.tensor([4, 11, 5, -1, -1])
        self.pools = random(3, BLOCK, KV_HEADS, HEAD_DIM), random(3, BLOCK, KV_HEADS, HEAD_DIM)

    def angles(self) -> tuple[Tensor, Tensor]:
        return rope_angles(self.positions, self.inv_freq, 1.2, self.qkv.dtype)


@pytest.mark.parametrize("norms", [False, True])
def test_the_reference_is_what_transformers_does(norms: bool) -> None:
    case = Case()
    pools = [pool.clone() for pool in case.pools]
    weights = {"q_norm": case.q_norm, "k_norm": case.k_norm} if norms else {}
    query = rope_write.reference(case.qkv, case.angles(), *pools, case.slots, **weights, eps=1e-3)

    heads = case.qkv.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)[None]  # [1, heads, T, head_dim]
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
    if norms:
        both = []
        for x, weight in ((q, case.q_norm), (k, case.k_norm)):
            norm = Qwen3RMSNorm(HEAD_DIM, eps=1e-3)
            norm.weight.data = weight
            both.append(norm(x))
        q, k = both
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


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norms", [False, True])
def test_kernel(norms: bool, dtype: torch.dtype) -> None:
    """Heads that fill no program, head_dim that is no power of two, pools with strides."""
    case = Case(dtype)
    weights = {"q_norm": case.q_norm, "k_norm": case.k_norm} if norms else {}
    expected_pools = [pool.clone() for pool in case.pools]
    expected = rope_write.reference(
        case.qkv.float(),
        tuple(half.float() for half in case.angles()),
        *(wide := [pool.float() for pool in expected_pools]),
        case.slots,
        **{name: weight.float() for name, weight in weights.items()},
        eps=1e-3,
    )
    # Keys in the order [P, kv heads, S, head_dim] in memory.
    key_pool = case.pools[0].transpose(1, 2).contiguous().transpose(1, 2)
    value_pool = case.pools[1].clone()
    query = rope_write.triton(
        case.qkv, case.angles(), key_pool, value_pool, case.slots, **weights, eps=1e-3
    )
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for found, want in ((query, expected), (key_pool, wide[0]), (value_pool, wide[1])):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), want, atol=tolerance, rtol=tolerance)
    untouched = [slot for slot in range(3 * BLOCK) if slot not in (4, 11, 5)]
    for pool, before in zip((key_pool, value_pool), case.pools, strict=True):
        assert torch.equal(pool.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


@inside
def test_angles_kernel() -> None:
    case = Case()
    found = rope_angles.triton(case.positions, case.inv_freq, 1.2, torch.float32)
    torch.testing.assert_close(found, case.angles(), atol=1e-5, rtol=0)
    assert torch.equal(found[0][4], torch.full((HEAD_DIM // 2,), 1.2))  # padding counts as 0


@on_gpu
def test_angles_of_far_positions(device: str) -> None:
    positions = torch.tensor([0, 1, 4095, 131_071, 1_000_000, -1], device=device)
    inv_freq = 10_000.0 ** -(torch.arange(0, 80, 2, device=device).float() / 80)
    angle = positions.clamp(min=0)[:, None].float() * inv_freq
    angles = rope_angles(positions, inv_freq, 1.3, torch.float32)
    for half, expected in zip(angles, (angle.cos(), angle.sin()), strict=True):
        torch.testing.assert_close(half, expected * 1.3, atol=1e-6, rtol=0)


@on_gpu
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(10, 3, 80), (32, 8, 128)])
def test_kernel_at_real_sizes(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float, norms: bool,
    device: str,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    positions = torch.tensor([0, 1, 4095, 131_071, 1_000_000, -1], device=device)
    inv_freq = 10_000.0 ** -(torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = rope_angles(positions, inv_freq, 1.0, dtype)
    qkv = random(6, (heads + 2 * kv_heads) * head_dim)
    pools = [random(3, 8, kv_heads, head_dim) for _ in range(2)]
    slots = torch.tensor([5, 17, 0, -1, 9, -1], device=device)
    options = {"q_norm": random(head_dim), "k_norm": random(head_dim), "eps": 1e-6}
    results = []
    for run in (rope_write, rope_write.reference):
        copies = [pool.clone() for pool in pools]
        results.append([run(qkv, angles, *copies, slots, **options if norms else {}), *copies])
    for output, expected in zip(*results, strict=True):
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
