"""The training loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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
from draftlab.target.model import resolve_device
from draftlab.target.parts import TargetParts
from draftlab.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint, trainable
from draftlab.train.knobs import FREE_KNOBS, TrainKnobs
from draftlab.train.metrics import MetricsLog, truncate_metrics
from draftlab.train.ttt import Sums, ttt_loss
from draftlab.train.validate import Validation, validate


def learning_rate(step: int, knobs: TrainKnobs) -> float:
    """Linear warm-up, then a cosine down to a share of the peak; a function of the step alone."""
    warmup = max(1, round(knobs.warmup * knobs.steps))
    if step < warmup:
        return knobs.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, knobs.steps - warmup)
    floor = knobs.final_learning_rate
    return knobs.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def split(store: Store, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Record indices for training and for validation, disjoint, fixed by the seed."""
    order = np.random.default_rng([seed, 1]).permutation(len(store)).tolist()
    held_out = min(max(1, round(share * len(store))), len(store) - 1) if share else 0
    return sorted(order[held_out:]), sorted(order[:held_out])


class Trainer:
    """Fits an EAGLE3 head to a store.

    Args:
        store: recorded hidden states.
        parts: the target's embeddings, final norm and lm_head.
        config: the head to train.
        vocabulary: its draft vocabulary.
        knobs: how.
        seed: of initial values, split and order of the data.
        folder: gets metrics.jsonl and checkpoints/.
        monitor: for lines and progress.
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
    ) -> None:
        self.store, self.knobs, self.seed = store, knobs, seed
        self.folder, self.monitor = folder, monitor
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
        head = Eagle3Head(config)
        initialise_head(
            head,
            embeddings=parts.embeddings.float(),
            final_norm=next(parts.norm.parameters()).float(),
            lm_head=parts.lm_head.float(),
            target_ids=vocabulary.target_ids,
            seed=seed,
        )
        self.parts = parts.to(self.device, torch.float32)
        weights = trainable(head)
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in weights.values() if p.ndim > 1],
                    "weight_decay": knobs.weight_decay,
                },
                {"params": [p for p in weights.values() if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=knobs.learning_rate,
            betas=(0.9, knobs.beta2),
            fused=self.device.type == "cuda",
        )
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
        tokens_logged, busy = self.tokens_seen, 0.0
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
                speed = (self.tokens_seen - tokens_logged) / busy
                tokens_logged = self.tokens_seen
                self._log(sums, rate, float(grad_norm), speed)
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

    def _pack(self, rows: list[list[int]]) -> list[Batch]:
        """The micro-batches of an optimizer step."""
        knobs = self.knobs
        size = knobs.micro_rows or len(rows)
        return [
            pack(
                [[self.store[i] for i in row] for row in rows[at : at + size]],
                knobs.row_tokens,
                knobs.ttt_steps,
            )
            for at in range(0, len(rows), size)
        ]

    def _prefetched(self) -> Iterator[list[Batch]]:
        """The remaining steps' micro-batches, in order, packed ahead of time by threads."""
        steps = islice(self._order(), self.step, self.knobs.steps)
        workers = 1 if self.device.type == "cpu" else 6
        with ThreadPoolExecutor(workers) as pool:
            ahead = deque(pool.submit(self._pack, rows) for rows in islice(steps, 2 * workers))
            while ahead:
                ready = ahead.popleft().result()
                ahead.extend(pool.submit(self._pack, rows) for rows in islice(steps, 1))
                yield ready

    def _optimize(self, micro: list[Batch], sums: Sums) -> torch.Tensor:
        """One optimizer step; the loss is normalised by N_0 of all its micro-batches."""
        knobs = self.knobs
        anchors = max(1, sum(batch.num_anchors for batch in micro))
        for batch in micro:
            with self.accelerator.autocast() if self.device.type != "cpu" else self._cpu_cast():
                loss, found = ttt_loss(
                    self.head, self.parts, batch.to(self.device), gamma=knobs.gamma
                )
            self.accelerator.backward(loss / anchors)
            sums.add(found)
            self.tokens_seen += batch.num_tokens
        norm = self.accelerator.clip_grad_norm_(trainable(self.head).values(), knobs.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _cpu_cast(self) -> Any:
        if self.accelerator.mixed_precision == "bf16":
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()

    def _log(self, sums: Sums, rate: float, norm: float, speed: float) -> None:
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
            "tokens_per_s": speed,
        }
        self.log.write(row)
        self.monitor.progress(
            "train",
            self.step,
            self.knobs.steps,
            f"{speed:,.0f} tokens/s · loss {losses[0]:.3f} · α {alpha[0]:.3f}",
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
