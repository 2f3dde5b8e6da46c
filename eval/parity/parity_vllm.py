"""Compare tokens and counters of draftlab and a real vLLM on the same prompts, in float32.

    .venv/bin/python eval/parity/parity_vllm.py [--head FOLDER|reference] [--k 4] [--prompts 64]

At T = 0 everything must be equal: tokens, finish reasons, the accepted drafts of every verify step,
and the counters of every prompt. draftlab decodes with batches of 1 and 8. vLLM serves the float32
exports in speculators layout and in its own layout, and the head folder itself (vLLM-native); a
parallel head runs with `parallel_drafting`. Of --random heads, of all shapes and two targets, every
draft token is compared as well, one prompt at a time in vLLM's own layout. DSpark runs in vLLM's V2
runner, and with VLLM_USE_V2_MODEL_RUNNER=1 in the environment heads of other families do; Triton's
interpreter then takes some 0.2 s a step. What is corrected of vLLM's CPU build is printed.
At --temps above 0 random numbers differ, so acceptance lengths are compared, with argmax drafts and
with sampled ones: the bootstrap interval of their difference over prompts must contain 0. All
intervals of a run together are wrong in 5 % of runs (Bonferroni).

Sequences have room for the last drafts, because near its length limit vLLM V1 verifies and counts
zeros instead of drafts (docs/benchmarks.md).

Exit status: 0 everything is equal; 1 something differs (the first difference is printed); 2 the
request cannot be run; 77 the vLLM environment cannot be installed (the reason is printed).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    DIFFERENT,
    EQUAL,
    SKIPPED,
    Subject,
    client,
    decoded,
    figures,
    prepare,
    run_program,
    subject_options,
)
from random_heads import chosen_subjects

from draftlab.engine.counters import Counters
from draftlab.engine.drafter import new_drafter
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.evaluate.metrics import acceptance_interval
from draftlab.export.layout import Layout
from draftlab.heads.family import get_family
from draftlab.servers.vllm_engine import COUNTERS, VllmEngine, drafting_options, required_positions
from draftlab.servers.vllm_process import CLIENT, PYTHON_VARIABLE
from eval.measurements import PrintMonitor, bootstrap_interval
from tests.helpers.greedy_answers import Drafts, recording_drafter

BATCHES = (1, 8)


def total(decoded: Sequence[Generation]) -> Counters:
    """Return the counters of all prompts."""
    return Counters.total(g.counters for g in decoded)


def accepted_steps(generation: Generation) -> tuple[int, ...]:
    """Return the accepted drafts of each step that verified any, in order."""
    return tuple(accepted for drafted, accepted in generation.steps if drafted)


def first_difference(ours: Sequence[Generation], theirs: Sequence[Generation]) -> str | None:
    """Return the first difference (prompt, position, both values); None if all is equal."""
    if [g.id for g in ours] != [g.id for g in theirs]:
        return f"prompts: draftlab has {len(ours)}, vLLM {len(theirs)}, or in another order"
    for mine, other in zip(ours, theirs, strict=True):
        sequences = {
            "token": (mine.token_ids, other.token_ids),
            "accepted drafts of verify step": (accepted_steps(mine), accepted_steps(other)),
        }
        for what, (a, b) in sequences.items():
            if a != b:
                at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905
                values = [str(side[at]) if at < len(side) else "nothing" for side in (a, b)]
                return f"prompt {mine.id}, {what} {at}: draftlab {values[0]}, vLLM {values[1]}"
        if mine.finish != other.finish:
            return f"prompt {mine.id}, finish: draftlab {mine.finish}, vLLM {other.finish}"
        for key in COUNTERS:
            a, b = (getattr(side.counters, key) for side in (mine, other))
            if a != b:
                return f"prompt {mine.id}, {key}: draftlab {a}, vLLM {b}"
    return None


def acceptance_difference(
    ours: Sequence[Generation], theirs: Sequence[Generation], level: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """Return the difference of acceptance lengths and its bootstrap interval over prompts."""
    pairs = [
        np.array([[g.counters.accepted, g.counters.drafts] for g in side], dtype=float)
        for side in (ours, theirs)
    ]

    def difference(index: np.ndarray) -> float:
        (a, n), (b, m) = (side[index].sum(0) for side in pairs)
        return a / n - b / m if n and m else float("nan")

    interval = bootstrap_interval(difference, len(ours), samples=10_000, level=level)
    return difference(np.arange(len(ours))), interval


@dataclass(frozen=True)
class Bench:
    """One subject, decoded by draftlab or by vLLM."""

    subject: Subject
    python: Path
    k: int
    max_new_tokens: int
    seed: int = 0

    def requests(self, temperature: float) -> list[Request]:
        """Return a request for every prompt."""
        return self.subject.requests(self.max_new_tokens, Sampling(temperature, seed=self.seed))

    @property
    def max_length(self) -> int:
        """The positions of a sequence, on both sides."""
        return required_positions(self.requests(0.0), self.k, self.subject.target.max_length)

    def ours(
        self, temperature: float, batch: int, *, probabilities: bool = False
    ) -> list[Generation]:
        """Decode with draftlab's engine."""
        drafter = new_drafter(self.subject.head, self.k, draft_probs=probabilities)
        target, requests = self.subject.target, self.requests(temperature)
        return decoded(target, requests, drafter, batch=batch, max_length=self.max_length)

    def theirs(self, folder: Path, *, probabilities: bool = False) -> VllmEngine:
        """Return vLLM with the head in `folder`, one request at a time."""
        os.environ[PYTHON_VARIABLE] = str(self.python)
        return VllmEngine(
            self.subject.target.folder,
            folder,
            k=self.k,
            draft_probs=probabilities,
            max_length=self.max_length,
            monitor=PrintMonitor(),
        )


