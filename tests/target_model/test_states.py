"""A target's hidden states equal transformers', with a cache and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftlab.errors import UserError
from draftlab.target_model.hidden_states import check_boundaries, default_boundaries
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import RowCache
from draftlab.target_model.parts import text_decoder
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.ragged import paged_cache, row_cache, run_ragged
from tests.helpers.zoo import (
    SHAPE,
    ZOO,
    assert_close,
    eager_model,
    load_on_cpu,
    random_texts,
    zoo_folder,
    zoo_target,
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
    ids = random_texts((70,))[0][None]
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
    assert target.states(ids).features.shape == (1, 70, 0)


@pytest.mark.parametrize("kind", ["rows", "pages"])
def test_a_cache_fed_in_ragged_chunks_changes_nothing(kind: str, target: Target) -> None:
    """Rows of different lengths, chunks of different sizes, one row started late."""
    texts = random_texts((30, 17, 24))
    table = torch.tensor([[3, 1, 8, 5], [2, 7, 4, 9], [6, 10, 12, 11]], dtype=torch.int32)
    cache = row_cache(target, [1, 3, 2], 30) if kind == "rows" else paged_cache(target, table, 8)
    passes = [[7, 1, 0], [1, 5, 12], [13, 0, 1], [2, 11, 3], [7, 0, 8]]
    for text, (features, last) in zip(
        texts, run_ragged(target, cache, texts, passes, (0, 2, 3)), strict=True
    ):
        expected = target.states(text[None], (0, 2, 3))
        assert_close(features, expected.features[0])
        assert_close(last, expected.last[0])


@pytest.mark.parametrize(("rows", "visible"), [([0, 1, 2], 5), ([1, 2, 3], 4), ([3], 1)])
def test_passes_that_do_not_fit_are_refused(rows: list[int], visible: int) -> None:
    with pytest.raises(ValueError, match="do not fit into 3 rows of 4"):
        RowCache(1, 3, 4).at_rows(rows, torch.zeros(len(rows), 1, dtype=torch.int64), visible)


@pytest.mark.parametrize("kind", [*ZOO, *HYBRID])
def test_texts_side_by_side_have_the_states_of_each_alone(kind: str, tmp_path: Path) -> None:
    target, texts = zoo_target(tmp_path, kind), random_texts((23, 2, 11))
    together = target.states(pad_sequence(texts, batch_first=True), (1, 2))
    for row, text in enumerate(texts):
        alone = target.states(text[None], (1, 2))
        for name in ("features", "last"):
            beside = getattr(together, name)[row : row + 1, : len(text)]
            assert_close(beside, getattr(alone, name), 1e-4)


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
