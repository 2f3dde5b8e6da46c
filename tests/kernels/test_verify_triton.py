"""The verification kernels emit the reference's tokens, in Triton's interpreter and on a GPU.

`test_lossless.py` shows that the reference and, with `-m gpu`, the kernels are lossless.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftlab.kernels import noise, sampling, verify
from draftlab.kernels.noise import Purpose
from draftlab.kernels.sampling_types import (
    DraftDistribution,
    VerifyResult,
)
from tests.helpers.gpu import on_gpu, to_device
from tests.helpers.interpreter import INTERPRETED, inside, run_in_the_interpreter, runs_the_others
from tests.helpers.verify_cases import make_batch, make_keys

if INTERPRETED:
    import triton
    import triton.language as tl

    from draftlab.kernels import noise_triton, sampling_triton, verify_launch

    @triton.jit
    def draw_noise(keys, bits, uniform, exponential, PURPOSE: tl.constexpr, SIZE: tl.constexpr):
        seed, prompt, position = tl.load(keys), tl.load(keys + 1), tl.load(keys + 2)
        key = noise_triton.keyed_bits(seed, prompt, position, PURPOSE)
        tl.store(bits, key)
        tl.store(uniform, noise_triton.keyed_uniform(seed, prompt, position, PURPOSE))
        token = tl.arange(0, SIZE)
        tl.store(exponential + token, noise_triton.exponential(key, token.to(tl.int64)))


@runs_the_others
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a row, and of the draft vocabulary, for a vocabulary of a thousand."""
    set_blocks(monkeypatch, 256, 512)


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set two blocks a row: each block costs the interpreter the same time, whatever its size."""
    set_blocks(monkeypatch, 512, 512)


def set_blocks(monkeypatch: pytest.MonkeyPatch, survey: int, race: int) -> None:
    monkeypatch.setattr(verify_launch, "REDUCE_BLOCK", survey)
    monkeypatch.setattr(verify_launch, "RACE_BLOCK", race)
    monkeypatch.setattr(sampling_triton, "BLOCK", race)


def assert_same(found: VerifyResult, expected: VerifyResult) -> None:
    assert torch.equal(found.accepted, expected.accepted)
    assert torch.equal(found.emitted, expected.emitted)
    torch.testing.assert_close(found.probability, expected.probability, atol=1e-5, rtol=0)


@inside
def test_noise_is_the_references() -> None:
    extremes = (0, -1, 2**63 - 1, -(2**63), 12345)
    for i, purpose in enumerate(Purpose):
        keys = torch.tensor([extremes[(i + n) % len(extremes)] for n in range(3)])
        bits, uniform = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
        found = torch.zeros(2**16)
        draw_noise[(1,)](keys, bits, uniform, found, int(purpose), len(found))
        parts = keys[0:1], keys[1:2], keys[2:3]
        assert torch.equal(bits, noise.keyed_bits(*parts, purpose))
        assert torch.equal(uniform, noise.keyed_uniform(*parts, purpose))
        expected = noise.keyed_exponential(*parts, purpose, len(found))[0]
        assert float(expected.min()) < 1e-4  # small values keep their relative precision
        torch.testing.assert_close(found, expected, rtol=5e-7, atol=0)


@inside
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("dtype", "limited"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),  # limited logits are float32; the head's stay as they are
        (torch.float16, False),
    ],
)
def test_mixed_rows(dtype: torch.dtype, limited: bool) -> None:
    batch = make_batch(18, 4, 1003, 757, dtype, limited=limited, seed=1)
    expected = verify.verify(*batch)
    full = expected.accepted == batch[2]
    assert bool((full & (batch[2] > 1)).any())  # bonus tokens
    assert {0, 1} <= set(expected.accepted[~full].tolist())  # and recovered ones
    assert_same(verify_launch.verify(*batch), expected)


@inside
@pytest.mark.parametrize(
    ("k", "vocab", "size"), [(0, 1003, 1), (1, 50, 20), (2, 5, 4), (16, 70, 9)]
)
def test_other_shapes(k: int, vocab: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_blocks(monkeypatch, 256, 512 if vocab > 512 else 64)
    batch = make_batch(12, k, vocab, size, seed=2)
    assert_same(verify_launch.verify(*batch), verify.verify(*batch))


@inside
@pytest.mark.parametrize(("vocab", "dtype"), [(128_256, torch.bfloat16), (201_088, torch.float32)])
def test_big_vocabularies(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    set_blocks(monkeypatch, 2**16, 2**15)
    batch = make_batch(9, 1, vocab, 32_000, dtype, seed=3)
    expected = verify.verify(*batch)
    assert int(expected.emitted.max()) > 2**16
    assert_same(verify_launch.verify(*batch), expected)
    logits, *_, positions, keys = batch
    first = sampling.sample_token(logits[:, 0], positions, keys)
    assert torch.equal(sampling_triton.sample_token(logits[:, 0], positions, keys), first)


@inside
@pytest.mark.usefixtures("two_blocks")
def test_argmax_drafts_and_options() -> None:
    """Without a distribution, with one that no row uses, without an index, without Σ min(p, q)."""
    batch = make_batch(12, 2, 1003, 257, seed=4)
    *start, q, positions, keys = batch
    assert q is not None
    plain = verify.verify(*start, None, positions, keys)
    assert_same(verify_launch.verify(*start, None, positions, keys), plain)
    unused = replace(q, sampled=torch.zeros_like(q.sampled))
    assert_same(verify_launch.verify(*start, unused, positions, keys, limited=False), plain)
    full = verify.verify(*batch)
    anew = replace(q, index=None)
    assert_same(verify_launch.verify(*start, anew, positions, keys), full)
    hurried = verify_launch.verify(*batch, expect=False)
    assert_same(hurried, verify.verify(*batch, expect=False))
    assert torch.equal(hurried.emitted, full.emitted)
    with pytest.raises(ValueError, match="expected a draft index of 1003"):
        verify_launch.verify(
            *start, replace(q, index=torch.zeros(9, dtype=torch.int32)), positions, keys
        )


@inside
@pytest.mark.usefixtures("two_blocks")
def test_views_of_larger_tensors() -> None:
    logits, drafts, number, q, positions, keys = make_batch(12, 2, 1003, 257, seed=5)
    assert q is not None
    expected = verify.verify(logits, drafts, number, q, positions, keys)
    padded = torch.full((12, 5, 1100), 99.0)
    padded[:, 1:4, 7:1010] = logits
    head = torch.full((2, 12, 300), 99.0)
    head[:, :, :257] = q.logits.transpose(0, 1)
    view = replace(q, logits=head.transpose(0, 1)[:, :, :257])
    found = verify_launch.verify(
        padded[:, 1:4, 7:1010], drafts.T.contiguous().T, number, view, positions, keys
    )
    assert_same(found, expected)
    turned = logits.transpose(1, 2).contiguous().transpose(1, 2)
    assert_same(verify_launch.verify(turned, drafts, number, q, positions, keys), expected)


@inside
@pytest.mark.usefixtures("two_blocks")
def test_distributions_in_the_rows_of_something_larger() -> None:
    logits, drafts, number, q, positions, keys = make_batch(12, 3, 1003, 257, seed=11)
    assert q is not None
    rows = torch.randperm(14, generator=torch.Generator().manual_seed(1))[:12]
    large, sums = torch.full((14, 3, 257), 9.0), torch.full((14, 3), 9.0)
    large[rows], sums[rows] = q.logits, q.log_sum
    aimed = replace(q, logits=large, log_sum=sums, rows=rows)
    chain = torch.cat([drafts[:, :1], drafts], 1)  # drafts as a step has them: part of a row
    expected = verify.verify(logits, drafts, number, q, positions, keys)
    assert bool((expected.accepted > 0).any() & (expected.accepted < number).any())
    for module in (verify, verify_launch):
        found = module.verify(logits, chain[:, 1:], number, aimed, positions, keys)
        assert_same(found, expected)
    some = torch.tensor([5, 2, 11])
    assert torch.equal(aimed[some].probabilities(), q.probabilities()[some])


@inside
@pytest.mark.usefixtures("two_blocks")
def test_ties_go_to_the_lowest_id() -> None:
    """Within a block and across blocks; greedy drafts too."""
    logits = torch.zeros(2, 2, 1003)
    logits[0, :, [300, 301, 900]] = 2.0
    logits[1, :, [5, 1002]] = 2.0
    keys, positions = make_keys(7)[torch.tensor([0, 6])], torch.tensor([3, 4])
    assert keys.temperature.tolist() == [0.0, 0.0]
    number = torch.ones(2, dtype=torch.int64)
    for drafts, accepted in (([300, 5], [1, 1]), ([301, 1002], [0, 0])):
        found = verify_launch.verify(
            logits, torch.tensor(drafts)[:, None], number, None, positions, keys
        )
        assert found.accepted.tolist() == accepted
        assert found.emitted.tolist() == [300, 5]
    flat = logits[:, 0]
    assert sampling_triton.sample_token(flat, positions, keys).tolist() == [300, 5]
    sampled = torch.zeros(2, dtype=torch.bool)
    drafted, _ = sampling_triton.sample_draft(flat, positions, keys, torch.ones(2), sampled)
    assert drafted.tolist() == [300, 5]


@inside
@pytest.mark.usefixtures("two_blocks")
def test_a_perfect_head_is_always_accepted() -> None:
    logits, _, _, _, positions, keys = make_batch(12, 3, 600, 600, seed=7)
    rows = keys.temperature >= 0.5
    logits, positions, keys = logits[rows], positions[rows], keys[rows]
    settings = keys.temperature, torch.ones(len(positions), dtype=torch.bool)
    found = [sampling.sample_draft(logits[:, i], positions + i, keys, *settings) for i in range(3)]
    q = DraftDistribution(
        logits[:, :3], torch.stack([f[1] for f in found], 1), *settings, torch.arange(600)
    )
    drafts = torch.stack([f[0] for f in found], 1)
    verdict = verify_launch.verify(logits, drafts, positions * 0 + 3, q, positions, keys)
    assert verdict.accepted.tolist() == [3] * len(positions)
    torch.testing.assert_close(verdict.probability, torch.ones(len(positions), 3))
    # Twice q is no distribution: half of the drafts are rejected and nothing is left to recover
    # from, so p itself is.
    doubled = replace(q, log_sum=q.log_sum - torch.tensor(2.0).log())
    arguments = logits, drafts, positions * 0 + 3, doubled, positions, keys
    expected = verify.verify(*arguments)
    assert bool((expected.accepted < 3).any())
    assert_same(verify_launch.verify(*arguments), expected)


@inside
@pytest.mark.usefixtures("two_blocks")
def test_broken_logits_still_give_a_token() -> None:
    """NaN and infinities, in some entries or all: ids stay in range, healthy rows undisturbed."""
    logits, drafts, number, q, positions, keys = make_batch(24, 2, 1003, 257, seed=8)
    assert q is not None
    healthy = verify.verify(logits, drafts, number, q, positions, keys)
    logits[1::4] = float("nan")
    logits[2::4, :, ::3] = float("nan")
    logits[3::4, :, 17] = float("inf")
    q.logits[1::8] = float("nan")
    q.log_sum[1::8] = float("nan")
    found = verify_launch.verify(logits, drafts, number, q, positions, keys)
    assert bool(((found.emitted >= 0) & (found.emitted < 1003)).all())
    assert bool(((found.accepted >= 0) & (found.accepted <= number)).all())
    assert found.emitted[1::4].tolist() == [0] * 6
    assert torch.equal(found.emitted[::4], healthy.emitted[::4])
    assert bool((found.emitted[3::4][found.accepted[3::4] == 0] == 17).all())
    first = sampling_triton.sample_token(logits[:, 0], positions, keys)
    assert bool(((first >= 0) & (first < 1003)).all())
    assert first[3::4].tolist() == [17] * 6


REAL = [  # rows, drafts, vocabulary, draft vocabulary, dtype
    (600, 4, 1003, 257, torch.float32),
    (600, 16, 1003, 1003, torch.bfloat16),
    (600, 1, 50, 20, torch.float16),
    (3000, 2, 5, 4, torch.float32),
    (64, 0, 5003, 7, torch.float32),
    (24, 5, 128_256, 32_000, torch.bfloat16),
    (24, 3, 201_088, 64_000, torch.float32),
    (8, 8, 262_144, 262_144, torch.bfloat16),
]


@on_gpu
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_tokens_at_real_sizes(shape: tuple, limited: bool, device: str) -> None:
    """Every token of verify, sample_token and sample_draft is the CPU reference's."""
    batch = make_batch(*shape, limited=limited, noise=1.0)
    logits, _, _, q, positions, keys = batch
    on_device = to_device(batch, device)
    expected = verify.verify(*batch)
    for result in (verify.verify(*on_device), verify.verify(*on_device, limited=limited)):
        assert torch.equal(result.accepted.cpu(), expected.accepted)
        assert torch.equal(result.emitted.cpu(), expected.emitted)
        torch.testing.assert_close(
            result.probability.cpu(), expected.probability, atol=1e-4, rtol=0
        )
    first = sampling.sample_token(on_device[0][:, 0], *on_device[4:])
    assert torch.equal(first.cpu(), sampling.sample_token(logits[:, 0], positions, keys))
    if q is not None:
        options = positions, keys, q.temperature, q.sampled
        index, log_sum = sampling.sample_draft(q.logits[:, 0], *options)
        found, found_sum = sampling.sample_draft(
            to_device(q.logits[:, 0], device), *to_device(options, device)
        )
        assert torch.equal(found.cpu(), index)
        torch.testing.assert_close(found_sum.cpu(), log_sum, rtol=1e-4, atol=0)


@on_gpu
def test_logits_of_nan_give_tokens_of_the_vocabulary(device: str) -> None:
    logits = torch.full((7, 4, 1003), float("nan"), device=device, dtype=torch.bfloat16)
    drafts = torch.zeros(7, 3, dtype=torch.int64, device=device)
    number = torch.full((7,), 3, device=device)
    result = verify.verify(logits, drafts, number, None, number, to_device(make_keys(7), device))
    assert bool(((result.emitted >= 0) & (result.emitted < 1003)).all())
