"""The K adviser: the speed-up for every K and batch, measured or predicted.

With K drafts a step emits n(K) tokens in s(K) milliseconds; plain decoding emits one in s(0). So

    speed-up(K) = n(K) · s(0) / s(K).

Where the suite was decoded and timed with K drafts, this is the row's own speed-up. n(K) belongs to
the whole suite: where it was decoded with K drafts, it is that row's own count, and between two
counted values of K the unconditional acceptance a_i of each position and the share of the tokens
that were emitted (stop tokens and limits truncate some) are interpolated; positions that only the
larger K has are the larger one's. K = 0 counts as decoded, with n(0) = 1. Beyond the largest
counted K there is no prediction. s(K) belongs to the timed prompts, and lies on the lines between
the timed K's of the batch (a parallel head that was timed at a single K has the same step for all).

As a check each timed K between two others is predicted from them. Without the smallest or largest
K the prediction would go beyond the measurements, where the cost of a step may bend, as it does
where a kernel needs a second tile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftlab.evaluate.metrics import suite_speedup
from draftlab.evaluate.results import Row, Timing, drafting_pays

Conditions = tuple[str, str | None, float, bool]
"""Engine, head, temperature and drafter setting."""


@dataclass(frozen=True)
class Probe:
    """A timing of a configuration that has no row: its K is timed for the adviser alone."""

    suite: str
    engine: str
    head: str | None
    temperature: float
    draft_probs: bool
    k: int
    timing: Timing


def conditions(one: Row | Probe) -> Conditions:
    """Return what the measurements of a table share."""
    return one.engine, one.head, one.temperature, one.draft_probs


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of steps with one K.

    Attributes:
        at: unconditional acceptance at each position.
        emitted: tokens a step over AL; below 1, since stop tokens and limits truncate.
    """

    at: Sequence[float] = ()
    emitted: float = 1.0

    @property
    def length(self) -> float:
        """AL."""
        return 1 + sum(self.at)

    @property
    def tokens(self) -> float:
        """Tokens that a step emits."""
        return self.length * self.emitted


def interpolate_acceptance(k: int, known: Mapping[int, Acceptance]) -> Acceptance | None:
    """Return the acceptance with `k` drafts; None beyond the largest known K."""
    known = {0: Acceptance()} | dict(known)
    if k in known:
        return known[k]
    if k > max(known):
        return None
    below, above = max(i for i in known if i < k), min(i for i in known if i > k)
    low, high, weight = known[below], known[above], (k - below) / (above - below)
    at = [a + weight * (b - a) for a, b in zip(low.at, high.at, strict=False)]
    emitted = low.emitted + weight * (high.emitted - low.emitted)
    return Acceptance((*at, *high.at[below:k]), emitted)


@dataclass(frozen=True)
class SpeedupTable:
    """Timings with drafts at a batch, which differ in K alone.

    Attributes:
        flat: whether a single timed K serves all others, as for a parallel head.
        timings: by K, in ascending order; each has its own time of plain decoding.
        head_steps: step times of the same head under the conditions where most were timed, by K.
    """

    flat: bool
    timings: Mapping[int, Timing]
    head_steps: Mapping[int, float]

    @property
    def plain_ms(self) -> float:
        """Return the milliseconds of a step without drafts."""
        return next(iter(self.timings.values())).baseline_tpot_ms or math.nan

    def step_ms(self, k: int, without: int | None = None) -> float | None:
        """Return the milliseconds of a step; None if they do not follow.

        A measured step is its own prediction. Others lie on the lines between the head's measured
        K's, moved by the interpolated difference to these conditions' own steps.

        Args:
            without: a K whose measurements are left out.
        """
        own = {i: one.step_ms for i, one in self.timings.items() if i != without}
        if k in own:
            return own[k]
        steps = {i: ms for i, ms in self.head_steps.items() if i != without}
        if not own or not (len(steps) > 1 or self.flat):
            return None
        if len(steps) < 2:
            return next(iter(own.values()))
        differences = [ms - _on_lines(i, steps) for i, ms in own.items()]
        return _on_lines(k, steps) + float(np.interp(k, [*own], differences))

    def predict(
        self, k: int, acceptance: Mapping[int, Acceptance], without: int | None = None
    ) -> tuple[Acceptance, float, float] | None:
        """Return acceptance, milliseconds of a step and speed-up; None if they are unknown."""
        at_k, step = interpolate_acceptance(k, acceptance), self.step_ms(k, without)
        if at_k is None or step is None:
            return None
        plain = self.plain_ms
        return at_k, max(step, plain), float(suite_speedup(plain, step, at_k.tokens))

    def left_out(self, k: int) -> float | None:
        """Return the speed-up of a timed K, predicted without any measurement with that K.

        None: the K does not lie between two others.
        """
        if not min(self.timings) < k < max(self.timings):
            return None
        known = {}
        for i, one in self.timings.items():
            if i != k and one.acceptance_at and one.tokens_per_step:
                emitted = one.tokens_per_step / (1 + sum(one.acceptance_at))
                known[i] = Acceptance(one.acceptance_at, emitted)
        predicted = self.predict(k, known, without=k)
        return predicted and predicted[2]


