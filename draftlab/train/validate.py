"""Validation: α and accuracy by step, and the acceptance length a server would count.

The teacher-forced walk (METHODS §6) goes through an answer as a server does: from t = a − 1 it
accepts the run of drafts that hit the recorded tokens, then continues behind them. On the target's
greedy answers its counters are those of real decoding; on sampled answers the expectation of the
acceptance rule takes the place of hits.

For a parallel head "step" reads "depth": its drafts depend on no other draft, those of a chain on
the recorded tokens in place of accepted drafts, so both are scored for all positions at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftlab.data.packing import Batch, loss_reach, pack
from draftlab.data.store import Record, Store
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.results import Counters
from draftlab.target.parts import TargetParts
from draftlab.train.families import OBJECTIVES
from draftlab.train.objective import Sums, weighted_loss


@dataclass
class Validation:
    """What validation found.

    Attributes:
        alpha, accuracy: per step (of a parallel head: depth).
        loss: per step, mean over rows.
        walk: counters over greedy answers, only steps whose K drafts lie inside the answer.
        sampled_al: predicted AL at temperature 1 over sampled answers; None without any.
    """

    alpha: list[float]
    accuracy: list[float]
    loss: list[float]
    walk: Counters
    sampled_al: float | None
    steps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def line(self) -> str:
        """One line for the console."""
        walk = self.walk.acceptance_length
        parts = [f"α {' '.join(f'{a:.3f}' for a in self.alpha)}"]
        parts.append(f"accuracy {' '.join(f'{a:.3f}' for a in self.accuracy)}")
        if walk is not None:
            parts.append(
                f"predicted AL {walk:.3f} (K = {self.walk.k}, greedy, {self.walk.drafts} steps)"
            )
        if self.sampled_al is not None:
            parts.append(f"expected AL {self.sampled_al:.3f} (T = 1)")
        return " · ".join(parts)

    def metrics(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        return {
            "alpha": self.alpha,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "walk_al": self.walk.acceptance_length,
            "walk_drafts": self.walk.drafts,
            "walk_accepted_at": self.walk.accepted_at,
            "sampled_al": self.sampled_al,
        }


def walk(hits: Tensor, spans: Tensor, k: int) -> tuple[Counters, list[tuple[int, int]]]:
    """Counters of one conversation from hits.

    Args:
        hits: bool [T, K]; step k at t drafted x_{t+2+k}.
        spans: int64 [T].
        k: drafts a step.

    Returns:
        Counters and the list of (t, accepted); steps with fewer than K drafts inside the answer
        (its tail) are left out.
    """
    reach = loss_reach(spans)
    counters, steps = Counters(k), []
    run = hits[:, :k].long().cumprod(-1).sum(-1)
    t, length = 0, len(spans)
    while t + 1 < length:
        starts_answer = spans[t + 1] > 0 and spans[t] != spans[t + 1]
        if not starts_answer:
            t += 1
            continue
        while reach[t] >= k:
            accepted = int(run[t])
            counters.add_step(k, accepted)
            steps.append((t, accepted))
            t += accepted + 1
        t += 1
    return counters, steps


@dataclass(frozen=True)
class DenseTeacher:
    """The target's distribution at every position that teaches, over the draft vocabulary.

    Attributes:
        logits: float32 [J, D]. row: int64 [B·S], which row a flat position has.
        logsumexp: float32 [B·S]. argmax: int64 [B·S], target ids.
    """

    logits: Tensor
    row: Tensor
    logsumexp: Tensor
    argmax: Tensor


@torch.no_grad()
def teach(parts: TargetParts, target_ids: Tensor, batch: Batch) -> DenseTeacher:
    """Computes each needed teacher once; all steps that share a position share it."""
    flat = batch.tokens.numel()
    needed = torch.zeros(flat, dtype=torch.bool, device=batch.tokens.device)
    for step in batch.steps:
        needed[step.teacher] = True
    positions = needed.nonzero()[:, 0]
    row = needed.cumsum(0) - 1
    logits = parts.logits(batch.last.flatten(0, 1)[positions], target_ids)
    return DenseTeacher(logits, row, batch.logsumexp.flatten(), batch.argmax.flatten())


@torch.no_grad()
def token_scores(head: Eagle3Head, parts: TargetParts, batch: Batch) -> tuple[Tensor, Tensor]:
    """For every position t and step k with loss: was x_{t+2+k} drafted, and min(1, q(x) / p(x)).

    Returns:
        hits bool and ratios float32, each [B, S, L]; False and 0 where there is no loss.
    """
    rows, width = batch.tokens.shape
    ids = head.target_ids(torch.arange(len(head.d2t), device=head.d2t.device))
    teacher = teach(parts, ids, batch)
    draft_of = torch.full((head.config.vocab_size,), -1, device=ids.device)
    draft_of[ids] = torch.arange(len(ids), device=ids.device)
    hits = torch.zeros(rows * width, len(batch.steps), dtype=torch.bool, device=ids.device)
    ratios = torch.zeros(rows * width, len(batch.steps), device=ids.device)
    tokens = batch.tokens.flatten()
    for k, step in enumerate(OBJECTIVES[head.config.family].outputs(head, batch)):
        logits = head.logits(step.output)
        at, token = step.teacher - 1 - k, tokens[step.teacher + 1]
        draft = draft_of[token]
        known = draft >= 0
        hits[at, k] = ids[logits.argmax(-1)] == token
        pick = draft.clamp(min=0)[:, None]
        log_q = logits.float().log_softmax(-1).gather(1, pick)[:, 0]
        z = teacher.logits[teacher.row[step.teacher]].gather(1, pick)[:, 0]
        log_p = z - teacher.logsumexp[step.teacher]
        ratios[at, k] = (log_q - log_p).exp().clamp(max=1) * known
    return hits.view(rows, width, -1), ratios.view(rows, width, -1)


@torch.no_grad()
def validate(
    head: Eagle3Head,
    parts: TargetParts,
    store: Store,
    indices: Sequence[int],
    *,
    num_steps: int,
    batch_rows: int = 8,
) -> Validation:
    """Validates on records `indices` of the store, one a row."""
    device = head.fc.weight.device
    sums = Sums.zeros(num_steps, device)
    counters = Counters(num_steps)
    steps: dict[str, list[tuple[int, int]]] = {}
    expected, anchors = 0.0, 0
    training = head.training
    head.eval()
    order = sorted(indices, key=lambda i: (store.lengths[i], i))
    for start in range(0, len(order), batch_rows):
        records: list[Record] = [store[i] for i in order[start : start + batch_rows]]
        longest = max(len(r.tokens) for r in records)
        batch = pack([[r] for r in records], longest, num_steps).to(device)
        outputs = OBJECTIVES[head.config.family].outputs(head, batch)
        sums.add(weighted_loss(outputs, head, parts, batch, [1.0] * num_steps)[1])
        hits, ratios = (x.cpu() for x in token_scores(head, parts, batch))
        for b, record in enumerate(records):
            if not record.temperature:
                found, steps[record.id] = walk(
                    hits[b, : len(record.tokens)], record.spans, num_steps
                )
                counters += found
            else:
                whole = loss_reach(record.spans) >= num_steps
                runs = ratios[b, : len(record.tokens)][whole].cumprod(-1).sum(-1)
                expected, anchors = expected + float(runs.sum()), anchors + len(runs)
    head.train(training)
    count = sums.count.clamp(min=1)
    return Validation(
        (sums.alpha / count).tolist(),
        (sums.hits / count).tolist(),
        (sums.loss / count).tolist(),
        counters,
        1 + expected / anchors if anchors else None,
        steps,
    )
