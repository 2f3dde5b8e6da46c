"""Validation: α and accuracy by step (of a parallel head: depth), and the predicted AL.

The teacher-forced walk (methods §6) goes through an answer as a server does: from t = a − 1 it
accepts the drafts that equal the recorded tokens up to the first that differs, then continues after
them. On the target's greedy answers its counters are those of real decoding. On sampled answers it
takes every path with its probability under the acceptance rule. Drafts depend on recorded tokens in
place of accepted drafts, so that all positions are scored at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from heapq import nsmallest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.counters import Counters
from draftlab.errors import UserError
from draftlab.files import sha256_text
from draftlab.formatting import count_text
from draftlab.heads.head import DraftHead
from draftlab.intervals import MIN_INTERVAL_PROMPTS, ratio_interval, sums_by_prompt
from draftlab.kernels.distill import at_least_float32, distill
from draftlab.progress import Monitor
from draftlab.store.manifest import StoreWindow
from draftlab.store.prompt_split import group_by_prompt, hold_out
from draftlab.store.recording_plan import cut_batches
from draftlab.store.store import Record, Store
from draftlab.train.batch.loader import fetch_ahead
from draftlab.train.batch.loss_rows import loss_reach
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.objectives.loss import DraftTeacher, step_of_row
from draftlab.train.settings import TrainSettings

GAP = 0.03
"""Difference of α between trained and held-out answers from which on it is said."""


class Walked(NamedTuple):
    """What a record adds to an AL: accepted drafts and steps, or their expected numbers."""

    id: str
    accepted: float
    steps: float


def al_text(al: float, records: Sequence[Walked]) -> str:
    """Return an AL with its interval over prompts; of too few prompts, that it is not known."""
    interval, count = None, 0
    if records := [record for record in records if record.steps]:
        ids, accepted, steps = zip(*records, strict=True)
        sums = sums_by_prompt(group_by_prompt(ids), accepted, steps)
        interval, count = ratio_interval(*sums), len(sums[0])
    if interval is None:
        return f"not known: {count_text(count, 'prompt')}, an interval needs {MIN_INTERVAL_PROMPTS}"
    low, high = (1 + end for end in interval)
    return f"{al:.3f} [{low:.3f}, {high:.3f}] of {count:,} prompts"


@dataclass(frozen=True)
class PositionBin:
    """Mean α of each step at positions start ≤ t < stop of a conversation; None without rows."""

    start: int
    stop: int
    alpha: list[float | None]
    rows: list[int]


@dataclass
class Validation:
    """Metrics of a head on held-out records.

    Attributes:
        alpha, accuracy, loss: for each step, mean over rows.
        walk: counters over greedy answers, of steps whose K drafts lie inside the answer.
        sampled_al: predicted AL over sampled answers with p and q at temperature 1, which is that
            of sampled drafts at T = 1 if the answers were sampled at 1; None without any.
        by_position: α by position in the conversation; heads get worse at positions beyond those
            they were trained on.
        greedy, sampled: the records that `walk` and `sampled_al` are of.
    """

    alpha: list[float]
    accuracy: list[float]
    loss: list[float]
    walk: Counters
    sampled_al: float | None
    by_position: list[PositionBin]
    greedy: list[Walked] = field(default_factory=list)
    sampled: list[Walked] = field(default_factory=list)

    def predicted_al(self) -> float:
        """Return AL by the walk over greedy answers; without any, by sampled ones or by α."""
        walked = self.walk.acceptance_length or self.sampled_al
        return walked or 1 + float(torch.tensor(self.alpha).cumprod(0).sum())

    def line(self) -> str:
        """Return a line for the console."""
        walk = self.walk.acceptance_length
        parts = [f"α {' '.join(f'{a:.3f}' for a in self.alpha)}"]
        parts.append(f"accuracy {' '.join(f'{a:.3f}' for a in self.accuracy)}")
        if walk is not None:
            found = al_text(walk, self.greedy)
            parts.append(
                f"predicted AL (T = 0) {found} (K = {self.walk.k}, {self.walk.drafts} steps)"
            )
        if self.sampled_al is not None:
            parts.append(f"predicted AL (sampled answers) {al_text(self.sampled_al, self.sampled)}")
        return " · ".join(parts)

    def gap_line(self, trained: float | None) -> str | None:
        """Return a line if the first step's α is far below that of the answers trained on; None
        also if too few prompts are held out to tell.
        """
        prompts = {*group_by_prompt([record.id for record in (*self.greedy, *self.sampled)])}
        few = len(prompts) < MIN_INTERVAL_PROMPTS
        if few or trained is None or trained - self.alpha[0] < GAP:
            return None
        return (
            f"α is {trained:.3f} on the answers trained on and {self.alpha[0]:.3f} on held-out "
            "ones: answers to more prompts would help more than more steps"
        )

    def position_line(self) -> str | None:
        """Return a line about the first step's α by position; None if all rows are in one bin."""
        bins = [(b.stop, b.alpha[0]) for b in self.by_position if b.alpha[0] is not None]
        if len(bins) < 2:
            return None
        return "α by position: " + " · ".join(f"below {stop:,} {a:.3f}" for stop, a in bins)

    def metrics(self) -> dict[str, Any]:
        """Return the fields of metrics.jsonl."""
        return {
            "alpha": self.alpha,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "walk_al": self.walk.acceptance_length,
            "walk_drafts": self.walk.drafts,
            "walk_accepted_at": self.walk.accepted_at,
            "sampled_al": self.sampled_al,
            "by_position": [asdict(b) for b in self.by_position],
        }


