"""From the rows of an optimizer step to its micro-batches, in whichever process packs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from draftlab.store.store import Record, Store
from draftlab.train.batch.feature_noise import StepNoise
from draftlab.train.batch.loss_rows import depths_kept
from draftlab.train.batch.packing import Batch, Room, pack
from draftlab.train.settings import TrainSettings

Rows = list[list[int]]
"""Records of each row, by number."""


class StepWork(NamedTuple):
    """The number of an optimizer step, and one process's micro-batches: rows, and whether idle."""

    step: int
    micro: Sequence[tuple[Rows, bool]]


@dataclass(frozen=True)
class Packer:
    """Packs micro-batches; what it makes is a function of the work, whoever does it.

    It may be pickled. This module imports little, for the processes that pack.

    Attributes:
        store: holds the records.
        settings, seed: the training's.
        drops, imitates: the objective's.
        one_row: see `pack`.
    """

    store: Store
    settings: TrainSettings
    seed: int
    drops: bool
    imitates: bool
    one_row: bool

    def batches(self, work: StepWork, room: Room | None = None) -> Iterator[Batch]:
        """The micro-batches of an optimizer step, one after the other, in `room` (see `pack`)."""
        settings = self.settings
        keep = partial(
            depths_kept,
            num_depths=settings.ttt_steps,
            ratio=settings.cod_ratio,
            least=settings.cod_min,
            seed=self.seed,
            step=work.step,
        )
        noise = StepNoise(settings.noise, self.seed, work.step)
        for rows, idle in work.micro:
            yield pack(
                self._records(rows),
                settings.row_tokens,
                settings.ttt_steps,
                keep=keep if self.drops else None,
                noise=noise if self.imitates and settings.noise else None,
                passes=settings.anchor_parts,
                room=room,
                one_row=self.one_row,
                idle=idle,
            )

    def _records(self, rows: Rows) -> list[list[Record]]:
        """The records of a micro-batch, asked for all at once."""
        found = iter(self.store.views([i for row in rows for i in row]))
        return [list(islice(found, len(row))) for row in rows]
