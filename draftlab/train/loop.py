"""The training loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from draftlab.base import Monitor, UserError, canonical_json, sha256_text
from draftlab.data.draft_vocab import DraftVocabulary
from draftlab.data.packing import Batch, batches, pack
from draftlab.data.store import Store
from draftlab.heads.config import HeadConfig
from draftlab.heads.eagle3 import Eagle3Head, initialise_head
from draftlab.heads.folder import new_head
from draftlab.heads.initial import fingerprint, start_from
from draftlab.target.model import resolve_device
from draftlab.target.parts import TargetParts
from draftlab.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint, trainable
from draftlab.train.families import OBJECTIVES
from draftlab.train.knobs import FREE_KNOBS, TrainKnobs
from draftlab.train.metrics import MetricsLog, truncate_metrics
from draftlab.train.objective import Sums, weighted_loss
from draftlab.train.optimizer import learning_rate, new_optimizer
from draftlab.train.parallel import depths_kept
from draftlab.train.validate import Validation, validate


def split(store: Store, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Record indices for training and for validation, disjoint, fixed by the seed."""
    order = np.random.default_rng([seed, 1]).permutation(len(store)).tolist()
    held_out = min(max(1, round(share * len(store))), len(store) - 1) if share else 0
    return sorted(order[held_out:]), sorted(order[:held_out])


