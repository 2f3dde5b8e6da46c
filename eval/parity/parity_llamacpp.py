"""Compare tokens and counters of draftlab and a real llama.cpp server, in float32 at T = 0.

    .venv/bin/python eval/parity/parity_llamacpp.py [--head FOLDER|reference] [--k 4] [--prompts 16]

The head is exported with `--to llamacpp`, llama.cpp's own converter converts target and head, and
its server decodes the same token ids. Tokens and counters must be equal. `clipped` applies to
draftlab's steps what llama.cpp does at the end of a generation: it drafts no more than the tokens
still to come, less one (`tools/server/server-context.cpp`, `get_n_draft_max`), and it accepts
nothing from a drafted stop token on. vLLM and draftlab draft K, count what was accepted, and
discard tokens after the end.

--quantized KIND adds a row with quantised target and head (Q4_K_M), and with --target FILE.gguf
that file is served. llama.cpp then computes with the quantised weights, draftlab with the numbers
that they stand for: another model, so acceptance is only reported, and must be above 0. The exit
status is that of parity_vllm.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import (
    DIFFERENT,
    EQUAL,
    SKIPPED,
    Subject,
    decoded,
    figures,
    prepare,
    run_program,
    subject_options,
)
from llamacpp_server import Answer, LlamaCpp, Server, serving
from random_heads import chosen_subjects

from draftlab.engine.counters import Counters
from draftlab.engine.drafter import new_drafter
from draftlab.engine.sampling import Generation
from draftlab.errors import UserError
from draftlab.servers.vllm_engine import required_positions


@dataclass(frozen=True)
class Work:
    """The comparison of one head.

    Attributes:
        gguf: the target's own file; None: the target is converted.
    """

    subject: Subject
    llama: LlamaCpp
    k: int
    max_new_tokens: int
    place: Path
    gguf: Path | None = None

    def ours(self) -> list[Generation]:
        """Decode with draftlab's engine."""
        requests = self.subject.requests(self.max_new_tokens)
        longest = required_positions(requests, self.k, self.subject.target.max_length)
        drafter = new_drafter(self.subject.head, self.k)
        return decoded(self.subject.target, requests, drafter, batch=8, max_length=longest)

    @contextmanager
    def served(self, quantized: str | None) -> Iterator[Server]:
        """Serve target and head with llama.cpp, converted and perhaps quantised."""
        export = self.place / "export"
        self.subject.export(export, self.k, "llamacpp")
        folder = self.subject.target.folder
        target = self.gguf or self.place.parent / f"{self.subject.target.fingerprint}.gguf"
        if not target.exists():  # the same for all heads
            self.llama.convert_target(folder, target)
        head = self.llama.convert_head(export, folder)
        if quantized:
            target = self.llama.quantize(target, self.place / "target.q.gguf", quantized)
            head = self.llama.quantize(head, self.place / "head.q.gguf", quantized)
        longest = max(len(ids) for _, ids in self.subject.prompts) + self.max_new_tokens
        length = longest + self.k + 8  # room for all drafts, so that only the end clips them
        method = self.subject.head.family.vllm_method
        with serving(self.llama, target, head, method, k=self.k, max_length=length) as server:
            yield server

    def theirs(self, server: Server) -> list[Answer]:
        """Decode with llama.cpp."""
        return [server.complete(ids, self.max_new_tokens) for _, ids in self.subject.prompts]


def clipped(generation: Generation, k: int, max_new_tokens: int) -> Counters:
    """Return counters of a generation's steps by llama.cpp's two rules."""
    counters, emitted = Counters(k), 1  # the prompt gives the first token
    for _, accepted in generation.steps:
        drafted = min(k, max_new_tokens - emitted - 1)
        counted = min(accepted, drafted)
        if generation.finish == "stop":
            # A drafted stop token ends acceptance and does not count, unless it is the last draft
            # (`common_sampler_sample_and_accept_n`).
            stop = len(generation.token_ids) - 1 - emitted
            if stop < counted and stop + 1 < drafted:
                counted = stop
        if drafted > 0:
            counters.add_step(drafted, counted)
        emitted += max(counted, 0) + 1
        if emitted >= max_new_tokens:
            break
    return counters


