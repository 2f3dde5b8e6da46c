"""Recording: samples → the target's states, in shards that are committed whole.

The plan (which sample lies in which shard, which share a forward pass) is written into the manifest
before anything is computed, so a killed recording goes on after its last committed shard and ends
with the bytes that an uninterrupted one writes, however many processes shared the work
(`store/receipts.py`). Forward passes, copies from the device and the disk work at the same time
(`store/extraction.py`, `store/shard_writer.py`).
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

from draftlab.errors import UserError
from draftlab.formatting import counted, size_text
from draftlab.progress import Monitor
from draftlab.store.extraction import HiddenStateExtractor, Source
from draftlab.store.manifest import MANIFEST, Manifest, Shard, StoreIdentity
from draftlab.store.plan import plan_store, refuse_other_plan
from draftlab.store.receipts import Receipts, adopt, locked
from draftlab.store.settings import RecordSettings
from draftlab.store.shard_writer import ShardWriters
from draftlab.store.store import Sample, Store
from draftlab.target_model.boundaries import check_boundaries
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target

Part = Literal["alone", "lead", "help"]
"""Of a process in a recording: it works alone; it makes the plan, shares the work and completes the
store; or it takes shards of a plan that another process makes."""


Opened = Callable[[Manifest], AbstractContextManager[Source]]
"""What computes the states of a plan, for as long as it is open."""

_POLL_S = 0.2


def record(
    target: Target | TargetMetadata,
    samples: Sequence[Sample],
    folder: Path,
    settings: RecordSettings,
    identity: StoreIdentity,
    *,
    monitor: Monitor,
    part: Part = "alone",
    opened: Opened | None = None,
) -> Store | None:
    """Records samples into a store, or goes on where an interrupted recording stopped.

    Shards that are whole are kept; calling it on a complete store returns that store, after making
    again any shard that is missing or has another size.

    Args:
        target: whose states are recorded.
        samples: in the order they are stored in.
        folder: the store's.
        settings: see `RecordSettings`; boundaries, when given, and dtype are those of the identity.
        identity: of the store, with its boundaries decided (`StoreIdentity.of`).
        monitor: told of everything truncated or dropped, and of progress in tokens.
        part: what this process does. Any number may help, come and go; one leads.
        opened: what computes the states, where the target does not (an `TargetMetadata` cannot).

    Returns:
        The store; None for a helper.

    Raises:
        UserError: nothing to record, a sample that does not fit the vocabulary, states that are not
            finite, too little disk, a folder that holds another recording or is being recorded.
    """
    opened = opened or _passes_of(target)
    heard = Monitor() if part == "help" else monitor
    plan, kept = planned(target, samples, settings, identity, monitor=heard)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, shared=part != "alone"):
        if part == "help":
            if published := _awaited(folder, plan, monitor):
                with opened(published.plan) as source:
                    _record_missing(source, kept, published, settings, monitor)
            return None
        receipts = Receipts(folder, adopt(folder, plan, monitor))
        if not receipts.plan.complete:
            missing = [shard for shard in receipts.plan.shards if not receipts.committed(shard)]
            _check_disk(receipts.plan, missing, folder, monitor)
            receipts.publish()
            with opened(receipts.plan) as source:
                _record_missing(source, kept, receipts, settings, monitor)
                # Those that another process took: it commits them, or dies and leaves them to us.
                _record_missing(source, kept, receipts, settings, monitor, wait=True)
            receipts.complete()
        receipts.clear()
    store = Store.open(folder, identity)
    _say_findings(store.manifest, monitor)
    return store


def _passes_of(target: Target | TargetMetadata) -> Opened:
    if isinstance(target, TargetMetadata):
        raise ValueError("an outline computes no states: expected `opened`")
    return lambda plan: nullcontext(HiddenStateExtractor(target, plan))


def planned(
    target: Target | TargetMetadata,
    samples: Sequence[Sample],
    settings: RecordSettings,
    identity: StoreIdentity,
    *,
    monitor: Monitor,
) -> tuple[Manifest, list[Sample]]:
    """What a recording with these arguments would do: `plan_store`."""
    _check_identity(target, settings, identity)
    reason = None if isinstance(target, TargetMetadata) else target.why_padded
    if reason is not None:
        monitor.say(f"a pass is of right-padded rows: the target {reason}")
    return plan_store(
        samples,
        identity,
        max_length=_max_length(target, settings, monitor),
        overlong=settings.overlong,
        shard_tokens=settings.shard_tokens,
        batch_tokens=settings.batch_tokens,
        target_dtype=str(target.dtype).removeprefix("torch."),
        not_finite=settings.not_finite,
        backend=settings.backend,
        padded=reason is not None,
        monitor=monitor,
    )


def _check_identity(
    target: Target | TargetMetadata, settings: RecordSettings, identity: StoreIdentity
) -> None:
    if identity.boundaries:  # none: the last state alone, which every store holds
        check_boundaries(identity.boundaries, target.num_layers)
    actual = StoreIdentity.of(
        target,
        tokenizer_sha256=identity.tokenizer_sha256,
        template_sha256=identity.template_sha256,
        boundaries=settings.boundaries or identity.boundaries,
        dtype=settings.dtype,
    )
    if replace(identity, target_name=actual.target_name) != actual:
        raise ValueError(f"the identity {identity} is not that of target and settings: {actual}")


def _max_length(target: Target | TargetMetadata, settings: RecordSettings, monitor: Monitor) -> int:
    """Tokens of a sample, at most: those asked for, and no more than the target has positions."""
    asked, positions = settings.max_length, target.max_length
    if asked is not None and asked > positions:
        cut = f"cut to {positions:,}, the positions that the target has"
        monitor.say(f"record.max_length: {asked:,} {cut}")
    return min(asked or positions, positions)


def _awaited(folder: Path, plan: Manifest, monitor: Monitor) -> Receipts | None:
    """What a helper works on, when the leading process has written its plan; None: nothing more."""
    path, said = folder / MANIFEST, False
    while not path.exists():
        if not said:
            monitor.say(f"waiting for the plan of {folder}, which the leading process makes")
        said = True
        time.sleep(_POLL_S)
    receipts = Receipts.of_published(folder)
    if receipts is not None:
        refuse_other_plan(receipts.plan, plan, folder)
    return receipts


def _record_missing(
    source: Source,
    samples: list[Sample],
    receipts: Receipts,
    settings: RecordSettings,
    monitor: Monitor,
    *,
    wait: bool = False,
) -> None:
    """Records the shards that are neither committed nor taken (`wait`: nor given up) by others."""
    plan, rest = receipts.plan, iter(samples)
    pieces = [(shard, list(itertools.islice(rest, len(shard.ids)))) for shard in plan.shards]
    total, done, started = plan.counts.tokens, 0, time.monotonic()
    with ShardWriters(receipts, settings.not_finite) as writers:
        for shard, mine in pieces:
            claim = None if receipts.committed(shard) else receipts.take(shard, wait=wait)
            if claim is None:
                total -= shard.tokens
                continue
            with writers.shard(shard, mine, claim) as put:
                for batch, states in zip(shard.batches, source.batches(shard, mine), strict=True):
                    put(states)
                    done += sum(shard.lengths[i] for i in batch)
                    rate = done / max(time.monotonic() - started, 1e-9)
                    monitor.progress("record", done, total, f"{rate:,.0f} tokens/s")
    if done:
        seconds = time.monotonic() - started
        monitor.say(
            f"recorded {done / seconds:,.0f} tokens/s, "
            f"{writers.bytes_written / seconds / 1e6:,.0f} MB/s; the target waited for the disk "
            f"{writers.waited / seconds:.0%} of the time"
        )


def _check_disk(plan: Manifest, missing: list[Shard], folder: Path, monitor: Monitor) -> None:
    needed = sum(
        shard.tokens * plan.identity.token_bytes + 8 * len(shard.ids) + 1024 for shard in missing
    )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"expected {size_text(needed)} of free disk for {counted(len(missing), 'shard')}, "
            f"found {size_text(free)}",
            where=folder,
            do="free some, name a folder elsewhere, store fp8 features (record.dtype), or record "
            "fewer samples or boundaries",
        )
    there = len(plan.shards) - len(missing)
    monitor.say(
        f"recording {counted(plan.counts.records, 'record')}, {plan.counts.tokens:,} tokens "
        f"({plan.counts.loss_tokens:,} in answers), {counted(len(plan.shards), 'shard')}"
        + (f", {there} of them there already" if there else "")
        + f"; {size_text(needed)} to write"
    )


def _say_findings(manifest: Manifest, monitor: Monitor) -> None:
    """What recording found in the states: samples that were skipped, errors of fp8."""
    bad = {name: place for shard in manifest.shards for name, place in shard.not_finite.items()}
    for name, place in list(bad.items())[:5]:
        monitor.say(f"skipped sample {name!r}: NaN or infinity at {place}")
    if bad:
        monitor.say(f"{len(bad):,} of {manifest.counts.records:,} samples skipped: not finite")
    for number, boundary in enumerate(manifest.identity.boundaries):
        shards = [shard for shard in manifest.shards if shard.fp8_errors]
        if not shards:
            continue
        tokens = sum(shard.tokens for shard in shards)
        errors = [(shard.tokens, *shard.fp8_errors[number]) for shard in shards]
        error = (sum(n * e**2 for n, e, _ in errors) / tokens) ** 0.5
        worst = max(w for _, _, w in errors)
        monitor.say(
            f"fp8: relative error {error:.2%} at boundary {boundary} (worst channel {worst:.2%})"
        )
