"""The objective of each family of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftlab.train.batch.packing import Batch
from draftlab.train.objectives.loss import StepOutput, Terms
from draftlab.train.objectives.parallel import parallel_outputs, parallel_weights
from draftlab.train.objectives.ttt import ttt_weights, unroll
from draftlab.train.settings import TrainSettings


@dataclass(frozen=True)
class Objective:
    """How a family of heads is trained.

    Attributes:
        outputs: (head, batch of one pass) → the output of each step that has rows, in order.
        weights: (γ, N_k of a whole optimizer step) → weight of each step's sum of losses, before
            all is divided by N_0.
        drops: whether training keeps only some anchors at later steps (`train.cod_ratio`).
        imitates: whether outputs imitate the target's states (`train.regression`), from features
            with noise on them (`train.noise`).
    """

    outputs: Callable[[Any, Batch], Iterator[StepOutput]]
    weights: Callable[[float, Sequence[int]], list[float]]
    drops: bool = False
    imitates: bool = False

    def terms(self, settings: TrainSettings) -> Terms:
        """What a row's loss is made of."""
        if self.imitates:
            return Terms(settings.loss, settings.distillation, settings.regression, settings.reach)
        return Terms(settings.loss, reach=settings.reach)


OBJECTIVES = {
    "eagle3": Objective(unroll, ttt_weights),
    "ptd": Objective(parallel_outputs, parallel_weights, drops=True),
    "eagle": Objective(unroll, ttt_weights, imitates=True),
    "eagle_llama4": Objective(unroll, ttt_weights, imitates=True),
}
