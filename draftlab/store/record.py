"""Recording: the target's states of samples, written into a store in shards.

The plan (which sample is in which shard and in which forward pass) is written into the manifest
before anything is computed. A killed recording therefore continues after its last committed shard,
and ends with the bytes of an uninterrupted one, however many processes share the work
(`store/receipts.py`). Forward passes, copies from the device and writes to the disk overlap
(`store/extraction.py`, `store/shard_writer.py`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

from draftlab.errors import UserError
from draftlab.formatting import count_text, size_text
from draftlab.progress import Monitor
from draftlab.store.extraction import HiddenStateExtractor, StateSource
from draftlab.store.manifest import MANIFEST, Manifest, Shard, StoreIdentity
from draftlab.store.receipts import Receipts, lock_folder, resume_plan
from draftlab.store.recording_plan import check_same_recording, plan_recording
from draftlab.store.samples import Sample
from draftlab.store.settings import RecordSettings
from draftlab.store.shard_writer import ShardWriters
from draftlab.store.store import Store
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target

Role = Literal["alone", "lead", "help"]
"""Role of a process in a recording. alone: it does all the work. lead: it makes the plan, shares
the work and completes the store. help: it records shards of a plan that another process makes."""

OpenStateSource = Callable[[Manifest], AbstractContextManager[StateSource]]
"""Opens what computes the states of a plan."""

_POLL_S = 0.2


def record(
    target: Target | TargetMetadata,
    samples: Sequence[Sample],
    folder: Path,
    settings: RecordSettings,
    identity: StoreIdentity,
    *,
    monitor: Monitor,
    role: Role = "alone",
    open_source: OpenStateSource | None = None,
) -> Store | None:
    """Record samples into a store, or continue an interrupted recording.

    Whole shards are kept. For a complete store, shards that are missing or have another size are
    recorded again.

    Args:
        target: the target model.
        samples: in the order in which they are stored.
        folder: the store's folder.
        settings: see `RecordSettings`; dtype and boundaries (unless None) must be the identity's.
        identity: of the store, with its boundaries chosen (`StoreIdentity.of`).
        monitor: receives what is truncated or dropped, and the progress in tokens.
        role: what this process does. One process leads; any number of helpers may come and go.
        open_source: opens what computes the states; required for a `TargetMetadata`, and by
            default the target.

    Returns:
        The store; None for a helper.

    Raises:
        UserError: there is nothing to record, a sample does not fit the vocabulary, states are not
            finite, the disk is too small, or the folder holds another recording or is in use.
    """
    open_source = open_source or _extractor_of(target)
    plan, recorded = plan_recording(
        target, samples, settings, identity, monitor=Monitor() if role == "help" else monitor
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, shared=role != "alone"):
        if role == "help":
            if receipts := _wait_for_plan(folder, plan, monitor):
                with open_source(receipts.plan) as source:
                    _record_missing(source, recorded, receipts, settings, monitor)
            return None
        receipts = Receipts(folder, resume_plan(folder, plan, monitor))
        if not receipts.plan.complete:
            missing = [shard for shard in receipts.plan.shards if not receipts.is_committed(shard)]
            _check_disk(receipts.plan, missing, folder, monitor)
            receipts.publish()
            with open_source(receipts.plan) as source:
                _record_missing(source, recorded, receipts, settings, monitor)
                # Wait for the shards of other processes, and record those of processes that die.
                _record_missing(source, recorded, receipts, settings, monitor, wait=True)
            receipts.complete()
        receipts.clear()
    store = Store.open(folder, identity)
    _report_state_quality(store.manifest, monitor)
    return store


def _extractor_of(target: Target | TargetMetadata) -> OpenStateSource:
    if isinstance(target, TargetMetadata):
        raise ValueError("a TargetMetadata computes no states: expected `open_source`")
    return lambda plan: nullcontext(HiddenStateExtractor(target, plan))


def _wait_for_plan(folder: Path, plan: Manifest, monitor: Monitor) -> Receipts | None:
    """Wait for the leader's plan and return its receipts; None if the store is complete."""
    path = folder / MANIFEST
    if not path.exists():
        monitor.say(f"waiting for the leading process to write the plan of {folder}")
    while not path.exists():
        time.sleep(_POLL_S)
    receipts = Receipts.from_published(folder)
    if receipts is not None:
        check_same_recording(receipts.plan, plan, folder)
    return receipts


