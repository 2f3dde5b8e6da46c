"""Validation: α and accuracy by step, and the acceptance length a server would count.

The teacher-forced walk (methods §6) goes through an answer as a server does: from t = a − 1 it
accepts the run of drafts that hit the recorded tokens, then continues behind them. On the target's
greedy answers its counters are those of real decoding; on sampled answers the expectation of the
acceptance rule takes the place of hits.

For a parallel head "step" reads "depth": its drafts depend on no other draft, those of a chain on
the recorded tokens in place of accepted drafts, so both are scored for all positions at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftlab.engine.counters import Counters
from draftlab.heads.head import DraftHead
from draftlab.store.store import Record, Store
from draftlab.train.batch.loss_rows import loss_reach
from draftlab.train.batch.packing import pack
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.token_scores import Scores, score


@dataclass(frozen=True)
class Stretch:
    """α at the positions start ≤ t < stop of a conversation, per step; None without any row."""

    start: int
    stop: int
    alpha: list[float | None]
    rows: list[int]


@dataclass
class Validation:
    """What validation found.

    Attributes:
        alpha, accuracy: per step (of a parallel head: depth).
        loss: per step, mean over rows.
        walk: counters over greedy answers, only steps whose K drafts lie inside the answer.
        sampled_al: predicted AL at temperature 1 over sampled answers; None without any.
        by_position: α by position in the conversation: heads fail past what they were trained on.
        steps: (t, accepted) of the walk, by record.
    """

    alpha: list[float]
    accuracy: list[float]
    loss: list[float]
    walk: Counters
    sampled_al: float | None
    by_position: list[Stretch]
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

    def position_line(self) -> str | None:
        """One line on α by position, at the first step; None if all lies in one stretch."""
        found = [(s.stop, s.alpha[0]) for s in self.by_position if s.alpha[0] is not None]
        if len(found) < 2:
            return None
        return "α by position: " + " · ".join(f"below {stop:,} {a:.3f}" for stop, a in found)

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
            "by_position": [asdict(stretch) for stretch in self.by_position],
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


MOST_TOKENS = 16384
"""Positions of a pass, padding included, unless a single record has more."""
FIRST_STRETCH = 256
"""Positions of the first stretch; each later one goes twice as far as those before it."""


class _ByPosition:
    """Sums of α by stretch and step."""

    def __init__(self, longest: int, num_steps: int, device: torch.device) -> None:
        self.stops = [FIRST_STRETCH]
        while self.stops[-1] < longest:
            self.stops.append(2 * self.stops[-1])
        self.edges = torch.tensor(self.stops, device=device)
        # [α or row, stretch, step]; float64, as counts are among them
        self.sums = torch.zeros(2, len(self.stops), num_steps, dtype=torch.float64, device=device)

    def add(self, positions: Tensor, scores: Scores) -> None:
        stretch = torch.bucketize(positions.flatten(), self.edges, right=True)
        for sums, values in zip(self.sums, (scores.alpha, scores.asked), strict=True):
            sums.index_add_(0, stretch, values.flatten(0, 1).to(sums.dtype))

    def stretches(self) -> list[Stretch]:
        found = []
        for start, stop, alpha, rows in zip(
            [0, *self.stops], self.stops, *self.sums.tolist(), strict=False
        ):
            mean = [a / n if n else None for a, n in zip(alpha, rows, strict=True)]
            found.append(Stretch(start, stop, mean, [int(n) for n in rows]))
        return found


def _groups(order: Sequence[int], lengths: Sequence[int], rows: int) -> Iterator[list[int]]:
    """Records for one pass each, of ascending lengths: so many, or fewer if they are long."""
    group: list[int] = []
    for i in order:
        full = (len(group) + 1) * lengths[i] > MOST_TOKENS
        if group and (full or len(group) == rows):
            yield group
            group = []
        group.append(i)
    yield group


@torch.no_grad()
def validate(
    head: DraftHead,
    target: DraftTeacher,
    store: Store,
    indices: Sequence[int],
    *,
    num_steps: int,
    batch_rows: int = 8,
    ranks: Ranks | None = None,
) -> Validation:
    """Validates on records `indices` of the store, one a row.

    Args:
        ranks: who share the work; None: it is done alone.
    """
    device = head.fc.weight.device
    ranks = ranks or Ranks(0, 1, device)
    lengths = [store.lengths[i] for i in indices]
    by_position = _ByPosition(max(lengths), num_steps, device)
    sums = torch.zeros(4, num_steps, dtype=torch.float64, device=device)  # loss, α, best, rows
    counters = Counters(num_steps)
    steps: dict[str, list[tuple[int, int]]] = {}
    expected, anchors = 0.0, 0
    training = head.training
    head.eval()
    order = sorted(indices, key=lambda i: (store.lengths[i], i))
    groups = [*_groups(order, store.lengths, batch_rows)]
    for group in groups[ranks.rank :: ranks.size]:
        records: list[Record] = store.views(group)
        longest = max(len(r.tokens) for r in records)
        batch = pack([[r] for r in records], longest, num_steps).to(device)
        scores = score(head, target, batch)
        by_position.add(batch.positions, scores)
        kinds = scores.loss, scores.alpha, scores.best, scores.asked
        sums += torch.stack([kind.double().sum((0, 1)) for kind in kinds])
        hits, ratios = scores.hits.cpu(), scores.ratios.cpu()
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
    by_position.sums, sums = (ranks.all_reduce(of.cpu()) for of in (by_position.sums, sums))
    each = ranks.all_gather((counters, steps, expected, anchors))
    counters = sum((c for c, _, _, _ in each), Counters(num_steps))
    steps = {name: found for _, of, _, _ in each for name, found in of.items()}
    expected, anchors = (sum(one[i] for one in each) for i in (2, 3))
    *of_rows, rows = sums.tolist()
    loss, alpha, accuracy = (
        [value / max(1, n) for value, n in zip(values, rows, strict=True)] for values in of_rows
    )
    return Validation(
        alpha,
        accuracy,
        loss,
        counters,
        1 + expected / anchors if anchors else None,
        by_position.stretches(),
        steps,
    )
