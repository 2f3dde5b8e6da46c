"""What the target itself says: its greedy answers to some prompts, and its states over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftlab.doctor.head_variant import Norm, Reading
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.progress import Monitor
from draftlab.store.store import Record
from draftlab.target_model.model import Target
from draftlab.train.batch.loss_rows import loss_reach
from draftlab.train.batch.packing import Batch, pack

ROWS = 16  # answers decoded at once


@dataclass
class ScoringSet:
    """Greedy answers and the states over them; what every reading of a head is scored against.

    Attributes:
        batch: one conversation a row, without features. spans: int64 [T] of each conversation.
        states: by boundary, [B, S, Ht]; `take` adds to them.
    """

    target: Target
    batch: Batch
    spans: tuple[Tensor, ...]
    states: dict[int, Tensor]

    @property
    def answer_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(int((spans > 0).sum()) for spans in self.spans)

    def positions(self, k: int) -> int:
        """Places of all answers where k drafts can be judged."""
        return sum(int((loss_reach(spans) >= k).sum()) for spans in self.spans)

    def take(self, boundaries: Iterable[int]) -> None:
        """Computes the states of boundaries that are not there yet, in one pass."""
        wanted = tuple(sorted({*boundaries} - self.states.keys()))
        if wanted:
            features = self.target.states(self.batch.tokens, wanted).features
            self.states |= zip(wanted, features.chunk(len(wanted), -1), strict=True)

    @torch.inference_mode()
    def seen_by(self, reading: Reading) -> Batch:
        """The batch with the features that a reading is fed."""
        self.take(reading.config.boundaries)
        parts = []
        for boundary in reading.config.boundaries:
            norm = entered_norm(self.target, boundary)
            through = norm if is_normed(reading.norm, boundary, self.target.num_layers) else None
            state = self.states[boundary]
            parts.append(state if through is None else through(state))
        features = torch.cat(parts, -1)
        if reading.lag:
            features = features.roll(reading.lag, dims=1)
        last = features if reading.config.reads_last else self.batch.last
        return replace(self.batch, features=features, last=last)


def is_normed(norm: Norm, boundary: int, last: int) -> bool:
    """Whether a boundary's state goes through the norm that it enters."""
    return norm == "entered" or (norm == "last" and boundary == last)


def entered_norm(target: Target, boundary: int) -> torch.nn.Module | None:
    """The norm that a boundary's state goes through first; None where it has another name."""
    if boundary == target.num_layers:
        return target.norm
    return getattr(target.layers[boundary], "input_layernorm", None)


def answer(target: Target, requests: Sequence[Request], monitor: Monitor) -> list[Generation]:
    """The target's answers, in the order of the requests."""
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + 1
    engine = Engine(
        target, batch=min(ROWS, len(requests)), max_length=min(longest, target.max_length)
    )
    answers: dict[str, Generation] = {}
    for generation in engine.generate(requests):
        answers[generation.id] = generation
        monitor.progress("doctor: the target answers", len(answers), len(requests))
    return [answers[request.id] for request in requests]


def greedy(
    prompts: Iterable[tuple[str, tuple[int, ...]]], max_new_tokens: int, stop_ids: frozenset[int]
) -> list[Request]:
    """Requests for plain greedy answers."""
    return [Request(id_, ids, max_new_tokens, Sampling(), stop_ids) for id_, ids in prompts]


def evidence_of(
    target: Target, requests: Sequence[Request], answers: Sequence[Generation], k: int
) -> ScoringSet:
    """ScoringSet for scoring k drafts a step; its states are taken when they are asked for."""
    records = []
    for request, generation in zip(requests, answers, strict=True):
        tokens = torch.tensor([*request.prompt_ids, *generation.token_ids])
        spans = (torch.arange(len(tokens)) >= len(request.prompt_ids)).long()
        nothing, unknown = torch.zeros(len(tokens), 0), torch.zeros(len(tokens))
        records.append(
            Record(
                request.id,
                tokens,
                spans,
                nothing,
                nothing,
                unknown,
                unknown.long(),
                temperature=0.0,
            )
        )
    width = max(len(record.tokens) for record in records)
    batch = pack([[record] for record in records], width, k).to(target.device)
    return ScoringSet(target, batch, tuple(record.spans for record in records), {})
