"""What an evaluation warns of."""

from __future__ import annotations

from draftlab.evaluate.grid import NamedHead
from draftlab.evaluate.results import Row, Timing
from draftlab.evaluate.self_check import complaint
from draftlab.evaluate.settings import EvalSettings

FEW_PROMPTS = 30
FEW_TIMED = 10
SLOWER = 0.995  # what is printed as 1.00 is no loss


def suite_warnings(prompts: int, settings: EvalSettings) -> list[str]:
    """Of every row with a drafter: too few prompts for an interval to be trusted."""
    found = []
    if prompts < FEW_PROMPTS:
        found.append(f"few prompts ({prompts}): mind the interval")
    if 0 < settings.timing_prompts < FEW_TIMED:
        found.append(
            f"few timed prompts ({settings.timing_prompts}): their intervals are too narrow "
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
    for what, timings in {
        "drafting slows decoding down here": [t for t in row.timings if _ends(t)[1] < SLOWER],
        "whether drafting pays here is not shown either way": [
            t for t in row.timings if _ends(t)[0] < SLOWER <= _ends(t)[1]
        ],
    }.items():
        if timings:
            where = ", ".join(f"{_speedup(t)} at batch {t.batch}" for t in timings)
            found.append(f"{what}: {where}")
    return found


def _ends(timing: Timing) -> tuple[float, float]:
    """The interval of a speed-up; without one the speed-up, or where there is none, no loss."""
    point = 1.0 if timing.speedup is None else timing.speedup
    return timing.speedup_ci or (point, point)


def _speedup(timing: Timing) -> str:
    low, high = _ends(timing)
    return f"{timing.speedup:.2f}×" + f" [{low:.2f}, {high:.2f}]" * (timing.speedup_ci is not None)