def walk(hits: Tensor, spans: Tensor, k: int) -> tuple[Counters, list[tuple[int, int]]]:
    """Count the accepted drafts of one conversation with `k` drafts a step.

    Args:
        hits: bool [T, K], whether step k at t drafted x_{t+2+k}. spans: int64 [T].

    Returns:
        Counters and the list of (t, accepted), without the steps at an answer's end whose K drafts
        are not all inside the answer.
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


def expected_walk(ratios: Tensor, spans: Tensor, k: int) -> tuple[float, float]:
    """Return the expected accepted drafts and steps of the walk over a sampled conversation.

    A position counts by the probability that a step begins there: steps that accept little are
    many, so that a mean over all positions would be too large.

    Args:
        ratios: float [T, K], the probability that draft k at t is accepted if it is reached, given
            that the target has written x_{t+2+k}. spans, k: as in `walk`.
    """
    reach, labels = loss_reach(spans).numpy(), spans.numpy()
    reached = np.ones((len(labels), k + 2))
    reached[:, 1:-1] = ratios[:, :k].double().cumprod(-1).numpy()
    reached[:, -1] = 0
    accepts = reached[:, :-1] - reached[:, 1:]  # the probabilities of 0 … k accepted drafts
    begins = np.zeros(len(labels) + k + 1)
    for t in range(len(labels) - 1):
        if labels[t + 1] > 0 and labels[t] != labels[t + 1]:
            begins[t] = 1
        if reach[t] >= k:
            begins[t + 1 : t + k + 2] += begins[t] * accepts[t]
    steps = np.where(reach >= k, begins[: len(labels)], 0)
    return float(steps @ reached[:, 1:].sum(1)), float(steps.sum())


MAX_TOKENS_PER_PASS = 16384
"""Most positions of a pass, padding included, unless a single record has more."""
FIRST_BIN = 256
"""Positions of the first bin; each later bin ends at twice the previous end."""


class _ByPosition:
    """Sums of α and rows by position bin and step."""

    def __init__(self, longest: int, num_steps: int, device: torch.device) -> None:
        self.stops = [FIRST_BIN]
        while self.stops[-1] < longest:
            self.stops.append(2 * self.stops[-1])
        self.edges = torch.tensor(self.stops, device=device)
        # [α or rows, bin, step]; float64, since rows are counted
        self.sums = torch.zeros(2, len(self.stops), num_steps, dtype=torch.float64, device=device)

    def add(self, positions: Tensor, scores: TokenScores) -> None:
        index = torch.bucketize(positions.flatten(), self.edges, right=True)
        for sums, values in zip(self.sums, (scores.alpha, scores.valid), strict=True):
            sums.index_add_(0, index, values.flatten(0, 1).to(sums.dtype))

    def bins(self) -> list[PositionBin]:
        bins = []
        for start, stop, alpha, rows in zip(
            [0, *self.stops], self.stops, *self.sums.tolist(), strict=False
        ):
            mean = [a / n if n else None for a, n in zip(alpha, rows, strict=True)]
            bins.append(PositionBin(start, stop, mean, [int(n) for n in rows]))
        return bins


def split_records(
    store: Store, settings: TrainSettings, seed: int, monitor: Monitor
) -> tuple[np.ndarray, list[int]]:
    """Return the records to train on, int64 [n], and the held-out ones that validations read,
    ascending; raises as `hold_out_records`.
    """
    ids = store.ids
    training, held_out = hold_out_records(ids, store.window, settings, seed)
    if settings.validation_share and not len(held_out):
        no_effect = "; train.validate_every has no effect" if settings.validate_every else ""
        monitor.say(f"validation: none, since all records answer one prompt{no_effect}")
    if len(held_out) > (most := settings.validation_records):
        monitor.say(
            f"validation: {most:,} of {len(held_out):,} held-out records "
            "(train.validation_records); a smaller train.validation_share trains on more"
        )
        smallest = nsmallest(most, map(int, held_out), key=lambda n: sha256_text(ids[n]))
        return training, sorted(smallest)
    return training, held_out.tolist()


def hold_out_records(
    ids: Sequence[str], window: StoreWindow | None, settings: TrainSettings, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a store's records to train on and of the others, ascending; raise a
    `UserError` if a window's plan, which holds its first records out, has held out others.
    """
    if window is None:
        return hold_out(ids, settings.validation_share, seed)
    planned, found = (window.validation_share, window.seed), (settings.validation_share, seed)
    if planned != found:
        raise UserError(
            f"expected train.validation_share {planned[0]:g} and seed {planned[1]}, by which this "
            f"store was planned, found {found[0]:g} and {found[1]}",
            where="train.validation_share",
            do="record the store again: with record.window its plan holds these records out",
        )
    held_out, training = np.split(np.arange(len(ids)), [window.validation_records])
    return training, held_out