def _on_lines(k: int, steps: Mapping[int, float]) -> float:
    """Return the milliseconds at K on the lines between steps; the outer ones go on."""
    ks = sorted(steps)
    above = next((i for i in range(1, len(ks)) if ks[i] >= k), len(ks) - 1)
    low, high = ks[above - 1], ks[above]
    return steps[low] + (k - low) / (high - low) * (steps[high] - steps[low])


def speedup_tables(
    drafted: Sequence[Row], probes: Sequence[Probe]
) -> dict[tuple[Conditions, int], SpeedupTable]:
    """Return a table of the timed steps for each drafted row's conditions, at each batch."""
    timed = [(conditions(p), p.k, p.timing) for p in probes]
    timed += [(conditions(row), row.k, timing) for row in drafted for timing in row.timings]
    found: dict[tuple[Conditions, int], dict[int, Timing]] = {}
    for key, k, timing in timed:
        if timing.baseline_tpot_ms and not timing.disturbance:
            found.setdefault((key, timing.batch), {})[k] = timing
    tables = {}
    for (key, batch), own in found.items():
        same = [ks for (k, b), ks in found.items() if (k[:2], b) == (key[:2], batch)]
        steps = {k: one.step_ms for k, one in max([own, *same], key=len).items()}
        flat = any(row.drafter == "parallel" for row in drafted if row.head == key[1])
        tables[key, batch] = SpeedupTable(flat, dict(sorted(own.items())), steps)
    return tables


@dataclass(frozen=True)
class Prediction:
    """The effect of K drafts a step on the whole suite.

    The last four fields belong to the timed prompts alone, and are None if K was not timed; the
    last three also if it was not timed between two other values of K.

    Attributes:
        measured: whether `speedup` is that of a row that was timed at this batch; else predicted.
        speedup_ci: the 95 % interval over the prompts of the suite and of the timing pass; None:
            there are too few.
        left_out_speedup: predicted without any measurement with this K.
        error: left_out_speedup / timed_speedup − 1.
        met: whether `left_out_speedup` lies in the interval of the timed one.
    """

    k: int
    acceptance_length: float
    tokens_per_step: float
    step_ms: float
    tpot_ms: float
    measured: bool
    speedup: float
    speedup_ci: tuple[float, float] | None
    timed_speedup: float | None = None
    left_out_speedup: float | None = None
    error: float | None = None
    met: bool | None = None


