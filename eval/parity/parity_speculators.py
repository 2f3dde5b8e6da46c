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
rows do not matter. Of DFlash2 heads the loss and its gradients must be equal to 1e-5, too: the
library rounds its losses to float32. `--random` compares random heads of all shapes that the layout
can hold, for the target and for a random Qwen3 with tied embeddings, with the first mask.

The exit status is that of parity_vllm.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from block_mistakes import Mistake, mistakes
from common import (
    DIFFERENT,
    EQUAL,
    SKIPPED,
    Subject,
    client,
    decoded,
    prepare,
    run_program,
    subject_options,
)
from random_heads import chosen_subjects
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftlab.heads.block import BlockConfig, BlockHead
from draftlab.heads.dflash2 import Dflash2Head
from draftlab.heads.folder import save_head
from draftlab.heads.head import DraftHead
from draftlab.heads.peagle import PeagleHead
from draftlab.store.store import Record
from draftlab.train.batch.loss_rows import loss_reach
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.objectives.block import block_outputs
from draftlab.train.objectives.loss import DraftTeacher, weighted_loss
from draftlab.train.settings import TrainSettings
from tests.helpers.greedy_answers import greedy_records

TOLERANCE = 1e-12
LOSS_TOLERANCE = 1e-5
"""The library rounds its losses to float32."""


@dataclass(frozen=True)
class Step:
    """Values of a step at the compared rows: what is fed back [n, H], and logits [n, D].

    A block head feeds nothing back: `output` is the input of its lm_head. `confidence` is [n, 1].
    `scores` are a selector's, of its candidates but the last.
    """

    rows: Tensor
    output: Tensor
    logits: Tensor
    confidence: Tensor | None = None
    scores: Tensor | None = None


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
        logits, scores = head.logits(output, previous), None
        if isinstance(head, Dflash2Head):
            candidates = logits.topk(head.config.selector_top_k, -1).indices[:, :-1]
            scores = head.drawn_logits(logits, output, previous).gather(-1, candidates)
        if isinstance(head, BlockHead):
            output = head.normed(output)
        steps.append(Step(rows, output, logits, confidence, scores))
    return steps


def library_rows(flat: Tensor, documents: Tensor) -> Tensor:
    """Return the library's rows of flat positions t in one row: it drops one row a document."""
    return flat - documents[flat]


def elements(documents: Tensor, num_depths: int) -> tuple[Tensor, Tensor]:
    """Return anchors and depths [M] of all elements inside their document, depth 0 first.

    Args:
        documents: int64 [T'], of the library's rows.
    """
    rows = torch.arange(len(documents))
    anchors = [
        rows[: len(rows) - d][documents[: len(rows) - d] == documents[d:]]
        for d in range(num_depths)
    ]
    depths = [torch.full_like(found, d) for d, found in enumerate(anchors)]
    return torch.cat(anchors), torch.cat(depths)


def by_depth(library: dict[str, Tensor], num_depths: int) -> dict[str, Tensor]:
    """Return the values of elements [1, M, …] as those of steps [K, T', …]; others are NaN."""
    place, rows = (library["depth"], library["anchor_pos"]), int((library["depth"] == 0).sum())
    found = {}
    for name in ("output", "logits", "draft_tokens"):
        values = library[name][0]
        blank = float("nan") if values.is_floating_point() else -1
        found[name] = values.new_full((num_depths, rows, *values.shape[1:]), blank)
        found[name][place] = values
    return library | found


def by_slot(library: dict[str, Tensor], config: BlockConfig) -> dict[str, Tensor]:
    """Return values of blocks [A, slots, …] as those of steps [K, T, …]; others are NaN.

    The block of anchor p is that of the pair at t = p − 1, so the first one is of t = 0.
    """
    found = {}
    for name, values in library.items():
        if name == "loss" or name.startswith("gradient."):
            found[name] = values
            continue
        drafts = values[:, config.first_slot :].transpose(0, 1)
        blank = drafts.new_full((config.k_trained, config.block_size, *drafts.shape[2:]), torch.nan)
        found[name] = torch.cat([drafts, blank], 1)
    return found | {"draft_tokens": found["logits"].argmax(-1), "output": found["hidden"]}


def bidirectional(subject: Subject, folder: Path) -> Subject:
    """Return the subject with its head saved in `folder` as one that is not causal."""
    head = copy.deepcopy(subject.head)
    head.config = head.config.model_copy(update={"is_causal": False})
    save_head(folder, head, torch.float32)
    return replace(subject, folder=folder, head=head)


