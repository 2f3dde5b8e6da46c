"""The head on one process or on several: passes, gradients, the optimizer's step, whole tensors.

A pass is a module's forward, as wrappers want it: their hooks gather what lies in shards before it
and reduce gradients behind its backward. DDP comes from accelerate. On a CPU accelerate ignores
FSDP2 and DeepSpeed in silence, so these come from their own API everywhere: what the tests run is
what GPUs run.

All of them average gradients over ranks. The loss is a sum over all ranks divided by N_0 of the
whole optimizer step, so each rank multiplies its part by their number.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from draftlab.errors import UserError
from draftlab.heads.folder import new_head
from draftlab.heads.head import DraftHead
from draftlab.train.batch.packing import Batch
from draftlab.train.checkpoint import trainable
from draftlab.train.distillation_module import DistillationModule
from draftlab.train.distributed.ranks import HOW, Ranks
from draftlab.train.objectives.loss import Sums
from draftlab.train.optimizer import new_optimizer
from draftlab.train.settings import TrainSettings

Tensors = dict[str, Tensor]


class Whole:
    """One process; also what all wrappers share."""

    name = "one process"

    def __init__(self, lesson: DistillationModule, settings: TrainSettings, ranks: Ranks) -> None:
        self.head, self.settings, self.ranks = lesson.head, settings, ranks
        self.module, self.optimizer = self._wrapped(lesson)

    def _wrapped(self, lesson: DistillationModule) -> tuple[Any, Any]:
        """The module to call, and the optimizer."""
        return lesson, self._new_optimizer()

    def _expect(self, module: Any, kind: type) -> Any:
        """The module, if it is of that kind: launchers may ask accelerate for another one."""
        if not isinstance(module, kind):
            raise UserError(
                f"expected the head inside a {kind.__name__} on {self.ranks.size} processes, found "
                f"a {type(module).__name__}",
                do=HOW,
            )
        return module

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return new_optimizer(self.head, self.settings, self.ranks.device)

    def describe(self) -> str:
        """Where the head is, for people; the wrapper is the one that was found, not asked for."""
        device, count = self.ranks.device.type, self.ranks.size
        return f"{count} × {device}, {self.name}" if count > 1 else str(self.ranks.device)

    def forward(
        self, part: Batch, weights: Sequence[float], *, reduce: bool
    ) -> tuple[Tensor, Sums]:
        """`DistillationModule.forward`.

        Args:
            reduce: whether ranks reduce their gradients behind this pass, their last of the step.
        """
        self._set_reducing(reduce)
        return self.module(part, weights)

    def _set_reducing(self, reduce: bool) -> None:
        """Nothing is reduced on one process."""

    def backward(self, loss: Tensor, anchors: int) -> None:
        """Adds a pass's gradients of the loss divided by `anchors`, N_0 of the whole step."""
        self._backward(loss / (max(1, anchors) / self.ranks.size))

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, rate: float) -> Tensor:
        """Clips, steps and clears; returns the norm of the gradient before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = nn.utils.clip_grad_norm_(trainable(self.head).values(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return _whole(norm)

    def plain(self) -> DraftHead:
        """The head as it is now, with all its tensors and no wrapper; every rank calls it."""
        return self.head

    def close(self) -> None:
        """Ends what would keep a wrapper, its gradients and moments when nobody wants them."""

    def weights(self) -> Tensors:
        """Trained parameters, whole, on the CPU of rank 0 (elsewhere none); every rank calls it."""
        return self._kept(self._weights())

    def moments(self) -> Tensors:
        """The optimizer's state by parameter/field, as `weights`."""
        return self._kept(self._moments())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, whole on every rank."""
        for name, parameter in trainable(self.head).items():
            yield name, _whole(parameter.detach())

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trainable(self.head).items():
            for field, value in self.optimizer.state[parameter].items():
                yield f"{name}/{field}", _whole(torch.as_tensor(value))

    def _kept(self, tensors: Iterator[tuple[str, Tensor]]) -> Tensors:
        kept = {}
        for name, whole in tensors:
            if self.ranks.is_main:
                kept[name] = whole.cpu().clone()
        return kept

    @torch.no_grad()
    def load(self, weights: Tensors, moments: Tensors) -> None:
        """Takes in what `weights` and `moments` gave, of any wrapper on any number of ranks."""
        fields = sorted({key.rpartition("/")[2] for key in moments} - {"step"})
        on_device = counts_on_device(self.optimizer)
        for name, parameter in trainable(self.head).items():
            parameter.copy_(_like(parameter, weights[name]))
            steps = moments[f"{name}/step"]
            state = {"step": steps.to(parameter.device) if on_device else steps}
            for field in fields:
                state[field] = _like(parameter, moments[f"{name}/{field}"])
            self.optimizer.state[parameter] = state


def counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an AdamW keeps its counts of steps beside the moments, or else on the CPU."""
    return any(group["fused"] or group["capturable"] for group in optimizer.param_groups)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor where its parameter is, in shards if that is."""
    whole = whole.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole


class Ddp(Whole):
    """The head on every rank; gradients are averaged while the last backward runs."""

    name = "DistributedDataParallel"

    def _wrapped(self, lesson: DistillationModule) -> tuple[Any, Any]:
        # Its buffers are functions of the recipe, and equal on all ranks.
        options = DistributedDataParallelKwargs(
            broadcast_buffers=False, gradient_as_bucket_view=True
        )
        accelerator = Accelerator(
            cpu=self.ranks.device.type == "cpu", mixed_precision="no", kwargs_handlers=[options]
        )
        with warnings.catch_warnings():
            # Newer versions of torch call the option by another name, which older ones lack.
            warnings.simplefilter("ignore", FutureWarning)
            module = accelerator.prepare_model(lesson)
        return self._expect(module, DistributedDataParallel), self._new_optimizer()

    def _set_reducing(self, reduce: bool) -> None:
        self.module.require_backward_grad_sync = reduce  # as its no_sync() does


class Sharded(Whole):
    """What FSDP2 and ZeRO share."""

    def plain(self) -> DraftHead:
        with self.ranks.device:
            head = new_head(self.head.config)
        mine = self._frozen | dict(self.head.named_buffers()) | dict(self._weights())
        head.load_state_dict({name: mine[name] for name in head.state_dict()}, assign=True)
        head.rope = self.head.rope  # computed on the CPU, which rounds otherwise than a GPU
        return head

    def _keep_frozen(self) -> None:
        """Frozen parameters stay whole on every rank: they need no reduction."""
        self._frozen = {n: p for n, p in self.head.named_parameters() if not p.requires_grad}


class Fsdp2(Sharded):
    """Parameters, gradients and moments in shards; the head is gathered for the passes."""

    name = "fully_shard"

    def _wrapped(self, lesson: DistillationModule) -> tuple[Any, Any]:
        self._keep_frozen()
        # One group: a head has one layer or few, which are needed all along an unroll.
        module = fully_shard(
            lesson, reshard_after_forward=False, ignored_params=set(self._frozen.values())
        )
        return self._expect(module, FSDPModule), self._new_optimizer()

    def _set_reducing(self, reduce: bool) -> None:
        self.module.set_requires_gradient_sync(reduce)
        self.module.set_reshard_after_backward(reduce)  # gathered once for all passes of a step


def wrap(lesson: DistillationModule, settings: TrainSettings, ranks: Ranks) -> Whole:
    """A lesson under `train.parallel`, as fits the number of processes."""
    if ranks.size == 1:
        return Whole(lesson, settings, ranks)
    if settings.parallel.startswith("zero"):
        from draftlab.train.distributed.zero import Zero

        return Zero(lesson, settings, ranks)
    return (
        Fsdp2(lesson, settings, ranks)
        if settings.parallel == "fsdp2"
        else Ddp(lesson, settings, ranks)
    )