def advise(rows: Sequence[Row], probes: Iterable[Probe] = ()) -> dict[str, Any] | None:
    """Return `report.adviser` (docs/formats.md): {"advice", "check", "break_even"}.

    The result is None if nothing was timed.
    """
    probes, advice = list(probes), list[dict[str, Any]]()
    for suite in dict.fromkeys(row.suite for row in rows):
        drafted = [row for row in rows if row.suite == suite and row.drafts]
        drafted.sort(key=lambda row: row.k)
        tables = speedup_tables(drafted, [p for p in probes if p.suite == suite])
        for key in dict.fromkeys(map(conditions, drafted)):
            members = [row for row in drafted if conditions(row) == key]
            for batch in (timing.batch for timing in members[-1].timings):
                table = tables.get((key, batch))
                if table and (one := _advice(table, members, batch)):
                    advice.append(one)
    if not advice:
        return None
    return {
        "advice": advice,
        "check": _check([p for one in advice for p in one["predictions"]]),
        "break_even": list(_break_even(advice)),
    }


def _advice(table: SpeedupTable, rows: Sequence[Row], batch: int) -> dict[str, Any] | None:
    """Return the advice at a batch; None if the step times do not give a slope.

    Its `best_k` is the K with the highest measured speed-up, unless another one is predicted to be
    faster beyond both intervals.

    Args:
        rows: the decoded suite, by K.
    """
    largest, timed = rows[-1], table.timings
    counted = {
        row.k: Acceptance(
            row.counters.acceptance_at or (), row.tokens_per_step / (row.acceptance_length or 1.0)
        )
        for row in rows
    }
    lengths = {row.k: row.acceptance_length_ci for row in rows}
    ratios = {k: one.step_ratio_ci for k, one in timed.items()}
    own = {row.k: t for row in rows for t in row.timings if t.batch == batch and t.speedup}
    predictions = []
    for k in range(1, largest.k + 1):
        predicted = table.predict(k, counted)
        if predicted is None:
            return None
        acceptance, step, speedup = predicted
        interval = _interval(speedup, [_half_width(ones, k) for ones in (lengths, ratios)])
        if k in own:
            speedup, interval = own[k].speedup, own[k].speedup_ci
        one, check = timed.get(k), {}
        ci, left = one and one.timed_speedup_ci, one and table.left_out(k)
        if one and one.timed_speedup and ci and left:
            error, met = left / one.timed_speedup - 1, ci[0] <= left <= ci[1]
            check = {"left_out_speedup": left, "error": error, "met": met}
        tokens = acceptance.tokens
        predictions.append(
            Prediction(
                k, acceptance.length, tokens, step, step / tokens, k in own, speedup, interval,
                one and one.timed_speedup, **check,
            )
        )  # fmt: skip
    best = _best(predictions)
    same = ("suite", "engine", "head", "drafter", "temperature", "draft_probs")
    return {name: getattr(largest, name) for name in same} | {
        "batch": batch,
        "plain_ms": table.plain_ms,
        "best_k": best.k,
        "text": _text(best, predictions, batch),
        "predictions": [asdict(one) for one in predictions],
    }


def _half_width(intervals: Mapping[int, tuple[float, float] | None], k: int) -> float | None:
    """Return half the width of the interval at K, or else of the widest, as a logarithm."""
    widths = {i: math.log(ci[1] / ci[0]) / 2 for i, ci in intervals.items() if ci and ci[0] > 0}
    return widths.get(k, max(widths.values(), default=None))


