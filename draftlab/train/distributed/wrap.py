"""The choice of a training backend."""

from __future__ import annotations

from draftlab.train.distillation_module import DistillationModule
from draftlab.train.distributed.backends import Ddp, Fsdp2, TrainBackend
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.distributed.zero import Zero
from draftlab.train.settings import TrainSettings

BACKENDS = {"ddp": Ddp, "fsdp2": Fsdp2, "zero1": Zero, "zero2": Zero, "zero3": Zero}


def wrap(distillation: DistillationModule, settings: TrainSettings, ranks: Ranks) -> TrainBackend:
    """Return the backend that `train.parallel` names; one process needs none of them."""
    backend = TrainBackend if ranks.size == 1 else BACKENDS[settings.parallel]
    return backend(distillation, settings, ranks)