@torch.no_grad()
def validate(
    head: DraftHead,
    target: DraftTeacher,
    store: Store,
    indices: Sequence[int],
    *,
    num_steps: int,
    ranks: Ranks | None = None,
) -> Validation:
    """Validate a head on records `indices` of the store, one record a row; ranks share the work."""
    device = head.fc.weight.device
    ranks = ranks or Ranks(0, 1, device)
    lengths = [store.lengths[i] for i in indices]
    by_position = _ByPosition(max(lengths), num_steps, device)
    sums = torch.zeros(4, num_steps, dtype=torch.float64, device=device)  # loss, α, best, rows
    counters = Counters(num_steps)
    greedy: list[Walked] = []
    sampled: list[Walked] = []
    training = head.training
    head.eval()
    groups = cut_batches(lengths, MAX_TOKENS_PER_PASS, padded=True)
    own = [[indices[i] for i in group] for group in groups[ranks.rank :: ranks.size]]
    for numbers in fetch_ahead(own, list, store, processes=ranks.local_gpus):
        records: list[Record] = store.views(numbers)
        longest = max(len(r.tokens) for r in records)
        batch = pack([[r] for r in records], longest, num_steps).to(device)
        scores = score(head, target, batch)
        by_position.add(batch.positions, scores)
        metrics = scores.loss, scores.alpha, scores.best, scores.valid
        sums += torch.stack([metric.double().sum((0, 1)) for metric in metrics])
        hits, ratios = scores.hits.cpu(), scores.ratios.cpu()
        for b, record in enumerate(records):
            if record.temperature is None:
                continue  # the target may not have written these answers
            if record.temperature == 0:
                found, _ = walk(hits[b, : len(record.tokens)], record.spans, num_steps)
                counters += found
                greedy.append(Walked(record.id, found.accepted, found.drafts))
            else:
                expected = expected_walk(ratios[b, : len(record.tokens)], record.spans, num_steps)
                sampled.append(Walked(record.id, *expected))
    head.train(training)
    by_position.sums, sums = (ranks.all_reduce(x.cpu()) for x in (by_position.sums, sums))
    gathered = ranks.all_gather((counters, greedy, sampled))
    rank_counters, *of_ranks = zip(*gathered, strict=True)
    greedy, sampled = (
        [record for records in ranked for record in records if record.steps] for ranked in of_ranks
    )
    accepted, steps = (sum(getattr(r, n) for r in sampled) for n in ("accepted", "steps"))
    *totals, rows = sums.tolist()
    loss, alpha, accuracy = (
        [value / max(1, n) for value, n in zip(values, rows, strict=True)] for values in totals
    )
    return Validation(
        alpha,
        accuracy,
        loss,
        sum(rank_counters, Counters(num_steps)),
        1 + accepted / steps if steps else None,
        by_position.bins(),
        greedy,
        sampled,
    )


