"""The data set of training: packed micro-batches, indexed by optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from draftlab.store.store import Record, Store
from draftlab.train.batch.feature_noise import StepNoise
from draftlab.train.batch.loss_rows import StepSampling
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.settings import TrainSettings

Rows = list[list[int]]
"""Record indices of each row."""


class OptimizerStep(NamedTuple):
    """An optimizer step on one rank.

    Attributes:
        micro_batches: rows, and whether idle.
        group: with a window, the last group of shards that the step reads (`WindowStep`).
    """

    number: int
    micro_batches: Sequence[tuple[Rows, bool]]
    group: int = 0

    def records(self) -> list[int]:
        """Return the indices of all records."""
        return [i for rows, _ in self.micro_batches for row in rows for i in row]


@dataclass(frozen=True)
class Packer:
    """Packs the micro-batches of an optimizer step.

    A batch is a function of the step, whichever process packs it. A packer can be pickled, and this
    module imports little, since every data worker imports it.

    Attributes:
        store: the records.
        settings, seed: of the training.
        sampling: the objective's choice of steps; None: all.
        imitates_states: whether the objective adds noise to the features.
        one_row: see `pack`.
    """

    store: Store
    settings: TrainSettings
    seed: int
    sampling: StepSampling | None
    imitates_states: bool
    one_row: bool

    def __getitem__(self, step: OptimizerStep) -> list[Batch]:
        settings, max_steps = self.settings, None
        if self.sampling is not None:
            options = {"settings": settings, "seed": self.seed, "step": step.number}
            max_steps = partial(self.sampling.sample, **options)
        noise = StepNoise(settings.noise, self.seed, step.number)
        return [
            pack(
                self._records(rows),
                settings.row_tokens,
                settings.ttt_steps,
                max_steps=max_steps,
                noise=noise if self.imitates_states and settings.noise else None,
                num_passes=settings.anchor_parts,
                one_row=self.one_row,
                idle=idle,
            )
            for rows, idle in step.micro_batches
        ]

    def _records(self, rows: Rows) -> list[list[Record]]:
        """Return the records of a micro-batch, read by one call."""
        records = iter(self.store.views([i for row in rows for i in row]))
        return [list(islice(records, len(row))) for row in rows]
