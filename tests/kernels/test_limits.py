"""Temperature, top-k and top-p against the definition written out, and verify's corner cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.kernels.noise import prompt_key
from draftlab.kernels.sampling import apply_top_k_top_p, sample_token, target_probabilities
from draftlab.kernels.sampling.types import DraftDistribution, SamplingMetadata
from draftlab.kernels.verify import verify
from tests.helpers.lossless import by_definition


def rows(
    *settings_: tuple[float, int, float], seed: int = 0, names: list[str] | None = None
) -> SamplingMetadata:
    """Rows of (temperature, top_k, top_p)."""
    names = names or [str(i) for i in range(len(settings_))]
    return SamplingMetadata(
        torch.tensor([s[0] for s in settings_]),
        torch.tensor([s[1] for s in settings_]),
        torch.tensor([s[2] for s in settings_]),
        torch.full((len(settings_),), seed),
        torch.tensor([prompt_key(name) for name in names]),
    )


def drawn_from(logits: torch.Tensor) -> DraftDistribution:
    """Drafts sampled at temperature 1 from logits [B, K, V] over the whole vocabulary."""
    return DraftDistribution(
        logits,
        logits.logsumexp(-1),
        torch.ones(len(logits)),
        torch.arange(logits.shape[-1]),
    )


# Logits on a grid give ties; masses that only rounding tells from top_p are excluded below.
LOGITS = st.lists(st.integers(-6, 6).map(lambda i: i / 2), min_size=6, max_size=6)
SETTINGS = st.tuples(
    st.sampled_from([0.0, 0.5, 0.8, 1.0, 1.5]),
    st.integers(0, 8),
    st.sampled_from([0.05, 0.31, 0.62, 0.9, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(LOGITS, SETTINGS), min_size=1, max_size=5))
def test_rows_of_a_mixed_batch_equal_the_definition(cases) -> None:
    logits = torch.tensor([case[0] for case in cases])[:, None].expand(-1, 2, -1)
    actual = target_probabilities(logits, rows(*(case[1] for case in cases)))
    for i, (z, (temperature, top_k, top_p)) in enumerate(cases):
        close = [by_definition(z, temperature, top_k, top_p + e) for e in (-1e-6, 0, 1e-6)]
        if top_p < 1 and not close[0] == close[1] == close[2]:
            continue
        for position in range(2):
            assert actual[i, position].tolist() == pytest.approx(close[1], abs=1e-6)


def test_top_p_off_drops_nothing_beside_top_k() -> None:
    """A running sum in float32 reaches 1 before the tail; the tail stays in the support."""
    logits = torch.full((1, 1, 3000), -18.0)
    logits[..., 0] = 0.0
    assert int((target_probabilities(logits, rows((1.0, 2000, 1.0))) > 0).sum()) == 2000


def test_nothing_left_to_recover_from_falls_back_to_p() -> None:
    """q ≥ p everywhere up to rounding, and a rejection all the same: p itself is then exact."""
    logits = torch.tensor([1.0, 0.0, -1.0]).expand(2000, 2, 3)
    names = [f"r{i}" for i in range(2000)]
    keys = rows(*[(1.0, 0, 1.0)] * 2000, names=names)
    p = target_probabilities(logits, keys)
    # Twice p is no distribution; it rejects half of the drafts with an empty residual.
    doubled = replace(drawn_from(logits[:, :1]), log_sum=logits[:, :1].logsumexp(-1) - math.log(2))
    verdict = verify(
        logits,
        torch.zeros(2000, 1, dtype=torch.int64),
        torch.ones(2000, dtype=torch.int64),
        doubled,
        torch.full((2000,), 4),
        keys,
    )
    rejected = verdict.emitted[verdict.accepted == 0]
    assert 800 < len(rejected) < 1200
    share = rejected.bincount(minlength=3) / len(rejected)
    assert share.tolist() == pytest.approx(p[0, 0].tolist(), abs=0.06)


GREEDY, SAMPLED = (0.0, 0, 1.0), (1.0, 0, 1.0)


def test_rows_with_fewer_drafts_ignore_their_padding() -> None:
    """Padding drafts and the logits behind them decide nothing."""
    generator = torch.Generator().manual_seed(0)
    kinds = [GREEDY, SAMPLED, (1.3, 3, 0.8)] * 40
    keys = rows(*kinds)
    count = len(kinds)
    logits = torch.randn(count, 4, 6, generator=generator) * 2
    q = drawn_from(torch.randn(count, 3, 6, generator=generator))
    drafts = torch.randint(6, (count, 3), generator=generator)
    number = torch.arange(count) % 4
    positions = torch.arange(count) + 2
    together = verify(logits, drafts, number, q, positions, keys)
    assert bool((together.accepted <= number).all())
    assert len({(int(a), int(n)) for a, n in zip(together.accepted, number, strict=True)}) > 6
    assert bool((together.probability[torch.arange(3) >= number[:, None]] == 0).all())
    for i in range(count):
        n, one = int(number[i]), torch.tensor([i])
        alone = verify(
            logits[one, : n + 1],
            drafts[one, :n],
            number[one],
            replace(q[one], logits=q.logits[one, :n], log_sum=q.log_sum[one, :n]),
            positions[one],
            keys[one],
        )
        assert int(alone.accepted) == int(together.accepted[i])
        assert int(alone.emitted) == int(together.emitted[i])
        torch.testing.assert_close(alone.probability[0], together.probability[i, :n])
    undrafted = number == 0
    first = sample_token(logits[:, 0], positions, keys)
    assert torch.equal(together.emitted[undrafted], first[undrafted])


def test_greedy_rows_do_not_look_at_draft_probabilities() -> None:
    """Alone, where verification takes a shorter way, and beside sampled rows."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 3, 5, generator=generator).round(decimals=1)  # with ties
    drafts = torch.randint(5, (60, 2), generator=generator)
    number, positions = torch.arange(60) // 2 % 3, torch.arange(60)
    keys = rows(*[GREEDY, SAMPLED] * 30)
    q = drawn_from(torch.randn(60, 2, 5, generator=generator) * 2)
    with_q = verify(logits, drafts, number, q, positions, keys)
    without = verify(logits, drafts, number, None, positions, keys)
    other = verify(logits, drafts, number, q, positions, keys, limited=False)
    assert all(torch.equal(value, vars(other)[name]) for name, value in vars(with_q).items())
    without_expectation = verify(logits, drafts, number, q, positions, keys, expect=False)
    assert torch.equal(without_expectation.emitted, with_q.emitted)
    assert torch.equal(without_expectation.probability[::2], with_q.probability[::2])
    assert bool((without_expectation.probability[1::2] == 0).all())
    best = torch.tensor([[z.index(max(z)) for z in row] for row in logits.tolist()])
    hits = (drafts == best[:, :2]) & (torch.arange(2) < number[:, None])
    accepted = hits.long().cumprod(-1).sum(-1)
    greedy = torch.arange(0, 60, 2)
    alone = verify(
        logits[greedy], drafts[greedy], number[greedy], None, positions[greedy], keys[greedy]
    )
    for verdict in (with_q, without):
        assert torch.equal(verdict.accepted[greedy], accepted[greedy])
        assert torch.equal(verdict.emitted[greedy], best.gather(1, accepted[:, None])[greedy, 0])
        for name in ("accepted", "emitted", "probability"):
            assert getattr(alone, name).dtype == getattr(verdict, name).dtype
            assert torch.equal(getattr(alone, name), getattr(verdict, name)[greedy]), name
    assert not torch.equal(with_q.accepted[1::2], without.accepted[1::2])


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.integers(-2, 2), min_size=1, max_size=9),
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=3),
)
def test_top_k_alone_is_what_sorting_gives(values: list[int], counts: list[int]) -> None:
    """With many equal logits, and rows without a limit among the others."""
    logits = torch.tensor(values).float().expand(len(counts), 2, len(values)).clone()
    logits[:, 1] = logits[:, 1].flip(-1)
    alone = [(1.0, count, 1.0) for count in counts]
    with_top_p = rows(*alone, (1.0, 0, 0.5))  # which asks for sorting
    sorted_ = apply_top_k_top_p(torch.cat([logits, logits[:1]]), with_top_p)[:-1]
    assert torch.equal(apply_top_k_top_p(logits, rows(*alone)), sorted_)
