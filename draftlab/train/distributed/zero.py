"""DeepSpeed's ZeRO (`train.parallel: zero1 | zero2 | zero3`), an optional extra.

Computation is float32 with autocast inside the passes, as in all backends: DeepSpeed's own 16-bit
modes would round the gradients. The trainer assigns rows to ranks, so DeepSpeed's micro-batch size
is 1.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftlab.errors import UserError
from draftlab.formatting import pip_install
from draftlab.process_environment import name_accelerator
from draftlab.train.checkpoint import trainable
from draftlab.train.distributed.backends import (
    DistillationModule,
    ShardedBackend,
    Tensors,
    steps_on_device,
)
from draftlab.train.fast.choose_forward import random_batch

MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(ShardedBackend):
    """ZeRO-1 shards the moments, ZeRO-2 gradients too, ZeRO-3 also the parameters."""

    @property
    def stage(self) -> int:
        """1, 2 or 3."""
        return int(self.settings.parallel.removeprefix("zero"))

    @property
    def name(self) -> str:
        """The backend's name, for the console."""
        return f"DeepSpeed ZeRO-{self.stage}"

    def _wrap(self, distillation: DistillationModule) -> tuple[Any, torch.optim.Optimizer]:
        self.deepspeed = deepspeed = _import_deepspeed()
        if self.stage == 3:
            # A pass reads parameters outside of the modules that own them.
            for parameter in self.head.parameters():
                deepspeed.zero.register_external_parameter(distillation, parameter)
        deepspeed.init_distributed(dist.get_backend(), verbose=False)
        optimizer = self._new_optimizer()
        module, *_ = deepspeed.initialize(
            model=distillation,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": self.settings.clip,
                "zero_optimization": {"stage": self.stage},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 2**60,
            },
        )
        if (stage := module.zero_optimization_stage()) != self.stage:
            raise UserError(
                f"expected DeepSpeed's ZeRO stage {self.stage}, found {stage}",
                do=f"install the newer DeepSpeed: {pip_install('deepspeed')}",
            )
        _create_moments(optimizer)
        return module, optimizer

    def close(self) -> None:
        # Python does not see the cycles through autograd's hooks. Stage 3 stays in the cache of one
        # of DeepSpeed's methods all the same, until the process ends.
        self.module.destroy()

    def _set_reduce(self, reduce: bool) -> None:
        self.module.set_gradient_accumulation_boundary(reduce)

    def _backward(self, loss: Tensor) -> None:
        self.module.backward(loss)

    def step(self, learning_rate: float) -> Tensor:
        self._set_learning_rate(learning_rate)
        self.module.step()
        # DeepSpeed skips a step whose gradients are not finite, and reports it by this norm alone.
        return torch.as_tensor(self.module.get_global_grad_norm(), device=self.ranks.device)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(self.head.named_parameters())
        with self._gathered(list(parameters.values())):
            for name, parameter in parameters.items():
                yield name, parameter.detach().clone()

    def _gathered(self, parameters: list[Any]) -> Any:
        """Gather sharded parameters; at the end rank 0's values are written back."""
        shards = parameters if self.stage == 3 else []
        return self.deepspeed.zero.GatheredParameters(shards, modifier_rank=0)

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        (steps, *_) = (state["step"] for state in self.optimizer.state.values())
        for name, parameter in trainable(self.head).items():
            yield f"{name}/step", steps
            for field in MOMENTS:
                get = self.deepspeed.utils.safe_get_full_optimizer_state
                yield f"{name}/{field}", get(parameter, field)

    @torch.no_grad()
    def load(self, weights: Tensors, moments: Tensors) -> None:
        self._run_empty_step()
        utils, device, parameters = self.deepspeed.utils, self.ranks.device, trainable(self.head)
        for name, parameter in parameters.items():
            utils.safe_set_full_fp32_param(parameter, weights[name].to(device))
            for field in MOMENTS:
                value = moments[f"{name}/{field}"].to(device)
                utils.safe_set_full_optimizer_state(parameter, value, field)
            for state in self.optimizer.state.values():
                state["step"].copy_(moments[f"{name}/step"])
        with self._gathered(list(parameters.values())):
            for name, parameter in parameters.items():
                if self.stage < 3 or self.ranks.is_main:
                    parameter.copy_(weights[name])

    @torch.enable_grad()
    def _run_empty_step(self) -> None:
        """Step with gradients and a learning rate of 0, which changes no weight.

        DeepSpeed gives access to the moments of a parameter after the first step.
        """
        batch = random_batch(self.head, 32).to(self.ranks.device)
        loss, _ = self.forward(batch, [0.0] * len(batch.steps), reduce=True)
        self._backward(loss)
        self.step(0.0)


def _create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Fill AdamW's state with zeros, as its first step would: DeepSpeed's stages 1 and 2 look for
    that of all parameter groups behind the first step of the first one.
    """
    on_device = steps_on_device(optimizer)
    for shard in (shard for group in optimizer.param_groups for shard in group["params"]):
        steps = torch.zeros((), device=shard.device if on_device else "cpu")
        fields = {field: torch.zeros_like(shard) for field in MOMENTS}
        optimizer.state[shard] = {"step": steps} | fields


def _import_deepspeed() -> Any:
    on_cpu = not torch.cuda.is_available()
    name_accelerator(has_gpu=not on_cpu)
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"train.parallel names DeepSpeed, which does not load: {error}",
            do=f"{pip_install('deepspeed')}, or use train.parallel: fsdp2",
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if on_cpu:
        # It would first compile an operator for shared memory, for minutes.
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    return deepspeed
