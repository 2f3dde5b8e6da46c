"""`RowCache` writes every key to the slot of its position and nothing anywhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftlab.target_model.cache import RowCache

HEADS, SIZE = 2, 3


def keys(rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HEADS, width, SIZE, generator=generator)


def test_tokens_land_at_their_positions() -> None:
    cache = RowCache(2, 4, 6)
    new = keys(2, 3)
    positions = torch.tensor([[2, 3, 4], [0, 1, -1]])
    visible_keys, values = cache.at([1, 2], positions, 5).update(new, 10 * new, 1)
    assert visible_keys.shape == (2, HEADS, 5, SIZE)
    assert torch.equal(visible_keys[0, :, 2:5], new[0])
    assert torch.equal(visible_keys[1, :, :2], new[1, :, :2])
    assert torch.equal(values, 10 * visible_keys)
    # Everything else is untouched: other rows, other slots, the other layer.
    assert int((visible_keys != 0).sum()) == 5 * HEADS * SIZE
    assert bool((cache.layers[1].keys[[0, 3]] == 0).all())
    assert not cache.layers[0].is_initialized


def test_padding_is_never_visible() -> None:
    """Position −1 writes to the spare slot, which no window up to max_length contains."""
    cache = RowCache(1, 2, 4)
    new = keys(2, 3)
    cache.at([0, 1], torch.full((2, 3), -1), 1).update(new, new, 0)
    visible_keys, _ = cache.at([0, 1], torch.tensor([[0], [-1]]), 4).update(
        new[:, :, :1], new[:, :, :1], 0
    )
    assert visible_keys.shape[2] == 4
    assert torch.equal(visible_keys[0, :, 0], new[0, :, 0])
    assert bool((visible_keys[0, :, 1:] == 0).all())
    assert bool((visible_keys[1] == 0).all())


@pytest.mark.parametrize(("rows", "visible"), [([0, 1, 2], 5), ([1, 2, 3], 4), ([3], 1)])
def test_passes_that_do_not_fit_are_refused(rows: list[int], visible: int) -> None:
    with pytest.raises(ValueError, match="do not fit into 3 rows of 4"):
        RowCache(1, 3, 4).at(rows, torch.zeros(len(rows), 1, dtype=torch.int64), visible)


def test_the_last_row_and_position_fit() -> None:
    cache = RowCache(1, 3, 4)
    new = keys(1, 1)
    visible_keys, _ = cache.at([2], torch.tensor([[3]]), 4).update(new, new, 0)
    assert torch.equal(visible_keys[0, :, 3], new[0, :, 0])
