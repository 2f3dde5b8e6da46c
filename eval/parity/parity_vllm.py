"""Tokens and counters of draftlab's engine against a real vLLM on the same prompts, in float32.

    .venv/bin/python eval/parity/parity_vllm.py [--head FOLDER|reference] [--k 4] [--temps 0.8]

At T = 0 everything must be equal: tokens, finish reasons, the accepted drafts of every verify step,
counters of every prompt and their totals. draftlab decodes at batch 1 and at batch 8; vLLM serves
the float32 export in speculators layout and, unexported, the head folder itself (vLLM-native).
At --temps above 0 the two draw from different random numbers, so acceptance lengths are compared:
the 95 % bootstrap interval of their difference, over prompts, must hold 0.

Rows keep room for the last drafts: near its length limit vLLM V1 verifies zeros in place of drafts,
and counts them (docs/results/parity.md).

Exit status: 0 everything equal; 1 a difference (the first one is printed); 2 a request that cannot
be run; 77 skipped, because the vLLM environment cannot be installed here (the reason is printed).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import reduce
from importlib import metadata
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftlab import pipeline
from draftlab.base import Monitor, UserError, write_json, write_text
from draftlab.chat.render import stop_ids
from draftlab.decode.drafter import ChainDrafter
from draftlab.decode.engine import Engine
from draftlab.decode.evaluate import Suite
from draftlab.decode.sampling import Request, Sampling
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.folder import load_head
from draftlab.results import Counters, acceptance_interval, bootstrap_interval
from draftlab.target.model import Target, load_target, load_tokenizer

HERE = Path(__file__).resolve().parent
EQUAL, DIFFERENT, UNUSABLE, SKIPPED = 0, 1, 2, 77
BATCHES = (1, 8)
TITLE = "# Parity with other programs"
EXACT = ("vLLM, T = 0: equal tokens and counters", (
    "date", "head", "vLLM reads", "versions", "K", "prompts", "tokens", "draftlab batch",
    "drafts / accepted / accepted_at: draftlab", "the same: vLLM", "equal",
))  # fmt: skip
SAMPLED = ("vLLM, T > 0: equal acceptance lengths", (
    "date", "head", "drafts", "T", "versions", "K", "prompts", "AL draftlab [95 %]",
    "AL vLLM [95 %]", "difference [95 %]", "holds 0",
))  # fmt: skip


@dataclass(frozen=True)
class Decoded:
    """One prompt's decoding. `steps`: accepted drafts of each step that verified any, in order."""

    id: str
    tokens: tuple[int, ...]
    finish: str
    steps: tuple[int, ...]
    counters: Counters

    @property
    def counted(self) -> dict[str, Any]:
        """The counters vLLM has too."""
        c = self.counters
        return {
            "drafts": c.drafts,
            "draft_tokens": c.draft_tokens,
            "accepted": c.accepted,
            "accepted_at": list(c.accepted_at),
        }


def total(decoded: Sequence[Decoded]) -> Counters:
    """Counters of all prompts."""
    return reduce(add, (d.counters for d in decoded))


def first_difference(ours: Sequence[Decoded], theirs: Sequence[Decoded]) -> str | None:
    """The first difference (prompt, position, both values), or None when all is equal."""
    if [d.id for d in ours] != [d.id for d in theirs]:
        return f"prompts: draftlab has {len(ours)}, vLLM {len(theirs)}, or in another order"
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("tokens", "steps"):
            a, b = getattr(mine, name), getattr(other, name)
            if a != b:
                at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905
                values = [str(side[at]) if at < len(side) else "nothing" for side in (a, b)]
                what = "token" if name == "tokens" else "accepted drafts of verify step"
                return f"prompt {mine.id}, {what} {at}: draftlab {values[0]}, vLLM {values[1]}"
        if mine.finish != other.finish:
            return f"prompt {mine.id}, finish: draftlab {mine.finish}, vLLM {other.finish}"
        for key, value in mine.counted.items():
            if value != other.counted[key]:
                return f"prompt {mine.id}, {key}: draftlab {value}, vLLM {other.counted[key]}"
    return None


