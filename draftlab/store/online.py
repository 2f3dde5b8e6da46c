"""A store without files: the target computes the states of records on demand.

The forward passes, copies and checks of a recording run in memory, so training sees the same
records. Only the records that share a pass differ, and with them, for most dtypes and devices, the
states' last bits; with record.batch_tokens = 1 each record has a pass of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from draftlab.kernels.devices import use_device
from draftlab.store.extraction import HiddenStateExtractor
from draftlab.store.manifest import Manifest
from draftlab.store.record_index import RecordIndex
from draftlab.store.recording_plan import cut_batches
from draftlab.store.samples import Sample
from draftlab.store.shard_writer import ShardBuffer
from draftlab.store.store import Record, Store
from draftlab.target_model.model import Target


class OnlineStore(Store):
    """A `Store` whose records are computed on demand. Threads that share it take turns.

    Args:
        target: on its own devices, or on the one of the training.
        samples: the samples that a recording stores, in stored order.
        plan: the plan of such a recording (`plan_recording`).
    """

    on_disk = False

    def __init__(self, target: Target, samples: Sequence[Sample], plan: Manifest) -> None:
        super().__init__(Path(), plan)
        self.samples, self.device = samples, target.device
        self.extractor = HiddenStateExtractor(target, plan)
        self._lock = threading.Lock()  # a pass hooks the model and needs the device's memory

    def view(self, index: int) -> Record:
        return self.views([index])[0]

    def views(self, indices: Sequence[int]) -> list[Record]:
        """Compute records together, in as few passes as record.batch_tokens allows.

        Raises:
            UserError: a pass runs out of device memory, or a state is not finite.
        """
        settings, samples = self.manifest.settings, [self.samples[i] for i in indices]
        lengths = [len(sample.token_ids) for sample in samples]
        batches = cut_batches(lengths, settings["batch_tokens"], padded=self.extractor.padded)
        index = RecordIndex.of(
            [sample.id for sample in samples],
            lengths,
            [sample.temperature for sample in samples],
            [len(samples)],
            [batches],
        )
        plan = self.manifest.model_copy(update={"index": index})
        shard = plan.shards[0]  # it is never written
        buffer = ShardBuffer(shard, samples, self.identity, settings["not_finite"])
        with self._lock, use_device(self.device):
            futures = list(self.extractor.batches(shard, samples))
        for batch, future in zip(batches, futures, strict=True):
            buffer.add(batch, future)
        store = Store(self.folder, plan, {0: buffer.tensors})
        return [store.view(number) for number in range(len(store))]
