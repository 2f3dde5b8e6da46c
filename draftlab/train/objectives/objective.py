"""The training objective of a family of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from draftlab.heads.head import DraftHead
from draftlab.train.batch.loss_rows import StepSampling
from draftlab.train.batch.packing import Batch
from draftlab.train.flops import StepWork, chain_flops
from draftlab.train.objectives.loss import LossTerms, StepOutput
from draftlab.train.settings import TrainSettings

if TYPE_CHECKING:
    from draftlab.train.fast.layers import FastForward

Forward = Callable[[Any, Batch], Iterable[StepOutput]]
"""(head, batch of one pass) → the outputs of the steps or depths that have rows, in order."""


@dataclass(frozen=True)
class Objective:
    """How the heads of a family are trained.

    Attributes:
        forward: the reference forward pass of training and validation.
        step_weights: (γ, N_k of a whole optimizer step) → weight of each step's sum of losses,
            before the total is divided by N_0.
        fast_forward: a faster forward pass; it is used for heads that it supports.
        sampling: chooses the steps that each position is trained with in an optimizer step; None:
            all that carry loss.
        imitates_states: whether outputs imitate the target's states, from features
            with noise on them (`train.noise`).
        flops: (head, `StepWork`) → floating-point operations.
        own_terms: terms of a row's loss, in place of `train.loss`.
    """

    forward: Forward
    step_weights: Callable[[float, Sequence[int]], list[float]]
    fast_forward: type[FastForward] | None = None
    sampling: StepSampling | None = None
    imitates_states: bool = False
    flops: Callable[[DraftHead, StepWork], float] = chain_flops
    own_terms: LossTerms | None = None

    def step_shares(self, settings: TrainSettings) -> list[float]:
        """Return the share of the positions that each step is trained at, if all carry loss."""
        return self.sampling.shares(settings) if self.sampling else [1.0] * settings.ttt_steps

    def loss_terms(self, settings: TrainSettings) -> LossTerms:
        """Return the terms of a row's loss."""
        weighting = settings.acceptance_weighting
        if self.own_terms is not None:
            return replace(self.own_terms, acceptance_weighting=weighting)
        if self.imitates_states:
            return LossTerms(settings.loss, settings.distillation, True, weighting)
        return LossTerms(settings.loss, acceptance_weighting=weighting)
