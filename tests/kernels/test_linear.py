"""Skinny products: the kernel in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreter import inside, run_in_the_interpreter, runs_the_others


@runs_the_others
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def random(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_linear(num_rows: int, split: int, dtype: torch.dtype) -> None:
    """N and Kin divide into nothing; norm, bias and residual alone and together."""
    from draftlab.kernels.linear import linear_reference
    from draftlab.kernels.linear_launch import Config, _workspace, launch

    x = random(num_rows, 104, seed=1, dtype=dtype, scale=3.0)
    weight = random(40, 104, seed=2, dtype=dtype, scale=0.1)
    norm = 1 + random(104, seed=3, dtype=dtype, scale=0.2)
    bias = random(40, seed=4, dtype=dtype)
    residual = random(num_rows, 40, seed=5, dtype=dtype)
    config = Config(16, 32, split)
    for norm_weight, b, r in (
        (norm, bias, residual),
        (norm, None, None),
        (None, None, residual),
        (None, bias, None),
    ):
        found = launch(x, weight, None, norm_weight, 0.5, b, r, config)
        wide = [None if t is None else t.float() for t in (norm_weight, r, b)]
        expected = linear_reference(
            x.float(), weight.float(), norm_weight=wide[0], eps=0.5, residual=wide[1], bias=wide[2]
        )
        close(found, expected, dtype)
    if split > 1:  # ready for the next launch
        assert int(_workspace(x.device)[1].abs().sum()) == 0


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [True, False])
def test_gated_linear(normed: bool, dtype: torch.dtype) -> None:
    from draftlab.kernels.linear import gated_linear_reference
    from draftlab.kernels.linear_launch import Config, launch

    x = random(5, 96, seed=1, dtype=dtype, scale=3.0)
    gate, up = (random(40, 96, seed=s, dtype=dtype, scale=0.1) for s in (2, 3))
    norm = 1 + random(96, seed=4, dtype=dtype, scale=0.2) if normed else None
    found = launch(x, gate, up, norm, 1e-5, None, None, Config(16, 32, 2))
    expected = gated_linear_reference(
        x.float(),
        gate.float(),
        up.float(),
        norm_weight=None if norm is None else norm.float(),
        eps=1e-5,
    )
    close(found, expected, dtype)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("splits", [(1, 1), (3, 2)])
def test_a_norm_begun_by_one_product_and_ended_by_the_next(
    splits: tuple[int, int], dtype: torch.dtype
) -> None:
    """40 outputs in tiles of 16: the last part of Σ y² has rows of W that are not there."""
    from draftlab.kernels.linear import gated_linear_reference, linear_reference
    from draftlab.kernels.linear_launch import Config, launch, next_norm

    x, residual = (random(3, n, seed=n, dtype=dtype) for n in (64, 40))
    first = random(40, 64, seed=1, dtype=dtype, scale=0.1)
    gate, up = (random(24, 40, seed=s, dtype=dtype, scale=0.2) for s in (2, 3))
    norm = 1 + random(40, seed=4, dtype=dtype, scale=0.2)
    before, after = (Config(16, 16, split) for split in splits)
    following = next_norm(norm, x, before)
    assert following.squares.shape == (3, 8)
    following.squares.fill_(float("nan"))  # every part is written
    y = launch(x, first, None, None, 0.0, None, residual, before, following=following)
    close(y, linear_reference(x.float(), first.float(), residual=residual.float()), dtype)
    begun = {"squares": following.squares}
    found = launch(following.rows, gate, None, None, 0.1, None, None, after, **begun)
    gated = launch(following.rows, gate, up, None, 0.1, None, None, after, **begun)
    wide = [t.float() for t in (y, gate, up)]
    options = {"norm_weight": norm.float(), "eps": 0.1}
    close(found, linear_reference(*wide[:2], **options), dtype)
    close(gated, gated_linear_reference(*wide, **options), dtype)


@inside
def test_a_place_for_the_result() -> None:
    from draftlab.kernels.linear_launch import Config, launch

    x, weight = (random(n, 32, seed=n, dtype=torch.float32) for n in (2, 20))
    place = torch.full((3, 20), float("nan"))
    found = launch(x, weight, None, None, 0.0, None, None, Config(16, 32), out=place[1:])
    assert found.data_ptr() == place[1].data_ptr()
    close(place[1:], x @ weight.T, torch.float32)
    assert place[0].isnan().all()


@inside
def test_rows_that_are_no_rows_of_their_own() -> None:
    """x may be a slice of wider rows; what lies beside and below it is never read into a sum."""
    from draftlab.kernels.linear import linear_reference
    from draftlab.kernels.linear_launch import Config, launch

    wide = random(6, 96, seed=1, dtype=torch.float32)
    wide[5], wide[:, 64:] = float("nan"), float("nan")
    weight = random(33, 64, seed=2, dtype=torch.float32)
    found = launch(wide[:5, :64], weight, None, None, 0.0, None, None, Config(16, 32, 2))
    close(found, linear_reference(wide[:5, :64], weight), torch.float32)


def test_references_are_the_modules() -> None:
    """Against float64, written out: the references are what the kernels are measured by."""
    from draftlab.kernels.linear import gated_linear, linear

    x, norm = random(3, 24, seed=1, dtype=torch.float64), random(24, seed=2, dtype=torch.float64)
    weight, up = (random(10, 24, seed=s, dtype=torch.float64) for s in (3, 4))
    residual = random(3, 10, seed=5, dtype=torch.float64)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm
    expected = residual + (normed[:, None] * weight).sum(-1)
    found = linear(x, weight, norm_weight=norm, eps=1e-3, residual=residual)
    torch.testing.assert_close(found, expected)
    first, second = ((normed[:, None] * w).sum(-1) for w in (weight, up))
    expected = first / (1 + torch.exp(-first)) * second
    found = gated_linear(x, weight, up, norm_weight=norm, eps=1e-3)
    torch.testing.assert_close(found, expected)


def test_a_norm_before_and_after_its_division() -> None:
    """`linear_then_norm` on a CPU, and `Normed` with parts: readers get the same norm."""
    from draftlab.kernels.linear import Normed, gated_linear, linear, linear_then_norm

    x, residual = (random(3, n, seed=n, dtype=torch.float64) for n in (12, 24))
    first, gate, up = (
        random(*shape, seed=i, dtype=torch.float64)
        for i, shape in enumerate([(24, 12), (7, 24), (7, 24)])
    )
    norm = random(24, seed=9, dtype=torch.float64)
    y, whole = linear_then_norm(x, first, norm, 1e-3, residual=residual)
    torch.testing.assert_close(y, x @ first.T + residual)
    parts = torch.zeros(2, 8, dtype=torch.float64)
    parts[0, :3], parts[1, :3] = (half.square().sum(1) for half in y.chunk(2, 1))
    begun = Normed(y * norm, parts, 1e-3)
    for read in (lambda n: linear(n, gate), lambda n: gated_linear(n, gate, up)):
        expected = read(whole)
        torch.testing.assert_close(read(begun), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(linear(whole, gate), linear(y, gate, norm_weight=norm, eps=1e-3))


@pytest.mark.parametrize("num_rows", [1, 4, 9, 17, 33, 64])
@pytest.mark.parametrize("shape", [(1024, 896), (6144, 4096), (152064, 3584), (4096, 14336)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_configurations_fit_the_device(
    num_rows: int, shape: tuple[int, int], gated: bool, normed: bool
) -> None:
    """Shared memory of an H200, tiles Triton takes, and no split where it is not meant."""
    from draftlab.kernels.linear_launch import choose

    config = choose(num_rows, *shape, gated, normed)
    rows = max(8, 1 << (num_rows - 1).bit_length())
    tile_bytes = 2 * config.depth * ((1 + gated) * config.tile + rows + 1)
    assert tile_bytes * (config.stages - 1) <= 227 * 1024
    assert config.tile >= 16 * config.warps
    assert config.depth & (config.depth - 1) == 0
    assert config.split == 1 or not gated
    assert config.prefetch % 256 == 0