class Trainer:
    """Fits a head to a store.

    Args:
        store: recorded hidden states.
        parts: the target's embeddings, final norm and lm_head.
        config: the head to train.
        vocabulary: its draft vocabulary.
        knobs: how.
        seed: of initial values, split and order of the data.
        folder: gets metrics.jsonl and checkpoints/.
        monitor: for lines and progress.
        initial: a trained head to start from.
    """

    def __init__(
        self,
        store: Store,
        parts: TargetParts,
        config: HeadConfig,
        vocabulary: DraftVocabulary,
        knobs: TrainKnobs,
        *,
        seed: int,
        folder: Path,
        monitor: Monitor,
        initial: Eagle3Head | None = None,
    ) -> None:
        self.store, self.knobs, self.seed = store, knobs, seed
        self.folder, self.monitor = folder, monitor
        self.objective = OBJECTIVES[config.family]
        device = resolve_device(knobs.device)
        precision = knobs.precision
        if precision == "auto":
            precision = "float32" if device.type == "cpu" else "bfloat16"
        self.accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="bf16" if precision == "bfloat16" else "no",
        )
        self.device = self.accelerator.device
        self.training, self.held_out = split(store, knobs.validation_share, seed)
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
        self.parts = parts.to(self.device, torch.float32)
        optimizer = new_optimizer(head, knobs, self.device)
        self.head: Eagle3Head
        self.head, self.optimizer = self.accelerator.prepare(head, optimizer)
        if self.accelerator.num_processes > 1:
            raise UserError(
                "training on several processes is not supported yet",
                do="start one process",
            )
        self.key = sha256_text(
            canonical_json(
                [
                    knobs.model_dump(exclude=set(FREE_KNOBS)),
                    config.model_dump(mode="json", exclude={"provenance"}),
                    vocabulary.target_ids.tolist(),
                    store.manifest.model_dump(mode="json"),
                    seed,
                    fingerprint(initial) if initial is not None else None,
                ]
            )
        )
        self.step = self.tokens_seen = 0
        self.log = MetricsLog(folder, knobs)
        self._resume()

    def _resume(self) -> None:
        found = checkpoints(self.folder / "checkpoints")
        if not found:
            truncate_metrics(self.log.path, 0)
            return
        # prepare() wraps the optimizer; its own state dictionary is the one that counts.
        self.step, self.tokens_seen = load_checkpoint(
            found[-1], self.head, self.optimizer.optimizer, key=self.key
        )
        self.monitor.say(f"resuming training after step {self.step}")
        truncate_metrics(self.log.path, self.step)

    def run(self) -> Validation | None:
        """Trains to the last step; returns the closing validation (None: nothing held out)."""
        knobs = self.knobs
        validation: Validation | None = None
        sums, started = Sums.zeros(knobs.ttt_steps, self.device), time.perf_counter()
        tokens_logged = self.tokens_seen
        grad_norm = torch.zeros(())
        for micro in self._prefetched():
            rate = learning_rate(self.step, knobs)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            grad_norm = self._optimize(micro, sums)
            self.step += 1
            last = self.step == knobs.steps
            if self.step % knobs.log_every == 0 or last:
                busy, started = time.perf_counter() - started, time.perf_counter()
                self._log(sums, rate, float(grad_norm), self.tokens_seen - tokens_logged, busy)
                tokens_logged = self.tokens_seen
                sums = Sums.zeros(knobs.ttt_steps, self.device)
            if knobs.validate_every and self.step % knobs.validate_every == 0 and not last:
                self.validate()
            if self.step % knobs.checkpoint_every == 0 and not last:
                self.save()
        if self.held_out:
            validation = self.validate()
        self.save()
        self.log.close()
        return validation

    def _order(self) -> Iterator[list[list[int]]]:
        """Rows of record indices for each optimizer step."""
        lengths = [self.store.lengths[i] for i in self.training]
        for rows in batches(lengths, self.knobs.row_tokens, self.knobs.batch_rows, seed=self.seed):
            yield [[self.training[i] for i in row] for row in rows]

    def _pack(self, step: int, rows: list[list[int]]) -> list[Batch]:
        """The micro-batches of an optimizer step."""
        knobs = self.knobs
        keep = partial(
            depths_kept,
            num_depths=knobs.ttt_steps,
            ratio=knobs.cod_ratio,
            least=knobs.cod_min,
            seed=self.seed,
            step=step,
        )
        size = knobs.micro_rows or len(rows)
        return [
            pack(
                [[self.store[i] for i in row] for row in rows[at : at + size]],
                knobs.row_tokens,
                knobs.ttt_steps,
                keep=keep if self.objective.drops else None,
                passes=knobs.anchor_parts,
            )
            for at in range(0, len(rows), size)
        ]

    def _prefetched(self) -> Iterator[list[Batch]]:
        """The remaining steps' micro-batches, in order, packed ahead of time by threads."""
        steps = islice(enumerate(self._order()), self.step, self.knobs.steps)
        workers = 1 if self.device.type == "cpu" else 6
        with ThreadPoolExecutor(workers) as pool:
            ahead = deque(pool.submit(self._pack, *step) for step in islice(steps, 2 * workers))
            while ahead:
                ready = ahead.popleft().result()
                ahead.extend(pool.submit(self._pack, *step) for step in islice(steps, 1))
                yield ready

    def _optimize(self, micro: list[Batch], sums: Sums) -> torch.Tensor:
        """One optimizer step; the loss is normalised by the counts of all its micro-batches."""
        counts = [sum(n) for n in zip(*(batch.counts for batch in micro), strict=True)]
        weights = self.objective.weights(self.knobs.gamma, counts)
        for batch in micro:
            for part in batch.to(self.device).split():
                with self.accelerator.autocast() if self.device.type != "cpu" else self._cpu_cast():
                    loss, found = weighted_loss(
                        self.objective.outputs(self.head, part),
                        self.head,
                        self.parts,
                        part,
                        weights,
                    )
                if loss.requires_grad:  # or no position of this part carries loss
                    self.accelerator.backward(loss / counts[0])
                sums.add(found)
            self.tokens_seen += batch.num_tokens
        norm = self.accelerator.clip_grad_norm_(trainable(self.head).values(), self.knobs.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _cpu_cast(self) -> Any:
        if self.accelerator.mixed_precision == "bf16":
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()

    def _log(self, sums: Sums, rate: float, norm: float, tokens: int, busy: float) -> None:
        count = sums.count.clamp(min=1)
        alpha, accuracy = (sums.alpha / count).tolist(), (sums.hits / count).tolist()
        losses = (sums.loss / count).tolist()
        if not all(math.isfinite(x) for x in losses):
            raise UserError(
                f"the loss is not finite at step {self.step}: {losses}",
                where=self.folder / "metrics.jsonl",
                do="lower train.learning_rate, or look for broken records with `draftlab inspect`",
            )
        row = {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "loss": losses,
            "alpha": alpha,
            "accuracy": accuracy,
            "lr": rate,
            "grad_norm": norm,
            "tokens_per_s": tokens / busy,
            "predictions_per_s": float(sums.count.sum()) / busy,
        }
        self.log.write(row)
        self.monitor.progress(
            "train",
            self.step,
            self.knobs.steps,
            f"{tokens / busy:,.0f} tokens/s · loss {losses[0]:.3f} · α {alpha[0]:.3f}",
        )

    def validate(self) -> Validation:
        """Validates on the held-out records, writes and says what it found."""
        found = validate(
            self.head, self.parts, self.store, self.held_out, num_steps=self.knobs.ttt_steps
        )
        self.log.write(
            {"step": self.step, "tokens_seen": self.tokens_seen, "validation": found.metrics()}
        )
        self.monitor.say(f"validation at step {self.step}: {found.line()}")
        return found

    def save(self) -> Path:
        """Writes a checkpoint of the current step."""
        return save_checkpoint(
            self.folder / "checkpoints",
            self.head,
            self.optimizer.optimizer,
            step=self.step,
            tokens_seen=self.tokens_seen,
            key=self.key,
        )
