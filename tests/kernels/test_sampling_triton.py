"""The sampling kernels draw the reference's drafts, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from draftlab.kernels.sampling import argmax_draft, sample_draft
from tests.helpers.gpu import on_gpu, to_device
from tests.helpers.interpreter import INTERPRETED, inside, interpreter_test
from tests.helpers.verify_cases import TEMPERATURES, make_keys

test_in_the_interpreter = interpreter_test(__file__)


@pytest.fixture(autouse=True)
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set several blocks a row, for a vocabulary of a thousand."""
    if INTERPRETED:
        from draftlab.kernels.sampling import triton as sampling_triton

        monkeypatch.setattr(sampling_triton, "BLOCK", 512)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_drafts(dtype: torch.dtype) -> None:
    """Drafts may be ids, use the noise of later positions and be written into tensors."""
    generator = torch.Generator().manual_seed(6)
    logits = (torch.randn(24, 1003, generator=generator) * 3).to(dtype)
    keys, positions = make_keys(24), torch.arange(24)
    ids = torch.randint(0, 2**40, (1003,), generator=generator)
    sampled = torch.arange(24) // len(TEMPERATURES) % 2 == 0
    for temperature in (keys.temperature, torch.full((24,), 0.6)):
        settings = keys, temperature, sampled
        index, log_sum = sample_draft.reference(logits, positions + 5, *settings)
        assert torch.equal(index[~sampled], logits.argmax(-1)[~sampled])
        assert not torch.equal(index[sampled], logits.argmax(-1)[sampled])
        drafts, log_sums = sample_draft.triton(logits, positions + 5, *settings)
        assert torch.equal(drafts, index)
        torch.testing.assert_close(log_sums, log_sum)
        for operation in (sample_draft.reference, sample_draft.triton):
            out = torch.zeros(3, 24, dtype=torch.int64), torch.zeros(3, 24)
            rows = out[0][1], out[1][1]
            returned = operation(logits, positions, *settings, ids=ids, offset=5, out=rows)
            assert all(a is b for a, b in zip(returned, rows, strict=True))
            assert torch.equal(rows[0], ids[index])
            torch.testing.assert_close(rows[1], log_sum)
            assert not any(each[[0, 2]].any() for each in out)


@inside
def test_confidence_is_the_logit_of_the_largest_probability() -> None:
    logits = torch.randn(24, 1003, generator=torch.Generator().manual_seed(3)) * 4
    logits[0, 700], logits[1] = 99.0, 0.0
    keys, sampled = make_keys(24), torch.arange(24) % 2 == 0
    temperature = keys.temperature
    divisor = temperature.where(temperature > 0, 1.0)[:, None]
    expected = (logits / divisor).double().softmax(-1).amax(-1).logit().clamp(max=15.95)
    for operation in (sample_draft.reference, sample_draft.triton):
        confidence = torch.zeros(24)
        operation(logits, torch.arange(24), keys, temperature, sampled, confidence=confidence)
        torch.testing.assert_close(confidence.double(), expected, rtol=1e-3, atol=1e-3)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_argmax_drafts(dtype: torch.dtype) -> None:
    logits = torch.randn(9, 1003, generator=torch.Generator().manual_seed(10)).to(dtype)
    logits[0, [77, 600, 1002]] = 30.0  # ties, in a block and across
    logits[1] = float("-inf")
    ids = 5 * torch.arange(1003) + 2
    out = torch.zeros(2, 9, dtype=torch.int64)
    for operation in (argmax_draft.reference, argmax_draft.triton):
        assert torch.equal(operation(logits), logits.argmax(-1))
        operation(logits, ids=ids, out=out[1])
        assert out[1].tolist() == (5 * logits.argmax(-1) + 2).tolist()
        assert out[1, :2].tolist() == [5 * 77 + 2, 2]
        out.zero_()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_drafts_at_real_sizes(rows: int, dtype: torch.dtype, device: str) -> None:
    """Drafts of 32,000 are the CPU reference's, but for races that rounding decides."""
    generator = torch.Generator().manual_seed(rows)
    logits = (3 * torch.randn(rows, 32_000, generator=generator)).to(dtype)
    ids = torch.randperm(128_256, generator=generator)[:32_000].sort().values
    positions = torch.randint(0, 8128, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator) + 0.1
    sampled = torch.rand(rows, generator=generator) < 0.8
    arguments = logits, positions, make_keys(rows), temperature, sampled
    expected, log_sum = sample_draft(*arguments, ids=ids, offset=5)
    out = torch.zeros(3, rows, dtype=torch.int64), torch.zeros(3, rows)
    logits, ids, arguments, out = to_device((logits, ids, arguments, out), device)
    sample_draft(*arguments, ids=ids, offset=5, out=(out[0][1], out[1][1]))
    assert not out[0][::2].any()
    assert (out[0][1].cpu() == expected).float().mean() > 0.95
    torch.testing.assert_close(out[1][1].cpu(), log_sum, rtol=1e-5, atol=1e-4)
    assert torch.equal(argmax_draft(logits, ids=ids), ids[logits.argmax(-1)])