def read_answer(answer: dict[str, Any], ids: Sequence[str], k: int) -> list[Decoded]:
    """vllm_client's answer, prompt by prompt.

    Raises:
        ValueError: when its totals are not the sums over its prompts.
    """
    decoded = []
    for i, tokens, finish, per in zip(
        ids, answer["outputs"], answer["finish_reasons"], answer["per_prompt"], strict=True
    ):
        counted = [per[key] for key in ("drafts", "draft_tokens", "accepted", "accepted_at")]
        decoded.append(
            Decoded(i, tuple(tokens), finish, tuple(per["steps"]), Counters(k, *counted))
        )
    for key, value in answer["counters"].items():
        if (found := getattr(total(decoded), key)) != value:
            raise ValueError(f"vLLM's total of {key} is {value}, its prompts add up to {found}")
    return decoded


def acceptance_difference(
    ours: Sequence[Decoded], theirs: Sequence[Decoded]
) -> tuple[float, tuple[float, float]]:
    """AL of ours minus AL of theirs, and its 95 % interval (bootstrap over shared prompts)."""
    pairs = [
        np.array([[d.counters.accepted, d.counters.drafts] for d in side], dtype=float)
        for side in (ours, theirs)
    ]

    def difference(index: np.ndarray) -> float:
        (a, n), (b, m) = (side[index].sum(0) for side in pairs)
        return a / n - b / m if n and m else float("nan")

    return difference(np.arange(len(ours))), bootstrap_interval(difference, len(ours))


def add_row(page: Path, table: tuple[str, tuple[str, ...]], cells: Sequence[str]) -> None:
    """Adds a row to a table of a Markdown page; what is missing of page and table is made."""
    title, columns = table
    lines = page.read_text().splitlines() if page.exists() else [TITLE]
    heading, row = f"## {title}", "| " + " | ".join(cells) + " |"
    if heading not in lines:
        head = "| " + " | ".join(columns) + " |"
        lines += ["", heading, "", head, "|" + "---|" * len(columns)]
    at = lines.index(heading)
    while at < len(lines) and not lines[at].startswith("|"):
        at += 1
    while at < len(lines) and lines[at].startswith("|"):
        at += 1
    lines.insert(at, row)
    write_text(page, "\n".join(lines) + "\n")


def prepare(name: str) -> Path | None:
    """The interpreter of a parity environment, installed when it is not there; None: impossible."""
    script = HERE / f"setup_{name}.sh"
    done = subprocess.run(["bash", str(script)], stderr=subprocess.PIPE, text=True)
    lines = done.stderr.strip().splitlines()
    if done.returncode:
        print(f"SKIPPED: the {name} environment cannot be installed here:", *lines[-6:], sep="\n  ")
        return None
    folder = next(
        line.split(": ", 1)[1]
        for line in reversed(lines)
        if line.startswith(("ready: ", "built: "))
    )
    return Path(folder.rsplit(" (", 1)[0]) / "bin" / "python"


