"""Convolutions and recurrences of a step: references against transformers, kernels against them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.nemotron_h.modeling_nemotron_h import causal_conv1d_fn, mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from draftlab.kernels.recurrent_step import (
    convolution_step,
    delta_rule_step,
    selective_scan_step,
)
from tests.helpers.interpreter import interpreter_test, kernel_cases

test_in_the_interpreter = interpreter_test(__file__)

TOKENS, PROMPT = 6, 5  # of a step, and of the text before it
ROWS, COUNTS = [4, 0, 2], [0, 3, 6]  # rows of a pool of six, and the tokens that each keeps


class Case:
    """Random operands of PROMPT + TOKENS tokens of three rows.

    Args:
        sizes: heads, groups of heads that share keys, values and keys of a head.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int, int] = (4, 2, 5, 3),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.generator = torch.Generator().manual_seed(0)
        self.rows, self.counts = (torch.tensor(x, device=device) for x in (ROWS, COUNTS))

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normal values, as a view that is not contiguous."""
        values = torch.randn(*shape[:-1], shape[-1] + 2, generator=self.generator) * scale
        return values.to(self.device, self.dtype)[..., 1:-1]

    def tokens(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.random(3, PROMPT + TOKENS, *shape, scale=scale)


class Convolution(Case):
    """A convolution of three taps over 7 or 150 channels."""

    def __init__(self, *args: Any, silu: bool = True, bias: bool = True) -> None:
        super().__init__(*args)
        channels = self.sizes[0] * self.sizes[2]
        self.inputs = [self.tokens(channels).mT]
        self.weight = self.random(channels, 3)
        self.bias = self.random(channels) if bias else None
        self.silu, self.state_shape = silu, (channels, 2)

    def run(self, operation: str, tokens: slice, *states: Any) -> Tensor:
        """Run an implementation of the operator on some of the tokens."""
        operator = getattr(convolution_step, operation)
        x = self.inputs[0][..., tokens]
        return operator(x, self.weight, self.bias, *states, silu=self.silu).mT

    def expected(self) -> Tensor:
        """Return transformers' outputs for the whole text."""
        activation = "silu" if self.silu else None
        return causal_conv1d_fn(self.inputs[0], self.weight, self.bias, activation).mT


