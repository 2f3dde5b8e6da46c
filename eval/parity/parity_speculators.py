"""A head's outputs in draftlab's training against the speculators library, in float32.

    .venv/bin/python eval/parity/parity_speculators.py [--head FOLDER|reference] [--prompts 6]

The target's own greedy answers are recorded in float32 and packed into one row, several
conversations side by side. Steps 0 .. L − 1 of training-time test, of a parallel head depths
0 .. L − 1, then run twice: here by the objective that trains the family, there by the library's own
forward on the exported head (speculators layout, loaded with its `from_pretrained`). Compared are
fc's output, the pre-norm output (what is fed back) and the logits, at every row both compute. The
largest difference of each must stay below 1e-5 of the largest value. Two masks: `all` (everything
carries loss, so every row is compared) and `answers` (real spans, so that rows left out by
compaction are proven not to matter). `--random` takes loud random heads of all shapes that the
layout holds in place of the head.

Exit status as of parity_vllm.py: 0 equal, 1 different, 2 unusable, 77 skipped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
from common import (
    DIFFERENT,
    EQUAL,
    SKIPPED,
    UNUSABLE,
    Subject,
    add_row,
    load_subject,
    prepare,
    subject_options,
    versions,
    with_random_head,
)
from speculators_library import library_rows, loading_fault, theirs
from torch import Tensor

from draftlab.base import UserError
from draftlab.data.packing import Batch, pack
from draftlab.data.store import Record
from draftlab.decode.engine import Engine
from draftlab.decode.sampling import Request
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.ptd import PtdHead
from draftlab.target.model import Target
from draftlab.train.families import OBJECTIVES

TOLERANCE = 1e-5
SHAPES = {
    f"random {family}, {layers} layer(s), {'qwen3' if qk_norm else 'llama'}": {
        "family": family,
        "num_layers": layers,
        "qk_norm": qk_norm,
    }
    for family, depths in (("eagle3", (1,)), ("ptd", (1, 2)))
    for layers in depths
    for qk_norm in (False, True)
}
"""What --random compares."""
PAGE = ("speculators, equal outputs of training's forward", (
    "date", "head", "mask", "versions", "steps", "rows of step 0 … last", "max abs(logits)",
    "largest difference / largest value: fc, pre-norm, logits", "argmax equal", "equal",
))  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One step's values at the rows compared: pre-norm outputs [n, H] and logits [n, D]."""

    rows: Tensor
    prenorm: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Deviation:
    """Largest absolute difference and largest absolute value (the library's) of one quantity."""

    difference: float
    scale: float

    @property
    def relative(self) -> float:
        """Difference over scale; infinite for NaN, and for rows of zeros that differ."""
        ratio = self.difference / self.scale if self.scale else float(self.difference > 0) * 1e30
        return ratio if ratio == ratio else float("inf")


def deviation(ours: Tensor, theirs: Tensor) -> Deviation:
    """Of two tensors of one shape."""
    if ours.shape != theirs.shape or not ours.numel():
        raise ValueError(f"expected equal shapes with rows, found {ours.shape}, {theirs.shape}")
    return Deviation(float((ours - theirs).abs().max()), float(theirs.abs().max()))


def ours(head: Eagle3Head, batch: Batch) -> list[Step]:
    """Every step, or depth; `rows` are positions t of the packed row."""
    taken: list[Tensor] = []
    handle = head.norm.register_forward_pre_hook(lambda _module, args: taken.append(args[0]))
    try:
        with torch.inference_mode():
            outputs = list(OBJECTIVES[head.config.family].outputs(head, batch))
    finally:
        handle.remove()
    return [
        Step(output.teacher - 1 - k, prenorm, output.logits)
        for k, (output, prenorm) in enumerate(zip(outputs, taken, strict=True))
    ]


@torch.inference_mode()
def record_answers(
    target: Target,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    stops: frozenset[int],
    boundaries: tuple[int, ...],
    max_new_tokens: int,
) -> list[Record]:
    """The target's greedy answers, recorded without rounding."""
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
    steps: Sequence[Step], library: dict[str, Tensor], documents: Tensor, tolerance: float
) -> tuple[dict[str, Deviation], float, str | None]:
    """Worst deviation of pre-norm outputs and logits over all steps, and the first fault.

    Returns:
        Deviations by name, share of rows with the same argmax, and the fault or None.
    """
    worst: dict[str, Deviation] = {}
    fault, same, count = None, 0, 0
    for k, step in enumerate(steps):
        rows = library_rows(step.rows, documents)
        for name in ("prenorm", "logits"):
            mine, other = getattr(step, name), library[name][k, rows]
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


