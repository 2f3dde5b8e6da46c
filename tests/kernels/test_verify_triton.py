"""The kernels of verification and sampling emit the reference's tokens, interpreted and on a GPU.

`test_lossless.py` shows that the reference and, with `-m gpu`, the kernels are lossless.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftlab.kernels import noise, sampling
from draftlab.kernels.noise import Purpose
from draftlab.kernels.sampling import argmax_draft, sample_draft, sample_token
from draftlab.kernels.sampling.types import (
    DraftDistribution,
    SamplingMetadata,
    VerifyResult,
    draft_index,
)
from draftlab.kernels.verify import verify
from tests.helpers.gpu import on_gpu, to_device
from tests.helpers.interpreter import (
    INTERPRETED,
    inside,
    interpreter_test,
    kernel_cases,
    on_kernels,
)

test_in_the_interpreter = interpreter_test(__file__)

if INTERPRETED:
    import triton
    import triton.language as tl

    from draftlab.kernels.noise import triton as noise_triton
    from draftlab.kernels.sampling import triton as sampling_triton
    from draftlab.kernels.verify import launch as verify_launch

    @triton.jit
    def draw_noise(keys, bits, uniform, exponential, PURPOSE: tl.constexpr, SIZE: tl.constexpr):
        seed, prompt, position = tl.load(keys), tl.load(keys + 1), tl.load(keys + 2)
        key = noise_triton.keyed_bits(seed, prompt, position, PURPOSE)
        tl.store(bits, key)
        tl.store(uniform, noise_triton.keyed_uniform(seed, prompt, position, PURPOSE))
        token = tl.arange(0, SIZE)
        tl.store(exponential + token, noise_triton.exponential(key, token.to(tl.int64)))


TEMPERATURES = (0.0, 0.7, 1.0, 1.5, 0.01, 5.0)


def make_keys(count: int, *, limited: bool = False, seed: int = 0) -> SamplingMetadata:
    """Return rows of all temperatures in turn; `limited`: some with top-k, some with top-p."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.arange(count)
    return SamplingMetadata(
        torch.tensor(TEMPERATURES)[row % len(TEMPERATURES)],
        row % 3 * 20 * limited,
        1.0 - (row % 4 == 1) * 0.3 * limited,
        torch.randint(0, 99, (count,), generator=generator),
        torch.randint(-(2**62), 2**62, (count,), generator=generator),
    )


def make_batch(
    count: int,
    k: int,
    vocab: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    *,
    limited: bool = False,
    seed: int = 0,
    noise: float = 0.3,
) -> tuple[Tensor, Tensor, Tensor, DraftDistribution | None, Tensor, SamplingMetadata]:
    """Return arguments of `verify` for a target and a head that approximates it.

    Rows have 0 to K drafts, mostly K.

    Args:
        size: of the draft vocabulary.
        noise: standard deviation of the difference between head and target logits.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(count, k + 1, vocab, generator=generator) * 3).to(dtype)
    ids = torch.randperm(vocab, generator=generator)[:size].sort().values
    head = logits[:, :k, ids].float() + torch.randn(count, k, size, generator=generator) * noise
    keys = make_keys(count, limited=limited, seed=seed)
    positions = torch.randint(1, 999, (count,), generator=generator)
    row = torch.arange(count)
    number = (row % (2 * k + 1)).clamp(max=k)
    if k == 0:
        return logits, positions.new_empty(count, 0), number, None, positions, keys
    head = head.to(dtype)
    index, log_sums = zip(
        *(sampling.sample_draft(head[:, i], positions + i, keys) for i in range(k)), strict=True
    )
    distribution = DraftDistribution(
        head, torch.stack(log_sums, 1), keys.temperature, ids, draft_index(ids, vocab)
    )
    return logits, ids[torch.stack(index, 1)], number, distribution, positions, keys


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set two blocks a row: each block costs the interpreter the same time, whatever its size."""
    if INTERPRETED:
        set_blocks(monkeypatch, 512, 512)


def set_blocks(monkeypatch: pytest.MonkeyPatch, reduce: int, race: int) -> None:
    monkeypatch.setattr(verify_launch, "REDUCE_BLOCK", reduce)
    monkeypatch.setattr(verify_launch, "RACE_BLOCK", race)
    monkeypatch.setattr(sampling_triton, "BLOCK", race)


def assert_same(result: VerifyResult, expected: VerifyResult, tolerance: float = 1e-5) -> None:
    assert torch.equal(result.accepted, expected.accepted)
    assert torch.equal(result.emitted, expected.emitted)
    torch.testing.assert_close(result.probability, expected.probability, atol=tolerance, rtol=0)


