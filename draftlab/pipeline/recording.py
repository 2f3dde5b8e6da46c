"""A recipe's answers and states: the conversations, the target, and what is recorded of it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import write_json
from draftlab.pipeline.gpu_workers import helper_devices, helpers
from draftlab.pipeline.head_spec import choose_boundaries
from draftlab.pipeline.recipe import Recipe
from draftlab.pipeline.stages import STAGES
from draftlab.progress import Monitor
from draftlab.store.manifest import MANIFEST, Manifest
from draftlab.store.online import OnlineStore
from draftlab.store.plan import plan_recording
from draftlab.store.record import Role, record
from draftlab.store.store import Sample, Store, StoreIdentity
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.text.answer_workers import start_answer_workers
from draftlab.text.answers import regenerate
from draftlab.text.chat_template import template_sha256, tokenizer_sha256
from draftlab.text.conversations import Conversation, read_conversations
from draftlab.text.prompts import load_prompts
from draftlab.text.samples import build_samples
from draftlab.train.distributed.ranks import Ranks
from draftlab.vllm.answers import VllmAnswers
from draftlab.vllm.hidden_states import VllmStateSource


@dataclass
class Recording:
    """What a recipe's target says and computes, in a run folder.

    Args:
        recipe: what to make.
        run: the folder.
        monitor: for lines and progress.
    """

    recipe: Recipe
    run: Path
    monitor: Monitor

    @cached_property
    def prompts(self) -> list[Conversation]:
        """The conversations to be answered."""
        return load_prompts(self.recipe.prompts, self.monitor)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return load_tokenizer(self.recipe.target)

    @cached_property
    def target(self) -> Target:
        """The target, loaded when the first stage needs it."""
        self.monitor.say(f"loading target {self.recipe.target.path}")
        target = load_target(self.recipe.target)
        for note in target.notes:
            self.monitor.say(note)
        return target

    @cached_property
    def target_metadata(self) -> TargetMetadata:
        """What is known of the target without loading it, where vLLM does."""
        return TargetMetadata(self.recipe.target)

    @property
    def _recorded(self) -> Target | TargetMetadata:
        return self.target_metadata if self.recipe.record.backend == "vllm" else self.target

    def answer(self, path: Path, gpus: int) -> None:
        """Has the prompts answered (`data.regenerate`), on several GPUs by a process on each."""
        settings, target, decode, others = self.recipe.regenerate, None, None, []
        with ExitStack() as stack:
            if settings.enabled and settings.backend == "vllm":
                target = self.target_metadata
                decode = stack.enter_context(VllmAnswers(target, settings, self.monitor))
            elif settings.enabled:
                devices = helper_devices(gpus, self.recipe.target.device)
                started = start_answer_workers(self.recipe.target, devices, settings.batch)
                others = stack.enter_context(started)
                target = self.target
            regenerate(
                target,
                self.tokenizer,
                self.prompts,
                settings,
                path,
                seed=self.recipe.seed,
                monitor=self.monitor,
                decode=decode,
                extra_decoders=others,
            )

    def lead(self, folder: Path, gpus: int) -> None:
        """Records the answers' states (`data.record`), with helpers on all but the first GPU."""
        devices = helper_devices(gpus, self.recipe.target.device)
        with helpers(self.run, devices, self.monitor):
            self._record(folder, "lead")

    def help(self, folder: Path) -> None:
        """Takes shards of a recording that another process leads."""
        self._record(folder, "help")

    def _record(self, folder: Path, role: Role) -> None:
        settings, monitor, open_source = self.recipe.record, self.monitor, None
        identity, recorded = self._asked(monitor)
        if settings.backend == "vllm":
            open_source = partial(VllmStateSource, self.target_metadata, settings, monitor)
        record(
            self._recorded,
            recorded,
            folder,
            settings,
            identity,
            monitor=monitor,
            role=role,
            open_source=open_source,
        )

    def _asked(self, monitor: Monitor) -> tuple[StoreIdentity, list[Sample]]:
        """What is to be recorded."""
        target = self._recorded
        boundaries = choose_boundaries(self.recipe, target.num_layers, monitor)
        identity = StoreIdentity.of(
            target,
            tokenizer_sha256=tokenizer_sha256(self.tokenizer),
            template_sha256=template_sha256(self.tokenizer),
            boundaries=boundaries,
            dtype=self.recipe.record.dtype,
        )
        answers = read_conversations(self.run / STAGES["answers"].artefact)
        return identity, build_samples(answers, self.tokenizer, monitor)

    def _planned(self, monitor: Monitor) -> tuple[Manifest, list[Sample]]:
        """The plan of the recording, and the samples in it."""
        identity, recorded = self._asked(monitor)
        return plan_recording(
            self._recorded, recorded, self.recipe.record, identity, monitor=monitor
        )

    def write_plan(self, folder: Path) -> None:
        """The manifest of a store whose states are made while training (record.online)."""
        plan, _ = self._planned(self.monitor)
        whole = plan.model_copy(update={"complete": True, "online": True})
        write_json(folder / MANIFEST, whole.dump())
        self.monitor.say("nothing is stored: states are made while training (record.online)")

    def opened(self, ranks: Ranks | None) -> Store:
        """The recorded states, or the target that makes them.

        Raises:
            UserError: several ranks would have one target.
        """
        if not self.recipe.record.online:
            return Store.open(self.run / STAGES["store"].artefact)
        settings = self.recipe.target
        if ranks and (settings.gpus > 1 or settings.device not in ("auto", "cuda", "cpu")):
            raise UserError(
                f"record.online gives each of {ranks.size} processes the whole target on its "
                f"own GPU; found target.gpus {settings.gpus}, target.device {settings.device}",
                where="target",
                do="leave both at their defaults, train with one process, or record first",
            )
        plan, kept = self._planned(Monitor())  # it was told when the plan was made
        return OnlineStore(self.target, kept, plan)