def first_difference(
    ours: Sequence[Generation],
    theirs: Sequence[Answer],
    expected: Sequence[Counters],
    stops: frozenset[int],
) -> str | None:
    """Return the first difference (prompt, position, both values); None if all is equal."""
    for mine, other, counters in zip(ours, theirs, expected, strict=True):
        tokens = [_without_stop(t, stops) for t in (mine.token_ids, other.token_ids)]
        for at, (a, b) in enumerate(zip(*tokens)):  # noqa: B905 (lengths are compared next)
            if a != b:
                return f"prompt {mine.id}, token {at}: draftlab {a}, llama.cpp {b}"
        a, b = map(len, tokens)
        if a != b:
            return f"prompt {mine.id}: draftlab {a} tokens, llama.cpp {b}"
        if (mine.finish == "stop") != other.stopped:
            return f"prompt {mine.id}: draftlab ends by {mine.finish}, llama.cpp does not"
        for name in ("draft_tokens", "accepted"):
            a, b = getattr(counters, name), getattr(other, name)
            if a != b:
                return f"prompt {mine.id}, {name}: draftlab {a}, llama.cpp {b}"
    return None


def _without_stop(tokens: Sequence[int], stops: frozenset[int]) -> tuple[int, ...]:
    return tuple(tokens[:-1] if tokens and tokens[-1] in stops else tokens)


def compare(work: Work, quantized: str | None = None) -> bool:
    """Print a comparison; return whether all is equal (quantised: whether drafts pass)."""
    ours = work.ours()
    with work.served(quantized) as server:
        theirs = work.theirs(server)
        drafts, accepted_at = server.counted(work.k)
    expected = [clipped(g, work.k, work.max_new_tokens) for g in ours]
    total = sum(expected, Counters(work.k))
    accepted = sum(a.accepted for a in theirs)
    mine, other = figures(total), f"{drafts:,} / {accepted:,} / {accepted_at}"
    weights = quantized or (work.gguf.name if work.gguf else "float32")
    if weights != "float32":
        fault = None if accepted > 0 else "no draft was accepted"
        lengths = f"AL {total.acceptance_length:.2f} and {1 + accepted / max(drafts, 1):.2f}"
        verdict = f"(another model) {lengths}"
    else:
        fault = first_difference(ours, theirs, expected, work.subject.stops)
        if fault is None and list(total.accepted_at) != accepted_at:
            fault = f"accepted_at: draftlab {list(total.accepted_at)}, llama.cpp {accepted_at}"
        verdict = "EQUAL"
    tokens = sum(len(g.token_ids) for g in ours)
    print(
        f"{work.llama.version()}, K={work.k} {work.subject.name}, {weights}, {len(ours)} prompts, "
        f"{tokens:,} tokens; drafts / accepted / accepted_at\n  draftlab  {mine}\n"
        f"  llama.cpp {other}\n  {verdict if fault is None else 'DIFFERENT: ' + fault}",
        flush=True,
    )
    return fault is None


def exportable(subjects: Iterator[Subject], place: Path, k: int) -> Iterator[Subject]:
    """Yield the subjects that llama.cpp can load; print why it cannot load others."""
    for subject in subjects:
        try:
            subject.export(place, k, "llamacpp")
        except UserError as error:
            print(f"left out: {subject.name}: {error.what}", flush=True)
        else:
            yield subject


def run(options: argparse.Namespace) -> int:
    """Compare; return the exit status."""
    python = prepare("llamacpp")
    if python is None:
        return SKIPPED
    llama, status = LlamaCpp(python), EQUAL
    with tempfile.TemporaryDirectory() as folder:
        subjects = chosen_subjects(options, Path(folder), grown=True)
        if options.random is not None:
            subjects = exportable(subjects, Path(folder) / "export", options.k)
        for number, subject in enumerate(subjects):
            for kind in dict.fromkeys([None, options.quantized]):
                place = Path(folder) / f"work-{number}-{kind}"
                place.mkdir()
                gguf = options.target and Path(options.target)
                gguf = gguf if gguf and gguf.suffix == ".gguf" else None
                work = Work(subject, llama, options.k, options.max_new_tokens, place, gguf)
                status = status if compare(work, kind) else DIFFERENT
    return status


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    subject_options(parser, prompts=16, new_tokens=128)
    parser.add_argument("--quantized", metavar="KIND", help="a second row, such as Q4_K_M")
    return run_program(run, parser)


if __name__ == "__main__":
    sys.exit(main())