def request(
    place: Path, subject: Subject, batch: Batch, num_steps: int, attention: str
) -> dict[str, Any]:
    """Return the request for a batch of one row.

    Args:
        place: an empty folder for the export and the row.
    """
    documents, parallel = batch.documents[0], subject.head.config.family == "peagle"
    chosen, causal = {}, False
    if isinstance(subject.head, BlockHead):
        config = subject.head.config
        anchors = torch.arange(1, len(documents) - config.block_size + 1)
        chosen = {"anchors": anchors}
        if isinstance(subject.head, Dflash2Head):
            chosen["last"] = batch.last[0].contiguous()
        causal = config.is_causal
        if causal:  # no key of the layout says so
            subject = bidirectional(subject, place / "bidirectional")
    if parallel:  # in place of the anchors that the library would draw at random
        kept = documents[1:][documents[1:] == documents[:-1]]
        chosen = dict(zip(("anchor_pos", "depth"), elements(kept, num_steps), strict=True))
    features, draft = place / "features.safetensors", place / "speculators"
    subject.export(draft)
    save_file(
        {
            "hidden_states": batch.features[0].contiguous(),
            "input_ids": batch.tokens[0].contiguous(),
            "document_ids": documents.contiguous(),
            **chosen,
        },
        features,
    )
    return {
        "draft": str(draft.resolve()),
        "target": str(subject.target.folder.resolve()),
        "features": str(features),
        "steps": num_steps,
        "attention": attention,
        "causal": causal,
    }


def answer(
    file: Path, subject: Subject, num_steps: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the library's tensors, with `output` for what is fed back, and its report."""
    found, report = load_file(file), json.loads(file.with_suffix(".json").read_text())
    config = subject.head.config
    if isinstance(subject.head, BlockHead):
        return by_slot(found, config), report
    found["output"] = found["hidden" if config.norm_output else "prenorm"]
    return (by_depth(found, num_steps) if config.family == "peagle" else found), report


def loading_fault(report: dict[str, Any]) -> str | None:
    """Return which tensors of the export the library missed or did not know; None if none."""
    faults = {key: value for key, value in report["tensors"].items() if value}
    return f"the library loaded another head: {faults}" if faults else None


def record_answers(subject: Subject, max_new_tokens: int) -> list[Record]:
    """Record the target's greedy answers without rounding."""
    requests, target = subject.requests(max_new_tokens), subject.target
    longest = max(len(request.prompt_ids) for request in requests) + max_new_tokens
    sizes = {"batch": len(requests), "max_length": min(longest + 1, target.max_length)}
    answers = decoded(target, requests, None, **sizes)
    pairs = list(zip(requests, answers, strict=True))
    return greedy_records(target, pairs, subject.head.config.boundaries)


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
        more = [n for n in ("confidence", "scores") if getattr(step, n) is not None]
        for name in ("output", "logits", *more):
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


def loss_fault(case: Case, head: Dflash2Head, library: dict[str, Tensor]) -> str | None:
    """Return where the loss or its gradients differ from the library's by 1e-5; None: nowhere.

    Blocks that end in their conversation have loss. The library's is a divergence: without the
    teacher's entropy, which is in a soft cross-entropy.
    """
    k, length = head.config.k_trained, case.batch.tokens.shape[1]
    batch = pack(
        [case.records], length, k, max_steps=lambda r: k * (loss_reach(r.spans) >= k).long()
    )
    batch = replace(batch, positions=case.batch.positions)
    batch = replace(batch, **{n: getattr(batch, n).double() for n in ("features", "last")})
    parts, gamma = case.subject.target.parts, math.exp(-1 / 4)
    teacher = DraftTeacher.of(parts, head, torch.float64)
    logits = teacher.norm(batch.last) @ teacher.weight.t()
    batch = replace(batch, logsumexp=logits.logsumexp(-1))
    entropy = torch.distributions.Categorical(logits=logits.flatten(0, 1)).entropy()
    terms = head.family.objective().loss_terms(TrainSettings())
    weights = [gamma**step for step in range(k)]
    head.requires_grad_(True)
    for frozen in (head.embed_tokens, head.lm_head):
        frozen.requires_grad_(False)
    steps = list(block_outputs(head, batch))
    total, _ = weighted_loss(steps, head, teacher, batch, weights, terms)
    total = total - sum(
        w * entropy[s.teacher_index].sum() for w, s in zip(weights, steps, strict=True)
    )
    (total / sum(batch.counts)).backward()
    loss, expected = total.detach() / sum(batch.counts), library["loss"]
    worst = deviation(loss[None], expected[None]).relative
    if not worst <= LOSS_TOLERANCE:
        return f"loss: {float(loss):.8g}, the library's {float(expected):.8g}"
    names = {n for n, p in head.named_parameters() if p.grad is not None}
    for name in sorted(names):
        theirs = library[f"gradient.{name.replace('codebook.weight', 'codebook')}"]
        found = deviation(head.get_parameter(name).grad, theirs)
        worst = max(worst, found.relative)
        if not found.relative <= LOSS_TOLERANCE:
            return f"gradient of {name}: off by {found.difference:.3g} of {found.scale:.3g}"
    head.requires_grad_(False)
    print(
        f"  loss {float(loss):.6f} and its gradients of {len(names)} tensors: largest difference / "
        f"largest value {worst:.1e}"
    )
    return None


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
        if isinstance(head, Dflash2Head) and case.mask == "all":
            fault = fault or loss_fault(case, head, library)
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
            answers[key] = record_answers(each, options.max_new_tokens)
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
