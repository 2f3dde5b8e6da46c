"""A target under oath: loaded once, asked once, for all heads that are examined with it."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

from torch import Tensor

from draftlab.doctor.scoring_set import ScoringSet, answer, evidence_of, greedy
from draftlab.doctor.settings import DoctorSettings
from draftlab.engine.sampling import Generation, Request
from draftlab.evaluate.statistics import repetition_rate
from draftlab.pipeline.head_spec import target_config
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import stop_ids
from draftlab.text.suites import load_suite


class TargetSession:
    """A target, its tokenizer, and what it answers; each is loaded when first asked for."""

    def __init__(
        self, target_settings: TargetSettings, settings: DoctorSettings, monitor: Monitor
    ) -> None:
        self.target_settings, self.settings, self.monitor = target_settings, settings, monitor
        self.evidence = cache(self._evidence)
        self._answers = cache(self._ask)

    @cached_property
    def text(self) -> Any:
        """The target's text config, as transformers reads it; no weights are."""
        return target_config(self.target_settings).get_text_config()

    @cached_property
    def target(self) -> Target:
        """The loaded target."""
        return load_target(self.target_settings)

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return load_tokenizer(self.target_settings)

    @property
    def has_template(self) -> bool:
        """Whether it takes chats."""
        return self.tokenizer.chat_template is not None

    @cached_property
    def shared_tensors(self) -> dict[str, Tensor]:
        """What a head may use of it, on the CPU, where heads' files are read."""
        return {name: tensor.cpu() for name, tensor in self.target.parts.shared_tensors.items()}

    def _ask(self, template: bool) -> tuple[list[Request], list[Generation]]:
        target, settings = self.target, self.settings
        longest = max(target.max_length - settings.max_new_tokens, 1)
        suite = load_suite(
            settings.prompts,
            self.tokenizer,
            self.monitor,
            raw=not template,
            max_prompt_tokens=longest,
        )
        stops = stop_ids(self.tokenizer, target.folder)
        requests = greedy(suite.prompts[: settings.max_prompts], settings.max_new_tokens, stops)
        return requests, answer(target, requests, self.monitor)

    def _evidence(self, template: bool, k: int) -> ScoringSet:
        """Greedy answers to chats (`template`), or to plain text, to score k drafts a step on."""
        return evidence_of(self.target, *self._answers(template), k)

    def conditions(self, template: bool, k: int) -> dict[str, Any]:
        """What scores are made with."""
        requests, answers = self._answers(template)
        return {
            "k": k,
            "prompts": len(requests),
            "suite": self.settings.prompts,
            "template": template,
            "max_new_tokens": self.settings.max_new_tokens,
            "answer_tokens": sum(len(g.token_ids) for g in answers),
            "repetition_rate": round(repetition_rate(g.token_ids for g in answers), 4),
            "device": str(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }
