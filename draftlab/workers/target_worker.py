"""What a process that holds the target does for a run: it answers chunks and records shards."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from draftlab.engine.sampling import Generation, Request
from draftlab.errors import UserError
from draftlab.kernels.devices import free_memory
from draftlab.progress import Monitor
from draftlab.recipe.head_spec import choose_boundaries
from draftlab.recipe.recipe import Recipe
from draftlab.run.stages import STAGES
from draftlab.servers.vllm_engine import VllmAnswers
from draftlab.servers.vllm_hidden_states import VllmStateSource
from draftlab.store.manifest import StoreIdentity
from draftlab.store.record import OpenStateSource, open_recorder
from draftlab.store.recording_plan import HeldOut
from draftlab.store.sample_table import SampleTable
from draftlab.store.shard_writer import ShardRecorder
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.text.answer_rounds import AnswerGenerator, Draft
from draftlab.text.chat_template import stop_ids, template_sha256, tokenizer_sha256
from draftlab.text.decode import Decode, engine_decode
from draftlab.text.samples import open_samples


def held_out(recipe: Recipe) -> HeldOut:
    """Return what decides the held-out records, which a store with a window is planned by."""
    return HeldOut(recipe.train.validation_share, recipe.seed)


@dataclass(frozen=True)
class TargetDescription:
    """What a process that does not load the target needs to know of the loaded one: its compute
    dtype, which depends on the device, and `Target.padding_reason`.
    """

    dtype: str
    padding_reason: str | None


@dataclass
class TargetWorker:
    """The target in this process, loaded when it is first needed, and its work for a run folder."""

    recipe: Recipe
    run: Path
    monitor: Monitor
    _recorder: ShardRecorder | None = field(default=None, init=False)
    _open: ExitStack = field(default_factory=ExitStack, init=False)

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
    def metadata(self) -> TargetMetadata:
        """Return what is known of the target without loading it, for stages that vLLM computes."""
        return TargetMetadata(self.recipe.target)

    @property
    def answering_target(self) -> Target | TargetMetadata:
        """The target of the stage answers; its metadata if another program decodes."""
        return self.target if self.recipe.regenerate.backend == "paged" else self.metadata

    @property
    def recorded_target(self) -> Target | TargetMetadata:
        """The target of the stage store; its metadata if vLLM computes the states."""
        if self.recipe.record.backend == "transformers":
            return self.target
        self.free("target")  # vLLM needs the memory
        return self.metadata

    def free(self, *names: str) -> None:
        """Free what earlier stages have loaded; a later one that needs it loads it again."""
        loaded = [name for name in names if name in self.__dict__]
        for name in loaded:
            delattr(self, name)
        if loaded:
            free_memory()

    def describe(self, stage: str) -> TargetDescription:
        """Return what the leading process needs to know of the target of a stage."""
        target = self.answering_target if stage == "answers" else self.recorded_target
        return TargetDescription(str(target.dtype).removeprefix("torch."), target.padding_reason)

    @cached_property
    def decode(self) -> Decode:
        """What decodes the answers: vLLM, which is started, or the target."""
        settings, target = self.recipe.regenerate, self.answering_target
        if isinstance(target, TargetMetadata):
            return self._open.enter_context(VllmAnswers(target, settings, self.monitor))
        return engine_decode(target, settings.batch, self.monitor)

    @cached_property
    def _generator(self) -> AnswerGenerator:
        settings, target = self.recipe.regenerate, self.answering_target
        stops = stop_ids(self.tokenizer, target.folder)
        reader = target if isinstance(target, Target) else None
        seed, length = self.recipe.seed, target.max_length
        return AnswerGenerator(self.tokenizer, settings, seed, stops, length, reader)

    def answer(self, chunk: list[Draft]) -> list[Draft]:
        """Return a chunk of prompts with the target's answers."""
        self._generator.answer(chunk, self.decode, lambda _: None)
        return chunk

    def decode_piece(self, requests: list[Request]) -> list[Generation]:
        """Return the generations of requests that are decoded together, in any order."""
        max_length = max(len(one.prompt_ids) + one.max_new_tokens for one in requests)
        return list(self.decode(requests, max_length))

    def record(self, number: int) -> int:
        """Record a shard of the published plan, and return its number of tokens.

        The shard may still be written; `finish` waits for it.
        """
        recorder = self._opened_recorder()
        shard = recorder.receipts.plan.shards[number]
        if not recorder.receipts.is_committed(shard):  # by a worker that was given up meanwhile
            for _ in recorder.record(number):
                pass
        return shard.tokens

    def record_ahead(self, number: int | None) -> list[int]:
        """Record a shard of a window, which may still be written then; None: wait for all.

        Returns:
            The numbers of the shards that were committed since the last call.
        """
        recorder = self._opened_recorder()
        if number is None:
            recorder.wait()
        else:
            for _ in recorder.record(number):
                pass
        return recorder.take_committed()

    def _opened_recorder(self) -> ShardRecorder:
        """Return what records shards of the published plan."""
        if self._recorder is None:
            identity, samples = self.samples(self.recorded_target, Monitor())
            self._recorder = open_recorder(
                self.recorded_target,
                samples,
                self.run / STAGES["store"].artefact,
                self.recipe.record,
                identity,
                self.open_source,
                self._open,
                held_out(self.recipe),
            )
        return self._recorder

    @property
    def open_source(self) -> OpenStateSource | None:
        """What opens vLLM or servers as the source of states; None: the target computes them."""
        if self.recipe.record.backend == "transformers":
            return None
        return partial(VllmStateSource, self.metadata, self.recipe.record, self.monitor)

    def samples(
        self, target: Target | TargetMetadata, monitor: Monitor
    ) -> tuple[StoreIdentity, SampleTable]:
        """Return the identity of the store and its samples, which the answers are made into."""
        boundaries = choose_boundaries(self.recipe, target.num_layers, monitor)
        identity = StoreIdentity.of(
            target,
            tokenizer_sha256=tokenizer_sha256(self.tokenizer),
            template_sha256=template_sha256(self.tokenizer),
            boundaries=boundaries,
            dtype=self.recipe.record.dtype,
        )
        answers = self.run / STAGES["answers"].artefact
        samples = open_samples(answers, self.tokenizer, monitor)
        if samples.has_images and self.recipe.record.backend != "transformers":
            raise UserError(
                "expected the states of answers to images, which vLLM is not sent here",
                where="record.backend",
                do="set record.backend=transformers",
            )
        return identity, samples

    def finish(self) -> None:
        """Wait until all shards are committed, and end vLLM or free the engine's memory."""
        self._recorder = None
        self._open.close()
        self.free("decode", "_generator")  # the generator holds the target
