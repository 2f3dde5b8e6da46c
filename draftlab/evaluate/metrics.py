"""Metrics of generations: the fields of a report row, and the machine they were measured on."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from draftlab.evaluate.results import Lossless, Row, Timing
from draftlab.evaluate.self_check import self_check
from draftlab.evaluate.timing import TimedRun
from draftlab.intervals import prompt_interval, ratio_interval, resample_sums
from draftlab.version import package_version

FASTEST_STEP = 0.99
"""Least time of a step with drafts over one without; below 1, since answers at temperatures above 0
differ, and so do the lengths at which steps are timed."""
Key = TypeVar("Key")


def suite_speedup(plain_ms: Any, step_ms: Any, tokens: Any) -> Any:
    """Return plain_ms · tokens / step_ms, the speed-up of steps that emit so many tokens.

    All are numbers or arrays. A step with drafts does all that one without does, so that it counts
    as no faster, and the speed-up as no larger than `tokens`.
    """
    return plain_ms * tokens / np.maximum(step_ms, plain_ms)


def acceptance_fields(
    generations: Sequence[Generation], *, greedy: bool, rows: int
) -> dict[str, Any]:
    """Return a row's raw counters and the fields that follow from the generations alone.

    Args:
        generations: one for each prompt of the suite.
        greedy: whether T = 0.
        rows: rows of the report whose self-checks share one level.
    """
    counters = Counters.total(g.counters for g in generations)
    expected = np.sum([g.expected for g in generations], axis=0)
    has_expected = counters.drafts > 0 and len(expected) == counters.k
    return {
        "prompts": len(generations),
        "output_tokens": sum(len(g.token_ids) for g in generations),
        **asdict(counters),
        "expected_acceptance": (expected / counters.drafts).tolist() if has_expected else None,
        "self_check": self_check(generations, counters.k, greedy=greedy, rows=rows),
        "acceptance_length": counters.acceptance_length,
        "acceptance_length_ci": acceptance_interval([g.counters for g in generations]),
        "repetition_rate": repetition_rate(g.token_ids for g in generations),
    }


@dataclass(frozen=True)
class Decoded:
    """What each prompt took after its first token, [P] each.

    A prompt that was decoded several times has the sums.

    Attributes:
        ms: milliseconds.
        tokens: tokens that its steps emitted.
        steps: verify steps, or steps without drafts.
    """

    ms: np.ndarray
    tokens: np.ndarray
    steps: np.ndarray

    @classmethod
    def of(cls, generations: Sequence[Generation], distinct: int | None = None) -> Decoded:
        """Return the sums of generations.

        Args:
            distinct: prompts after which the generations begin again with the first one (see
                `timing_batches`); None: all differ.
        """
        answers = [
            (1e3 * (g.total_s - g.first_token_s), len(g.token_ids) - 1, len(g.steps))
            if len(g.token_ids) > 1
            else (0, 0, 0)
            for g in generations
        ]
        prompt = np.arange(len(answers)) % (distinct or len(answers))
        return cls(*(np.bincount(prompt, sums) for sums in np.array(answers, dtype=float).T))

    def __len__(self) -> int:
        return len(self.steps)


def timing(
    run: TimedRun,
    plain: TimedRun | None,
    *,
    batch: int,
    counted: Sequence[Generation] | None = None,
    distinct: int | None = None,
) -> Timing | None:
    """Return the times of one configuration; None if no prompt has a second output token.

    Args:
        run: the timed generations.
        plain: plain decoding of the same prompts, for the speed-up.
        batch: prompts decoded at once.
        counted: the configuration's answers to the whole suite, in the order of the timed prompts;
            None: the suite is the timed prompts.
        distinct: prompts after which the timed generations begin again with the first one; None:
            all differ. Intervals are over different prompts.
    """
    timed = Decoded.of(run.generations, distinct)
    suite = Decoded.of(counted) if counted is not None else timed
    if not (timed.tokens.sum() and suite.tokens.sum()):
        return None
    step_ms = timed.ms.sum() / timed.steps.sum()
    fields: dict[str, Any] = {
        "batch": batch,
        "prompts": len(run.generations),
        "ttft_ms": 1e3 * float(np.mean([g.first_token_s for g in run.generations])),
        "step_ms": step_ms,
        "throughput_tok_s": sum(len(g.token_ids) for g in run.generations) / run.wall_s,
        "tokens_per_step": timed.tokens.sum() / timed.steps.sum(),
        "acceptance_at": Counters.total(g.counters for g in run.generations).acceptance_at,
    }
    base = Decoded.of(plain.generations, distinct) if plain else None
    return Timing(**fields | speed_fields(timed, suite, base, paired=len(timed) == len(suite)))


def speed_fields(
    timed: Decoded, suite: Decoded, plain: Decoded | None, *, paired: bool
) -> dict[str, Any]:
    """Return TPOT and speed-ups of a suite: its tokens a step, with the timed prompts' steps.

    In all of them a step with drafts counts as no faster than one without. Intervals resample the
    prompts of both; of those that took a step the fewest count.

    Args:
        plain: the timed prompts without drafts; None: there is nothing to compare with.
        paired: whether `timed` and `suite` are the same prompts in the same order, which then are
            drawn together.
    """
    tokens, steps = resample_sums(suite.tokens, suite.steps, seed=0 if paired else 1)
    of_plain = (plain.ms, plain.tokens, plain.steps) if plain else ()
    sums = resample_sums(timed.ms, timed.tokens, timed.steps, *of_plain)
    compared = (timed, suite, plain) if plain is not None else (timed, suite)
    prompts = min(np.count_nonzero(one.steps) for one in compared)

    def interval(values: np.ndarray) -> tuple[float, float] | None:
        return prompt_interval(values, prompts)

    per_step, step_ms = suite.tokens.sum() / suite.steps.sum(), timed.ms.sum() / timed.steps.sum()
    with np.errstate(invalid="ignore", divide="ignore"):  # a resample may have no second token
        steps_ms, fields = sums[0] / sums[2], {}
        if plain is not None and plain.tokens.sum():
            plain_ms, plain_steps_ms = plain.ms.sum() / plain.steps.sum(), sums[3] / sums[5]
            timed_per_step = timed.tokens.sum() / timed.steps.sum()
            speedups = suite_speedup(plain_steps_ms, steps_ms, tokens / steps)
            timed_speedups = suite_speedup(plain_steps_ms, steps_ms, sums[1] / sums[2])
            fields = {
                "baseline_tpot_ms": plain_ms,
                "step_ratio_ci": interval(steps_ms / plain_steps_ms),
                "speedup": float(suite_speedup(plain_ms, step_ms, per_step)),
                "speedup_ci": interval(speedups),
                "timed_speedup": float(suite_speedup(plain_ms, step_ms, timed_per_step)),
                "timed_speedup_ci": interval(timed_speedups),
            }
            step_ms, steps_ms = max(step_ms, plain_ms), np.maximum(steps_ms, plain_steps_ms)
        return fields | {
            "tpot_ms": step_ms / per_step,
            "tpot_ms_ci": interval(steps_ms / (tokens / steps)),
        }


def without_disturbed(timings: Mapping[Key, Timing]) -> dict[Key, Timing]:
    """Return timings of one batch, without speed-ups if the machine was disturbed meanwhile.

    A step with drafts does all that one without does. If it was timed as faster, beyond its
    interval, the two were timed under different conditions, and every configuration is compared
    with the same plain decoding.

    Args:
        timings: of one engine, suite, temperature and batch, by configuration.
    """
    intervals = {key: one.step_ratio_ci for key, one in timings.items()}
    wrong = [key for key, ci in intervals.items() if ci and ci[1] < FASTEST_STEP]
    if not wrong:
        return dict(timings)
    one = timings[wrong[0]]
    text = (
        f"the machine was disturbed while it was timed at batch {one.batch}: a step with drafts "
        f"took {one.step_ms:.2f} ms and one without {one.baseline_tpot_ms or 0.0:.2f} ms, so there "
        "is no speed-up"
    )
    fields = ("speedup", "speedup_ci", "timed_speedup", "timed_speedup_ci")
    update = dict.fromkeys(fields) | {"disturbance": text}
    return {
        key: one.model_copy(update=update) if one.baseline_tpot_ms else one
        for key, one in timings.items()
    }


def timing_fields(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return the row's time fields: those of the first timing, and the list of all timings."""
    if not timings:
        return {}
    shared = Row.model_fields.keys() & Timing.model_fields.keys() - {"batch", "prompts"}
    return timings[0].model_dump(include=shared) | {"timings": list(timings)}


