"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NoReturn

import torch

from draftlab.errors import UserError
from draftlab.files import canonical_json, sha256_text
from draftlab.formatting import rounded_text
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.folder import new_head
from draftlab.heads.head import DraftHead, initialise_head
from draftlab.heads.initial import fingerprint, start_from
from draftlab.progress import Monitor
from draftlab.store.prompt_split import hold_out
from draftlab.store.store import Store
from draftlab.store.verification import ShardVerification
from draftlab.target_model.parts import TargetParts
from draftlab.text.draft_vocabulary import DraftVocabulary
from draftlab.train.batch.loader import BatchLoader, MicroBatch
from draftlab.train.batch.order import batches
from draftlab.train.batch.packer import OptimizerStep, Packer
from draftlab.train.batch.packing import uses_one_row
from draftlab.train.checkpoint import Checkpoint, checkpoints, read_checkpoint, save_checkpoint
from draftlab.train.distillation_module import DistillationModule
from draftlab.train.distributed.ranks import Ranks, assign_micro_batches, idle_note
from draftlab.train.distributed.wrap import wrap
from draftlab.train.flops import dense_flops, matrix_rate, mean_context
from draftlab.train.metrics import MetricsLog, Window, speed_line
from draftlab.train.objectives.loss import DraftTeacher, Sums
from draftlab.train.optimizer import learning_rate
from draftlab.train.profiler import NOT_TRAINING, PhaseTimer
from draftlab.train.settings import TrainSettings
from draftlab.train.validation import Validation, validate


