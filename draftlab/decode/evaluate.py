"""Evaluation: real speculative decoding of a prompt suite, counted and timed.

Counters come from decoding the whole suite in batches. Times come from a second pass at batch 1
over a few prompts, stop tokens ignored, plain and speculative decoding in turn, so that a machine
whose speed drifts hurts both alike.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib import metadata
from operator import add
from typing import Annotated, Any, Literal

from pydantic import Field

from draftlab.base import Knobs, Monitor, UserError, canonical_json, sha256_text
from draftlab.decode.drafter import ChainDrafter
from draftlab.decode.engine import Engine
from draftlab.decode.measure import (
    Measured,
    counted_figures,
    device_name,
    environment,
    equality,
    one_thread,
    timed_figures,
)
from draftlab.decode.sampling import Generation, Request, Sampling
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.results import Counters, Report, Row
from draftlab.target.model import Target

__all__ = ["EvalKnobs", "Evaluator", "Suite", "environment"]

ENGINE = "draftlab-eager"


class EvalKnobs(Knobs):
    """What is decoded, how, and what is measured."""

    suite: str = "embedded:heldout"
    """Prompts: "embedded:heldout", or a JSONL file of conversations."""
    max_prompts: int | None = Field(default=64, ge=1)
    """Prompts taken from the suite's start; None: all."""
    k: int | None = Field(default=None, ge=1)
    """Drafts a step; None: what the head was trained for, at most 4."""
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0, 0.8), min_length=1
    )
    """Each gives its own rows; 0 is greedy."""
    draft_probs: Literal["on", "off", "both"] = "both"
    """Drafts sampled from the head and verified with its probabilities (on), or its argmax verified
    without (off, the default of vLLM). Temperature 0 knows no difference and is decoded once."""
    draft_temperature: float | None = Field(default=None, gt=0)
    """Temperature of sampled drafts; None: the row's own."""
    greedy_below: float = Field(default=0.0, ge=0)
    """Rows at a lower temperature draft greedily."""
    top_k: int | None = Field(default=None, ge=1)
    """Keep the k most likely tokens of the target; None: off."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the most likely tokens that reach this mass; None: off."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Tokens of an answer."""
    batch: int = Field(default=16, ge=1)
    """Prompts decoded at once for the counters."""
    timing_prompts: int = Field(default=6, ge=0)
    """Prompts timed at batch 1; 0: no times."""
    timing_tokens: int = Field(default=64, ge=2)
    """Tokens of a timed answer; stop tokens are ignored there."""
    seed: int = 0
    """Of every noise that sampling uses."""


@dataclass(frozen=True)
class Suite:
    """Prompts by id, as token ids of the target's template."""

    name: str
    template_sha256: str
    prompts: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def sha256(self) -> str:
        """Of ids and tokens."""
        return sha256_text(canonical_json(self.prompts))


@dataclass(frozen=True)
class _Mode:
    """One drafter setting: None decodes plainly, else whether draft probabilities are used."""

    draft_probs: bool | None

    @property
    def name(self) -> str:
        if self.draft_probs is None:
            return "no drafting"
        return f"draft probabilities {'on' if self.draft_probs else 'off'}"


