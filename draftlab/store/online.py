"""A store that holds nothing: the target makes the states of records when they are asked for.

What a recording would write to disk is made in memory by the same passes, copies and checks, so
training sees the same records. Only which of them share a pass differs, and with that, in most
dtypes and devices, their last bits; with record.batch_tokens = 1 each has a pass of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftlab.kernels.current import made_current
from draftlab.store.extraction import HiddenStateExtractor
from draftlab.store.manifest import Manifest, Shard
from draftlab.store.plan import cut_batches
from draftlab.store.shard_writer import Filling
from draftlab.store.store import Record, Sample, Store
from draftlab.target_model.model import Target


class OnlineStore(Store):
    """What a `Store` offers, computed on demand. Threads may share it; they take turns.

    Args:
        target: on devices of its own, or on that of the training.
        samples: what a recording would keep, in stored order.
        plan: its manifest (`data.record.planned`).
    """

    def __init__(self, target: Target, samples: Sequence[Sample], plan: Manifest) -> None:
        super().__init__(Path(), plan)
        self.samples, self.device = samples, target.device
        self.capture = HiddenStateExtractor(target, plan)
        self._turn = threading.Lock()  # a pass hooks the model, and fills the device

    def view(self, index: int) -> Record:
        return self.views([index])[0]

    def views(self, indices: Sequence[int]) -> list[Record]:
        """Records, computed together in as few passes as record.batch_tokens allows.

        Raises:
            UserError: a pass does not fit the device, or a state is not finite.
        """
        settings, samples = self.manifest.settings, [self.samples[i] for i in indices]
        lengths = [len(sample.token_ids) for sample in samples]
        shard = Shard(
            file="",
            ids=[sample.id for sample in samples],
            lengths=lengths,
            temperatures=[sample.temperature for sample in samples],
            batches=cut_batches(lengths, settings["batch_tokens"], padded=self.capture.padded),
        )
        filling = Filling(shard, samples, self.identity, settings["not_finite"])
        with self._turn, made_current(self.device):
            captured = list(self.capture.batches(shard, samples))
        for batch, states in zip(shard.batches, captured, strict=True):
            filling.take(batch, states)
        plan = self.manifest.model_copy(update={"shards": [shard]})
        made = Store(self.folder, plan, {0: filling.tensors})
        return [made.view(number) for number in range(len(made))]

    def tokens_and_spans(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.samples[index]
        return torch.tensor(sample.token_ids), torch.tensor(sample.spans)