class Trainer:
    """Trains a head on the hidden states of a store.

    Args:
        store: recorded hidden states.
        parts: the target's embeddings, final norm and lm_head.
        config: config of the head to train.
        vocabulary: the draft vocabulary.
        settings: the recipe's `train:`.
        seed: of initial values, validation split and order of the data.
        folder: folder of metrics.jsonl and checkpoints/.
        monitor: for messages and progress.
        initial: a trained head to start from.
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
        ranks: Ranks | None = None,
    ) -> None:
        self.store, self.settings, self.seed = store, settings, seed
        self.folder, self.monitor = folder, monitor
        self.objective = get_family(config.family).objective()
        self.ranks = ranks or Ranks.join(settings.device)
        self.device = self.ranks.device
        self.dtype = product_dtype(settings.precision, self.device)
        self.training, self.held_out = hold_out(store.ids, settings.validation_share, seed)
        if settings.validation_share and not self.held_out:
            monitor.say("validation: none, since all records answer one prompt")
        drops, imitates = self.objective.drops_anchors, self.objective.imitates_states
        one_row = uses_one_row(self.device)
        packer = Packer(store, settings, seed, drops, imitates, one_row)
        self.loader = BatchLoader(packer, self.ranks)
        head = new_head(config)
        initialise_head(
            head,
            embeddings=parts.embeddings.float(),
            final_norm=next(parts.norm.parameters()).float(),
            lm_head=parts.lm_head.float(),
            target_ids=vocabulary.target_ids,
            seed=seed,
        )
        if initial is not None:
            monitor.say(start_from(head, initial, "head.init"))
        self.head = head.to(self.device)
        if not head.embed_tokens.weight.requires_grad:
            head.embed_tokens.to(self.dtype)  # they are read in this dtype anyway
        self.target = DraftTeacher.of(parts, head, torch.float32)
        module = DistillationModule(head, self.target, settings, self.dtype)
        self.backend = wrap(module, settings, self.ranks)
        inputs = [
            config.identity(),
            vocabulary.target_ids.tolist(),
            store.manifest.model_dump(mode="json"),
            seed,
            fingerprint(initial) if initial is not None else None,
        ]
        self.key, self.former_key = (
            sha256_text(canonical_json([identity, *inputs]))
            for identity in (settings.identity(), settings.former_identity())
        )
        self.step = self.tokens_seen = 0
        self.log = MetricsLog(folder, settings, muted=not self.ranks.is_main)
        self.timer = PhaseTimer(self.device)
        self._report_setup(module)
        self._resume()
        self.verification = ShardVerification(store, folder, self.ranks.rank, self.ranks.size)

    def _report_setup(self, module: DistillationModule) -> None:
        """Print how training runs; on a GPU measure the rate of products, which MFU refers to."""
        self.monitor.say(
            f"training on {self.backend.describe()}, products in {str(self.dtype)[6:]}"
        )
        self.monitor.say(
            f"how steps are run: {module.description}; batches are packed by "
            f"{self.loader.describe()}"
        )
        self.working = min(self.ranks.size, self.settings.batch_rows)
        if note := idle_note(self.settings.batch_rows, self.ranks.size):
            self.monitor.say(note)
        self.token_mfu: float | None = None
        if self.device.type == "cuda":
            context = mean_context([self.store.lengths[i] for i in self.training])
            flops = dense_flops(self.head.config, self.settings.ttt_steps, context)
            rate = matrix_rate(self.device, self.dtype)
            self.token_mfu = flops / (rate * self.working)
            self.monitor.say(
                f"MFU: {rounded_text(flops / 1e9)} GFLOP a token, over {rounded_text(rate / 1e12)} "
                f"TFLOP/s of a large product on each working GPU ({self.working})"
            )

    def _resume(self) -> None:
        """Continue after the last checkpoint, if there is one."""
        for path in self.ranks.broadcast(checkpoints(self.folder / "checkpoints")[-1:]):
            checkpoint = read_checkpoint(path, keys=[self.key, self.former_key])
            self.backend.load(checkpoint.weights, checkpoint.moments)
            self.step, self.tokens_seen = checkpoint.step, checkpoint.tokens_seen
            self.monitor.say(f"resuming training after step {self.step}")
        self.log.truncate(self.step)

    def run(self) -> Validation | None:
        """Train to the last step; return the final validation (None: no records are held out)."""
        with closing(self.verification), self.ranks.report_lost_rank():
            self._train()
            validation = None
            if self.held_out:
                validation = self.validate()
                if self.ranks.is_main and (line := self.log.overfitting_warning()):
                    self.monitor.say(line)
            self.save()
        self.log.close()
        return validation

    def _train(self) -> None:
        """Run the remaining steps."""
        settings = self.settings
        self.window = Window.empty(settings.ttt_steps, self.device)
        self.timer.start()
        with closing(self.loader.micro_batches(self._optimizer_steps())) as micro_batches:
            for micro in micro_batches:
                self.timer.mark("data")
                if micro.first:
                    self._start_step(micro)
                self._accumulate(micro)
                if not micro.last:
                    continue
                self._update()
                self.step += 1
                last = self.step == settings.steps
                if self.step % settings.log_every == 0 or last:
                    self._log()
                if (
                    settings.validate_every
                    and self.step % settings.validate_every == 0
                    and not last
                ):
                    self.validate()
                if self.step % settings.checkpoint_every == 0 and not last:
                    self.save()

    def _optimizer_steps(self) -> Iterator[OptimizerStep]:
        """Yield this process's share of the remaining optimizer steps."""
        for step, rows in islice(enumerate(self._order()), self.step, self.settings.steps):
            yield OptimizerStep(
                step, assign_micro_batches(rows, self.settings.micro_rows, self.ranks)
            )

    def _order(self) -> Iterator[list[list[int]]]:
        """Yield each optimizer step's rows of record indices."""
        lengths = [self.store.lengths[i] for i in self.training]
        for rows in batches(
            lengths, self.settings.row_tokens, self.settings.batch_rows, seed=self.seed
        ):
            yield [[self.training[i] for i in row] for row in rows]

    def _start_step(self, micro: MicroBatch) -> None:
        """Sum an optimizer step's counts over all ranks; processes wait for each other here."""
        *counts, tokens = self.ranks.all_reduce(
            torch.tensor([*micro.counts, micro.tokens])
        ).tolist()
        self.anchors = counts[0]
        self.weights = self.objective.step_weights(self.settings.gamma, counts)
        self.window.add_step(counts, tokens)
        self.tokens_seen += tokens
        if self.ranks.size > 1:
            self.timer.mark("ranks")

    def _accumulate(self, micro: MicroBatch) -> None:
        """Add a micro-batch's gradients; the loss is normalised by the counts of the whole step."""
        idle, batches_of_passes = micro.batch.idle, list(micro.batch.split())
        weights = [0.0] * len(self.weights) if idle else self.weights
        for number, batch in enumerate(batches_of_passes, 1):
            last = micro.last and number == len(batches_of_passes)
            loss, sums = self.backend.forward(batch, weights, reduce=last)
            self.timer.mark("forward")
            self.backend.backward(loss, self.anchors)
            self.timer.mark("backward")
            if not idle:
                self.window.sums.add(sums)

    def _update(self) -> None:
        """Run the optimizer step."""
        self.window.add_gradient_norm(self.backend.step(learning_rate(self.step, self.settings)))
        self.timer.mark("optimizer")

    def _log(self) -> None:
        """Write a line of metrics.jsonl about the steps since the last one, and report progress."""
        sums = torch.stack(self.window.sums.tensors()).cpu()
        self.window.sums = Sums(*self.ranks.all_reduce(sums))
        metrics = self.window.compute(self.timer, token_mfu=self.token_mfu)
        largest = float(self.window.largest_norm)
        self.window = Window.empty(self.settings.ttt_steps, self.device)
        if not all(map(math.isfinite, (largest, *metrics["loss"]))):
            self._raise_not_finite(f"losses {metrics['loss']} and a gradient of norm {largest}")
        progress = {"step": self.step, "tokens_seen": self.tokens_seen}
        rate = learning_rate(self.step - 1, self.settings)
        self.log.write({**progress, **metrics, "lr": rate, "working_processes": self.working})
        self.monitor.progress("train", self.step, self.settings.steps, speed_line(metrics))

    def validate(self) -> Validation:
        """Validate on the held-out records; write the metrics to metrics.jsonl and the console."""
        validation = validate(
            self.backend.unwrap(),
            self.target,
            self.store,
            self.held_out,
            num_steps=self.settings.ttt_steps,
            ranks=self.ranks,
        )
        metrics = validation.metrics()
        self.log.write({"step": self.step, "tokens_seen": self.tokens_seen, "validation": metrics})
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
        """Write a checkpoint of the current step with whole weights and moments, not shards.

        Raises:
            UserError: weights are not finite, or a shard of the store is damaged. A run that
                resumes from such weights could not recover.
        """
        self.verification.finish(self.ranks.all_gather, self.monitor)
        weights, moments = self.backend.weights(), self.backend.moments()
        broken = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
        if broken := self.ranks.broadcast(broken):
            self._raise_not_finite(f"weights that are not finite: {', '.join(broken)}")
        if self.ranks.is_main:
            checkpoint = Checkpoint(self.step, self.tokens_seen, self.key, weights, moments)
            save_checkpoint(self.folder / "checkpoints", checkpoint)
        self.timer.mark(NOT_TRAINING)


def product_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of products that `train.precision` means on a device."""
    if precision == "auto":
        precision = "float32" if device.type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
