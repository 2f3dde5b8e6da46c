"""The timing pass times nothing that happens once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request
from draftlab.evaluate.decoding_config import DecodingConfig
from draftlab.evaluate.metrics import timing
from draftlab.evaluate.timing import (
    PREFILL_TOKENS,
    WARM_UP_TOKENS,
    time_in_turn,
    timing_batches,
)


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
    steps = [(size, WARM_UP_TOKENS) for size in sizes]
    assert decoder.calls == [*steps, (batch, PREFILL_TOKENS), (batch, 64)]


class CapturingDecoder:
    """Takes ten times as long for the first prefill of a prompt length, as for a CUDA graph.

    If a capture `empties` memory, it slows the next prefill of each other engine down, too.
    """

    def __init__(self, others: list[CapturingDecoder], empties: bool) -> None:
        self.graphs = SimpleNamespace(patience=4096, emptied=False)
        self.empties, self.calls = empties, 0
        self.known: set[int] = set()
        self.slowed: set[int] = set()
        self.others = others
        others.append(self)

    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        self.calls += 1
        for request in requests:
            length, steps = len(request.prompt_ids), ((0, 0),) * (request.max_new_tokens - 1)
            first = 1.0
            if length not in self.known:
                self.known.add(length)
                self.graphs.emptied = self.empties
                first = 10.0
                for other in self.others if self.empties else ():
                    other.slowed |= other.known - {length}
            elif length in self.slowed:
                self.slowed.remove(length)
                first = 5.0
            tokens = (1,) * request.max_new_tokens
            yield Generation(
                request.id, tokens, "length", Counters(0), (), steps, first, first + len(steps)
            )


@pytest.mark.parametrize("empties", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_no_timed_prefill_is_the_first_of_its_length(batch: int, empties: bool) -> None:
    """So the time to the first token does not depend on which row is timed first."""
    decoders: list[CapturingDecoder] = []
    engines = {DecodingConfig(k=k): CapturingDecoder(decoders, empties) for k in (0, 3)}
    requests = [Request(str(i), (1,) * (2 + i % 4), 64) for i in range(8)]
    batches = list(timing_batches(requests, 8, batch))
    num_sizes = batch  # a batch of 2 shrinks to 1
    num_passes = 2 + empties  # one of them is timed
    for number in (1, 2):  # the temperatures share the engines
        runs = time_in_turn(engines, batches, lambda *_: None)
        assert all(decoder.graphs.patience == 0 for decoder in decoders)
        assert {timing(run, None, batch=batch).ttft_ms for run in runs.values()} == {1000.0}
        for run in runs.values():
            assert {g.first_token_s for g in run.generations} == {1.0}
        calls = number * (num_sizes + num_passes * len(batches))
        assert [decoder.calls for decoder in decoders] == [calls, calls]
