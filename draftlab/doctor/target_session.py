"""Load the target on first use and cache its greedy answers."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from draftlab.doctor.scoring_set import ScoringSet, generate_answers, make_scoring_set
from draftlab.doctor.settings import DoctorSettings
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.evaluate.statistics import repetition_rate
from draftlab.progress import Monitor
from draftlab.recipe.head_spec import target_config
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.model import Target
from draftlab.target_model.parts import load_parts
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import stop_ids
from draftlab.text.suites import load_suite


class TargetSession:
    """A target, its tokenizer and its greedy answers, which all diagnosed heads share."""

    def __init__(
        self, target_settings: TargetSettings, settings: DoctorSettings, monitor: Monitor
    ) -> None:
        self.target_settings, self.settings, self.monitor = target_settings, settings, monitor
        self.scoring_set = cache(self._scoring_set)
        self._answers = cache(self._generate)

    @cached_property
    def folder(self) -> Path:
        """The target's folder."""
        return resolve_target(self.target_settings)

    @cached_property
    def fingerprint(self) -> str:
        """The target's fingerprint; no model is built."""
        return fingerprint(self.folder)

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

    @property
    def has_template(self) -> bool:
        """True if the tokenizer has a chat template."""
        return self.tokenizer.chat_template is not None

    @cached_property
    def shared_tensors(self) -> dict[str, Tensor]:
        """The target's tensors that a head may share, on the CPU; no layer is loaded."""
        remote_code = self.target_settings.trust_remote_code
        return load_parts(self.folder, trust_remote_code=remote_code).shared_tensors

    def _generate(self, template: bool) -> tuple[list[Request], list[Generation]]:
        target, settings = self.target, self.settings
        suite = load_suite(
            settings.prompts,
            self.tokenizer,
            self.monitor,
            raw=not template,
            max_prompt_tokens=max(target.max_length - settings.max_new_tokens, 1),
        )
        stops = stop_ids(self.tokenizer, target.folder)
        requests = [
            Request(name, ids, settings.max_new_tokens, Sampling(), stops)
            for name, ids in suite.sample(settings.max_prompts, seed=0).prompts
        ]
        return requests, generate_answers(target, requests, self.monitor)

    def _scoring_set(self, template: bool, k: int) -> ScoringSet:
        """Return the greedy answers to chats (`template`) or plain text, for k drafts per step."""
        return make_scoring_set(self.target, *self._answers(template), k)

    def conditions(self, template: bool, k: int) -> dict[str, Any]:
        """Return the conditions of the scores, for the diagnosis."""
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
