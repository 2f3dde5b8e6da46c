"""A target's hidden states equal transformers', with a cache and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.target_model.boundaries import check_boundaries, default_boundaries
from draftlab.target_model.model import Target
from draftlab.target_model.parts import text_decoder
from tests.helpers.zoo import (
    SHAPE,
    ZOO,
    assert_close,
    eager_model,
    load_on_cpu,
    random_texts,
    zoo_folder,
)

LAYERS = SHAPE["num_hidden_layers"]


@pytest.fixture(scope="module", params=list(ZOO))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_on_cpu(folder)


def test_boundaries_are_transformers_hidden_states(target: Target, folder: Path) -> None:
    """hidden_states[b] enters layer b; the last state enters the final norm."""
    ids = random_texts((25,))[0][None]
    before_norm: list[Tensor] = []
    model = eager_model(folder)
    _, _, norm = text_decoder(model)
    norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.inference_mode():
        expected = model(input_ids=ids, output_hidden_states=True)
    boundaries = tuple(range(LAYERS + 1))
    states = target.states(ids, boundaries)
    features = states.features.chunk(LAYERS + 1, -1)
    for b in range(LAYERS):
        assert_close(features[b], expected.hidden_states[b])
    assert_close(features[LAYERS], before_norm[0])
    assert torch.equal(features[LAYERS], states.last)
    assert_close(target.logits(states.last), expected.logits)
    picked = target.states(ids, (1, LAYERS)).features
    assert torch.equal(picked, torch.cat([features[1], features[LAYERS]], -1))
    assert target.states(ids).features.shape == (1, 25, 0)


def test_a_cache_fed_in_ragged_chunks_changes_nothing(target: Target) -> None:
    """Rows of different lengths, chunks of different sizes, one row started late."""
    tokens = random_texts((30, 17, 24))
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
        # Rows without tokens keep their cache row; `visible` covers the longest row.
        states = target.states(
            ids, (0, 2, 3), positions=positions, cache=cache.at([1, 3, 2], positions, visible)
        )
        for row, n in enumerate(sizes):
            columns = slice(done[row], done[row] + n)
            assert_close(states.last[row, :n], expected[row].last[0, columns])
            assert_close(states.features[row, :n], expected[row].features[0, columns])
            done[row] += n
    assert done == [30, 17, 24]


def test_rejected_tokens_leave_no_trace(target: Target) -> None:
    """Wrong tokens precede the right ones at later positions, and fill another row."""
    right, wrong = random_texts((20, 20), seed=1)
    expected = target.states(right[None]).last
    cache = target.new_cache(2, 20)

    def feed(row: int, tokens: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + len(tokens))[None]
        aimed = cache.at([row], positions, start + len(tokens))
        return target.states(tokens[None], positions=positions, cache=aimed).last

    feed(0, wrong, 0)  # an earlier request
    feed(1, right[:9], 0)
    feed(1, wrong[9:15], 9)
    feed(0, wrong[:20], 0)
    assert_close(feed(1, right[9:12], 9), expected[:, 9:12])
    assert_close(feed(1, right[12:20], 12), expected[:, 12:])


def test_right_padding_without_a_cache(target: Target) -> None:
    short, long = random_texts((9, 21), seed=2)
    padded = torch.zeros(2, 21, dtype=torch.int64)
    padded[0, :9], padded[1] = short, long
    states = target.states(padded)
    assert_close(states.last[0, :9], target.states(short[None]).last[0])
    assert_close(states.last[1], target.states(long[None]).last[0])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(32, (2, 16, 29)), (6, (2, 3, 6)), (4, (1, 2, 4)), (2, (0, 1, 2)), (1, (0, 1))],
)
def test_default_boundaries(layers: int, expected: tuple[int, ...]) -> None:
    check_boundaries(expected, layers)
    assert default_boundaries(layers) == expected


@pytest.mark.parametrize("boundaries", [(), (2, 1), (1, 1), (-1, 2), (0, 5)])
def test_impossible_boundaries_are_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="boundaries"):
        check_boundaries(boundaries, 4)
