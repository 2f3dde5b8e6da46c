"""Measurement of a running server under load: AL, goodput, TPOT and TTFT, with intervals.

AL is made of the server's counters, as the difference after and before; its interval resamples
prompts, among which the counted steps are divided as the answers show them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.files import parse_json, write_json
from draftlab.formatting import count_text
from draftlab.intervals import (
    prompt_interval,
    quantile_intervals,
    ratio_interval,
    resample_sums,
    sums_by_prompt,
)
from draftlab.progress import Monitor
from draftlab.servers.server_counters import CountersRestarted, ServerCounters
from draftlab.servers.server_load import Answer, LoadedServer, LoadResult
from draftlab.servers.settings import MAX_AT_ONCE, BenchSettings
from draftlab.text.suites import Suite

KIND, SCHEMA_VERSION = "draftlab_bench", 1
QUANTILES = (0.5, 0.9, 0.99)
REQUESTS_PER_SLOT = 4
"""Least requests for each that runs at once."""
PIECES_APART = 0.1
"""Largest share by which the pieces of the streams may differ from the counted steps, if they are
to divide the steps among the prompts."""
LATE_S = 0.05
"""An open loop that sends a request later than this is a warning."""
Interval = tuple[float, float] | None
"""A 95 % interval over prompts; None: there are too few."""


@dataclass
class Acceptance:
    """Acceptance on the server.

    Attributes:
        source: what counted.
        k: drafts a step, as far as the counters show it.
        accepted_at: accepted drafts at each position; empty where the server does not state them.
    """

    source: str
    k: int
    drafts: int
    accepted: int
    accepted_at: tuple[int, ...]
    acceptance_length: float
    acceptance_length_ci: Interval
    acceptance_at: list[float]


@dataclass
class Percentiles:
    """Percentiles of a time over requests, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    p50_ci: Interval
    p90_ci: Interval
    p99_ci: Interval

    @classmethod
    def of(cls, times: Sequence[tuple[Answer, float]]) -> Percentiles | None:
        """Return those of the requests' seconds; None without any."""
        if not times:
            return None
        values = np.array([1e3 * seconds for _, seconds in times])
        intervals = quantile_intervals(values, np.array([a.prompt for a, _ in times]), QUANTILES)
        return cls(float(values.mean()), *np.quantile(values, QUANTILES).tolist(), *intervals)


@dataclass
class LoadFigures:
    """Goodput and times of the measured requests.

    Attributes:
        running: mean number of requests at once.
        goodput_tok_s: output tokens per second of all requests under steady load (`SteadyLoad`).
        speedup: goodput over that without drafts, for the same requests.
    """

    output_tokens: int
    running: float
    goodput_tok_s: float
    goodput_tok_s_ci: Interval
    tpot_ms: Percentiles | None
    ttft_ms: Percentiles | None
    speedup: float | None = None
    speedup_ci: Interval = None


@dataclass
class ServerPoint:
    """A server at one concurrency or rate.

    Attributes:
        load: goodput, TPOT and TTFT; None: no request was answered.
        acceptance: None without drafts or counters.
        interrupted: requests were left out.
        answers: the measured requests.
    """

    url: str
    concurrency: int | None
    rate: float | None
    requests: int
    failures: dict[str, int]
    retries: dict[str, int]
    load: LoadFigures | None
    acceptance: Acceptance | None
    interrupted: bool = False
    warnings: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    plain: ServerPoint | None = None


