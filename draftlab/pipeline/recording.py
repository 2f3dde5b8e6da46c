"""Make a recipe's answers and store, in this process or by a pool of workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from draftlab.engine.sampling import Generation, Request
from draftlab.errors import UserError
from draftlab.formatting import size_text
from draftlab.kernels.devices import free_memory
from draftlab.plan.estimate import RecipeSizes
from draftlab.progress import Monitor
from draftlab.run.stages import STAGES
from draftlab.servers.openai_answers import ServerAnswers
from draftlab.store.record import record
from draftlab.store.sample_table import SampleTable
from draftlab.store.shard_cache import SIZE, ShardCache
from draftlab.store.shard_files import RemoteShardFiles
from draftlab.store.store import Store, StoreIdentity
from draftlab.target_model.images import no_images
from draftlab.target_model.locate import TOKENIZER_FILES, resolve_target
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.text.answers import regenerate
from draftlab.text.chat_template import unread_arguments
from draftlab.text.conversations import Conversation
from draftlab.text.decode import Decode, in_order
from draftlab.text.prompts import load_prompts
from draftlab.text.samples import open_samples
from draftlab.text.self_prompts import SELF_PROMPTS, write_self_prompts
from draftlab.text.settings import SELF, PromptSettings
from draftlab.text.suites import prompt_digest
from draftlab.train.batch.order import check_row_tokens
from draftlab.workers.pool import WorkerPool
from draftlab.workers.target_worker import TargetWorker, held_out

_MARGIN = 2.0
"""The target stays if so many times the planned memory of the training are free."""


def cache_line(store: Store, cache: ShardCache) -> str:
    """Return how the shards of a store at a URL are read, for the console."""
    size = int(store.manifest.written.bytes.sum())
    line = (
        f"store: {size_text(size)} at {store.address}, read through a cache of "
        f"{size_text(cache.max_bytes)} in {cache.folder}"
    )
    window = cache.max_bytes if store.window is None else store.window.size
    if size <= cache.max_bytes or 2 * window <= cache.max_bytes:
        return line
    return (
        f"{line}; it is smaller than the store, so that shards are downloaded again and again: "
        f"{SIZE}={math.ceil(size / 1e9)}GB avoids that, and so does a recording with "
        "record.window of at most half of the cache and record.keep=all"
    )


@dataclass
class Recording(TargetWorker):
    """The stages of a run that need the target, answers and store, here or by a pool of workers.

    If a head is trained next (`trains`), its rows have to hold the longest record. If it is
    evaluated then (`evaluates`), the target stays on a GPU that has the memory.
    """

    trains: bool = field(default=False, init=False)
    evaluates: bool = field(default=False, init=False)

    @cached_property
    def prompts(self) -> list[Conversation]:
        """Return the conversations that the target answers."""
        settings = self.recipe.prompts
        given = [] if settings.source == SELF else self.given_prompts
        if not settings.num_self_written:
            return given
        update = {"source": str(self.run / SELF_PROMPTS), "max_prompts": None}
        written = self._load(settings.model_copy(update=update))
        if repeated := {one.id for one in given} & {one.id for one in written}:
            raise UserError(
                f"expected other ids than those of prompts that the target writes, found "
                f"{min(repeated)}",
                where=settings.source,
                do="rename them, or leave ids out of all lines",
            )
        known = {prompt_digest(one) for one in given if settings.deduplicate}
        return given + [one for one in written if prompt_digest(one) not in known]

    @cached_property
    def given_prompts(self) -> list[Conversation]:
        """Return the conversations of `prompts.source`, without those that the target writes."""
        return self._load(self.recipe.prompts)

    def _load(self, settings: PromptSettings) -> list[Conversation]:
        modes = self.recipe.target.modes
        prompts = load_prompts(
            settings,
            self.monitor,
            reads_answers=not self.recipe.regenerate.enabled,
            no_images=self._no_images,
            modes=modes,
            seed=self.recipe.seed,
        )
        if own := [one for p in prompts if (one := p.template_arguments) not in modes]:
            for name in unread_arguments(self.tokenizer, own):
                self.monitor.say(f"warning: prompts: the chat template does not read {name!r}")
        return prompts

    def _no_images(self) -> str:
        """Return why images of prompts are not read; "": they are."""
        recipe = self.recipe
        own = recipe.regenerate.backend == "paged" or not recipe.regenerate.enabled
        if not own or recipe.record.backend != "transformers":
            return "draftlab sends none to vLLM or other servers"
        return no_images(resolve_target(recipe.target, TOKENIZER_FILES))

    def write_answers(self, path: Path, pool: WorkerPool | None) -> None:
        """Write the target's answers to the prompts, by the pool's workers or in this process."""
        settings = self.recipe.regenerate
        target: Target | TargetMetadata | None = None
        decode = answer_chunks = None
        if settings.enabled and settings.backend == "openai":
            target = self.metadata
            decode = ServerAnswers(settings, self.tokenizer, self.monitor, target.vocab_size)
        elif settings.enabled and pool is not None:
            target = self._metadata(pool, "answers")

            def answer_chunks(chunks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
                yield from pool.run("answer", chunks)
                pool.finish()  # ends vLLM

        elif settings.enabled:
            target, decode = self.answering_target, self.decode
        try:
            if target is not None and self.recipe.prompts.num_self_written:
                self._write_prompts(target, decode, pool)
            prompts = [
                replace(one, images=tuple(image.copy_to(self.run) for image in one.images))
                for one in self.prompts
            ]
            regenerate(
                target,
                self.tokenizer,
                prompts,
                settings,
                path,
                seed=self.recipe.seed,
                monitor=self.monitor,
                decode=decode,
                answer_chunks=answer_chunks,
            )
        finally:
            decode = None
            self.finish()  # ends vLLM, or frees the engine

    def _write_prompts(
        self, target: Target | TargetMetadata, decode: Decode | None, pool: WorkerPool | None
    ) -> None:
        """Have the target write the prompts itself, by `decode` or by the pool's workers."""

        def decode_pieces(pieces: Sequence[list[Request]]) -> Iterator[list[Generation]]:
            if decode is None and pool is not None:
                yield from in_order(pool.run("decode_piece", pieces))
            for piece in pieces if decode else ():
                length = max(len(one.prompt_ids) + one.max_new_tokens for one in piece)
                yield list(decode(piece, length))

        write_self_prompts(
            self.run / SELF_PROMPTS,
            target,
            self.tokenizer,
            self.recipe.prompts,
            decode_pieces,
            arguments=self.recipe.target.modes[0],
            piece=self.recipe.regenerate.piece,
            seed=self.recipe.seed,
            monitor=self.monitor,
        )

    def _metadata(self, pool: WorkerPool, stage: str) -> TargetMetadata:
        """Return the target's metadata as it is on the workers' devices."""
        described = pool.describe(stage)
        update = {"dtype": described.dtype, "device": "cpu"}
        settings = self.recipe.target.model_copy(update=update)
        return TargetMetadata(settings, described.padding_reason)

    def write_store(self, folder: Path, pool: WorkerPool | None) -> None:
        """Write the store, by the pool's workers or in this process."""
        target = self.recorded_target if pool is None else self._metadata(pool, "store")
        record_shards = None
        if pool is not None:

            def record_shards(numbers: Sequence[int]) -> Iterator[int]:
                for _, tokens in pool.run("record", numbers):
                    yield tokens
                pool.finish()

        identity, samples = self.samples(target, self.monitor)
        with ThreadPoolExecutor(1) as thread:
            record(
                target,
                samples,
                folder,
                self.recipe.record,
                identity,
                monitor=self.monitor,
                open_source=self.open_source if pool is None else None,
                record_shards=record_shards,
                held_out=held_out(self.recipe),
                while_writing=partial(thread.submit, self._import_compiler),
            )

    def _import_compiler(self) -> None:
        """Import what torch.compile needs, if a head is trained next on a GPU, which would wait for
        these seconds then. A failure is met again, and said, by the training.
        """
        settings = self.recipe.train
        on_gpu = settings.device != "cpu" and torch.cuda.is_available()
        if self.trains and on_gpu and settings.compile is not False:
            import_module("torch._inductor.compile_fx")

    def samples(
        self, target: Target | TargetMetadata, monitor: Monitor
    ) -> tuple[StoreIdentity, SampleTable]:
        """Return the identity and the samples of the store, whose lengths are checked."""
        identity, samples = super().samples(target, monitor)
        if self.trains:
            settings, lengths = self.recipe.record, samples.lengths
            limit = settings.length_limit(target.max_length)
            check_row_tokens(lengths.clip(max=limit), self.recipe.train.row_tokens)
        return identity, samples

    def open_store(self) -> Store:
        """Return the recorded store. The target is freed, unless it fits beside the training."""
        record, folder = self.recipe.record, self.run / STAGES["store"].artefact
        if self.evaluates and self._fits_beside_training():
            self.monitor.say("the target stays on the GPU for the evaluation")
        else:
            self.free("target")
        self.free("metadata")
        for name in ("prompts", "given_prompts"):
            self.__dict__.pop(name, None)
        if record.window is None and record.url is None:
            return Store.open(folder, url=record.url)
        # Counting tokens must not download all shards of a URL; a window's may not be there.
        answers = self.run / STAGES["answers"].artefact
        table = open_samples(answers, self.tokenizer, Monitor())
        store = Store.open_recorded(folder, table, record.url)
        if isinstance(store.files, RemoteShardFiles):
            self.monitor.say(cache_line(store, store.files.cache))
        return store

    def _fits_beside_training(self) -> bool:
        """Return whether a GPU has the memory of a training, and a margin, beside the target."""
        target: Target | None = self.__dict__.get("target")
        if target is None or target.device.type != "cuda" or self.recipe.target.gpus > 1:
            return False
        free_memory()
        planned = {row.name: row.memory for row in RecipeSizes(self.recipe).stages()}
        free, _ = torch.cuda.mem_get_info(target.device)
        return bool(planned["head"]) and _MARGIN * planned["head"] < free