def _record_missing(
    source: StateSource,
    samples: Sequence[Sample],
    receipts: Receipts,
    settings: RecordSettings,
    monitor: Monitor,
    *,
    wait: bool = False,
) -> None:
    """Record the shards that are not committed and, unless `wait`, not claimed by others."""
    total, done, started = receipts.plan.counts.tokens, 0, time.monotonic()
    end = 0
    with ShardWriters(receipts, settings.not_finite) as writers:
        for shard in receipts.plan.shards:
            start, end = end, end + shard.records
            claim = None if receipts.is_committed(shard) else receipts.claim(shard, wait=wait)
            if claim is None:
                total -= shard.tokens
                continue
            shard_samples = samples[start:end]
            with writers.shard(shard, shard_samples, claim) as put:
                futures = source.batches(shard, shard_samples)
                for batch, future in zip(shard.batches, futures, strict=True):
                    put(future)
                    done += sum(shard.lengths[i] for i in batch)
                    rate = done / max(time.monotonic() - started, 1e-9)
                    monitor.progress("record", done, total, f"{rate:,.0f} tokens/s")
    if done:
        seconds = time.monotonic() - started
        monitor.say(
            f"recorded {done / seconds:,.0f} tokens/s, "
            f"{writers.bytes_written / seconds / 1e6:,.0f} MB/s; the target waited for the disk "
            f"{writers.seconds_waited / seconds:.0%} of the time"
        )


def _check_disk(plan: Manifest, missing: list[Shard], folder: Path, monitor: Monitor) -> None:
    needed = sum(
        shard.tokens * plan.identity.bytes_per_token + 8 * shard.records + 1024 for shard in missing
    )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"expected {size_text(needed)} of free disk for {count_text(len(missing), 'shard')}, "
            f"found {size_text(free)}",
            where=folder,
            do="free disk space, name a folder on another disk, store fp8 features (record.dtype), "
            "or record fewer samples or boundaries",
        )
    committed = len(plan.shards) - len(missing)
    monitor.say(
        f"recording {count_text(plan.counts.records, 'record')}, {plan.counts.tokens:,} tokens "
        f"({plan.counts.loss_tokens:,} in answers), {count_text(len(plan.shards), 'shard')}"
        + (f", {committed} of them there already" if committed else "")
        + f"; {size_text(needed)} to write"
    )


def _report_state_quality(manifest: Manifest, monitor: Monitor) -> None:
    """Report skipped samples, whose states are not finite, and the errors of fp8."""
    locations = {id_: location for s in manifest.shards for id_, location in s.not_finite.items()}
    for id_, location in list(locations.items())[:5]:
        monitor.say(f"skipped sample {id_!r}: NaN or infinity at {location}")
    if locations:
        monitor.say(
            f"{len(locations):,} of {manifest.counts.records:,} samples skipped: not finite"
        )
    shards = [shard for shard in manifest.shards if shard.fp8_errors]
    if not shards:
        return
    tokens = sum(shard.tokens for shard in shards)
    for number, boundary in enumerate(manifest.identity.boundaries):
        errors = [(shard.tokens, *shard.fp8_errors[number]) for shard in shards]
        error = (sum(n * e**2 for n, e, _ in errors) / tokens) ** 0.5
        worst = max(w for _, _, w in errors)
        monitor.say(
            f"fp8: relative error {error:.2%} at boundary {boundary} (worst channel {worst:.2%})"
        )
