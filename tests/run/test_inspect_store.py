"""`draftlab inspect` of a store: its tokens, lengths and hashes."""

from __future__ import annotations

from pathlib import Path

from draftlab.run.inspect import count_predicted, length_histogram
from draftlab.store.sample_table import Sample
from tests.helpers.small_run import copy_of_finished, draftlab
from tests.helpers.table_target import record_table


def test_statistics_count_predicted_tokens_and_lengths(tmp_path: Path) -> None:
    samples = [
        Sample("a", (1, 2, 3, 3, 3), (0, 1, 1, 1, 1)),
        Sample("b", (4,) * 40, (0,) * 38 + (1, 1)),
    ]
    store = record_table(tmp_path, samples)
    predicted, coverage = count_predicted(store)
    # All tokens of an answer but the first are predicted.
    assert predicted == 4
    assert coverage in ({1: 0.0}, {2: 0.0})  # one conversation has 3, the other 4
    assert length_histogram(store.lengths) == [(16, 1), (32, 0), (64, 1)]
    assert length_histogram([16, 17, 4096]) == [(2**i, int(i in (4, 5, 12))) for i in range(4, 13)]


def test_a_store_is_printed_and_verified(tmp_path: Path) -> None:
    copy_of_finished(tmp_path)
    result = draftlab(tmp_path, "inspect", "runs/small/store", "--verify")
    for words in ("checksums", "shards agree", "≤ 64", "covers"):
        assert words in result.output
