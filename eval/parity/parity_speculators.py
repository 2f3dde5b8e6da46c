"""Compare a head's training outputs in draftlab and in the speculators library, in float64.

    .venv/bin/python eval/parity/parity_speculators.py [--head FOLDER|reference] [--prompts 6]

The target's greedy answers are recorded in float32 and packed into one row. Steps 0 .. L − 1 of
training-time test, or depths 0 .. L − 1 of a parallel head, run in the objective that trains the
family and in the library's own forward on the exported head. The output of fc, what is fed back
(the output before the last norm, or after it with norm_output) and the logits are compared at every
row that both compute; of block heads the input of lm_head, the logits and the confidence. Both
compute in float64. The largest difference of each must stay below 1e-12 of the largest value, and
each mistake of `block_mistakes.py` must make a difference. There are two masks: with `all` every
token has loss, so every row is compared; with `answers` spans are real, which shows that skipped
rows do not matter. `--random` compares random heads of all shapes that the layout can hold, for the
target and for a random Qwen3 with tied embeddings, with the first mask.

The exit status is that of parity_vllm.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from block_mistakes import Mistake, mistakes
from common import (
    DIFFERENT,
    EQUAL,
    SKIPPED,
    Subject,
    client,
    prepare,
    run_program,
    subject_options,
)
from random_heads import chosen_subjects
from speculators_library import answer, library_rows, loading_fault, request
from torch import Tensor

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request
from draftlab.heads.block import BlockHead
from draftlab.heads.head import DraftHead
from draftlab.heads.peagle import PeagleHead
from draftlab.store.store import Record
from draftlab.target_model.model import Target
from draftlab.train.batch.packing import Batch, pack

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Step:
    """Values of a step at the compared rows: what is fed back [n, H], and logits [n, D].

    A block head feeds nothing back: `output` is the input of its lm_head. `confidence` is [n, 1].
    """

    rows: Tensor
    output: Tensor
    logits: Tensor
    confidence: Tensor | None = None


@dataclass(frozen=True)
class Deviation:
    """Largest absolute difference and largest absolute value (the library's) of a quantity."""

    difference: float
    scale: float

    @property
    def relative(self) -> float:
        """Difference over scale; infinite for NaN, and for rows of zeros that differ."""
        ratio = self.difference / self.scale if self.scale else float(self.difference > 0) * 1e30
        return ratio if ratio == ratio else float("inf")


def deviation(ours: Tensor, theirs: Tensor) -> Deviation:
    """Return the deviation of two tensors of one shape."""
    if ours.shape != theirs.shape or not ours.numel():
        raise ValueError(f"expected equal shapes with rows, found {ours.shape}, {theirs.shape}")
    return Deviation(float((ours - theirs).abs().max()), float(theirs.abs().max()))


@torch.inference_mode()
def ours(head: DraftHead, batch: Batch) -> list[Step]:
    """Return every step or depth; `rows` are positions t of the packed row."""
    tokens, steps = batch.tokens.flatten(), []
    for k, step in enumerate(head.family.objective().forward(head, batch)):
        rows, output, previous = step.teacher_index - 1 - k, step.output, tokens[step.teacher_index]
        confidence = None
        if isinstance(head, BlockHead):
            # The library cannot run blocks that reach beyond the packed row.
            inside = rows + 1 + head.config.block_size <= len(tokens)
            rows, output, previous = rows[inside], output[inside], previous[inside]
            if head.confidence_head is not None:
                factors = head.markov_factors(previous)
                confidence = head.confidence_logits(head.normed(output), factors)[:, None]
        logits = head.logits(output, previous)
        if isinstance(head, BlockHead):
            output = head.normed(output)
        steps.append(Step(rows, output, logits, confidence))
    return steps


@torch.inference_mode()
def record_answers(
    target: Target,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    stops: frozenset[int],
    boundaries: tuple[int, ...],
    max_new_tokens: int,
) -> list[Record]:
    """Record the target's greedy answers without rounding."""
    longest = max(len(ids) for _, ids in prompts) + max_new_tokens
    engine = Engine(target, batch=len(prompts), max_length=min(longest + 1, target.max_length))
    requests = [Request(i, ids, max_new_tokens, stop_ids=stops) for i, ids in prompts]
    answers = {g.id: g.token_ids for g in engine.generate(requests)}
    records = []
    for i, ids in prompts:
        tokens = torch.tensor([*ids, *answers[i]])
        states = target.states(tokens[None], boundaries)
        logits = target.logits(states.last[0])
        spans = (torch.arange(len(tokens)) >= len(ids)).long()
        records.append(
            Record(
                i,
                tokens,
                spans,
                states.features[0].clone(),
                states.last[0].clone(),
                logits.logsumexp(-1),
                logits.argmax(-1),
                0.0,
            )
        )
    return records


def compare(
    steps: Sequence[Step],
    library: dict[str, Tensor],
    documents: Tensor,
    tolerance: float,
    *,
    blocks: bool = False,
) -> tuple[dict[str, Deviation], float, str | None]:
    """Return the worst deviations of outputs and logits over all steps, and the first fault.

    Args:
        blocks: whether the library's rows are the positions t, as of block heads.

    Returns:
        Deviations by name, share of rows with the same argmax, and the fault or None.
    """
    worst: dict[str, Deviation] = {}
    fault, same, count = None, 0, 0
    for k, step in enumerate(steps):
        rows = step.rows if blocks else library_rows(step.rows, documents)
        names = ("output", "logits") + (() if step.confidence is None else ("confidence",))
        for name in names:
            mine, other = getattr(step, name), library[name][k, rows].view(len(rows), -1)
            found = deviation(mine, other)
            if name not in worst or found.relative > worst[name].relative:
                worst[name] = found
            if fault is None and not found.relative <= tolerance:
                at = int((mine - other).abs().amax(-1).nan_to_num(torch.inf).argmax())
                fault = (
                    f"step {k}, {name}, position {int(step.rows[at])} of the packed row "
                    f"(conversation {int(documents[step.rows[at]])}): off by "
                    f"{found.difference:.3g}, largest value {found.scale:.3g}"
                )
        same += int((step.logits.argmax(-1) == library["draft_tokens"][k, rows]).sum())
        count += len(rows)
    return worst, same / count, fault


@dataclass(frozen=True)
class Case:
    """One head under one mask.

    Attributes:
        records: the target's answers, with the mask's spans.
        batch: the same, packed.
        attention: the library's.
        place: the case's own folder.
    """

    subject: Subject
    mask: str
    records: Sequence[Record]
    batch: Batch
    num_steps: int
    attention: str
    place: Path

    @property
    def answer(self) -> Path:
        """The file for the library's answer."""
        return self.place / "answer.safetensors"


def new_case(
    subject: Subject,
    mask: str,
    answered: Sequence[Record],
    num_steps: int,
    place: Path,
) -> Case:
    """Return a case of a target's answers."""
    records = [replace(r, spans=torch.ones_like(r.spans)) if mask == "all" else r for r in answered]
    batch = pack([records], sum(len(r.tokens) for r in records), num_steps)
    documents, attention = batch.documents[0], "flex"
    if isinstance(subject.head, BlockHead):  # the library's positions go on over all documents
        positions = torch.arange(len(documents))[None]
        attention = "sdpa"  # flex compiles the masks of blocks
    elif subject.head.config.family == "peagle":  # the library counts rows on over all documents
        positions = library_rows(torch.arange(len(documents)), documents)[None]
    else:  # the library gives a feature the position of the token after it
        positions = batch.positions + 1
    # Only differences of positions matter, but float32 rounds the angles of each differently.
    batch = replace(batch, features=batch.features.double(), positions=positions)
    place.mkdir()
    return Case(subject, mask, records, batch, num_steps, attention, place)


@torch.inference_mode()
def unnoticed(case: Case, head: BlockHead, library: dict[str, Tensor]) -> str | None:
    """Return a mistake that the comparison of a block head does not notice; None: there is none."""
    batch, target = case.batch, case.subject.target
    wrong: list[Mistake] = list(mistakes(head, batch))
    for shift in (-1, 1):
        ids = tuple(b + shift for b in head.config.boundaries)
        rows = [target.states(r.tokens[None], ids).features[0] for r in case.records]
        other = replace(batch, features=torch.cat(rows)[None].double())
        wrong.append((f"boundaries {shift:+}", head, other, nullcontext()))
    for name, wrong_head, wrong_batch, context in wrong:
        with context:
            steps = ours(wrong_head, wrong_batch)
        if compare(steps, library, batch.documents[0], 1e-6, blocks=True)[2] is None:
            return f"a mistake makes no difference: {name}"
    print(f"  noticed: {', '.join(name for name, *_ in wrong)}")
    return None


def compare_case(case: Case) -> bool:
    """Print the comparison after the library has answered; return whether all is equal."""
    head, name = case.subject.head, case.subject.name
    head.double()
    library, report = answer(case.answer, case.subject, case.num_steps)
    steps = ours(head, case.batch)
    blocks, documents = isinstance(head, BlockHead), case.batch.documents[0]
    worst, same, fault = compare(steps, library, documents, TOLERANCE, blocks=blocks)
    if isinstance(head, BlockHead):
        fault = fault or unnoticed(case, head, library)
    else:
        fused = torch.cat([head.project_features(r.features[:-1].double()) for r in case.records])
        if isinstance(head, PeagleHead):
            masked = head.mask_state().expand(len(library["fc"]) - len(fused), -1)
            fused = torch.cat([fused, masked])
        worst = {"fc": deviation(fused, library["fc"]), **worst}
        if not worst["fc"].relative <= TOLERANCE:
            fault = f"fc: off by {worst['fc'].difference:.3g}"
    fault = loading_fault(report) or fault
    counts = [len(step.rows) for step in steps]
    figures = ", ".join(f"{d.relative:.1e}" for d in worst.values())
    versions = f"speculators {report['engine_version']}, torch {report['torch_version']}"
    print(
        f"{name}, mask {case.mask}: {len(case.records)} conversations, {case.num_steps} steps with "
        f"{counts} rows; {versions} ({case.attention})\n"
        f"  largest difference / largest value: {figures} ({', '.join(worst)}); "
        f"largest logit {worst['logits'].scale:.2f}; argmax equal {same:.4%}\n"
        f"  {'EQUAL within ' + str(TOLERANCE) if fault is None else 'DIFFERENT: ' + fault}",
        flush=True,
    )
    return fault is None


def cases(options: argparse.Namespace, place: Path) -> Iterator[Case]:
    """Yield all requested cases; each target is recorded once for each choice of boundaries."""
    answers: dict[tuple[Path, tuple[int, ...]], list[Record]] = {}
    for number, each in enumerate(chosen_subjects(options, place)):
        boundaries = each.head.config.boundaries
        key = (each.target.folder, boundaries)
        if key not in answers:
            answers[key] = record_answers(
                each.target, each.prompts, each.stops, boundaries, options.max_new_tokens
            )
        num_steps = options.steps or each.head.config.k_trained
        if isinstance(each.head, BlockHead):
            num_steps = each.head.config.k_trained
        for mask in ("all",) if options.random is not None else ("all", "answers"):
            own = place / f"case-{number}-{mask}"
            yield new_case(each, mask, answers[key], num_steps, own)


def run(options: argparse.Namespace) -> int:
    """Compare; return the exit status."""
    python = prepare("speculators")
    if python is None:
        return SKIPPED
    status = EQUAL
    with tempfile.TemporaryDirectory() as place:
        requested = list(cases(options, Path(place)))
        requests = {
            c.answer: request(c.place, c.subject, c.batch, c.num_steps, c.attention)
            for c in requested
        }
        client(python, "speculators_client.py", requests)
        for case in requested:
            status = status if compare_case(case) else DIFFERENT
    return status


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    subject_options(parser, prompts=6)
    parser.add_argument("--steps", type=int, help="default: as many as the head was trained for")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    return run_program(run, parser)


if __name__ == "__main__":
    sys.exit(main())