class Evaluator:
    """Evaluates one head on one suite.

    Args:
        target: the model.
        head: the head, on the target's device; None evaluates plain decoding only.
        head_name: as printed in the rows.
        suite: the prompts.
        stop_ids: tokens that end an answer.
        knobs: how.
        monitor: for lines and progress.
    """

    def __init__(
        self,
        target: Target,
        head: Eagle3Head | None,
        head_name: str | None,
        suite: Suite,
        stop_ids: frozenset[int],
        knobs: EvalKnobs,
        *,
        monitor: Monitor,
    ) -> None:
        self.target, self.head, self.head_name = target, head, head_name
        self.knobs, self.monitor, self.stop_ids = knobs, monitor, stop_ids
        taken = suite.prompts[: knobs.max_prompts]
        self.suite = replace(suite, prompts=taken)
        if not taken:
            raise UserError("expected prompts to evaluate, found none", where=suite.name)
        self.k_trained = head.config.k_trained if head else None
        self.k = (knobs.k or min(self.k_trained or 1, 4)) if head else 0
        longest = max(len(ids) for _, ids in taken) + max(knobs.max_new_tokens, knobs.timing_tokens)
        self.max_length = min(longest + self.k + 1, target.max_length)
        self.warnings: list[str] = []
        if head and self.k > head.config.k_trained:
            self.warnings.append(f"K = {self.k} exceeds the {self.k_trained} steps of training")
            monitor.say(f"warning: {self.warnings[-1]}")
        if len(taken) < 30:
            self.warnings.append(f"{len(taken)} prompts are few: mind the interval")

    def run(self) -> Report:
        """Evaluates every temperature and mode."""
        rows = []
        for temperature in self.knobs.temperatures:
            modes = self._modes(temperature)
            runs = {mode: self._decode(temperature, mode) for mode in modes}
            times = self._time(temperature, modes)
            rows += [self._row(temperature, mode, runs, times) for mode in modes]
        config = self.target.config
        return Report(
            target={
                "name": self.target.name,
                "fingerprint": self.target.fingerprint,
                "architecture": type(self.target.model).__name__,
                "num_layers": self.target.num_layers,
                "hidden_size": config.hidden_size,
                "parameters": sum(p.numel() for p in self.target.model.parameters()),
            },
            environment=environment(self.target.device) | {"timing": self._timing()},
            rows=rows,
        )

    def _timing(self) -> dict[str, Any] | None:
        """Conditions of the times, which are not those of the counters."""
        if not self.knobs.timing_prompts:
            return None
        return {
            "batch": 1,
            "prompts": min(self.knobs.timing_prompts, len(self.suite.prompts)),
            "tokens": self.knobs.timing_tokens,
            "threads": 1 if self.target.device.type == "cpu" else None,
            "stop_tokens": "ignored",
        }

    def _modes(self, temperature: float) -> list[_Mode]:
        """Plain decoding first, then the drafter's settings."""
        plain = [_Mode(None)]
        if self.head is None:
            return plain
        asked = {"on": [True], "off": [False], "both": [False, True]}[self.knobs.draft_probs]
        # Greedy decoding makes no use of draft probabilities: one row says it all.
        return plain + [_Mode(probs) for probs in (asked[:1] if temperature == 0 else asked)]

    def _engine(self, mode: _Mode, batch: int) -> Engine:
        drafter = None
        if mode.draft_probs is not None and self.head is not None:
            drafter = ChainDrafter(
                self.head,
                self.k,
                draft_probs=mode.draft_probs,
                draft_temperature=self.knobs.draft_temperature,
                greedy_below=self.knobs.greedy_below,
            )
        return Engine(self.target, drafter, batch=batch, max_length=self.max_length)

    def _requests(self, temperature: float, *, timed: bool) -> list[Request]:
        knobs = self.knobs
        sampling = Sampling(temperature, knobs.top_k, knobs.top_p, knobs.seed)
        count = knobs.timing_prompts if timed else None
        return [
            Request(
                id_,
                ids,
                knobs.timing_tokens if timed else knobs.max_new_tokens,
                sampling,
                frozenset() if timed else self.stop_ids,
            )
            for id_, ids in self.suite.prompts[:count]
        ]

    def _decode(self, temperature: float, mode: _Mode) -> list[Generation]:
        """Every prompt's generation, in the suite's order."""
        requests = self._requests(temperature, timed=False)
        done: dict[str, Generation] = {}
        started = time.perf_counter()
        engine = self._engine(mode, min(self.knobs.batch, len(requests)))
        for generation in engine.generate(requests):
            done[generation.id] = generation
            tokens = sum(len(g.token_ids) for g in done.values())
            self.monitor.progress(
                f"eval T={temperature:g}, {mode.name}",
                len(done),
                len(requests),
                f"{tokens / (time.perf_counter() - started):,.0f} tokens/s",
            )
        generations = [done[request.id] for request in requests]
        total: Counters = reduce(add, (g.counters for g in generations))
        total.check_tokens(sum(len(g.token_ids) for g in generations), len(generations))
        return generations

    def _time(self, temperature: float, modes: Sequence[_Mode]) -> dict[_Mode, list[Generation]]:
        """Batch-1 generations of the timed prompts, modes in turn; empty when not asked for."""
        requests = self._requests(temperature, timed=True)
        if not requests:
            return {}
        engines = {mode: self._engine(mode, 1) for mode in modes}
        times: dict[_Mode, list[Generation]] = {mode: [] for mode in engines}
        with one_thread(self.target.device):
            for engine in engines.values():  # first calls pay for allocation and kernel selection
                list(engine.generate([replace(requests[0], max_new_tokens=8)]))
            for number, request in enumerate(requests):
                for mode, engine in engines.items():
                    times[mode] += engine.generate([request])
                self.monitor.progress(f"time T={temperature:g}", number + 1, len(requests))
        return times

    def _row(
        self,
        temperature: float,
        mode: _Mode,
        runs: dict[_Mode, list[Generation]],
        times: dict[_Mode, list[Generation]],
    ) -> Row:
        knobs, drafting = self.knobs, mode.draft_probs is not None
        found = Measured(runs[mode], times.get(mode, []))
        plain = Measured(runs[_Mode(None)], times.get(_Mode(None), []))
        return Row(
            head=self.head_name if drafting else None,
            engine=ENGINE,
            engine_version=metadata.version("draftlab"),
            device=device_name(self.target.device),
            dtype=str(self.target.dtype).removeprefix("torch."),
            batch=min(knobs.batch, len(self.suite.prompts)),
            suite=self.suite.name,
            suite_sha256=self.suite.sha256,
            template=self.suite.template_sha256,
            max_new_tokens=knobs.max_new_tokens,
            seed=knobs.seed,
            drafter="chain" if drafting else "none",
            k=self.k if drafting else 0,
            k_trained=self.k_trained if drafting else None,
            temperature=temperature,
            top_k=knobs.top_k,
            top_p=knobs.top_p,
            draft_temperature=knobs.draft_temperature if drafting else None,
            draft_probs=bool(mode.draft_probs),
            **counted_figures(found),
            **timed_figures(found, plain if drafting else None),
            **(equality(found, plain, self.target.dtype) if drafting and temperature == 0 else {}),
            warnings=list(self.warnings) if drafting else [],
        )
