"""The module of head and teacher whose forward is the loss, and backends that train it.

A pass is the forward of a module: the hooks of wrappers gather sharded parameters before it, and
reduce gradients behind its backward.

All backends average gradients over ranks. The loss is a sum over all ranks divided by N_0 of the
whole optimizer step, so each rank multiplies its part by the number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from draftlab.heads.folder import empty_head
from draftlab.heads.head import DraftHead
from draftlab.kernels.compile_ahead import CompileAhead
from draftlab.kernels.devices import to_device
from draftlab.target_model.parts import TargetParts
from draftlab.tensor_files import host_copy
from draftlab.train.batch.packing import Batch
from draftlab.train.checkpoint import trainable
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.fast.choose_forward import NOT_COMPILED, choose_forward
from draftlab.train.fast.layers import FastForward
from draftlab.train.objectives.loss import DraftTeacher, Sums, weighted_loss
from draftlab.train.optimizer import new_optimizer
from draftlab.train.settings import TrainSettings

Tensors = dict[str, Tensor]


def product_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of products that `train.precision` means on a device."""
    if precision == "auto":
        precision = "float32" if device.type == "cpu" else "bfloat16"
    return torch.float32 if precision == "float32" else torch.bfloat16


class DistillationModule(nn.Module):
    """The module that DDP, FSDP2 or ZeRO wrap. Its products are in `dtype`; weights, sums and
    gradients stay float32.
    """

    def __init__(
        self, head: DraftHead, target: DraftTeacher, settings: TrainSettings, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.head, self.target, self.dtype = head, target, dtype
        self.objective = head.family.objective()
        self.terms = self.objective.loss_terms(settings)
        self.head_forward, self.description = choose_forward(head, self.objective, settings, dtype)
        self._without_fp8 = self.head_forward
        if self.in_fp8:
            settings = settings.model_copy(update={"precision": "bfloat16"})
            self._without_fp8, other = choose_forward(head, self.objective, settings, dtype)
            if NOT_COMPILED in other:
                self.description += f", then {other[other.index(NOT_COMPILED) :]}"

    @property
    def in_fp8(self) -> bool:
        """Return whether layers, and lm_head if it is trained, multiply in 8 bits now."""
        return isinstance(self.head_forward, FastForward) and self.head_forward.in_fp8

    def end_fp8(self) -> None:
        """Multiply in 16 bits from now on."""
        self.head_forward = self._without_fp8

    @classmethod
    def on_device(
        cls, head: DraftHead, parts: TargetParts, settings: TrainSettings, device: torch.device
    ) -> DistillationModule:
        """Move a head to a device, frozen embeddings in the dtype of products, and return its
        module.
        """
        dtype = product_dtype(settings.precision, device)
        if not head.embed_tokens.weight.requires_grad:
            head.embed_tokens.to(dtype)  # they are read in this dtype anyway
        teacher = DraftTeacher.for_training(parts, to_device(head, device), dtype)
        return cls(head, teacher, settings, dtype)

    def compile_ahead(self, batch: Batch, weights: Sequence[float]) -> None:
        """Compile the Triton kernels of a pass side by side; a pass compiles them one by one."""
        compiled, trained = self.head_forward, [p for p in self.parameters() if p.requires_grad]
        if isinstance(compiled, FastForward):
            self.head_forward = compiled.eager()
        try:
            CompileAhead(batch.tokens.device)(
                lambda: torch.autograd.grad(self(batch, weights)[0], trained, allow_unused=True)
            )
        finally:
            self.head_forward = compiled

    def forward(self, batch: Batch, weights: Sequence[float]) -> tuple[Tensor, Sums]:
        """Return `weighted_loss` of a batch, with a gradient for every trained parameter."""
        with torch.autocast(
            batch.tokens.device.type, self.dtype, enabled=self.dtype != torch.float32
        ):
            outputs = self.head_forward(self.head, batch)
            inputs = outputs, self.head, self.target, batch, weights, self.terms
            loss, sums = weighted_loss(*inputs, fp8=self.in_fp8)
        if not loss.requires_grad:  # no position of this pass carries loss
            loss = loss + 0 * sum(p.sum() for p in self.head.parameters() if p.requires_grad)
        return loss, sums


class TrainBackend:
    """Training on one process; also the base class of the other backends."""

    name = "one process"

    def __init__(
        self, distillation: DistillationModule, settings: TrainSettings, ranks: Ranks
    ) -> None:
        self.head, self.settings, self.ranks = distillation.head, settings, ranks
        self.module, self.optimizer = self._wrap(distillation)

    def _wrap(self, distillation: DistillationModule) -> tuple[Any, torch.optim.Optimizer]:
        """Return the module to call, and the optimizer."""
        return distillation, self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return new_optimizer(self.head, self.settings, self.ranks.device)

    def describe(self) -> str:
        """Return the devices and the wrapper, for the console."""
        device, count = self.ranks.device.type, self.ranks.size
        return f"{count} × {device}, {self.name}" if count > 1 else str(self.ranks.device)

    def forward(
        self, batch: Batch, weights: Sequence[float], *, reduce: bool
    ) -> tuple[Tensor, Sums]:
        """Run `DistillationModule.forward`; `reduce`: it is the last pass of the step on this rank,
        behind which ranks reduce their gradients.
        """
        self._set_reduce(reduce)
        return self.module(batch, weights)

    def _set_reduce(self, reduce: bool) -> None:
        """Set whether the next backward reduces gradients."""

    def backward(self, loss: Tensor, num_anchors: int) -> None:
        """Add a pass's gradients of the loss divided by N_0 of the whole optimizer step."""
        self._backward(loss / (max(1, num_anchors) / self.ranks.size))

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> Tensor:
        """Clip gradients, step the optimizer, clear gradients; return the norm before clipping."""
        self._set_learning_rate(learning_rate)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return _full_tensor(norm)

    def _set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("rate_factor", 1.0)

    def unwrap(self) -> DraftHead:
        """Return the current head with whole tensors and no wrapper; every rank calls this."""
        return self.head

    def close(self) -> None:
        """Free what keeps the wrapper, its gradients and moments alive."""

    def weights(self) -> Tensors:
        """Return whole trained parameters on the CPU of rank 0; every rank calls this."""
        names = trainable(self.head)
        return self._on_main((name, value) for name, value in self._parameters() if name in names)

    def moments(self) -> Tensors:
        """Return the optimizer's state by parameter/field, as `weights`."""
        return self._on_main(self._moments())

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters, whole on every rank."""
        for name, parameter in self.head.named_parameters():
            yield name, _full_tensor(parameter.detach())

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trainable(self.head).items():
            for field, value in self.optimizer.state[parameter].items():
                yield f"{name}/{field}", _full_tensor(torch.as_tensor(value))

    def _on_main(self, tensors: Iterator[tuple[str, Tensor]]) -> Tensors:
        copies = {}
        for name, tensor in tensors:
            if self.ranks.is_main:
                copies[name] = host_copy(tensor)
        return copies

    @torch.no_grad()
    def load(self, weights: Tensors, moments: Tensors) -> None:
        """Restore what `weights` and `moments` returned, by any backend on any number of ranks."""
        on_device = steps_on_device(self.optimizer)
        for name, parameter in trainable(self.head).items():
            parameter.copy_(_shard_like(parameter, weights[name]))
            state = self.optimizer.state[parameter] = {}
            for key in (key for key in moments if key.rpartition("/")[0] == name):
                field, value = key.rpartition("/")[2], moments[key]
                if field != "step":
                    state[field] = _shard_like(parameter, value)
                else:
                    state[field] = value.to(parameter.device) if on_device else value


def steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether AdamW keeps its step counts beside the moments, not on the CPU."""
    return any(group["fused"] or group["capturable"] for group in optimizer.param_groups)


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a whole tensor on the parameter's device, sharded as the parameter is."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


class Ddp(TrainBackend):
    """The head on every rank; gradients are averaged while the last backward runs."""

    name = "DistributedDataParallel"

    def _wrap(self, distillation: DistillationModule) -> tuple[Any, torch.optim.Optimizer]:
        # Buffers are functions of the recipe, so they are equal on all ranks.
        device = self.ranks.device
        with warnings.catch_warnings():
            # Newer versions of torch have another name for the option, which older ones lack.
            warnings.simplefilter("ignore", FutureWarning)
            module = DistributedDataParallel(
                distillation,
                device_ids=[device] if device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )
        return module, self._new_optimizer()

    def _set_reduce(self, reduce: bool) -> None:
        self.module.require_backward_grad_sync = reduce  # as its no_sync() does


class ShardedBackend(TrainBackend):
    """The base class of backends whose parameters or optimizer states are sharded."""

    def unwrap(self) -> DraftHead:
        with self.ranks.device:
            head = empty_head(self.head.config)
        state = dict(self.head.named_buffers()) | dict(self._parameters())
        head.load_state_dict({name: state[name] for name in head.state_dict()}, assign=True)
        head.rope = self.head.rope  # computed on the CPU, which rounds otherwise than a GPU
        return head


class Fsdp2(ShardedBackend):
    """FSDP2: sharded parameters, gradients and moments; the passes of a step gather the head."""

    name = "fully_shard"

    def _wrap(self, distillation: DistillationModule) -> tuple[Any, torch.optim.Optimizer]:
        # One group: a head has one layer or few, which every step of an unroll needs. Frozen
        # parameters stay whole on every rank: they need no reduction.
        frozen = {p for p in self.head.parameters() if not p.requires_grad}
        module = fully_shard(distillation, reshard_after_forward=False, ignored_params=frozen)
        return module, self._new_optimizer()

    def _set_reduce(self, reduce: bool) -> None:
        self.module.set_requires_gradient_sync(reduce)
        self.module.set_reshard_after_backward(reduce)  # gathered once for all passes of a step


def wrap(distillation: DistillationModule, settings: TrainSettings, ranks: Ranks) -> TrainBackend:
    """Return the backend that `train.parallel` names; one process needs none of them."""
    from draftlab.train.distributed.zero import Zero  # its base class is above

    backends = {"ddp": Ddp, "fsdp2": Fsdp2}
    backend = TrainBackend if ranks.size == 1 else backends.get(settings.parallel, Zero)
    return backend(distillation, settings, ranks)