def check(*batch: Any, device: str = "cpu", **options: Any) -> VerifyResult:
    """Return the reference's result, which the kernels' equals."""
    expected = verify.reference(*batch, **options)
    result = verify.triton(*to_device(batch, device), **options)
    assert_same(to_device(result, "cpu"), expected, 1e-5 if device == "cpu" else 1e-4)
    return expected


@inside
def test_noise_is_the_references() -> None:
    extremes = (0, -1, 2**63 - 1, -(2**63), 12345)
    for i, purpose in enumerate(Purpose):
        keys = torch.tensor([extremes[(i + n) % len(extremes)] for n in range(3)])
        bits, uniform = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
        exponential = torch.zeros(2**16)
        draw_noise[(1,)](keys, bits, uniform, exponential, int(purpose), len(exponential))
        parts = keys[0:1], keys[1:2], keys[2:3]
        assert torch.equal(bits, noise.keyed_bits(*parts, purpose))
        assert torch.equal(uniform, noise.keyed_uniform(*parts, purpose))
        expected = noise.keyed_exponential(*parts, purpose, len(exponential))[0]
        assert float(expected.min()) < 1e-4  # small values keep their relative precision
        torch.testing.assert_close(exponential, expected, rtol=5e-7, atol=0)


@kernel_cases(
    "rows, k, vocab, draft_vocab, dtype, limited",
    [
        (18, 4, 1003, 757, torch.float32, False),
        (18, 4, 1003, 757, torch.bfloat16, True),  # limited logits are float32, the head's are not
        (12, 0, 1003, 1, torch.float32, False),
        (12, 1, 50, 20, torch.float32, False),
        (12, 2, 5, 4, torch.float32, False),
        (12, 16, 70, 9, torch.float32, False),
        (9, 1, 128_256, 32_000, torch.bfloat16, False),
        (9, 1, 201_088, 32_000, torch.float32, False),
    ],
    [
        (*sizes, limited)
        for limited in (False, True)
        for sizes in (
            (600, 4, 1003, 257, torch.float32),
            (600, 16, 1003, 1003, torch.bfloat16),
            (600, 1, 50, 20, torch.float16),
            (3000, 2, 5, 4, torch.float32),
            (64, 0, 5003, 7, torch.float32),
            (24, 5, 128_256, 32_000, torch.bfloat16),
            (24, 3, 201_088, 64_000, torch.float32),
            (8, 8, 262_144, 262_144, torch.bfloat16),
        )
    ],
)
def test_tokens_equal_the_references(
    rows: int,
    k: int,
    vocab: int,
    draft_vocab: int,
    dtype: torch.dtype,
    limited: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every token of verify, sample_token and sample_draft, from several blocks a row."""
    difference = 0.3  # between the logits of head and target
    if device == "cpu":
        block = max(64, 1 << (vocab // 2).bit_length())
        set_blocks(monkeypatch, block // 2, block)
    else:
        difference = 1.0
    batch = make_batch(rows, k, vocab, draft_vocab, dtype, limited=limited, noise=difference)
    expected = check(*batch, device=device)
    if device == "cuda":
        check(*batch, device=device, limited=limited)
    if vocab == 1003 and k:  # bonus and recovered tokens
        full = expected.accepted == batch[2]
        assert bool((full & (batch[2] > 1)).any())
        assert {0, 1} <= set(expected.accepted[~full].tolist())
    logits, _, _, q, positions, keys = batch
    on_device: Any = to_device(batch, device)
    first = sample_token.triton(on_device[0][:, 0], *on_device[4:])
    assert torch.equal(first.cpu(), sample_token.reference(logits[:, 0], positions, keys))
    if q is not None:
        arguments = q.logits[:, 0], positions, keys
        index, log_sum = sample_draft.reference(*arguments)
        draft, draft_sum = sample_draft.triton(*to_device(arguments, device))
        assert torch.equal(draft.cpu(), index)
        torch.testing.assert_close(draft_sum.cpu(), log_sum, rtol=1e-4, atol=0)


@inside
def test_argmax_drafts_and_options() -> None:
    """Without a distribution, without an index, without Σ min(p, q)."""
    batch = make_batch(12, 2, 1003, 257, seed=4)
    *start, q, positions, keys = batch
    assert q is not None
    check(*start, None, positions, keys)
    full = check(*start, replace(q, index=None), positions, keys)
    without_expectation = check(*batch, expect=False)
    assert torch.equal(without_expectation.emitted, full.emitted)
    with pytest.raises(ValueError, match="expected a draft index of 1003"):
        verify.triton(*start, replace(q, index=torch.zeros(9, dtype=torch.int32)), positions, keys)


@kernel_cases(
    "rows, k, vocab, draft_vocab, dtype, limited",
    [
        (18, 4, 1003, 757, torch.float32, False),
        (18, 3, 1003, 757, torch.bfloat16, True),
        (12, 1, 50, 20, torch.float32, False),
    ],
    [
        (600, 4, 1003, 257, torch.float32, False),
        (600, 16, 1003, 1003, torch.bfloat16, True),
        (64, 0, 5003, 7, torch.float32, False),
        (24, 8, 128_256, 32_000, torch.bfloat16, False),
    ],
)
def test_block_verification_equals_the_references(
    rows: int,
    k: int,
    vocab: int,
    draft_vocab: int,
    dtype: torch.dtype,
    limited: bool,
    device: str,
) -> None:
    batch = make_batch(rows, k, vocab, draft_vocab, dtype, limited=limited, noise=1.0)
    expected = check(*batch, device=device, block=True)
    without_expectation = check(*batch, device=device, block=True, expect=False)
    assert torch.equal(without_expectation.emitted, expected.emitted)
    by_token = verify.reference(*batch)
    if batch[3] is None:
        assert_same(expected, by_token)
        return
    greedy = batch[-1].temperature == 0
    assert torch.equal(expected.emitted[greedy], by_token.emitted[greedy])
    assert torch.equal(expected.accepted[greedy], by_token.accepted[greedy])
    assert k == 1 or not torch.equal(expected.accepted, by_token.accepted)


@inside
def test_views_of_larger_tensors() -> None:
    """Logits and drafts with strides; distributions in the rows of something larger."""
    logits, drafts, number, q, positions, keys = make_batch(12, 3, 1003, 257, seed=11)
    assert q is not None
    expected = check(logits, drafts, number, q, positions, keys)
    assert bool((expected.accepted > 0).any() & (expected.accepted < number).any())
    padded = torch.full((12, 6, 1100), 99.0)
    padded[:, 1:5, 7:1010] = logits
    head = torch.full((3, 12, 300), 99.0)
    head[:, :, :257] = q.logits.transpose(0, 1)
    rows = torch.randperm(14, generator=torch.Generator().manual_seed(1))[:12]
    large, sums = torch.full((14, 3, 257), 9.0), torch.full((14, 3), 9.0)
    large[rows], sums[rows] = q.logits, q.log_sum
    by_row = replace(q, logits=large, log_sum=sums, rows=rows)
    chain = torch.cat([drafts[:, :1], drafts], 1)  # drafts as a step has them: part of a row
    by_head = replace(q, logits=head.transpose(0, 1)[:, :, :257])
    turned = logits.transpose(1, 2).contiguous().transpose(1, 2)
    for view, tokens, distribution in (
        (padded[:, 1:5, 7:1010], drafts.T.contiguous().T, by_head),
        (turned, chain[:, 1:], by_row),
    ):
        assert_same(check(view, tokens, number, distribution, positions, keys), expected)
    some = torch.tensor([5, 2, 11])
    assert torch.equal(by_row[some].probabilities(), q.probabilities()[some])


@inside
def test_ties_go_to_the_lowest_id() -> None:
    """Within a block and across blocks; greedy drafts too."""
    logits = torch.zeros(2, 2, 1003)
    logits[0, :, [300, 301, 900]] = 2.0
    logits[1, :, [5, 1002]] = 2.0
    keys, positions = make_keys(7)[torch.tensor([0, 6])], torch.tensor([3, 4])
    assert keys.temperature.tolist() == [0.0, 0.0]
    number = torch.ones(2, dtype=torch.int64)
    for drafts, accepted in (([300, 5], [1, 1]), ([301, 1002], [0, 0])):
        result = check(logits, torch.tensor(drafts)[:, None], number, None, positions, keys)
        assert result.accepted.tolist() == accepted
        assert result.emitted.tolist() == [300, 5]
        assert result.probability[:, 0].tolist() == accepted
    flat = logits[:, 0]
    for operation in (sample_token.reference, sample_token.triton):
        assert operation(flat, positions, keys).tolist() == [300, 5]
    assert sample_draft.triton(flat, positions, keys)[0].tolist() == [300, 5]


@inside
def test_a_perfect_head_is_always_accepted() -> None:
    logits, _, _, _, positions, keys = make_batch(12, 3, 600, 600, seed=7)
    rows = keys.temperature >= 0.5
    logits, positions, keys = logits[rows], positions[rows], keys[rows]
    drafts, log_sums = zip(
        *(sample_draft(logits[:, i], positions + i, keys) for i in range(3)), strict=True
    )
    sums, temperature = torch.stack(log_sums, 1), keys.temperature
    q = DraftDistribution(logits[:, :3], sums, temperature, torch.arange(600))
    arguments = logits, torch.stack(drafts, 1), positions * 0 + 3
    result = check(*arguments, q, positions, keys)
    assert result.accepted.tolist() == [3] * len(positions)
    torch.testing.assert_close(result.probability, torch.ones(len(positions), 3))
    # Twice q is no distribution: half of the drafts are rejected and nothing is left to recover
    # from, so p itself is.
    doubled = replace(q, log_sum=q.log_sum - torch.tensor(2.0).log())
    assert bool((check(*arguments, doubled, positions, keys).accepted < 3).any())


@on_kernels
def test_broken_logits_still_give_a_token(device: str) -> None:
    """NaN and infinities, in some entries or all: ids stay in range, healthy rows undisturbed."""
    logits, drafts, number, q, positions, keys = make_batch(24, 2, 1003, 257, seed=8)
    assert q is not None
    healthy = verify.reference(logits, drafts, number, q, positions, keys)
    logits[1::4] = float("nan")
    logits[2::4, :, ::3] = float("nan")
    logits[3::4, :, 17] = float("inf")
    q.logits[1::8] = float("nan")
    q.log_sum[1::8] = float("nan")
    batch: Any = to_device((logits, drafts, number, q, positions, keys), device)
    result = to_device(verify.triton(*batch), "cpu")
    assert bool(((result.emitted >= 0) & (result.emitted < 1003)).all())
    assert bool(((result.accepted >= 0) & (result.accepted <= number)).all())
    assert torch.equal(result.emitted[::4], healthy.emitted[::4])
    first = sample_token.triton(batch[0][:, 0], *batch[4:]).cpu()
    assert bool(((first >= 0) & (first < 1003)).all())
    if device == "cpu":  # a GPU's comparisons with NaN may give other ids
        assert result.emitted[1::4].tolist() == [0] * 6
        assert bool((result.emitted[3::4][result.accepted[3::4] == 0] == 17).all())
        assert first[3::4].tolist() == [17] * 6


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_drafts(dtype: torch.dtype) -> None:
    """Drafts may be ids, use the noise of later positions and be written into tensors."""
    generator = torch.Generator().manual_seed(6)
    logits = (torch.randn(24, 1003, generator=generator) * 3).to(dtype)
    keys, positions = make_keys(24), torch.arange(24)
    ids = torch.randint(0, 2**40, (1003,), generator=generator)
    sampled = keys.temperature > 0
    index, log_sum = sample_draft.reference(logits, positions + 5, keys)
    assert torch.equal(index[~sampled], logits.argmax(-1)[~sampled])
    assert not torch.equal(index[sampled], logits.argmax(-1)[sampled])
    drafts, log_sums = sample_draft.triton(logits, positions + 5, keys)
    assert torch.equal(drafts, index)
    torch.testing.assert_close(log_sums, log_sum)
    for operation in (sample_draft.reference, sample_draft.triton):
        out = torch.zeros(3, 24, dtype=torch.int64), torch.zeros(3, 24)
        rows = out[0][1], out[1][1]
        returned = operation(logits, positions, keys, ids=ids, offset=5, out=rows)
        assert all(a is b for a, b in zip(returned, rows, strict=True))
        assert torch.equal(rows[0], ids[index])
        torch.testing.assert_close(rows[1], log_sum)
        assert not any(each[[0, 2]].any() for each in out)


@inside
def test_confidence_is_the_logit_of_the_largest_probability() -> None:
    logits = torch.randn(24, 1003, generator=torch.Generator().manual_seed(3)) * 4
    logits[0, 700], logits[1] = 99.0, 0.0
    keys = make_keys(24)
    divisor = keys.temperature.where(keys.temperature > 0, 1.0)[:, None]
    expected = (logits / divisor).double().softmax(-1).amax(-1).logit().clamp(max=15.95)
    for operation in (sample_draft.reference, sample_draft.triton):
        confidence = torch.zeros(24)
        operation(logits, torch.arange(24), keys, confidence=confidence)
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
    arguments = logits, positions, make_keys(rows)
    expected, log_sum = sample_draft(*arguments, ids=ids, offset=5)
    out = torch.zeros(3, rows, dtype=torch.int64), torch.zeros(3, rows)
    logits, ids, arguments, out = to_device((logits, ids, arguments, out), device)
    sample_draft(*arguments, ids=ids, offset=5, out=(out[0][1], out[1][1]))
    assert not out[0][::2].any()
    assert (out[0][1].cpu() == expected).float().mean() > 0.95
    torch.testing.assert_close(out[1][1].cpu(), log_sum, rtol=1e-5, atol=1e-4)
    assert torch.equal(argmax_draft(logits, ids=ids), ids[logits.argmax(-1)])
