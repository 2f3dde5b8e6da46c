"""The sampling kernels draw the reference's drafts, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from draftlab.kernels import sampling
from tests.helpers.gpu import on_gpu, to_device
from tests.helpers.interpreter import INTERPRETED, inside, run_in_the_interpreter, runs_the_others
from tests.helpers.verify_cases import TEMPERATURES, make_keys

if INTERPRETED:
    from draftlab.kernels import sampling_triton


@runs_the_others
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a row, for a vocabulary of a thousand."""
    monkeypatch.setattr(sampling_triton, "BLOCK", 512)


@inside
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = (torch.randn(48, 1003, generator=generator) * 3).to(dtype)
    keys, positions = make_keys(48), torch.arange(48)
    sampled = torch.arange(48) // len(TEMPERATURES) % 2 == 0
    for temperature in (keys.temperature, torch.full((48,), 0.6)):
        settings = positions, keys, temperature, sampled
        index, log_sum = sampling.sample_draft(logits, *settings)
        found, found_sum = sampling_triton.sample_draft(logits, *settings)
        assert torch.equal(found, index)
        torch.testing.assert_close(found_sum, log_sum)
        assert torch.equal(index[~sampled], logits.argmax(-1)[~sampled])
        assert not torch.equal(index[sampled], logits.argmax(-1)[sampled])


@inside
@pytest.mark.usefixtures("small_blocks")
def test_ids_offsets_and_output_tensors() -> None:
    """Drafts may be ids, use the noise of later positions and be written into tensors."""
    generator = torch.Generator().manual_seed(9)
    logits = (torch.randn(24, 1003, generator=generator) * 3).half()
    keys, positions = make_keys(24), torch.arange(24)
    ids = torch.randint(0, 2**40, (1003,), generator=generator)
    settings = keys, keys.temperature, keys.temperature > 0.5
    index, log_sum = sampling.sample_draft(logits, positions + 5, *settings)
    for module in (sampling, sampling_triton):
        out = torch.zeros(3, 24, dtype=torch.int64), torch.zeros(3, 24)
        outputs = out[0][1], out[1][1]
        found = module.sample_draft(logits, positions, *settings, ids=ids, offset=5, out=outputs)
        assert all(a is b for a, b in zip(found, outputs, strict=True))
        assert torch.equal(out[0][1], ids[index])
        torch.testing.assert_close(out[1][1], log_sum)
        assert not out[0][[0, 2]].any()
        assert not out[1][[0, 2]].any()
        elsewhere, _ = module.sample_draft(logits, positions, *settings, ids=ids)
        assert not torch.equal(elsewhere, ids[index])


@inside
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_argmax_drafts(dtype: torch.dtype) -> None:
    logits = torch.randn(9, 1003, generator=torch.Generator().manual_seed(10)).to(dtype)
    logits[0, [77, 600, 1002]] = 30.0  # ties, in a block and across
    logits[1] = float("-inf")
    ids = 5 * torch.arange(1003) + 2
    out = torch.zeros(2, 9, dtype=torch.int64)
    for module in (sampling, sampling_triton):
        assert torch.equal(module.argmax_draft(logits), logits.argmax(-1))
        module.argmax_draft(logits, ids=ids, out=out[1])
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
    expected, log_sum = sampling.sample_draft(*arguments, ids=ids, offset=5)
    out = torch.zeros(3, rows, dtype=torch.int64), torch.zeros(3, rows)
    logits, ids, arguments, out = to_device((logits, ids, arguments, out), device)
    sampling.sample_draft(*arguments, ids=ids, offset=5, out=(out[0][1], out[1][1]))
    assert not out[0][::2].any()
    assert (out[0][1].cpu() == expected).float().mean() > 0.95
    torch.testing.assert_close(out[1][1].cpu(), log_sum, rtol=1e-5, atol=1e-4)
    assert torch.equal(sampling.argmax_draft(logits, ids=ids), ids[logits.argmax(-1)])
