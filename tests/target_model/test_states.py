"""States of a target: with a cache as without one, and at the boundaries transformers names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.target_model.boundaries import check_boundaries, default_boundaries
from draftlab.target_model.model import Target, TargetSettings, load_target
from draftlab.target_model.parts import text_decoder
from tests.helpers.zoo import SHAPE, ZOO, eager_model, zoo_folder

LAYERS = SHAPE["num_hidden_layers"]


@pytest.fixture(scope="module", params=list(ZOO))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(TargetSettings(path=str(folder), device="cpu"))


def sequences(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, SHAPE["vocab_size"], (n,), generator=generator) for n in lengths]


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    scale = float(expected.abs().amax()) if expected.numel() else 1.0
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=2e-5)


def test_boundaries_are_transformers_hidden_states(target: Target, folder: Path) -> None:
    """hidden_states[b] enters layer b; the last state is what the final norm is given."""
    ids = sequences([25])[0][None]
    before_norm: list[Tensor] = []
    model = eager_model(folder)
    _, _, norm = text_decoder(model)
    norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.inference_mode():
        expected = model(input_ids=ids, output_hidden_states=True)
    boundaries = tuple(range(LAYERS + 1))
    states = target.states(ids, boundaries)
    found = states.features.chunk(LAYERS + 1, -1)
    for b in range(LAYERS):
        close(found[b], expected.hidden_states[b])
    close(found[LAYERS], before_norm[0])
    assert torch.equal(found[LAYERS], states.last)
    close(target.logits(states.last), expected.logits)
    picked = target.states(ids, (1, LAYERS)).features
    assert torch.equal(picked, torch.cat([found[1], found[LAYERS]], -1))
    assert target.states(ids).features.shape == (1, 25, 0)


def test_a_cache_fed_in_ragged_chunks_changes_nothing(target: Target) -> None:
    """Rows of different lengths, chunks of different sizes, one row started late."""
    tokens = sequences([30, 17, 24])
    expected = [target.states(t[None], (0, 2, 3)) for t in tokens]
    cache = target.new_cache(5, 40)
    done = [0, 0, 0]
    for sizes in ([7, 1, 0], [1, 5, 12], [13, 0, 1], [2, 11, 3], [7, 0, 8]):
        width = max(sizes)
        ids, positions = torch.zeros(3, width, dtype=torch.int64), torch.full((3, width), -1)
        for row, n in enumerate(sizes):
            ids[row, :n] = tokens[row][done[row] : done[row] + n]
            positions[row, :n] = torch.arange(done[row], done[row] + n)
        visible = int(positions.max()) + 1
        # Rows that are not fed keep their place; `visible` covers the longest of all.
        states = target.states(
            ids, (0, 2, 3), positions=positions, cache=cache.at(1, positions, visible)
        )
        for row, n in enumerate(sizes):
            part = slice(done[row], done[row] + n)
            close(states.last[row, :n], expected[row].last[0, part])
            close(states.features[row, :n], expected[row].features[0, part])
            done[row] += n
    assert done == [30, 17, 24]


def test_rejected_tokens_and_moved_rows_leave_no_trace(target: Target) -> None:
    """Wrong tokens at later positions are fed, then the right ones; the row moves in between."""
    right, wrong = sequences([20, 20], seed=1)
    expected = target.states(right[None]).last
    cache = target.new_cache(2, 20)

    def feed(row: int, tokens: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + len(tokens))[None]
        aimed = cache.at(row, positions, start + len(tokens))
        return target.states(tokens[None], positions=positions, cache=aimed).last

    feed(0, wrong, 0)  # what an earlier request left
    feed(1, right[:9], 0)
    feed(1, wrong[9:15], 9)
    cache.move(1, 0)
    feed(1, wrong[:20], 0)
    close(feed(0, right[9:12], 9), expected[:, 9:12])
    close(feed(0, right[12:20], 12), expected[:, 12:])


def test_right_padding_without_a_cache(target: Target) -> None:
    short, long = sequences([9, 21], seed=2)
    padded = torch.zeros(2, 21, dtype=torch.int64)
    padded[0, :9], padded[1] = short, long
    states = target.states(padded)
    close(states.last[0, :9], target.states(short[None]).last[0])
    close(states.last[1], target.states(long[None]).last[0])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(32, (2, 16, 29)), (6, (2, 3, 6)), (4, (1, 2, 4)), (2, (0, 1, 2)), (1, (0, 1))],
)
def test_default_boundaries(layers: int, expected: tuple[int, ...]) -> None:
    found = default_boundaries(layers)
    check_boundaries(found, layers)
    assert found == expected


@pytest.mark.parametrize("boundaries", [(), (2, 1), (1, 1), (-1, 2), (0, 5)])
def test_impossible_boundaries_are_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="boundaries"):
        check_boundaries(boundaries, 4)