def compare_head(
    subject: Subject,
    python: Path,
    answered: Sequence[Record],
    mask: str,
    options: argparse.Namespace,
) -> tuple[list[str], bool]:
    """One head under one mask: a row of the page, and whether all is equal."""
    head, name = subject.head, subject.name
    num_steps = options.steps or head.config.k_trained
    records = [replace(r, spans=torch.ones_like(r.spans)) if mask == "all" else r for r in answered]
    batch = pack([records], sum(len(r.tokens) for r in records), num_steps)
    documents = batch.documents[0]
    if head.config.family == "ptd":
        # The library counts rows on over all documents, so float32 rounds other angles than ours.
        rows = library_rows(torch.arange(len(documents)), documents)
        batch = replace(batch, positions=rows[None])
    with tempfile.TemporaryDirectory() as place:
        layout = Path(place) / "speculators"
        subject.export(layout)
        library, report = theirs(python, layout, subject, batch, num_steps, options.attention)
    steps = ours(head, batch)
    worst, same, fault = compare(steps, library, documents, TOLERANCE)
    fused = torch.cat([head.fuse(r.features[:-1]) for r in records])
    if isinstance(head, PtdHead):
        masked = head.mask_state().expand(len(library["fc"]) - len(fused), -1)
        fused = torch.cat([fused, masked])
    worst = {"fc": deviation(fused, library["fc"]), **worst}
    if not worst["fc"].relative <= TOLERANCE:
        fault = f"fc: off by {worst['fc'].difference:.3g}"
    fault = loading_fault(report) or fault
    counts = [len(step.rows) for step in steps]
    figures = ", ".join(f"{d.relative:.1e}" for d in worst.values())
    library_version = f"speculators {report['engine_version']} ({options.attention})"
    print(
        f"{name}, mask {mask}: {len(records)} conversations, {num_steps} steps with {counts} "
        f"rows; {library_version}\n"
        f"  largest difference / largest value: {figures} (fc, pre-norm, logits); "
        f"largest logit {worst['logits'].scale:.2f}; argmax equal {same:.4%}\n"
        f"  {'EQUAL within ' + str(TOLERANCE) if fault is None else 'DIFFERENT: ' + fault}",
        flush=True,
    )
    row = [
        date.today().isoformat(),
        name,
        mask,
        f"{versions()}; {library_version}, torch {report['torch_version']}",
        str(num_steps),
        f"{counts[0]:,} … {counts[-1]:,}",
        f"{worst['logits'].scale:.2f}",
        figures,
        f"{same:.2%}",
        f"no: {fault}" if fault else f"yes (within {TOLERANCE})",
    ]
    return row, fault is None


def run(options: argparse.Namespace) -> int:
    """Compares; returns the exit status."""
    python = prepare("speculators")
    if python is None:
        return SKIPPED
    subject = load_subject(options.head, options.target, options.prompts)
    answered = record_answers(
        subject.target,
        subject.prompts,
        subject.stops,
        subject.head.config.boundaries,
        options.max_new_tokens,
    )
    status = EQUAL
    with tempfile.TemporaryDirectory() as place:
        heads = [subject]
        if options.random:
            heads = [
                with_random_head(subject, Path(place) / str(number), name, **shape)
                for number, (name, shape) in enumerate(SHAPES.items())
            ]
        for each in heads:
            for mask in ("all", "answers"):
                row, equal = compare_head(each, python, answered, mask, options)
                status = status if equal else DIFFERENT
                if options.write:
                    add_row(options.write, PAGE, row)
    return status


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    subject_options(parser, prompts=6)
    parser.add_argument("--steps", type=int, help="default: as many as the head was trained for")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--random", action="store_true", help="random heads of all shapes instead")
    parser.add_argument("--attention", default="flex", choices=("flex", "eager", "sdpa"))
    try:
        return run(parser.parse_args())
    except UserError as error:
        print(f"parity_speculators: {error}", file=sys.stderr)
        return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
