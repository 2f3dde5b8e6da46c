"""The timing pass times nothing that happens once."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest

from draftlab.engine.sampling import Generation, Request
from draftlab.evaluate.timing import WARM_UP_TOKENS, collected_garbage, time_in_turn


class CountingDecoder:
    """Records the size and the tokens of every batch; generates nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        self.calls.append((len(requests), requests[0].max_new_tokens))
        yield from ()


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (1, [1]),
        (6, [6, 4, 2, 1]),
        (8, [8, 4, 2, 1]),
        (100, [100, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1]),
    ],
)
def test_every_size_of_a_shrinking_batch_is_warmed_up(batch: int, sizes: list[int]) -> None:
    decoder = CountingDecoder()
    requests = [Request(str(i), (1, 2), 64) for i in range(batch)]
    with pytest.raises(KeyError):  # the first timed batch has no generations
        time_in_turn({None: decoder}, [requests], lambda *_: None)  # type: ignore[dict-item]
    assert decoder.calls == [*((size, WARM_UP_TOKENS) for size in sizes), (batch, 64)]


def test_collections_pass_over_what_was_there_before() -> None:
    before = gc.get_freeze_count()
    with collected_garbage():
        assert gc.get_freeze_count() > before + 10_000
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0