class ServerBench:
    """Measures a server, and a second one without drafts, with the prompts of a suite.

    Args:
        report, tokenizer: what the server is compared with.

    Attributes:
        points: what has been measured so far, an interrupted point included.
    """

    def __init__(
        self,
        server: LoadedServer,
        plain: LoadedServer | None,
        suite: Suite,
        settings: BenchSettings,
        monitor: Monitor,
        report: Report | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.server, self.plain, self.settings, self.monitor = server, plain, settings, monitor
        self.report, self.tokenizer = report, tokenizer
        self.suite = suite.sample(settings.max_prompts, settings.seed)
        self.prompts = [ids for _, ids in self.suite.evenly_ordered(settings.seed)]
        self.points: list[ServerPoint] = []

    def run(self) -> None:
        """Measure every concurrency or rate; add each to `points`, also when it is interrupted."""
        settings = self.settings
        for server in filter(None, (self.server, self.plain)):
            server.warm_up(self.prompts[:2])
        loads: list[tuple[int | None, float | None]] = [(c, None) for c in settings.concurrency]
        if settings.rate is not None:
            loads = [(None, rate) for rate in settings.rate]
        for load in loads:
            self.measure(self.server, *load)
            if self.plain is None:
                continue
            point = self.points[-1]
            self.measure(self.plain, *load)
            point.plain = plain = self.points.pop()
            if load[0] and point.load and plain.load:
                drafted, alone = (sorted(a.prompt for a in one.answers) for one in (point, plain))
                if drafted != alone:
                    point.warnings.append("no speed-up: not the same requests were answered")
                    continue
                ratio = speedup(point.answers, plain.answers, load[0])
                point.load.speedup, point.load.speedup_ci = ratio

    def write(self, path: Path) -> None:
        """Write bench.json: the settings, what was measured, and every answer's numbers."""
        suite = {"name": self.suite.name, "sha256": self.suite.sha256}
        write_json(
            path,
            {
                KIND: SCHEMA_VERSION,
                "model": self.server.model,
                "program": self.server.program,
                "settings": self.settings.model_dump(mode="json"),
                "suite": suite | {"prompts": len(self.prompts)},
                "points": [asdict(point) for point in self.points],
            },
        )

    def measure(self, server: LoadedServer, concurrency: int | None, rate: float | None) -> None:
        """Measure a server once; the point is there even if that is interrupted.

        The prompts are repeated as whole for a high concurrency.
        """
        times = math.ceil(REQUESTS_PER_SLOT * (concurrency or 0) / len(self.prompts))
        requests = list(enumerate(self.prompts)) * max(times, 1)
        arrivals, at_once = None, concurrency or min(len(requests), MAX_AT_ONCE)
        if rate is not None:
            generator = np.random.default_rng(self.settings.seed)
            arrivals = generator.exponential(1 / rate, len(requests)).cumsum().tolist()
        title = f"{server.url}, " + (f"{rate:g} a second" if rate else f"{at_once} at once")
        before, quiet = server.settled_counters()
        result, finished = LoadResult(), False
        try:
            server.run(
                requests,
                result,
                at_once=at_once,
                arrivals=arrivals,
                progress=lambda done: self.monitor.progress(title, done, len(requests)),
            )
            finished = True
        finally:
            answers = sorted(result.answers, key=lambda answer: answer.started_s)
            least = before.values.get("tokens", 0) if before and finished else 0
            least += sum(a.tokens - 1 for a in answers)
            after = server.settled_counters(least)[0] if finished else server.counters()
            failed, warnings = result.failures.total(), list[str]()
            counted = self._counted(server, before, after, answers if finished else [], warnings)
            mixed = "failed requests included" * bool(failed)
            mixed = mixed if finished else "unfinished requests included"
            if counted is not None:
                other = "" if quiet else "requests ran before the first one"
                other = other or (other_traffic(counted, answers, failed) if finished else "")
                if other:
                    mixed = "others' requests included"
                    warnings.append(f"other traffic: {other}")
            if failed:
                warnings.append(f"{count_text(failed, 'request')} failed, and are not measured")
            if rate is not None and result.late_s > LATE_S:
                warnings.append(f"requests were sent up to {result.late_s:.2f} s late")
            found = acceptance(counted, answers, server.program, mixed)
            if found is None and counted is not None and server is self.server:
                warnings.append("the server drafted nothing")
            lengths = [(a.prompt_tokens, len(self.prompts[a.prompt])) for a in answers]
            if truncated := sum(n is not None and n != sent for n, sent in lengths):
                warnings.append(
                    f"{count_text(truncated, 'prompt')} had other lengths on the server: "
                    "truncated, or with tokens that it adds"
                )
            self.points.append(
                ServerPoint(
                    server.url,
                    concurrency,
                    rate,
                    len(answers),
                    dict(result.failures),
                    dict(result.retries),
                    load_figures(answers, concurrency) if answers else None,
                    found,
                    not finished,
                    warnings,
                    answers,
                )
            )

    def _counted(
        self,
        server: LoadedServer,
        before: ServerCounters | None,
        after: ServerCounters | None,
        answers: Sequence[Answer],
        warnings: list[str],
    ) -> ServerCounters | None:
        """Return the difference of the counters, which have at least these answers; None: none."""
        if before is None or after is None:
            if server.no_counters:
                warnings.append(f"no counters of the server: {server.no_counters}")
            return None
        try:
            counted = after.since(before)
            counted.check_least(len(answers), sum(a.tokens - 1 for a in answers))
        except CountersRestarted:
            warnings.append("the counters restarted: the server did, or another one answered")
            return None
        if after.rounded:
            warnings.append("the counters are rounded to six digits: restart the server")
        return counted


def check_out(path: Path) -> None:
    """Check that a file is new or a bench.json, which the measurement replaces.

    Raises:
        UserError: it is something else.
    """
    try:
        known = not path.exists() or KIND in parse_json(path.read_bytes())
    except (OSError, ValueError, TypeError):
        known = False
    if not known:
        what = "expected a new file or a bench.json of draftlab, found another"
        raise UserError(what, where=path, do="name another file with --out")


class SteadyLoad(NamedTuple):
    """The tokens and seconds of the requests until one ended that none replaced.

    From then on fewer and fewer run at once, which a busy server answers faster. An open loop ends
    with the last arrival. If fewer than half had ended by then, it is until the end of all.

    Attributes:
        tokens, seconds: of each prompt's requests, [P]; tokens are written at an even pace.
        duration: seconds.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    duration: float

    @classmethod
    def of(cls, answers: Sequence[Answer], concurrency: int | None) -> SteadyLoad:
        """Return it for all answers of one measurement; concurrency is None in an open loop."""
        start, first, end = np.array(
            [(a.started_s, a.started_s + a.first_token_s, a.started_s + a.total_s) for a in answers]
        ).T
        stop = start.max() if concurrency is None else np.sort(end)[-min(concurrency, len(end))]
        if 2 * np.count_nonzero(end <= stop) < len(answers):
            stop = end.max()
        share = np.clip((stop - first) / np.maximum(end - first, 1e-9), 0, 1)
        more = np.array([max(a.tokens - 1, 0) for a in answers])
        written = (first <= stop) + more * share
        ran = np.minimum(end, stop) - start
        return cls(*sums_by_prompt([a.prompt for a in answers], written, ran), stop - start.min())

    @property
    def running(self) -> float:
        """Requests that ran at once, on average."""
        return float(self.seconds.sum()) / self.duration


def load_figures(answers: Sequence[Answer], concurrency: int | None) -> LoadFigures:
    """Return goodput under steady load, and percentiles of TPOT and TTFT.

    Goodput is L · Σ tokens / Σ seconds, with L requests running; its interval is of the ratio.
    """
    load = SteadyLoad.of(answers, concurrency)
    interval = ratio_interval(load.tokens, load.seconds)
    tpot = [(a, (a.total_s - a.first_token_s) / (a.tokens - 1)) for a in answers if a.tokens > 1]
    return LoadFigures(
        sum(a.tokens for a in answers),
        load.running,
        float(load.tokens.sum()) / load.duration,
        interval and (load.running * interval[0], load.running * interval[1]),
        Percentiles.of(tpot),
        Percentiles.of([(a, a.first_token_s) for a in answers]),
    )


def speedup(
    answers: Sequence[Answer], plain: Sequence[Answer], concurrency: int | None
) -> tuple[float, Interval]:
    """Return the ratio of two goodputs over the same prompts, and its interval."""
    ours, theirs = (SteadyLoad.of(one, concurrency) for one in (answers, plain))
    sums = [ours.tokens, ours.seconds, theirs.tokens, theirs.seconds]
    factor = ours.running / theirs.running
    totals, drawn = [column.sum() for column in sums], resample_sums(*sums)
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN is ignored by the interval
        ratio, ratios = (factor * (o[0] / o[1]) / (o[2] / o[3]) for o in (totals, drawn))
    return float(ratio), prompt_interval(ratios, len(sums[0]))


def other_traffic(counted: ServerCounters, answers: Sequence[Answer], failed: int) -> str:
    """Return what the counters have that our requests do not explain; "": nothing.

    The server may have counted failed requests, and their tokens, or not.
    """
    requests = counted.values.get("requests", 0) - len(answers)
    if requests > failed:
        return f"the server counted {count_text(requests - failed, 'further request')}"
    tokens = counted.values.get("tokens", 0) - sum(a.tokens for a in answers)
    # A server may count an answer's stop token, or its first one, elsewhere than in the usage.
    if not failed and tokens > len(answers):
        return f"the server counted {tokens:,} further tokens"
    return ""


def acceptance(
    counted: ServerCounters | None, answers: Sequence[Answer], program: str, mixed: str = ""
) -> Acceptance | None:
    """Return the acceptance on the server; None without drafts or counters.

    Args:
        counted: difference of the server's counters; None: it has none.
        mixed: what else they have than the measured requests; "": nothing. If something, the
            answers' own counters serve, if they have any.
    """
    own = [a for a in answers if a.accepted is not None]
    has_own = len(own) == len(answers) > 0
    values = dict(counted.values) if counted else {}
    steps = np.array([_steps(a) for a in answers], dtype=float)
    tokens = sum(a.tokens for a in answers)
    source, accepted_at = f"{program}'s counters", counted.accepted_at if counted else ()
    if "verify_steps" in values:  # SGLang: every later token is accepted, or one of each step
        drafts = values["verify_steps"]
        accepted = values.get("tokens", tokens) - values.get("requests", len(answers)) - drafts
        draft_tokens, accepted_at = 0, ()
    else:
        drafts, accepted, draft_tokens = (
            values.get(name, 0) for name in ("drafts", "accepted", "draft_tokens")
        )
    if has_own and (mixed or not drafts):
        source, accepted_at, mixed = "the counters in the answers", (), ""
        drafts = int(steps.sum())
        accepted, draft_tokens = (
            sum(getattr(a, name) or 0 for a in answers) for name in ("accepted", "draft_tokens")
        )
        drafts *= draft_tokens > 0
    if drafts <= 0 or not accepted >= 0:
        return None
    return Acceptance(
        f"{source}, {mixed}" if mixed else source,
        max(len(accepted_at), math.ceil(draft_tokens / drafts)),
        drafts,
        accepted,
        accepted_at,
        1 + accepted / drafts,
        _interval(answers, steps, drafts, accepted, exact=has_own),
        [count / drafts for count in accepted_at],
    )


def _steps(answer: Answer) -> int:
    """Return the verify steps of an answer, as it states or shows them."""
    if answer.drafts is not None:
        return answer.drafts
    if answer.accepted is not None:
        return max(answer.tokens - 1 - answer.accepted, 0)
    return answer.pieces


def _interval(
    answers: Sequence[Answer], steps: np.ndarray, drafts: int, accepted: int, *, exact: bool
) -> Interval:
    """Return the interval of AL over prompts; None: they do not show their steps.

    The counted drafts and accepted drafts are divided among the prompts as their answers show.
    """
    if not steps.sum() or (not exact and abs(steps.sum() / drafts - 1) > PIECES_APART):
        return None
    more = [max(a.tokens - 1 - n, 0) for a, n in zip(answers, steps, strict=True)]
    weights = np.array([a.accepted for a in answers] if exact else more, dtype=float)
    if not weights.sum():
        return None
    each = sums_by_prompt(
        [a.prompt for a in answers],
        weights * (accepted / weights.sum()),
        steps * (drafts / steps.sum()),
    )
    interval = ratio_interval(*each)
    return interval and (1 + interval[0], 1 + interval[1])