def client(python: Path, program: str, request: dict[str, Any], answer: Path) -> None:
    """Runs a client program in its own environment.

    Raises:
        UserError: with the end of its output, when it fails.
    """
    file = answer.with_suffix(".request.json")
    write_json(file, request)
    command = [str(python), str(HERE / program), str(file), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{program} failed:\n{(done.stdout + done.stderr)[-3000:]}")


@dataclass
class Bench:
    """One head, its target and prompts, decoded by either side."""

    target: Target
    head: Eagle3Head
    suite: Suite
    stops: frozenset[int]
    k: int
    max_new_tokens: int
    seed: int = 0

    @property
    def max_length(self) -> int:
        """Positions a row may take, on both sides: 2 K + 1 more than an answer can reach."""
        # vLLM drafts while the length of a step, drafts included, plus K fits.
        longest = max(len(ids) for _, ids in self.suite.prompts)
        return min(longest + self.max_new_tokens + 2 * self.k + 1, self.target.max_length)

    def ours(self, temperature: float, batch: int, *, probabilities: bool = False) -> list[Decoded]:
        """Decoded by draftlab's engine."""
        sampling = Sampling(temperature, seed=self.seed)
        requests = [
            Request(i, ids, self.max_new_tokens, sampling, self.stops)
            for i, ids in self.suite.prompts
        ]
        drafter = ChainDrafter(self.head, self.k, draft_probs=probabilities)
        engine = Engine(self.target, drafter, batch=batch, max_length=self.max_length)
        done = {g.id: g for g in engine.generate(requests)}
        return [
            Decoded(
                i,
                (g := done[i]).token_ids,
                g.finish,
                tuple(accepted for drafted, accepted in g.steps if drafted),
                g.counters,
            )
            for i, _ in self.suite.prompts
        ]

    def theirs(
        self, python: Path, folder: Path, temperature: float, *, probabilities: bool = False
    ) -> tuple[list[Decoded], dict[str, Any]]:
        """Decoded by vLLM, one request at a time, with the head in `folder`; and its answer."""
        request = {
            "target": str(self.target.folder.resolve()),
            "draft": str(folder.resolve()),
            "prompts": [list(ids) for _, ids in self.suite.prompts],
            "k": self.k,
            "temperature": temperature,
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": True,  # stop_token_ids says it all, the same on both sides
            "stop_token_ids": sorted(self.stops),
            "max_model_len": self.max_length,
            "draft_sample_method": "probabilistic" if probabilities else "greedy",
        }
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "answer.json"
            client(python, "vllm_client.py", request, file)
            answer = json.loads(file.read_text())
        return read_answer(answer, [i for i, _ in self.suite.prompts], self.k), answer


def _figures(decoded: Sequence[Decoded]) -> str:
    c = total(decoded)
    return f"{c.drafts:,} / {c.accepted:,} / {list(c.accepted_at)}"


def versions() -> str:
    """draftlab's side."""
    return ", ".join(f"{p} {metadata.version(p)}" for p in ("draftlab", "torch", "transformers"))


def _versions(answer: dict[str, Any]) -> str:
    engine = f"vLLM {answer['engine_version']} (runner {answer['runner']}, CPU)"
    return f"{versions()}; {engine}"


def compare_greedy(bench: Bench, python: Path, folders: dict[str, Path], name: str) -> list[list]:
    """Every layout against every batch size at T = 0; rows of the table EXACT."""
    mine = {batch: bench.ours(0.0, batch) for batch in BATCHES}
    rows = []
    for layout, folder in folders.items():
        theirs, answer = bench.theirs(python, folder, 0.0)
        for batch, ours in mine.items():
            fault = first_difference(ours, theirs)
            tokens = sum(len(d.tokens) for d in ours)
            print(
                f"T=0 K={bench.k} {name}, vLLM reads {layout}, draftlab batch {batch}, "
                f"{len(ours)} prompts, {tokens:,} tokens; drafts / accepted / accepted_at\n"
                f"  draftlab {_figures(ours)}  AL {total(ours).acceptance_length:.4f}\n"
                f"  vLLM     {_figures(theirs)}  AL {total(theirs).acceptance_length:.4f}\n"
                f"  {'EQUAL' if fault is None else 'DIFFERENT at ' + fault}",
                flush=True,
            )
            rows.append(
                [
                    date.today().isoformat(),
                    name,
                    layout,
                    _versions(answer),
                    str(bench.k),
                    str(len(ours)),
                    f"{tokens:,}",
                    str(batch),
                    _figures(ours),
                    _figures(theirs),
                    "yes" if fault is None else f"no: {fault}",
                ]
            )
    return rows


def compare_sampled(
    bench: Bench, python: Path, folder: Path, name: str, temperature: float
) -> list[list]:
    """Drafts without and with probabilities at a temperature; rows of the table SAMPLED."""
    rows = []
    for probabilities in (False, True):
        ours = bench.ours(temperature, BATCHES[-1], probabilities=probabilities)
        theirs, answer = bench.theirs(python, folder, temperature, probabilities=probabilities)
        shown = []
        for side in (ours, theirs):
            low, high = acceptance_interval([d.counters for d in side]) or (0.0, 0.0)
            shown.append(f"{total(side).acceptance_length:.3f} [{low:.3f}, {high:.3f}]")
        difference, (low, high) = acceptance_difference(ours, theirs)
        shown.append(f"{difference:+.3f} [{low:+.3f}, {high:+.3f}]")
        drafts = "sampled, with probabilities" if probabilities else "argmax, without probabilities"
        holds = "yes" if low <= 0 <= high else "no"
        print(
            f"T={temperature:g} K={bench.k} {name}, drafts {drafts}, {len(ours)} prompts\n"
            f"  AL draftlab {shown[0]}, vLLM {shown[1]}, difference {shown[2]}: holds 0: {holds}",
            *(f"  corrected in vLLM: {sentence}" for sentence in answer["corrections"]),
            sep="\n",
            flush=True,
        )
        rows.append(
            [
                date.today().isoformat(),
                name,
                drafts,
                f"{temperature:g}",
                _versions(answer),
                str(bench.k),
                str(len(ours)),
                *shown,
                holds,
            ]
        )
    return rows


def choose(head: str | None, target: str | None) -> pipeline.Subject:
    """The head asked for; by default the latest run's, else the reference head."""
    if head is None:
        try:
            return pipeline.eval_subject(None, None, target)
        except UserError as error:
            print(f"{error}\nno run with a head, so: the reference head", file=sys.stderr)
            head = pipeline.REFERENCE
    return pipeline.eval_subject(None, head, target)


def run(options: argparse.Namespace) -> int:
    """Compares; returns the exit status."""
    python = prepare("vllm")
    if python is None:
        return SKIPPED
    subject, monitor = choose(options.head, options.target), Monitor()
    knobs = subject.target.model_copy(update={"dtype": "float32", "device": "cpu"})
    target, tokenizer = load_target(knobs), load_tokenizer(knobs)
    whole = pipeline.load_suite("embedded:heldout", tokenizer, monitor)
    embeddings = target.parts.embeddings.to("cpu", torch.float32)
    bench = Bench(
        target,
        load_head(subject.head, embeddings=embeddings, dtype=torch.float32, device="cpu"),
        Suite(whole.name, whole.template_sha256, whole.prompts[: options.prompts]),
        stop_ids(tokenizer, target.folder),
        options.k,
        options.max_new_tokens,
        options.seed,
    )
    name = subject.head.parent.name if subject.head.name == "head" else subject.head.name
    with tempfile.TemporaryDirectory() as place:
        layout = Path(place) / "speculators"
        pipeline.export(
            subject.head, knobs, layout, "speculators", k=bench.k, dtype="float32", monitor=monitor
        )
        folders = {"speculators": layout, "native": subject.head}
        tables = [(EXACT, compare_greedy(bench, python, folders, name))]
        for temperature in options.temps:
            tables.append((SAMPLED, compare_sampled(bench, python, layout, name, temperature)))
    if options.write:
        for table, rows in tables:
            for row in rows:
                add_row(options.write, table, row)
    return EQUAL if all(row[-1] == "yes" for _, rows in tables for row in rows) else DIFFERENT


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head", help="head folder or 'reference'; default: the latest run's")
    parser.add_argument("--target", help="its target; default: the run's, or the embedded one")
    parser.add_argument("--prompts", type=int, default=20, help="first held-out prompts")
    parser.add_argument("--k", type=int, default=4, help="drafts a step")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temps", type=float, nargs="*", default=[], help="above 0, beside T = 0")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--write", type=Path, help="Markdown page that gets the result's rows")
    try:
        return run(parser.parse_args())
    except UserError as error:
        print(f"parity_vllm: {error}", file=sys.stderr)
        return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