def _interval(speedup: float, widths: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the interval of a predicted speed-up; None if the width of a part is not known.

    Tokens a step vary between the prompts of the suite as AL does, and step times between timed
    prompts. Both are independent, so the squares of their relative widths add up.
    """
    known = [width for width in widths if width is not None]
    if len(known) < len(widths):
        return None
    width = math.hypot(*known)
    return speedup * math.exp(-width), speedup * math.exp(width)


def _best(predictions: Sequence[Prediction]) -> Prediction:
    """Return the prediction of the best K (see `_advice`)."""
    measured = [one for one in predictions if one.measured]
    best = max(measured or predictions, key=lambda p: p.speedup)
    limit = best.speedup_ci[1] if best.speedup_ci else math.inf
    clear = [p for p in predictions if p.speedup_ci and p.speedup_ci[0] > limit]
    return max(clear, key=lambda p: p.speedup, default=best)


def _text(best: Prediction, predictions: Sequence[Prediction], batch: int) -> str:
    """Return "best K = 5 at batch 1: 1.90× [1.80, 2.01], measured".

    Beside a predicted speed-up the text has that of the nearest measured K, and beside a measured
    one a higher prediction. It also names a left-out K whose prediction a measurement refutes.
    """

    def speedup(one: Prediction) -> str:
        limits = one.speedup_ci and " [{:.2f}, {:.2f}]".format(*one.speedup_ci)
        return f"{one.speedup:.2f}×{limits or ''}"

    text = f"best K = {best.k} at batch {batch}: {speedup(best)}"
    text += ", measured" if best.measured else ", predicted"
    measured = [one for one in predictions if one.measured]
    if measured and not best.measured:
        nearest = min(measured, key=lambda p: abs(p.k - best.k))
        text += f"; measured at K = {nearest.k}: {speedup(nearest)}"
    highest = max(predictions, key=lambda p: p.speedup)
    if highest.k != best.k:
        text += f"; K = {highest.k} is predicted not to be clearly faster: {speedup(highest)}"
    refuted = [(abs(p.error), p.k, p.error) for p in predictions if p.error and not p.met]
    if refuted:
        _, k, error = max(refuted)
        text += (
            f"; the prediction of K = {k} from the other timed K's is off by {100 * error:+.0f} %"
        )
    pays = drafting_pays(best.speedup_ci)
    if pays is False:
        text += "; drafting does not pay here"
    elif pays is None:
        text += "; it is not shown whether drafting pays here"
    elif best.k == predictions[-1].k:
        text += "; no larger K was measured"
    return text


def _check(predictions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how many timed K's were predicted from the others, and how well."""
    checked = [p for p in predictions if p["error"] is not None]
    met = sum(p["met"] for p in checked)
    worst = max((abs(p["error"]) for p in checked), default=None)
    text = "no prediction was checked: too few timed K's or timed prompts"
    if worst is not None:
        text = (
            f"{met} of {len(checked)} speed-ups at a timed K, predicted from the other timed K's, "
            f"lie in the measured interval; the error is {100 * worst:.0f} % at most"
        )
    return {"timed": len(checked), "met": met, "worst_error": worst, "text": text}


def _break_even(advice: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield from which K on a parallel head is faster than a chain under the same conditions.

    `k` is the smallest K from which on the parallel head has the lower TPOT at every K that both
    heads have; None: there is none. At the same K

        TPOT(parallel) ≤ TPOT(chain)  ⟺  n(parallel) / n(chain) ≥ step(parallel) / step(chain),

    so that the text says which share of the chain's AL the parallel head needs.
    """
    shared = ("suite", "engine", "temperature", "draft_probs", "batch")
    for chain, parallel in itertools.product(advice, advice):
        same = {name: chain[name] for name in shared}
        drafters = chain["drafter"], parallel["drafter"]
        if drafters != ("chain", "parallel") or same != {name: parallel[name] for name in shared}:
            continue
        pairs = [*zip(chain["predictions"], parallel["predictions"], strict=False)]
        first = max((c["k"] for c, p in pairs if p["tpot_ms"] >= c["tpot_ms"]), default=0) + 1
        k = first if first <= len(pairs) else None
        ours, theirs = pairs[(k or len(pairs)) - 1]
        share = theirs["acceptance_length"] / ours["acceptance_length"]
        needed = share * theirs["tpot_ms"] / ours["tpot_ms"]
        text = f"the chain is faster at the same K, up to K = {ours['k']}"
        if k:
            text = f"parallel is faster at the same K from K = {k} on"
        text += f": parallel has {share:.2f} of the chain's AL there and needs {needed:.2f}"
        for one in (chain, parallel):
            best = min(one["predictions"], key=lambda p: p["tpot_ms"])
            text += (
                f"; {one['drafter']} at its best K = {best['k']}: {best['tpot_ms']:.2f} ms/token"
            )
        yield same | {"chain": chain["head"], "parallel": parallel["head"], "k": k, "text": text}
