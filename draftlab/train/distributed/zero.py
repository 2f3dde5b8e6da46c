"""DeepSpeed's ZeRO around a head (`train.parallel: zero1 | zero2 | zero3`), an optional extra.

Computation is float32 with autocast inside the passes, as everywhere: its own 16-bit modes would
round what is summed. The rows are dealt by the trainer, so it is told of micro-batches of one.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.heads.head import DraftHead
from draftlab.train.checkpoint import trainable
from draftlab.train.distillation_module import DistillationModule
from draftlab.train.distributed.backends import Sharded, Tensors, counts_on_device

MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(Sharded):
    """ZeRO-1 shards the moments, ZeRO-2 gradients too, ZeRO-3 also the parameters."""

    @property
    def stage(self) -> int:
        """1, 2 or 3."""
        return int(self.settings.parallel.removeprefix("zero"))

    @property
    def name(self) -> str:
        """For people."""
        return f"DeepSpeed ZeRO-{self.stage}"

    def _wrapped(self, lesson: DistillationModule) -> tuple[Any, Any]:
        deepspeed = _deepspeed()
        self._keep_frozen()
        _unregister_frozen(self.head)  # stage 3 would shard them, and gather them for every pass
        if self.stage == 3:
            # A pass reads parameters past the modules they belong to, so it has to hold them all.
            for parameter in trainable(self.head).values():
                deepspeed.zero.register_external_parameter(lesson, parameter)
        deepspeed.init_distributed(dist.get_backend(), verbose=False)
        module, optimizer, _, _ = deepspeed.initialize(
            model=lesson,
            optimizer=self._new_optimizer(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": self.settings.clip if self.stage == 3 else 0.0,  # else `_clip`
                "zero_optimization": {"stage": self.stage} | self._communication(),
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 2**60,
                # Its own timer has the host wait for the GPU at the start and end of each step.
                "timers": {"throughput": {"enabled": False}},
            },
        )
        self._expect(module, deepspeed.DeepSpeedEngine)
        if module.zero_optimization_stage() != self.stage:
            found = module.zero_optimization_stage()
            raise UserError(f"expected DeepSpeed's ZeRO stage {self.stage}, found {found}")
        _make_moments(optimizer.optimizer, self._shards(optimizer))
        if self.stage < 3:
            # By itself it links states to parameters behind the first group's first step, when the
            # states of later groups are not there yet, and then never finds those.
            optimizer._lazy_init_hp_params_optimizer_state()
        return module, optimizer

    def _communication(self) -> dict[str, Any]:
        """How gradients and weights travel: the fastest that is right (docs/benchmarks.md).

        DeepSpeed's default bucket is larger than a head: all gradients are copied to one buffer of
        2 GB and reduced there. Those larger than a bucket are reduced where they are.
        """
        elements = sum(p.numel() for p in trainable(self.head).values())
        buckets = {"reduce_bucket_size": max(1, elements // 10)}
        if self.stage == 3:
            # Each weight is gathered where it stays, not with all others and then copied there.
            return buckets | {"stage3_allgather_sequential": True}
        # Reduced on all ranks either way, without copies. Not overlapped with the backward pass:
        # it would drop gradients larger than a bucket while another stream still reduces them.
        # Its norm would have the host wait for the GPU, and the GPU then for the host (`_clip`).
        return buckets | {
            "reduce_scatter": False,
            "overlap_comm": False,
            "compute_grad_norm": False,
        }

    def close(self) -> None:
        # Cycles through autograd's hooks, which Python does not see. Stage 3 keeps what it has all
        # the same (a cache of one of its methods) until the process ends.
        self.module.destroy()

    def _set_reducing(self, reduce: bool) -> None:
        self.module.set_gradient_accumulation_boundary(reduce)

    def _backward(self, loss: Tensor) -> None:
        self.module.backward(loss)

    def step(self, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = self._clip() if self.stage < 3 else None
        self.module.step()
        if norm is None:
            # It leaves a step out where gradients are not finite, and says so by this norm alone.
            norm = torch.as_tensor(self.module.get_global_grad_norm(), device=self.ranks.device)
        return norm

    @torch.no_grad()
    def _clip(self) -> Tensor:
        """Clips this rank's part of the gradients; returns the norm of all, unread by the host."""
        groups = self.optimizer.averaged_gradients.values()
        parts = [part for group in groups for part in group]
        squared = nn.utils.get_total_norm(parts).square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
        scale = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
        for part in parts:
            part.mul_(scale)
        return norm

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trainable(self.head).items():
            yield name, _deepspeed().utils.safe_get_full_fp32_param(parameter)

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        steps = self._states()[0]["step"]
        for name, parameter in trainable(self.head).items():
            yield f"{name}/step", steps
            for field in MOMENTS:
                whole = _deepspeed().utils.safe_get_full_optimizer_state(parameter, field)
                yield f"{name}/{field}", whole

    def _shards(self, optimizer: Any) -> list[Tensor]:
        """The flat float32 shards of this rank, which torch's AdamW inside of it steps."""
        if self.stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return list(optimizer.single_partition_of_fp32_groups)

    def _states(self) -> list[dict[str, Tensor]]:
        """AdamW's state of each shard."""
        return [self.optimizer.optimizer.state[s] for s in self._shards(self.optimizer)]

    @torch.no_grad()
    def load(self, weights: Tensors, moments: Tensors) -> None:
        utils, device = _deepspeed().utils, self.ranks.device
        for name, parameter in trainable(self.head).items():
            utils.safe_set_full_fp32_param(parameter, weights[name].to(device))
            for field in MOMENTS:
                value = moments[f"{name}/{field}"].to(device)
                utils.safe_set_full_optimizer_state(parameter, value, field)
            for state in self._states():
                state["step"].copy_(moments[f"{name}/step"])
        named = trainable(self.head)
        shards = list(named.values()) if self.stage == 3 else []
        with _deepspeed().zero.GatheredParameters(shards, modifier_rank=0):
            for name, parameter in named.items():
                if self.stage < 3 or self.ranks.is_main:
                    parameter.copy_(weights[name])


def _make_moments(optimizer: torch.optim.Optimizer, shards: list[Tensor]) -> None:
    """Fills AdamW's state with zeros, as its first step would."""
    on_device = counts_on_device(optimizer)
    for shard in shards:
        steps = torch.zeros((), device=shard.device if on_device else "cpu")
        fields = {field: torch.zeros_like(shard) for field in MOMENTS}
        optimizer.state[shard] = {"step": steps} | fields


def _unregister_frozen(head: DraftHead) -> None:
    """Makes plain attributes of submodules with no trained parameter: hooks then pass them by."""
    for name, child in list(head.named_children()):
        parameters = list(child.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            del head._modules[name]
            head.__dict__[name] = child


def _deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found no GPU
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"train.parallel names DeepSpeed, which does not load: {error}",
            do="pip install 'draftlab[deepspeed]', or use train.parallel: fsdp2",
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if not torch.cuda.is_available():
        # It would first compile an operator for shared memory, for minutes.
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    return deepspeed