def our_drafts(bench: Bench) -> list[tuple[Generation, Drafts]]:
    """Decode with draftlab's engine; return answers and drafts."""
    results = []
    for request in bench.requests(0.0):
        drafter, drafts = recording_drafter(bench.subject.head, bench.k)
        length = bench.max_length
        answers = decoded(bench.subject.target, [request], drafter, batch=1, max_length=length)
        results.append((answers[0], drafts))
    return results


def their_drafts(bench: Bench, place: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Decode with vLLM; return its description and the answers to the prompts."""
    subject, head, answer = bench.subject, place / "head", place / "answer.json"
    subject.export(head, bench.k, "vllm")
    shutil.copytree(CLIENT, place / "client" / CLIENT.name)
    options = {
        "temperature": 0.0,
        "max_new_tokens": bench.max_new_tokens,
        "stop_token_ids": sorted(subject.stops),
    }
    request = {
        "client": str(place / "client"),
        "setup": {
            "target": str(subject.target.folder.resolve()),
            "draft": str(head),
            "k": bench.k,
            "max_model_len": bench.max_length,
            **drafting_options(head),
        },
        "prompts": [list(ids) for _, ids in subject.prompts],
        "sampling": [options] * len(subject.prompts),
    }
    client(bench.python, "vllm_drafts.py", {answer: request})
    result = json.loads(answer.read_text())
    return result["info"], result["answers"]


def first_draft_difference(
    ours: Sequence[tuple[Generation, Drafts]], theirs: Sequence[dict[str, Any]]
) -> str | None:
    """Return the first difference (prompt, step, both values); None if all is equal."""
    for (mine, drafts), other in zip(ours, theirs, strict=True):
        if list(mine.token_ids) != other["outputs"][0]:
            return f"prompt {mine.id}: the tokens"
        steps = mine.counters.drafts
        for at, (a, b) in enumerate(zip(drafts[:steps], other["drafts"][:steps], strict=True)):
            if a != b:
                return f"prompt {mine.id}, drafts of step {at}: draftlab {a}, vLLM {b}"
        for key in COUNTERS:
            a, b = getattr(mine.counters, key), other["per_prompt"][0][key]
            if a != b:
                return f"prompt {mine.id}, {key}: draftlab {a}, vLLM {b}"
    return None


def compare_greedy(
    bench: Bench, engine: VllmEngine, layout: str, mine: dict[int, list[Generation]]
) -> Iterator[bool]:
    """Compare one layout with every batch size at T = 0; yield whether all is equal."""
    theirs = list(engine.generate(bench.requests(0.0)))
    for batch, ours in mine.items():
        fault = first_difference(ours, theirs)
        tokens = sum(len(g.token_ids) for g in ours)
        print(
            f"T=0 K={bench.k} {bench.subject.name}, vLLM {engine.version} ({engine.runner}) reads "
            f"{layout}, draftlab batch {batch}, {len(ours)} prompts, {tokens:,} tokens; "
            "drafts / accepted / accepted_at\n"
            f"  draftlab {figures(total(ours))}  AL {total(ours).acceptance_length:.4f}\n"
            f"  vLLM     {figures(total(theirs))}  AL {total(theirs).acceptance_length:.4f}\n"
            f"  {'EQUAL' if fault is None else 'DIFFERENT at ' + fault}",
            flush=True,
        )
        yield fault is None


def compare_sampled(
    bench: Bench, engine: VllmEngine, temperature: float, probabilities: bool, level: float
) -> bool:
    """Compare one kind of drafts at a temperature; return whether the interval holds 0."""
    ours = bench.ours(temperature, BATCHES[-1], probabilities=probabilities)
    theirs = list(engine.generate(bench.requests(temperature)))
    shown = []
    for side in (ours, theirs):
        low, high = acceptance_interval([g.counters for g in side]) or (0.0, 0.0)
        shown.append(f"{total(side).acceptance_length:.3f} [{low:.3f}, {high:.3f}]")
    difference, (low, high) = acceptance_difference(ours, theirs, level)
    shown.append(f"{difference:+.3f} [{low:+.3f}, {high:+.3f}] at {level:.2%}")
    drafts = "sampled, with probabilities" if probabilities else "argmax, without probabilities"
    holds = low <= 0 <= high
    print(
        f"T={temperature:g} K={bench.k} {bench.subject.name}, drafts {drafts}, {len(ours)} prompts"
        f"\n  AL draftlab {shown[0]}, vLLM {shown[1]}, difference {shown[2]}: "
        f"holds 0: {'yes' if holds else 'no'}",
        flush=True,
    )
    return holds


def compare_one(bench: Bench) -> Iterator[bool]:
    """Compare a head in vLLM's own layout at T = 0; yield whether all is equal."""
    mine = {batch: bench.ours(0.0, batch) for batch in BATCHES[-1:]}
    with tempfile.TemporaryDirectory() as place:
        bench.subject.export(Path(place) / "vllm", bench.k, "vllm")
        with bench.theirs(Path(place) / "vllm") as engine:
            yield from compare_greedy(bench, engine, "vllm", mine)


def compare_drafts(bench: Bench) -> bool:
    """Compare every draft token at T = 0; return whether all are equal."""
    ours = our_drafts(bench)
    with tempfile.TemporaryDirectory() as place:
        info, theirs = their_drafts(bench, Path(place))
    fault = first_draft_difference(ours, theirs)
    verified = {tuple(d) for g, drafts in ours for d in drafts[: g.counters.drafts]}
    whole = total([g for g, _ in ours])
    print(
        f"{bench.subject.name}, vLLM {info['version']} ({info['runner']}), K={bench.k}: "
        f"{len(ours)} prompts, {whole.drafts} steps with {len(verified)} different blocks of "
        f"drafts, {whole.accepted} accepted: "
        f"{'EQUAL' if fault is None else 'DIFFERENT at ' + fault}",
        flush=True,
    )
    return fault is None


def compare(bench: Bench, temperatures: Sequence[float]) -> Iterator[bool]:
    """Compare everything, with one start of vLLM per layout and kind of drafts.

    Yields:
        Whether each comparison has passed.
    """
    family = bench.subject.head.config.family
    program = (
        "speculators"
        if isinstance(get_family(family).layouts().get("speculators"), Layout)
        else "vllm"
    )
    if program != "vllm":
        yield from compare_one(bench)
    level = 1 - 0.05 / max(2 * len(temperatures), 1)
    mine = {batch: bench.ours(0.0, batch) for batch in BATCHES}
    with tempfile.TemporaryDirectory() as place:
        layout = Path(place) / program
        bench.subject.export(layout, bench.k, program)
        with bench.theirs(layout) as engine:
            yield from compare_greedy(bench, engine, program, mine)
            for t in temperatures:
                yield compare_sampled(bench, engine, t, False, level)
        with bench.theirs(bench.subject.folder) as engine:
            yield from compare_greedy(bench, engine, "native", mine)
        if temperatures:
            with bench.theirs(layout, probabilities=True) as engine:
                for t in temperatures:
                    yield compare_sampled(bench, engine, t, True, level)


def run(options: argparse.Namespace) -> int:
    """Compare; return the exit status."""
    python = prepare("vllm")
    if python is None:
        return SKIPPED
    status = EQUAL
    with tempfile.TemporaryDirectory() as place:
        for subject in chosen_subjects(options, Path(place), grown=True):
            k = options.k
            if options.random is not None and subject.head.family.freezes_lm_head:
                k = min(k, subject.head.config.k_trained)  # the slots of a block
            bench = Bench(subject, python, k, options.max_new_tokens, options.seed)
            if options.random is not None:
                equal = compare_drafts(bench)
            else:
                equal = all(list(compare(bench, options.temps)))
            status = status if equal else DIFFERENT
    return status


def temperatures(text: str) -> list[float]:
    """Parse "0.7,1.5"; T = 0 is always compared."""
    values = [float(part) for part in text.split(",") if part]
    if any(not 0 < t < float("inf") for t in values):
        raise argparse.ArgumentTypeError(f"expected temperatures above 0, found {text}")
    return values


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    subject_options(parser, prompts=64, new_tokens=128)
    parser.add_argument(
        "--temps",
        type=temperatures,
        default=[0.7, 1.5],
        metavar="T,T,…",
        help='above 0, beside T = 0; default 0.7,1.5; "" compares at T = 0 only',
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    return run_program(run, parser)


if __name__ == "__main__":
    sys.exit(main())