class DeltaRule(Case):
    """A gated delta rule with a decay for each head, or for each key dimension (`kimi`)."""

    def __init__(self, *args: Any, kimi: bool = False) -> None:
        super().__init__(*args)
        heads, group, values, keys = self.sizes
        self.inputs = [self.tokens(heads // group, keys) for _ in range(2)]
        self.inputs.append(self.tokens(heads, values))
        decay = self.tokens(heads, keys) if kimi else self.tokens(heads)
        self.inputs += [-F.softplus(decay), self.tokens(heads).sigmoid()]
        self.state_shape, self.kimi = (heads, values, keys), kimi

    def run(self, operation: str, tokens: slice, *states: Any) -> Tensor:
        inputs = (x[:, tokens] for x in self.inputs)
        return getattr(delta_rule_step, operation)(*inputs, *states, normalise=True)

    def expected(self) -> Tensor:
        options = {"use_qk_l2norm_in_kernel": True}
        if not self.kimi:
            return torch_chunk_gated_delta_rule(*self.inputs, **options)[0]
        kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
        q, k = (x.repeat_interleave(self.sizes[1], 2) for x in self.inputs[:2])
        return kimi.chunk_kimi_delta_attention(q, k, *self.inputs[2:], **options)[0]


class Mamba2(Case):
    """Mamba 2's selective scan: a time step for each head, of at most 0.6."""

    limits = (0.0, 0.6)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        heads, group, values, keys = self.sizes
        self.x, self.dt = self.tokens(heads, values), self.tokens(heads, scale=3.0)
        self.a = -self.random(heads).exp()
        self.b, self.c = (self.tokens(heads // group, keys) for _ in range(2))
        self.d, self.bias = self.random(heads), self.random(heads)
        self.state_shape = heads, values, keys

    def run(self, operation: str, tokens: slice, *states: Any) -> Tensor:
        shape = self.state_shape
        x, dt, b, c = (x[:, tokens] for x in (self.x, self.dt, self.b, self.c))
        vectors = (x[:, None].expand(shape[:2]) for x in (self.d, self.bias))
        a, dt = self.a[:, None, None].expand(shape), dt[..., None].expand_as(x)
        operator = getattr(selective_scan_step, operation)
        return operator(x, dt, a, b, c, *vectors, *states, limits=self.limits)

    def expected(self) -> Tensor:
        return mamba2_chunk_scan(
            self.x,
            self.dt,
            self.a,
            self.b,
            self.c,
            chunk_size=4,
            D=self.d,
            dt_bias=self.bias,
            dt_softplus=True,
            dt_limit=self.limits,
        )


class Mamba(Case):
    """Mamba's selective scan: one head, a time step and a decay for each of its values."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        heads, _, values, keys = self.sizes
        channels = heads * values
        self.x, self.dt = self.tokens(1, channels), self.tokens(1, channels, scale=3.0)
        self.a = -self.random(1, channels, keys).exp()
        self.b, self.c = (self.tokens(1, keys) for _ in range(2))
        self.state_shape = 1, channels, keys

    def run(self, operation: str, tokens: slice, *states: Any) -> Tensor:
        x, dt, b, c = (x[:, tokens] for x in (self.x, self.dt, self.b, self.c))
        return getattr(selective_scan_step, operation)(x, dt, self.a, b, c, None, None, *states)

    def expected(self) -> Tensor:
        x, dt, b, c = (x[:, :, 0].mT for x in (self.x, self.dt, self.b, self.c))
        return mamba_selective_scan(x, dt, self.a[0], b, c, delta_softplus=True).mT[:, :, None]


CASES = [
    Convolution,
    partial(Convolution, silu=False, bias=False),
    DeltaRule,
    partial(DeltaRule, kimi=True),
    Mamba2,
    Mamba,
]


def in_steps(case: Any, operation: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Run a prompt and a verify step from empty states, as an engine does.

    Returns:
        The outputs of the prompt's and of the step's tokens, the pool before the step, and the pool
        after it.
    """
    dtype = case.dtype if isinstance(case, Convolution) else torch.float32
    pool = torch.zeros(6, *case.state_shape, dtype=dtype, device=case.device)
    prompt, step = slice(PROMPT), slice(PROMPT, None)
    outputs = [case.run(operation, prompt, pool, case.rows, torch.full_like(case.rows, PROMPT))]
    before = pool.clone()
    outputs.append(case.run(operation, step, pool, case.rows))
    assert torch.equal(pool, before), "outputs alone leave the pool as it is"
    case.run(operation, step, pool, case.rows, case.counts)
    return outputs, before, pool


@pytest.mark.parametrize("new_case", CASES)
def test_the_reference_equals_transformers(new_case: Callable[..., Any]) -> None:
    case = new_case()
    outputs, before, after = in_steps(case, "reference")
    torch.testing.assert_close(torch.cat(outputs, 1), case.expected(), atol=1e-5, rtol=1e-4)
    others = [row for row in range(6) if row not in ROWS]
    assert torch.equal(before[others], torch.zeros_like(before[others]))
    assert torch.equal(after[[*others, ROWS[0]]], before[[*others, ROWS[0]]])
    for row, count in zip(ROWS, COUNTS, strict=True):  # the next token, from the state
        alone = torch.zeros_like(before)
        ends = torch.full_like(case.rows, PROMPT + count)
        case.run("reference", slice(PROMPT + count), alone, case.rows, ends)
        torch.testing.assert_close(after[row], alone[row], atol=1e-5, rtol=1e-4)


TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@kernel_cases(
    "sizes, dtype",
    [((4, 2, 5, 3), dtype) for dtype in (torch.float32, torch.float16)],
    [
        (sizes, d)
        for sizes in ((4, 2, 5, 3), (32, 2, 128, 128), (6, 3, 80, 200))
        for d in TOLERANCES
    ],
)
@pytest.mark.parametrize("new_case", CASES)
def test_the_kernel_equals_the_reference(
    new_case: Callable[..., Any], sizes: tuple, dtype: torch.dtype, device: str
) -> None:
    """Sizes that are no powers of two, views with strides, rows that keep no token."""
    case, close = new_case(sizes, dtype, device), TOLERANCES[dtype]
    outputs, _, pool = in_steps(case, "triton")
    expected, _, reference_pool = in_steps(case, "reference")
    for actual, exact in zip(outputs, expected, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, exact, atol=close, rtol=close)
    torch.testing.assert_close(pool, reference_pool, atol=2e-5, rtol=2e-5)


@kernel_cases("dtype", [(torch.float32,)], [(torch.float32,)])
def test_small_time_steps_are_exact(dtype: torch.dtype, device: str) -> None:
    """softplus(−20) is 2.06e-9, which 1 + exp(−20) rounds to 0."""
    case = Mamba2((4, 2, 5, 3), dtype, device)
    case.bias = torch.full_like(case.bias, -20.0)
    case.d = torch.zeros_like(case.d)
    outputs, _, _ = in_steps(case, "triton")
    expected, _, _ = in_steps(case, "reference")
    largest = float(expected[1].abs().max())
    assert 0 < largest < 1e-4
    torch.testing.assert_close(outputs[1], expected[1], atol=1e-4 * largest, rtol=1e-3)
