"""Compute a recipe's answers and store: the target answers prompts, and its states are recorded."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.kernels.cuda_device import free_memory
from draftlab.pipeline.gpu_workers import recording_workers, worker_devices
from draftlab.pipeline.head_spec import choose_boundaries
from draftlab.pipeline.recipe import Recipe
from draftlab.pipeline.stages import STAGES
from draftlab.progress import Monitor
from draftlab.store.manifest import MANIFEST, Manifest
from draftlab.store.online import OnlineStore
from draftlab.store.record import Role, record
from draftlab.store.recording_plan import plan_recording
from draftlab.store.samples import SampleTable, Selection
from draftlab.store.store import Store, StoreIdentity
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.text.answer_workers import Decode, start_answer_workers
from draftlab.text.answers import regenerate
from draftlab.text.chat_template import template_sha256, tokenizer_sha256
from draftlab.text.conversations import Conversation
from draftlab.text.prompts import load_prompts
from draftlab.text.samples import open_samples
from draftlab.text.server_answers import ServerAnswers
from draftlab.train.batch.order import check_row_tokens
from draftlab.train.distributed.ranks import Ranks
from draftlab.vllm.answers import VllmAnswers
from draftlab.vllm.hidden_states import VllmStateSource


@dataclass
class Recording:
    """The stages of a run that need the target: answers and store.

    Args:
        recipe: the recipe.
        run: the run folder.
        monitor: receives lines and progress.

    Attributes:
        trains: whether a head is trained next, whose rows have to hold the longest record.
    """

    recipe: Recipe
    run: Path
    monitor: Monitor
    trains: bool = field(default=False, init=False)

    @cached_property
    def prompts(self) -> list[Conversation]:
        """Return the conversations that the target answers."""
        return load_prompts(
            self.recipe.prompts,
            self.monitor,
            reads_answers=not self.recipe.regenerate.enabled,
        )

    @cached_property
    def tokenizer(self) -> Any:
        """Return the target's tokenizer."""
        return load_tokenizer(self.recipe.target)

    @cached_property
    def target(self) -> Target:
        """Return the target, which is loaded when the first stage needs it."""
        self.monitor.say(f"loading target {self.recipe.target.path}")
        target = load_target(self.recipe.target)
        for note in target.notes:
            self.monitor.say(note)
        return target

    @cached_property
    def target_metadata(self) -> TargetMetadata:
        """Return what is known of the target without loading it, for stages that vLLM computes."""
        return TargetMetadata(self.recipe.target)

    @property
    def _recorded_target(self) -> Target | TargetMetadata:
        if self.recipe.record.backend != "vllm":
            return self.target
        self._free("target")  # vLLM needs the memory
        return self.target_metadata

    def _free(self, *names: str) -> None:
        """Free what earlier stages have loaded; a later one that needs it loads it again."""
        loaded = [name for name in names if name in self.__dict__]
        for name in loaded:
            delattr(self, name)
        if loaded:
            free_memory()

    def answer(self, path: Path, gpus: int) -> None:
        """Write the target's answers to the prompts, on several GPUs with a process on each."""
        settings, target, decode = self.recipe.regenerate, None, None
        workers: list[Decode] = []
        with ExitStack() as stack:
            if settings.enabled and settings.backend == "vllm":
                target = self.target_metadata
                decode = stack.enter_context(VllmAnswers(target, settings, self.monitor))
            elif settings.enabled and settings.backend == "openai":
                target = self.target_metadata
                decode = ServerAnswers(settings, self.tokenizer, self.monitor)
            elif settings.enabled:
                devices = worker_devices(gpus, self.recipe.target.device)
                workers = stack.enter_context(
                    start_answer_workers(self.recipe.target, devices, settings.batch, self.monitor)
                )
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
                extra_decoders=workers,
            )

    def record(self, folder: Path, gpus: int) -> None:
        """Write the store, with worker processes on all GPUs but the first.

        With record.online only the store's manifest is written.
        """
        if self.recipe.record.online:
            plan, _ = self._plan(self.monitor)
            manifest = plan.model_copy(update={"complete": True, "online": True})
            manifest.write(folder)
            self.monitor.say("store: states are computed during training (record.online)")
            return
        devices = worker_devices(gpus, self.recipe.target.device)
        with recording_workers(self.run, devices, self.monitor):
            self._record(folder, "lead")

    def join(self, folder: Path) -> None:
        """Record shards of a plan that another process writes."""
        self._record(folder, "help")

    def _record(self, folder: Path, role: Role) -> None:
        settings, monitor, open_source = self.recipe.record, self.monitor, None
        identity, samples = self._samples(monitor)
        if settings.backend == "vllm":
            open_source = partial(VllmStateSource, self.target_metadata, settings, monitor)
        record(
            self._recorded_target,
            samples,
            folder,
            settings,
            identity,
            monitor=monitor,
            role=role,
            open_source=open_source,
        )

    def _samples(self, monitor: Monitor) -> tuple[StoreIdentity, SampleTable]:
        """Return the identity and the samples of the store."""
        target = self._recorded_target
        boundaries = choose_boundaries(self.recipe, target.num_layers, monitor)
        identity = StoreIdentity.of(
            target,
            tokenizer_sha256=tokenizer_sha256(self.tokenizer),
            template_sha256=template_sha256(self.tokenizer),
            boundaries=boundaries,
            dtype=self.recipe.record.dtype,
        )
        samples = open_samples(self.run / STAGES["answers"].artefact, self.tokenizer, monitor)
        if self.trains:
            settings, lengths = self.recipe.record, samples.lengths
            limit = min(settings.max_length or target.max_length, target.max_length)
            kept = (
                lengths[lengths <= limit]
                if settings.overlong == "skip"
                else lengths.clip(max=limit)
            )
            check_row_tokens(kept, self.recipe.train.row_tokens)
        return identity, samples

    def _plan(self, monitor: Monitor) -> tuple[Manifest, Selection]:
        """Return the plan of the store, and its samples."""
        identity, samples = self._samples(monitor)
        return plan_recording(
            self._recorded_target, samples, self.recipe.record, identity, monitor=monitor
        )

    def open_store(self, ranks: Ranks | None) -> Store:
        """Return the recorded store; with record.online, one that computes states when read.

        Unless training needs the target (record.online, train.replay), it is freed: training gets
        the whole memory.

        Raises:
            UserError: training needs the target with several ranks, and the target is on a named
                device or on several GPUs.
        """
        online, settings = self.recipe.record.online, self.recipe.target
        needed = "record.online" * online or "train.replay" * (self.recipe.train.replay is not None)
        if not needed:
            self._free("target", "target_metadata", "prompts")
        elif ranks and (settings.gpus > 1 or settings.device not in ("auto", "cuda", "cpu")):
            raise UserError(
                f"{needed} gives each of {ranks.size} processes the whole target on its "
                f"own GPU; found target.gpus {settings.gpus}, target.device {settings.device}",
                where="target",
                do=f"leave both at their defaults, train with one process, or leave {needed} out",
            )
        if not online:
            return Store.open(self.run / STAGES["store"].artefact)
        plan, samples = self._plan(Monitor())  # its lines were printed with the manifest
        recorded = Manifest.read(self.run / STAGES["store"].artefact / MANIFEST)
        # They are part of the key of checkpoints, which an older version may have written.
        update = {"schema_version": recorded.schema_version, "identity": recorded.identity}
        plan = plan.model_copy(update=update)
        return OnlineStore(self.target, samples, plan)