BUFFER = 64 << 20
"""Bytes of the logits of one chunk of rows."""


@dataclass(frozen=True)
class TokenScores:
    """Scores at every position t and step k of a batch, [B, S, L] each; 0 at rows without loss.

    Attributes:
        valid: bool, whether the row carries loss.
        hits: bool, whether the draft is x_{t+2+k}.
        best: bool, whether the draft is the target's most probable token.
        alpha, loss: float32, Σ min(p, q) and the soft cross-entropy.
        ratios: float32, min(1, q(x) / p(x)) of x = x_{t+2+k}; 0 if the draft vocabulary lacks x.
    """

    valid: Tensor
    hits: Tensor
    best: Tensor
    alpha: Tensor
    loss: Tensor
    ratios: Tensor


@torch.no_grad()
def score(head: DraftHead, target: DraftTeacher, batch: Batch) -> TokenScores:
    """Return the scores of one forward pass; a teacher's logits are computed once for all steps."""
    num_rows, width = batch.tokens.shape
    shape = (num_rows * width, len(batch.steps))
    device = batch.tokens.device
    dtypes = (torch.bool,) * 3 + (torch.float32,) * 3
    scores = [torch.zeros(shape, dtype=dtype, device=device) for dtype in dtypes]
    outputs = list(head.family.objective().forward(head, batch))
    if outputs:
        step = step_of_row([len(o.teacher_index) for o in outputs], device)
        row = torch.cat([o.teacher_index for o in outputs])
        valid = torch.ones_like(row, dtype=torch.bool)
        values = _score_rows(head, target, batch, torch.cat([o.output for o in outputs]), row)
        for tensor, value in zip(scores, (valid, *values), strict=True):
            tensor[row - 1 - step, step] = value
    return TokenScores(*(x.view(num_rows, width, -1) for x in scores))


def _score_rows(
    head: DraftHead, target: DraftTeacher, batch: Batch, output: Tensor, row: Tensor
) -> list[Tensor]:
    """Return hits, best, α, loss and ratio of each row, from the head's outputs [R, H] and the flat
    positions of their teachers, int64 [R].
    """
    plan, teacher = batch.plan, target.at(batch)
    tokens, argmax = batch.tokens.flatten(), batch.argmax.flatten()[row]
    token, previous = tokens[row + 1], tokens[row]
    draft_id = target.draft_index[token]
    dtypes = (torch.bool,) * 2 + (torch.float32,) * 3
    scores = [torch.empty_like(row, dtype=dtype) for dtype in dtypes]
    weight = at_least_float32(target.weight)
    for chunk in plan.chunks(max(2, BUFFER // (4 * len(weight)))):
        rows, index = plan.order[chunk.rows], plan.teacher_index[chunk.rows]
        states = teacher.last[plan.positions[chunk.teachers]]
        last = target.norm(states.to(weight.dtype))
        z = teacher.to_logits(last @ weight.t())[index - chunk.teachers.start]
        logsumexp = teacher.logsumexp[plan.positions[index]]
        logits = head.logits(output[rows], previous[rows]).float()
        out = distill(logits, z, logsumexp)
        loss, drawn = out.loss, head.drawn_logits(logits, output[rows], previous[rows])
        if drawn is not logits:
            out = distill(drawn, z, logsumexp)
        column = draft_id[rows].clamp(min=0)[:, None]
        log_q = drawn.log_softmax(-1).gather(1, column)[:, 0]
        log_p = z.gather(1, column)[:, 0] - logsumexp
        ratio = (log_q - log_p).exp().clamp(max=1) * (draft_id[rows] >= 0)
        drafted = target.target_ids[out.best]
        hits, best = drafted == token[rows], drafted == argmax[rows]
        for tensor, value in zip(scores, (hits, best, out.alpha, loss, ratio), strict=True):
            tensor[rows] = value
    return scores
