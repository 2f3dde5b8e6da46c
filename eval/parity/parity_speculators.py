"""A head's outputs in draftlab's training against the speculators library, in float32.

    .venv/bin/python eval/parity/parity_speculators.py [--head FOLDER|reference] [--prompts 6]

The target's own greedy answers are recorded in float32 and packed into one row, several
conversations side by side. Steps 0 .. L − 1 of training-time test then run twice: here by
`draftlab.train.ttt.unroll`, there by the library's own forward on the exported head (speculators
layout, loaded with its `from_pretrained`). Compared are fc's output, the pre-norm output (what is
fed back) and the logits, at every row both compute. The largest difference of each must stay below
1e-5 of the largest value. Two masks: `all` (everything carries loss, so every row is compared) and
`answers` (real spans, so that rows left out by compaction are proven not to matter).

Exit status as of parity_vllm.py: 0 equal, 1 different, 2 unusable, 77 skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from common import (
    DIFFERENT,
    EQUAL,
    SKIPPED,
    UNUSABLE,
    add_row,
    client,
    load_subject,
    prepare,
    subject_options,
    versions,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftlab.base import UserError
from draftlab.data.packing import Batch, pack
from draftlab.data.store import Record
from draftlab.decode.engine import Engine
from draftlab.decode.sampling import Request
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.target.model import Target
from draftlab.train.ttt import unroll

TOLERANCE = 1e-5
PAGE = ("speculators, equal outputs of training-time test", (
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


def library_rows(flat: Tensor, documents: Tensor) -> Tensor:
    """Rows of the library for flat positions t of one packed row: it drops one row a document."""
    return flat - documents[flat]


def ours(head: Eagle3Head, batch: Batch) -> list[Step]:
    """Every step of the unroll; `rows` are positions t of the packed row."""
    taken: list[Tensor] = []
    handle = head.norm.register_forward_pre_hook(lambda _module, args: taken.append(args[0]))
    try:
        with torch.inference_mode():
            outputs = list(unroll(head, batch))
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


def theirs(
    python: Path, draft: Path, target: Path, batch: Batch, num_steps: int, attention: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The library's tensors and report for the batch's one row."""
    with tempfile.TemporaryDirectory() as place:
        features, answer = Path(place) / "features.safetensors", Path(place) / "answer.safetensors"
        save_file(
            {
                "hidden_states": batch.features[0].float().contiguous(),
                "input_ids": batch.tokens[0].contiguous(),
                "document_ids": batch.documents[0].contiguous(),
            },
            features,
        )
        request = {
            "draft": str(draft.resolve()),
            "target": str(target.resolve()),
            "features": str(features),
            "ttt_steps": num_steps,
            "attention": attention,
        }
        client(python, "speculators_client.py", request, answer)
        return load_file(answer), json.loads(answer.with_suffix(".json").read_text())


def loading_fault(report: dict[str, Any]) -> str | None:
    """What the library did not take from the export, or did not find in it."""
    faults = {key: value for key, value in report["tensors"].items() if value}
    return f"the library loaded another head: {faults}" if faults else None


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


def run(options: argparse.Namespace) -> int:
    """Compares; returns the exit status."""
    python = prepare("speculators")
    if python is None:
        return SKIPPED
    subject = load_subject(options.head, options.target, options.prompts)
    head, target, name = subject.head, subject.target, subject.name
    answered = record_answers(
        target,
        subject.prompts,
        subject.stops,
        head.config.boundaries,
        options.max_new_tokens,
    )
    num_steps = options.steps or head.config.k_trained
    faults = []
    with tempfile.TemporaryDirectory() as place:
        layout = Path(place) / "speculators"
        subject.export(layout)
        for mask in ("all", "answers"):
            records = [
                replace(r, spans=torch.ones_like(r.spans)) if mask == "all" else r for r in answered
            ]
            batch = pack([records], sum(len(r.tokens) for r in records), num_steps)
            library, report = theirs(
                python, layout, target.folder, batch, num_steps, options.attention
            )
            steps = ours(head, batch)
            worst, same, fault = compare(steps, library, batch.documents[0], TOLERANCE)
            fused = torch.cat([head.fuse(r.features[:-1]) for r in records])
            worst = {"fc": deviation(fused, library["fc"]), **worst}
            if worst["fc"].relative > TOLERANCE:
                fault = f"fc: off by {worst['fc'].difference:.3g}"
            fault = loading_fault(report) or fault
            rows = [len(step.rows) for step in steps]
            figures = ", ".join(f"{d.relative:.1e}" for d in worst.values())
            library_version = f"speculators {report['engine_version']} ({options.attention})"
            print(
                f"{name}, mask {mask}: {len(records)} conversations, {num_steps} steps with {rows} "
                f"rows; {library_version}\n"
                f"  largest difference / largest value: {figures} (fc, pre-norm, logits); "
                f"largest logit {worst['logits'].scale:.2f}; argmax equal {same:.4%}\n"
                f"  {'EQUAL within ' + str(TOLERANCE) if fault is None else 'DIFFERENT: ' + fault}",
                flush=True,
            )
            faults += [fault] if fault else []
            if options.write:
                cells = [
                    date.today().isoformat(),
                    name,
                    mask,
                    f"{versions()}; {library_version}, torch {report['torch_version']}",
                    str(num_steps),
                    f"{rows[0]:,} … {rows[-1]:,}",
                    f"{worst['logits'].scale:.2f}",
                    figures,
                    f"{same:.2%}",
                    f"no: {fault}" if fault else f"yes (within {TOLERANCE})",
                ]
                add_row(options.write, PAGE, cells)
    return DIFFERENT if faults else EQUAL


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    subject_options(parser, prompts=6)
    parser.add_argument("--steps", type=int, help="default: as many as the head was trained for")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--attention", default="flex", choices=("flex", "eager", "sdpa"))
    try:
        return run(parser.parse_args())
    except UserError as error:
        print(f"parity_speculators: {error}", file=sys.stderr)
        return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
