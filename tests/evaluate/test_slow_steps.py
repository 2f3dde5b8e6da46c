"""Steps that a larger step undercuts are told."""

from __future__ import annotations

from draftlab.evaluate.warnings import with_slow_step_warnings
from tests.helpers import sample_report as sample
from tests.helpers.sample_report import with_timing

BATCHES, KS = (1, 2, 4, 8), (1, 3, 5)


def additive(batch: int, k: int) -> float:
    return 4.0 + 0.012 * batch * (k + 1) + 0.25 * k + (0.3 if k else 0)


def warned(slow: dict[tuple[int, int], float]) -> dict[tuple[str | None, int], list[str]]:
    """Return the warnings of plain decoding and of two heads, by head and K."""
    heads = [sample.row(k=k, keep=0.6, head=name) for name in ("a", "b") for k in KS]
    rows = [sample.baseline(), *heads]
    for batch in BATCHES:
        rows = [
            with_timing(r, additive(batch, r.k) * slow.get((batch, r.k), 1), batch) for r in rows
        ]
    found = {(row.head, row.k): row.warnings for row in with_slow_step_warnings(rows)}
    return {key: texts for key, texts in found.items() if texts}


def test_steps_that_grow_with_batch_and_k_are_not_warned_of() -> None:
    assert warned({}) == {}
    assert warned({(8, 5): 3.0}) == {}, "nothing is larger"
    assert warned({(2, 3): 1.1}) == {}


def test_a_step_slower_than_a_larger_one_is_warned_of_in_its_own_row() -> None:
    found = warned({(2, 3): 1.6})
    assert sorted(found) == [("a", 3), ("b", 3)]
    (text,) = found["a", 3]
    assert text.startswith(
        f"a step at batch 2, K = 3 takes {1.6 * additive(2, 3):.2f} ms, longer than one at batch "
        f"4, K = 3 ({additive(4, 3):.2f} ms)"
    )


def test_a_larger_k_shows_a_slow_step_too() -> None:
    (text,) = warned({(8, 1): 2.0})["a", 1]
    assert "longer than one at batch 8, K = 3" in text


def test_plain_decoding_is_compared_with_itself() -> None:
    """A drafted step's excess over plain decoding says nothing of other batches."""
    assert list(warned({(1, 0): 2.0})) == [(None, 0)]
