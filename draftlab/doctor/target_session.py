"""The target, loaded on first use: its greedy answers, and its states over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.doctor.hypotheses import HeadVariant
from draftlab.doctor.settings import DoctorSettings
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.evaluate.metrics import repetition_rate
from draftlab.progress import Monitor
from draftlab.recipe.head_spec import target_config
from draftlab.run.api import HELD_OUT
from draftlab.store.store import Record
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.model import Target
from draftlab.target_model.parts import load_parts
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import stop_ids
from draftlab.text.conversations import Conversation
from draftlab.text.decode import engine_decode
from draftlab.text.suites import Suite, conversation_suite, load_suite
from draftlab.train.batch.loss_rows import loss_reach
from draftlab.train.batch.packing import Batch, pack

MAX_BATCH = 16  # answers that are decoded at once


@dataclass
class ScoringSet:
    """Greedy answers of the target, and its states over them.

    Attributes:
        batch: one conversation per row, without features. spans: int64 [T] of each conversation.
        states: [B, S, Ht] by boundary; `compute_states` adds to them.
    """

    target: Target
    batch: Batch
    spans: tuple[Tensor, ...]
    states: dict[int, Tensor]

    def num_positions(self, k: int) -> int:
        """Return the number of positions where k drafts lie inside the answer."""
        return sum(int((loss_reach(spans) >= k).sum()) for spans in self.spans)

    def compute_states(self, boundaries: Iterable[int]) -> None:
        """Compute the states of the boundaries that are not there yet, in one pass."""
        missing = tuple(sorted({*boundaries} - self.states.keys()))
        if missing:
            features = self.target.states(self.batch.tokens, missing).features
            self.states |= zip(missing, features.chunk(len(missing), -1), strict=True)

    @torch.inference_mode()
    def batch_for(self, variant: HeadVariant) -> Batch:
        """Return the batch with the features of a variant."""
        self.compute_states(variant.config.boundaries)
        states = []
        for boundary in variant.config.boundaries:
            state, last = self.states[boundary], boundary == self.target.num_layers
            if variant.norm == "input" or (variant.norm == "final" and last):
                norm = input_norm(self.target, boundary)
                state = state if norm is None else norm(state)
            states.append(state)
        features = torch.cat(states, -1)
        if variant.lag:
            features = features.roll(variant.lag, dims=1)
        last_states = features if variant.config.reads_last else self.batch.last
        return replace(self.batch, features=features, last=last_states)


def input_norm(target: Target, boundary: int) -> torch.nn.Module | None:
    """Return the norm that a boundary's state enters first; None: the layer's is not known."""
    if boundary == target.num_layers:
        return target.norm
    return getattr(target.layers[boundary], "input_layernorm", None)


class TargetSession:
    """A target, its tokenizer and its greedy answers, which all diagnosed heads share.

    Args:
        held_out: returns the prompts for settings that name none; None: the built-in ones are.
    """

    def __init__(
        self,
        target_settings: TargetSettings,
        settings: DoctorSettings,
        monitor: Monitor,
        held_out: Callable[[], list[Conversation]] | None = None,
    ) -> None:
        self.target_settings, self.settings, self.monitor = target_settings, settings, monitor
        self._held_out = held_out
        self.suite_name = settings.prompts or (HELD_OUT if held_out else "embedded:heldout")
        self.scoring_set = cache(self._scoring_set)

    @cached_property
    def folder(self) -> Path:
        """The target's folder."""
        return resolve_target(self.target_settings)

    @cached_property
    def text_config(self) -> Any:
        """The target's text config, as transformers reads it; no weights are loaded."""
        return target_config(self.target_settings).get_text_config()

    @cached_property
    def target(self) -> Target:
        """The loaded target."""
        return load_target(self.target_settings)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return load_tokenizer(self.target_settings)

    @cached_property
    def shared_tensors(self) -> dict[str, Tensor]:
        """The target's tensors that a head may share, on the CPU; no layer is loaded."""
        remote_code = self.target_settings.trust_remote_code
        return load_parts(self.folder, trust_remote_code=remote_code).shared_tensors

    def _suite(self) -> Suite:
        room = self.target.max_length - self.settings.max_new_tokens
        raw = self.tokenizer.chat_template is None
        options: dict[str, Any] = {"raw": raw, "max_prompt_tokens": max(room, 1)}
        arguments = self.tokenizer, self.monitor
        if self.settings.prompts is None and self._held_out is not None:
            return conversation_suite(self.suite_name, self._held_out(), *arguments, **options)
        modes = self.target_settings.modes
        return load_suite(self.suite_name, *arguments, modes=modes, **options)

    @cached_property
    def _answers(self) -> tuple[list[Request], list[Generation]]:
        target, settings = self.target, self.settings
        stops = stop_ids(self.tokenizer, target.folder)
        requests = [
            Request(name, ids, settings.max_new_tokens, Sampling(), stops)
            for name, ids in self._suite().sample(settings.max_prompts, seed=0).prompts
        ]
        longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + 1
        decode = engine_decode(target, MAX_BATCH, self.monitor)
        answers: dict[str, Generation] = {}
        for generation in decode(requests, min(longest, target.max_length)):
            answers[generation.id] = generation
            self.monitor.progress("doctor: the target answers", len(answers), len(requests))
        return requests, [answers[request.id] for request in requests]

    def _scoring_set(self, k: int) -> ScoringSet:
        """Return the greedy answers, for k drafts per step."""
        requests, answers = self._answers
        records = []
        for request, generation in zip(requests, answers, strict=True):
            tokens = torch.tensor([*request.prompt_ids, *generation.token_ids])
            spans = (torch.arange(len(tokens)) >= len(request.prompt_ids)).long()
            empty, zeros = torch.zeros(len(tokens), 0), torch.zeros(len(tokens))
            records.append(
                Record(request.id, tokens, spans, empty, empty, zeros, zeros.long(), 0.0)
            )
        width = max(len(record.tokens) for record in records)
        batch = pack([[record] for record in records], width, k).to(self.target.device)
        return ScoringSet(self.target, batch, tuple(r.spans for r in records), {})

    def conditions(self, k: int) -> dict[str, Any]:
        """Return the conditions of the scores, for the diagnosis."""
        requests, answers = self._answers
        return {
            "k": k,
            "prompts": len(requests),
            "suite": self.suite_name,
            "template": self.tokenizer.chat_template is not None,
            "max_new_tokens": self.settings.max_new_tokens,
            "answer_tokens": sum(len(g.token_ids) for g in answers),
            "repetition_rate": round(repetition_rate(g.token_ids for g in answers), 4),
            "device": str(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }
