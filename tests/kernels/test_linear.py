"""Skinny products: the kernel in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftlab.kernels.linear import (
    DeferredNorm,
    linear,
    linear_reference,
    linear_then_norm,
    swiglu_linear,
    swiglu_linear_reference,
)
from tests.helpers.gpu import capture, on_gpu
from tests.helpers.interpreter import inside, interpreter_test

test_in_the_interpreter = interpreter_test(__file__)


def random(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@inside
@pytest.mark.parametrize(
    ("num_rows", "split", "dtype"),
    [
        *((num_rows, split, torch.float32) for num_rows in (1, 3, 9) for split in (1, 3)),
        *((3, 3, dtype) for dtype in (torch.float16, torch.bfloat16)),
    ],
)
def test_products(num_rows: int, split: int, dtype: torch.dtype) -> None:
    """N and Kin divide into nothing; norm, bias and residual alone and together.

    x is a slice of wider rows and y is written into a part of a tensor; both have NaN around them.
    """
    from draftlab.kernels.linear.launch import Config, _workspace, launch

    wide_x = random(num_rows + 1, 136, seed=1, dtype=dtype, scale=3.0)
    wide_x[num_rows], wide_x[:, 104:] = float("nan"), float("nan")
    x = wide_x[:num_rows, :104]
    weight, up = (random(40, 104, seed=s, dtype=dtype, scale=0.1) for s in (2, 6))
    norm = 1 + random(104, seed=3, dtype=dtype, scale=0.2)
    bias = random(40, seed=4, dtype=dtype)
    residual = random(num_rows, 40, seed=5, dtype=dtype)
    exact_x, exact_weight, exact_up = x.float(), weight.float(), up.float()
    for norm_weight, b, r in (
        (norm, bias, residual),
        (norm, None, None),
        (None, None, residual),
        (None, bias, None),
    ):
        place = torch.full((num_rows + 1, 40), float("nan"), dtype=dtype)
        config = Config(16, 32, split)
        y = launch(x, weight, None, norm_weight, 0.5, b, r, config, out=place[1:])
        options = {"norm_weight": None if norm_weight is None else norm_weight.float(), "eps": 0.5}
        addends = {"bias": b, "residual": r}
        addends = {name: None if t is None else t.float() for name, t in addends.items()}
        close(y, linear_reference(exact_x, exact_weight, **options, **addends), dtype)
        assert y.data_ptr() == place[1].data_ptr()
        assert place[0].isnan().all()
        if b is None:
            gated = launch(x, weight, up, norm_weight, 0.5, None, None, Config(16, 32, 2))
            expected = swiglu_linear_reference(exact_x, exact_weight, exact_up, **options)
            close(gated, expected, dtype)
    assert int(_workspace(x.device)[1].abs().sum()) == 0  # ready for the next launch


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("splits", [(1, 1), (3, 2)])
def test_a_norm_started_by_one_product_and_finished_by_the_next(
    splits: tuple[int, int], dtype: torch.dtype
) -> None:
    """40 outputs in tiles of 16: the last partial Σ y² covers rows that W does not have."""
    from draftlab.kernels.linear.launch import Config, allocate_next_norm, launch

    x, residual = (random(3, n, seed=n, dtype=dtype) for n in (64, 40))
    first = random(40, 64, seed=1, dtype=dtype, scale=0.1)
    gate, up = (random(24, 40, seed=s, dtype=dtype, scale=0.2) for s in (2, 3))
    norm = 1 + random(40, seed=4, dtype=dtype, scale=0.2)
    before, after = (Config(16, 16, split) for split in splits)
    following = allocate_next_norm(norm, x, before)
    _, rows, squares = following
    assert squares.shape == (3, 8)
    squares.fill_(float("nan"))  # every part is written
    y = launch(x, first, None, None, 0.0, None, residual, before, next_norm=following)
    close(y, linear_reference(x.float(), first.float(), residual=residual.float()), dtype)
    options = {"squares": squares}
    product = launch(rows, gate, None, None, 0.1, None, None, after, **options)
    swiglu = launch(rows, gate, up, None, 0.1, None, None, after, **options)
    wide = [t.float() for t in (y, gate, up)]
    options = {"norm_weight": norm.float(), "eps": 0.1}
    close(product, linear_reference(*wide[:2], **options), dtype)
    close(swiglu, swiglu_linear_reference(*wide, **options), dtype)


def test_references_are_the_formulas() -> None:
    """The references equal the formulas in float64; the kernels are compared with them."""
    x, norm = random(3, 24, seed=1, dtype=torch.float64), random(24, seed=2, dtype=torch.float64)
    weight, up = (random(10, 24, seed=s, dtype=torch.float64) for s in (3, 4))
    residual = random(3, 10, seed=5, dtype=torch.float64)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm
    expected = residual + (normed[:, None] * weight).sum(-1)
    actual = linear(x, weight, norm_weight=norm, eps=1e-3, residual=residual)
    torch.testing.assert_close(actual, expected)
    first, second = ((normed[:, None] * w).sum(-1) for w in (weight, up))
    expected = first / (1 + torch.exp(-first)) * second
    actual = swiglu_linear(x, weight, up, norm_weight=norm, eps=1e-3)
    torch.testing.assert_close(actual, expected)


def test_a_norm_before_and_after_its_division() -> None:
    """`linear_then_norm` on a CPU and `DeferredNorm` with partial sums give the same norm."""
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
    deferred = DeferredNorm(y * norm, parts, 1e-3)
    for read in (lambda n: linear(n, gate), lambda n: swiglu_linear(n, gate, up)):
        expected = read(whole)
        torch.testing.assert_close(read(deferred), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(linear(whole, gate), linear(y, gate, norm_weight=norm, eps=1e-3))


@pytest.mark.parametrize("num_rows", [1, 4, 9, 17, 33, 64])
@pytest.mark.parametrize(
    "shape", [(1024, 896), (6144, 4096), (152064, 3584), (4096, 14336), (128256, 256)]
)
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_configurations_fit_the_device(
    num_rows: int, shape: tuple[int, int], swiglu: bool, normed: bool, dtype: torch.dtype
) -> None:
    """Shared memory of an H200, tiles Triton takes, and no split where it is not meant."""
    from draftlab.kernels.linear.launch import choose

    x = torch.empty(num_rows, shape[1], dtype=dtype, device="meta")
    config = choose(x, shape[0], swiglu, normed)
    rows = max(8, 1 << (num_rows - 1).bit_length())
    tile_bytes = dtype.itemsize * config.depth * ((1 + swiglu) * config.tile + rows + 1)
    assert tile_bytes * (config.stages - 1) <= 227 * 1024
    assert config.tile >= 16 * config.warps
    assert config.depth & (config.depth - 1) == 0
    assert config.split == 1 or not swiglu
    assert config.prefetch % 256 == 0


REAL = [  # dtype, rows, outputs, inputs, arguments of a configuration (None: the chosen one)
    (torch.bfloat16, (1, 40, 96), None),
    (torch.bfloat16, (3, 1000, 520), (16, 256, 1, 1, 4, 256)),
    (torch.bfloat16, (5, 4096, 4096), None),
    (torch.bfloat16, (5, 4096, 4096), (64, 64, 4, 4, 4, 256)),
    (torch.bfloat16, (9, 257, 4104), (64, 64, 4, 4, 4, 256)),
    (torch.bfloat16, (3, 33000, 256), None),
    (torch.bfloat16, (64, 640, 896), None),
    (torch.bfloat16, (64, 640, 896), (64, 64, 4, 4, 4, 256)),
    (torch.float16, (6, 1000, 4096), (64, 64, 4, 4, 4, 256)),
    (torch.float32, (7, 640, 384), None),
    (torch.float32, (9, 4096, 4104), None),
    (torch.float32, (33, 16384, 384), None),
]


@on_gpu
@pytest.mark.parametrize(("dtype", "shape", "config"), REAL, ids=str)
def test_products_at_real_sizes(
    dtype: torch.dtype, shape: tuple[int, int, int], config: tuple[int, ...] | None, device: str
) -> None:
    """Errors against float64 of the same numbers; a split product repeats bit by bit."""
    from draftlab.kernels.linear.launch import Config

    m, n, k = shape
    draw = lambda *s, seed, **o: random(*s, seed=seed, dtype=dtype, **o).to(device)  # noqa: E731
    x, norm = draw(m, k, seed=1, scale=4), 1 + draw(k, seed=2, scale=0.2)
    weight, up = (draw(n, k, seed=s, scale=k**-0.5) for s in (3, 4))
    residual, bias = draw(m, n, seed=5), draw(n, seed=6)
    chosen = Config(*config) if config else None
    bound = 2e-6 if dtype == torch.float32 else 0.02

    def error(output: Tensor, expected: Tensor) -> float:
        return float((output.double() - expected).abs().max() / expected.abs().max())

    for options in (
        {"norm_weight": norm, "eps": 1e-5, "bias": bias, "residual": residual},
        {"residual": residual},
    ):
        wide = {name: v.double() if torch.is_tensor(v) else v for name, v in options.items()}
        outputs = [linear(x, weight, config=chosen, **options) for _ in range(5)]
        assert all(torch.equal(outputs[0], other) for other in outputs)
        assert error(outputs[0], linear_reference(x.double(), weight.double(), **wide)) < bound
    swiglu = swiglu_linear(x, weight, up, norm_weight=norm, eps=1e-5, config=chosen)
    wide = [t.double() for t in (x, weight, up)]
    expected = swiglu_linear_reference(*wide, norm_weight=norm.double(), eps=1e-5)
    assert error(swiglu, expected) < bound


@on_gpu
def test_overlapped_launches_change_no_bit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 dependent products in a CUDA graph equal the same ones launched one by one."""
    from draftlab.kernels import launching
    from draftlab.kernels.linear.launch import Config

    weights = [
        random(2048, 2048, seed=s, dtype=torch.bfloat16, scale=0.03).to(device) for s in range(8)
    ]
    x = random(4, 2048, seed=8, dtype=torch.bfloat16).to(device)
    norm = torch.ones_like(x[0])

    def chain() -> Tensor:
        y = x
        for i in range(64):
            config = Config(64, 64, 1 + i % 3, 4, 4, 256)
            y = linear(y, weights[i % 8], norm_weight=norm, eps=1e-5, residual=y, config=config)
        return y

    with monkeypatch.context() as patch:
        patch.setattr(launching, "ENABLED", False)
        expected = chain()
        torch.cuda.synchronize()
    graph, output = capture(chain)
    for _ in range(20):
        output.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, expected)
