"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from draftlab.errors import UserError
from draftlab.formatting import rounded_text
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.folder import meta_head
from draftlab.heads.head import DraftHead
from draftlab.heads.validate import is_finite
from draftlab.kernels.cpu_float32_products import onednn_products
from draftlab.kernels.devices import out_of_memory_error
from draftlab.kernels.distill.linear import MIN_GPU_BUFFER
from draftlab.progress import Monitor
from draftlab.store.store import Store
from draftlab.target_model.parts import TargetParts
from draftlab.text.draft_vocabulary import DraftVocabulary
from draftlab.train.batch.loader import BatchLoader, MicroBatch
from draftlab.train.batch.packing import Packer, uses_one_row
from draftlab.train.best_head import BestHead
from draftlab.train.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    checkpoints,
    mark_verified,
    read_checkpoint,
    training_key,
)
from draftlab.train.distributed.backends import DistillationModule, wrap
from draftlab.train.distributed.ranks import EndingSignal, Ranks, idle_note
from draftlab.train.flops import StepWork, matrix_rate, mean_context
from draftlab.train.initial_weights import start_from, untrained_head
from draftlab.train.metrics import (
    NOT_TRAINING,
    MetricsLog,
    PhaseTimer,
    Window,
    reset_peak_memory,
    speed_line,
)
from draftlab.train.objectives.loss import Sums
from draftlab.train.optimizer import learning_rate
from draftlab.train.settings import TrainSettings
from draftlab.train.step_graph import MOST_SECONDS, StepGraph, supports_graph
from draftlab.train.validation import Validation, split_records, validate
from draftlab.train.verification import ShardVerification


