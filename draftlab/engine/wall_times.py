"""Correct modelled times of steps by the time that passes while requests come and go.

The model adds up costs that are measured one by one before the first request. What it leaves out,
such as the host's work on results and finished requests, or a cost whose measurement was disturbed,
shows in the wall time of many steps in a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from draftlab.engine.admission_costs import AdmissionCosts
from draftlab.engine.step_costs import ShapeFamily, StepCosts

START_STEPS = 2
"""First steps of a family, which are in no window."""
TRIAL_STEPS = START_STEPS + 32
"""Steps of a trial that finds out a family's wall time."""
LEAST_STEPS = 6
"""Steps of the shortest window that is kept."""
LATEST = 5
"""Windows of a family and size that its correction is the median of."""
FREE_TRIALS = 4
"""Trials of a family without a window that need no credit; its steps may end too early for one."""


@dataclass(frozen=True)
class Window:
    """The wall time of consecutive steps of one family.

    Attributes:
        family: of its steps.
        rows: of their graph.
        steps: number of them.
        ms: from its first step to the first one after it.
        admissions: how many times requests were admitted meanwhile.
        requests: how many were.
    """

    family: ShapeFamily
    rows: int
    steps: int
    ms: float
    admissions: int
    requests: int

    def modelled_ms(self, costs: StepCosts, admissions: AdmissionCosts, host_ms: float) -> float:
        """Return the milliseconds that the window should have taken."""
        step_ms, count = costs.ms(self.family, self.rows), self.admissions
        together = self.requests / max(count, 1)
        extra_ms = admissions.extra_ms(self.family.k, together, step_ms, host_ms)
        return self.steps * max(step_ms, host_ms) + count * extra_ms


class WallClock:
    """Takes the wall time of windows, from one result that the host reads to another.

    Attributes:
        read_s: when the host read the latest result; None before the first one.
    """

    def __init__(self) -> None:
        self.read_s: float | None = None
        self._began: tuple[float, ShapeFamily, int, int] | None = None
        self._admissions = self._requests = 0

    def start(self, family: ShapeFamily, rows: int, steps: int) -> None:
        """Begin a window of steps of a family; it has no window before the first result."""
        self._began = None if self.read_s is None else (self.read_s, family, rows, steps)
        self._admissions = self._requests = 0

    def admitted(self, requests: int) -> None:
        """Note an admission of requests."""
        self._admissions, self._requests = self._admissions + 1, self._requests + requests

    def stop(self, steps_left: int = 0) -> Window | None:
        """End the window, of whose steps some were not run; None: there is none."""
        began, self._began = self._began, None
        if began is None or self.read_s is None:
            return None
        began_s, family, rows, steps = began
        ms = 1e3 * (self.read_s - began_s)
        return Window(family, rows, steps - steps_left, ms, self._admissions, self._requests)


class WallTimes:
    """Ratios of wall time to modelled time, by family and rows.

    Attributes:
        active: whether any wall time is known; on a CPU none is.
    """

    def __init__(self) -> None:
        self.active = False
        self._windows: dict[tuple[ShapeFamily, int], deque[Window]] = {}
        self._ratios: dict[int, dict[ShapeFamily, float]] = {}
        # By family and rows: the number of trials, and the latest one's place among all.
        self._tried: dict[tuple[ShapeFamily, int], tuple[int, int]] = {}

    def add(self, window: Window) -> None:
        """Take in a window, unless it is too short or its steps state confidence."""
        self.active = True
        if window.steps >= LEAST_STEPS and not window.family.confidence:
            key = window.family, window.rows
            self._windows.setdefault(key, deque(maxlen=LATEST)).append(window)

    def fit(self, rows: int, costs: StepCosts, admissions: AdmissionCosts, host_ms: float) -> None:
        """Compare the windows of a number of rows with their modelled milliseconds."""
        self._ratios[rows] = {
            family: median_low(w.ms / w.modelled_ms(costs, admissions, host_ms) for w in windows)
            for (family, size), windows in self._windows.items()
            if size == rows
        }

    def ratio(self, family: ShapeFamily, rows: int) -> float:
        """Return the ratio of a family, or of the one with the nearest K; 1 where none is known."""
        ratios = self._ratios.get(rows)
        if not ratios:
            return 1.0
        if family not in ratios:
            family = min(ratios, key=lambda each: (abs(each.k - family.k), -each.share))
        return ratios[family]

    def next_trial(
        self, families: Sequence[ShapeFamily], rows: int, *, known: bool
    ) -> ShapeFamily | None:
        """Return the family whose latest trial is the oldest; None: there is none.

        Args:
            known: of those whose wall time is known, or could not be learned; else of the others.
        """
        chosen = [family for family in families if self._is_known(family, rows) == known]
        return min(chosen, key=lambda f: self._tried.get((f, rows), (0, 0))[1], default=None)

    def note_trial(self, family: ShapeFamily, rows: int) -> None:
        """Note that a family is tried now, to learn its wall time."""
        trials, _ = self._tried.get((family, rows), (0, 0))
        place = 1 + max((place for _, place in self._tried.values()), default=0)
        self._tried[family, rows] = trials + 1, place

    def _is_known(self, family: ShapeFamily, rows: int) -> bool:
        trials, _ = self._tried.get((family, rows), (0, 0))
        return (family, rows) in self._windows or trials >= FREE_TRIALS
