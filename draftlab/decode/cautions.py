"""What an evaluation warns of."""

from __future__ import annotations

from draftlab.decode.grid import NamedHead
from draftlab.decode.knobs import EvalKnobs
from draftlab.decode.self_check import complaint
from draftlab.results import Row

FEW_PROMPTS = 30
FEW_TIMED = 10
SLOWER = 0.995  # what is printed as 1.00 is no loss


def suite_warnings(prompts: int, knobs: EvalKnobs) -> list[str]:
    """Of every row with a drafter: too few prompts for an interval to be trusted."""
    found = []
    if prompts < FEW_PROMPTS:
        found.append(f"few prompts ({prompts}): mind the interval")
    if 0 < knobs.timing_prompts < FEW_TIMED:
        found.append(
            f"few timed prompts ({knobs.timing_prompts}): their intervals are too narrow "
            f"(eval.timing_prompts, at least {FEW_TIMED})"
        )
    return found


def depth_warnings(head: NamedHead, k: int) -> list[str]:
    """Of more drafts a step than a head was trained for: known before anything is measured."""
    if k <= head.k_trained:
        return []
    unit = "depths" if head.drafter == "parallel" else "steps"
    return [f"K = {k} exceeds the {head.k_trained} {unit} of training: its last drafts are guesses"]


def row_warnings(row: Row) -> list[str]:
    """Of one row as it was measured: its self-check, and drafting that does not pay."""
    found = []
    if row.self_check and (failed := complaint(row.self_check)):
        found.append(failed)
    slow = [t for t in row.timings if t.speedup is not None and t.speedup < SLOWER]
    if slow:
        where = ", ".join(f"{t.speedup:.2f}× at batch {t.batch}" for t in slow)
        found.append(f"drafting slows decoding down here: {where}")
    return found