def equality_fields(
    generations: Sequence[Generation], plain: Sequence[Generation], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the share of prompts with the same tokens as plain decoding at T = 0.

    Equal tokens prove L2 in float32. In other dtypes they only show closeness (L3).
    """
    equal = share_equal(generations, plain)
    exact = dtype == torch.float32 and equal == 1.0
    lossless = Lossless(
        level="L2" if exact else "L3",
        test=f"tokens equal to plain decoding: {equal:.1%} of prompts",
        n=len(generations),
    )
    return {"prompts_equal": equal, "lossless": lossless}


def share_equal(generations: Sequence[Generation], others: Sequence[Generation]) -> float:
    """Return the share of prompts with the same tokens in both, which have the same order."""
    pairs = zip(generations, others, strict=True)
    return float(np.mean([a.token_ids == b.token_ids for a, b in pairs]))


def device_name(device: torch.device) -> str:
    """Return the device name for a row."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()})"


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device and CPU threads for a report."""
    names = ("draftlab", "torch", "transformers")
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in names},
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def repetition_rate(answers: Iterable[Sequence[int]], n: int = 4) -> float:
    """Return the mean share of n-grams that repeat an earlier n-gram of the same answer.

    Answers shorter than n tokens are left out.
    """
    shares = []
    for answer in answers:
        grams = Counter(tuple(answer[i : i + n]) for i in range(len(answer) - n + 1))
        if grams:
            shares.append(1 - len(grams) / grams.total())
    return float(np.mean(shares)) if shares else 0.0


def acceptance_interval(
    per_prompt: Sequence[Counters], *, samples: int = 2000
) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of AL over prompts; None: too few have drafts."""
    accepted, drafts = ([getattr(c, name) for c in per_prompt] for name in ("accepted", "drafts"))
    interval = ratio_interval(accepted, drafts, samples=samples)
    return interval and (1 + interval[0], 1 + interval[1])