class Trainer:
    """Trains a head on the hidden states of a store.

    Args:
        seed: of initial values, validation split and order of the data.
        folder: of metrics.jsonl and checkpoints/.
        initial: a trained head to start from.
        tracked_config: all settings of the run, for trackers.
        ranks: processes that train together; None: those of the launcher's environment.
    """

    def __init__(
        self,
        store: Store,
        parts: TargetParts,
        config: HeadConfig,
        vocabulary: DraftVocabulary,
        settings: TrainSettings,
        *,
        seed: int,
        folder: Path,
        monitor: Monitor,
        initial: DraftHead | None = None,
        tracked_config: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.store, self.settings, self.seed = store, settings, seed
        self.folder, self.monitor, self.tracked_config = folder, monitor, tracked_config or {}
        self.objective = get_family(config.family).objective()
        self.ranks = ranks or Ranks.join(settings.device)
        self.device = self.ranks.device
        on_gpu = self.device.type == "cuda"
        self.bytes_before = torch.cuda.memory_allocated(self.device) if on_gpu else 0
        self.training, self.held_out = split_records(store, settings, seed, monitor)
        rules = self.objective.sampling, self.objective.imitates_states
        packer = Packer(store, settings, seed, *rules, uses_one_row(self.device))
        self.loader = BatchLoader(packer, self.ranks)
        self.loader.start_workers()  # they import while the head is made and kernels are compiled
        try:
            head = untrained_head(config, parts, vocabulary, seed)
            if parts.norm_form is not None and not parts.norm_form.is_rms:
                monitor.say(
                    f"final norm: the target's ({type(parts.norm).__name__}) subtracts the mean or "
                    "adds a bias; the head's starts with its weight alone"
                )
            if initial is not None:
                monitor.say(start_from(head, initial, "head.init"))
            self._prepare(
                head, parts, training_key(settings, config, vocabulary, store, seed, initial)
            )
        except BaseException:
            self.loader.close()
            raise

    def _prepare(self, head: DraftHead, parts: TargetParts, key: str) -> None:
        """Make what steps need, compile their kernels, and read the last checkpoint, if any."""
        monitor, folder = self.monitor, self.folder
        if self.device.type == "cuda":
            monitor.say(
                "preparing the training step: kernels that no earlier process has compiled are "
                "compiled now and in the first step"
            )
        self.module = DistillationModule.on_device(head, parts, self.settings, self.device)
        self.head, self.dtype = head, self.module.dtype
        self.backend = wrap(self.module, self.settings, self.ranks)
        self.key = key
        self.step, self.tokens_seen, self.resumed_verified = 0, 0, True
        self.trained_alpha: float | None = None  # of the first step, since the last log line
        self.log = MetricsLog(folder, muted=not self.ranks.is_main)
        self.best = BestHead(folder / "best", self.key)
        self.ending, self.timer = EndingSignal(self.ranks), PhaseTimer(self.device)
        self._report_setup()
        self.graph = self._step_graph()
        self._resume()
        self.verification = ShardVerification(self.store, folder, self.ranks)
        self.writer = CheckpointWriter(folder / "checkpoints")

    def _report_setup(self) -> None:
        """Print how training runs; on a GPU measure the rate of products, which MFU refers to."""
        say, packed_by = self.monitor.say, self.loader.describe()
        say(f"training on {self.backend.describe()}, products in {str(self.dtype)[6:]}")
        say(f"how steps are run: {self.module.description}; batches are packed by {packed_by}")
        self.working = min(self.ranks.size, self.settings.batch_rows)
        if note := idle_note(self.settings.batch_rows, self.ranks.size):
            say(note)
        self.context = mean_context(np.asarray(self.store.lengths)[self.training])
        self.shapes = meta_head(self.head.config)  # a sharded head does not show its sizes
        self.rate: float | None = None
        if self.device.type == "cuda":
            one = matrix_rate(self.device, self.dtype)
            one *= 1 + self.module.in_fp8  # products in 8 bits are twice as fast
            self.rate = one * self.working
            say(
                f"MFU: of the {rounded_text(one / 1e12)} TFLOP/s of a large product, on each of "
                f"the GPUs that have work ({self.working}); skipped rows are not counted"
            )

    def _step_graph(self) -> StepGraph | None:
        """Return the graph of the steps, and pad batches for it; None: steps run without one.

        The choice follows from the GPU's speed and free memory. A training that resumes with the
        other one differs in rounding, and in the sample that gives lk's mean α.
        """
        one = self.ranks.size == 1 and self.loader.window.order is None
        if not (one and supports_graph(self.module, self.settings, self.device)):
            return None
        row_bytes = self.head.config.draft_vocab_size * self.dtype.itemsize
        sizes = self.loader.choose_sizes(self.training, MIN_GPU_BUFFER // row_bytes)
        work = StepWork(sizes.positions, sizes.rows, sizes.teachers, self.context)
        if self.rate is None or self.objective.flops(self.shapes, work) > MOST_SECONDS * self.rate:
            return None
        self.loader.packer = replace(self.loader.packer, sizes=sizes)
        self.monitor.say(
            f"each step is one CUDA graph of {sum(sizes.rows):,} rows, of which some carry no "
            "loss: the host would queue its kernels more slowly than they run; steps with more "
            "rows run without it"
        )
        return StepGraph(self.module, self.device)

    def _resume(self) -> None:
        """Continue after the last checkpoint, if there is one."""
        for path in self.ranks.broadcast(checkpoints(self.folder / "checkpoints")[-1:]):
            checkpoint = read_checkpoint(path, key=self.key)
            self.backend.load(checkpoint.weights, checkpoint.moments)
            self.step, self.tokens_seen = checkpoint.step, checkpoint.tokens_seen
            self.resumed_verified = checkpoint.verified
            self.monitor.say(f"resuming training after step {self.step}")
        self.best.resume(self.step)
        self.validated = self.ranks.broadcast(self.log.truncate(self.step, self.settings.steps))

    def run(self) -> Validation | None:
        """Train to the end; return the final validation (None: none was done)."""
        tracked = self.log.tracked(self.settings, self.key, self.tracked_config, self.step)
        memory = out_of_memory_error(
            "training", "lower train.micro_rows or train.row_tokens, or raise train.anchor_parts"
        )
        products = onednn_products(self.device)
        with (
            closing(self.loader),
            closing(self.verification),
            closing(self.writer),
            self.ranks.report_lost_rank(),
            tracked,
            memory,
            products,
        ):
            if not self.resumed_verified:
                self.verification.finish(self.monitor)
            with self.ending.postponed():
                self._train()
            self.save()
            validation = None
            if self.held_out:
                validation = self.validate()
                self.best.compare(validation, self.monitor.say)
                if line := validation.gap_line(self.trained_alpha):
                    self.monitor.say(line)
            self.writer.finish()  # it is set aside, too, if a shard is damaged
            if self.verification.finish(self.monitor) and self.ranks.is_main:
                mark_verified(checkpoints(self.writer.folder)[-1])
        return validation

    def _train(self) -> None:
        """Run the remaining steps; end the process if a rank received SIGTERM or SIGHUP."""
        settings = self.settings
        every = (self.held_out and settings.validate_every) or settings.steps + 1
        self.window = Window.empty(settings.ttt_steps, self.device)
        reset_peak_memory(self.device)
        self.timer.start()
        if 0 < self.step < settings.steps and self.step % every == 0 and not self.validated:
            self.validate()  # a signal came before it
        steps, began = self.loader.steps(self.training, first=self.step), time.perf_counter()
        compiles, window = self.device.type == "cuda", self.loader.window
        with closing(self.loader.micro_batches(steps)) as micro_batches, window.stopping():
            for micro in micro_batches:
                self.timer.mark(window.phase(self.step))
                if micro.first:
                    self._start_step(micro)
                    if compiles:
                        waited = time.perf_counter() - began
                        self._compile_ahead(micro)
                self._accumulate(micro)
                if not micro.last:
                    continue
                self.window.add_gradient_norm(self.backend.step(learning_rate(self.step, settings)))
                self.timer.mark("optimizer")
                self.step += 1
                if compiles:
                    torch.cuda.synchronize(self.device)
                    took = time.perf_counter() - began
                    self.monitor.say(
                        f"the first step took {took:.0f} s: {waited:.0f} s until data came, the "
                        "rest mostly for compiling"
                    )
                    compiles = False
                last = self.step == settings.steps
                if self.step % settings.log_every == 0 or last:
                    self._log()
                if last or self.ranks.size == 1:  # otherwise the ranks agree as a step begins
                    self.ending.sum([])
                self._end_on_signal()
                if last:
                    continue
                if self.step % every == 0:
                    self.validate()
                if self.step % settings.checkpoint_every == 0:
                    self.save()

    def _compile_ahead(self, micro: MicroBatch) -> None:
        """Compile the kernels of the first step; a sharded head cannot run without its values."""
        if self.ranks.size == 1:
            self.module.compile_ahead(next(micro.batch.split()), self.weights)

    def _start_step(self, micro: MicroBatch) -> None:
        """Sum an optimizer step's counts over all ranks; processes wait for each other here."""
        sums = self.ending.sum([*micro.counts, micro.tokens, micro.teachers])
        *counts, tokens, teachers = sums
        self.loader.window.begin_step(self.step)
        decays = self.step >= self.settings.steps - self.settings.decay_steps
        if decays and self.module.in_fp8:
            self.module.end_fp8()
            self.rate = self.rate and self.rate / 2
        self.anchors = counts[0]
        self.weights = self.objective.step_weights(self.settings.gamma, counts)
        self.window.add_step(counts, tokens, teachers)
        self.tokens_seen += tokens
        if self.ranks.size > 1:
            self.timer.mark("ranks")

    def _end_on_signal(self) -> None:
        """Write a checkpoint and end the process if a rank received SIGTERM or SIGHUP."""
        if (number := self.ending.agreed) is not None:
            self.save()
            self.writer.finish()
            written = f"a checkpoint of step {self.step} is written"
            self.monitor.say(f"{number.name}: {written}; the same command continues from it")
            raise SystemExit(128 + number)

    def _accumulate(self, micro: MicroBatch) -> None:
        """Add a micro-batch's gradients; the loss is normalised by the counts of the whole step."""
        if self.graph is not None and micro.batch.padding is not None:
            sums = self.graph(micro.batch, self.weights, self.anchors)
            torch._foreach_add_(self.window.sums, sums)
            self.timer.mark("graph")
            return
        idle, batches_of_passes = micro.batch.idle, list(micro.batch.split())
        weights = [0.0] * len(self.weights) if idle else self.weights
        for number, batch in enumerate(batches_of_passes, 1):
            last = micro.last and number == len(batches_of_passes)
            loss, sums = self.backend.forward(batch, weights, reduce=last)
            self.timer.mark("forward")
            self.backend.backward(loss, self.anchors)
            self.timer.mark("backward")
            if not idle:
                torch._foreach_add_(self.window.sums, sums)

    def _log(self) -> None:
        """Write a line of metrics.jsonl about the steps since the last one, and report progress."""
        sums = torch.stack(self.window.sums).cpu()
        self.window.sums = Sums(*self.ranks.all_reduce(sums))
        window = self.window
        work = StepWork(window.tokens, window.counts, window.teachers, self.context)
        flops = self.objective.flops(self.shapes, work)
        share = None if self.rate is None else flops / self.rate
        metrics = window.compute(self.timer, mfu_seconds=share, bytes_before=self.bytes_before)
        metrics |= self.loader.window.metrics()
        self.trained_alpha = metrics["alpha"][0]
        largest = float(self.window.largest_norm)
        self.window = Window.empty(self.settings.ttt_steps, self.device)
        if not all(map(isfinite, (largest, *metrics["loss"]))):
            self._raise_not_finite(f"losses {metrics['loss']} and a gradient of norm {largest}")
        progress = {"step": self.step, "tokens_seen": self.tokens_seen}
        rate = learning_rate(self.step - 1, self.settings)
        self.log.write({**progress, **metrics, "lr": rate, "working_processes": self.working})
        self.monitor.progress("train", self.step, self.settings.steps, speed_line(metrics))

    def validate(self) -> Validation:
        """Validate on the held-out records; write the metrics to metrics.jsonl and the console."""
        data, num_steps = (self.module.target, self.store, self.held_out), self.settings.ttt_steps
        validation = validate(self.backend.unwrap(), *data, num_steps=num_steps, ranks=self.ranks)
        row = {"step": self.step, "tokens_seen": self.tokens_seen}
        self.log.write({**row, "validation": validation.metrics()})
        self.best.update(self.step, validation, self.backend.unwrap, write=self.ranks.is_main)
        self.monitor.say(f"validation at step {self.step}: {validation.line()}")
        if line := validation.position_line():
            self.monitor.say(line)
        self.timer.mark(NOT_TRAINING)
        return validation

    def _raise_not_finite(self, values: str) -> NoReturn:
        raise UserError(
            f"expected finite numbers up to step {self.step}, found {values}",
            where=self.folder / "metrics.jsonl",
            do="lower train.learning_rate, or look for broken records with `draftlab inspect`",
        )

    def save(self) -> None:
        """Have a checkpoint of the current step written; raise a `UserError` if weights are not
        finite, a shard that is hashed by now is damaged, or the last one could not be written.
        """
        self.writer.finish()
        self.verification.update()
        weights, moments = self.backend.weights(), self.backend.moments()
        broken = [name for name, weight in weights.items() if not is_finite(weight)]
        if broken := self.ranks.broadcast(broken):
            self._raise_not_finite(f"weights that are not finite: {', '.join(broken)}")
        if self.ranks.is_main:
            state, verified = (self.step, self.tokens_seen, self.key), self.verification.complete
            self.writer.write(Checkpoint(*state, weights, moments, verified))
        self.timer.mark(NOT_TRAINING)
