"""Keyed noise: fixed for ever, well distributed, and a function of its key alone."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from draftlab.kernels.noise import (
    Purpose,
    exponential_race,
    keyed_bits,
    keyed_exponential,
    keyed_uniform,
    prompt_key,
)

COUNT = 50_000


def keys(count: int = COUNT) -> tuple[Tensor, Tensor, Tensor]:
    """One seed, many prompts as a suite names them, and one position."""
    prompts = torch.tensor([prompt_key(f"prompt-{i}") for i in range(count)])
    return torch.zeros(count, dtype=torch.int64), prompts, torch.full((count,), 17)


def test_pinned_values() -> None:
    """A change here changes every sampled result that anyone has written down."""
    seed, prompt = torch.tensor([0, 1]), torch.tensor([prompt_key("a"), prompt_key("b")])
    position = torch.tensor([5, 6])
    assert prompt_key("a") == -3837880752741967926
    bits = keyed_bits(seed, prompt, position, Purpose.EMIT)
    assert bits.tolist() == [7854227999525982488, -913151713381541847]
    uniform = keyed_uniform(seed, prompt, position, Purpose.ACCEPT)
    assert uniform.tolist() == [0.3352062257758258, 0.3817803937302653]
    exponential = keyed_exponential(seed, prompt, position, Purpose.DRAFT, 3)
    expected = [
        0.0660036951,
        0.0005293041468,
        1.8384141922,
        0.8945761919,
        1.0095936060,
        0.3613622487,
    ]
    assert exponential.flatten().tolist() == pytest.approx(expected, rel=1e-6)


def spread(vary: str) -> Tensor:
    """Uniform numbers of keys that differ only in one part, by ones."""
    count = torch.arange(COUNT)
    parts = {"seed": 0 * count, "prompt": 0 * count + prompt_key("x"), "position": 0 * count}
    parts[vary] = count
    return keyed_uniform(parts["seed"], parts["prompt"], parts["position"], Purpose.EMIT)


@pytest.mark.parametrize("vary", ["seed", "prompt", "position"])
def test_uniform_over_neighbouring_keys(vary: str) -> None:
    u = spread(vary)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert len(u.unique()) == COUNT
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    # Neighbours in sequence, and the last bits that a uniform number keeps.
    assert abs(float(torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1])) < 4 * COUNT**-0.5
    low = (u * 2.0**53).long() & 15
    assert stats.chisquare(low.bincount(minlength=16).numpy()).pvalue > 1e-3


def test_exponential_over_keys_and_tokens() -> None:
    e = keyed_exponential(*keys(5_000), Purpose.EMIT, 20)
    assert float(e.min()) > 0
    assert bool(e.isfinite().all())
    for slice_ in (e.flatten()[:20_000], e[:, 0], e[:, 19], e.min(-1).values * 20):
        assert stats.kstest(slice_.numpy(), "expon").pvalue > 1e-3
    n = e.numel()
    assert float(e.mean()) == pytest.approx(1, abs=4 * n**-0.5)
    assert float(e.var()) == pytest.approx(1, abs=4 * (8 / n) ** 0.5)
    correlation = torch.corrcoef(e.T) - torch.eye(20)
    assert float(correlation.abs().max()) < 5 * 5_000**-0.5


def test_small_values_are_fine_grained() -> None:
    """In a race over a large vocabulary the winner is decided near zero."""
    e = keyed_exponential(*keys(100), Purpose.EMIT, 20_000)
    smallest = e.flatten().sort().values[:1000]
    assert len(smallest.unique()) > 990


def named_numbers() -> dict[str, Tensor]:
    """Numbers whose keys differ in one thing each, for the same prompts."""
    seed, prompt, position = keys(20_000)
    numbers = {
        f"{purpose.name} {offset:+}": keyed_uniform(seed, prompt, position + offset, purpose)
        for purpose in Purpose
        for offset in (-1, 0, 1, 8)
    }
    numbers["seed"] = keyed_uniform(seed + 1, prompt, position, Purpose.EMIT)
    for purpose in Purpose:
        e = keyed_exponential(seed, prompt, position, purpose, 4)
        numbers |= {f"{purpose.name} token {v}": (-e[:, v]).exp().double() for v in range(4)}
    return numbers


def test_parts_of_a_key_give_independent_numbers() -> None:
    numbers = named_numbers()
    stacked = torch.stack(list(numbers.values()))
    for values in (stacked, (stacked - 0.5).abs()):  # monotone and symmetric dependence
        correlation = torch.corrcoef(values) - torch.eye(len(values))
        worst = int(correlation.abs().argmax())
        pair = [list(numbers)[i] for i in divmod(worst, len(values))]
        assert float(correlation.abs().max()) < 5 * stacked.shape[1] ** -0.5, pair


def test_no_state_and_no_batch() -> None:
    seed, prompt, position = keys(64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    for draw in (keyed_uniform, lambda *key: keyed_exponential(*key, 11)):
        whole = draw(seed, prompt, position, Purpose.EMIT)
        shuffled = draw(seed[order], prompt[order], position[order], Purpose.EMIT)
        assert torch.equal(shuffled, whole[order])
        alone = torch.cat(
            [
                draw(seed[i : i + 1], prompt[i : i + 1], position[:1], Purpose.EMIT)
                for i in range(64)
            ]
        )
        assert torch.equal(alone, whole)
    assert torch.equal(torch.get_rng_state(), before)
    # A token's noise does not depend on how many tokens there are.
    few, many = (keyed_exponential(seed, prompt, position, Purpose.EMIT, n) for n in (5, 50))
    assert torch.equal(many[:, :5], few)


def test_race_draws_in_proportion() -> None:
    weights = torch.tensor([0.0, 2.0, 1.0, 0.0, 5.0])
    won = exponential_race(weights, keyed_exponential(*keys(), Purpose.EMIT, 5)).bincount(
        minlength=5
    )
    assert won[[0, 3]].tolist() == [0, 0]
    expected = weights[[1, 2, 4]] / weights.sum() * COUNT
    assert (
        stats.chisquare(won[[1, 2, 4]].numpy(), expected.double().numpy(), sum_check=False).pvalue
        > 1e-3
    )


def test_first_of_equals() -> None:
    x = torch.zeros(3, 5000)
    x[1, [70, 4000]] = 2.0
    x[2, 4999] = 1.0
    assert x.argmax(-1).tolist() == [0, 70, 4999]
    assert int(exponential_race(torch.tensor([0.0, 1.0, 1.0]), torch.ones(3))) == 1
