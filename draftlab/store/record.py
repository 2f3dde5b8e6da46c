"""Recording: the target's states of samples, written into a store in shards.

The plan (which sample is in which shard and in which forward pass) is written into the manifest
before anything is computed. A killed recording therefore continues after its last committed shard,
and ends with the bytes of an uninterrupted one, whichever processes record the shards
(`store/resume.py`). Forward passes, copies from the device and writes to the disk overlap
(`store/extraction.py`, `store/shard_writer.py`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from draftlab.errors import UserError
from draftlab.formatting import count_text, size_text
from draftlab.progress import Monitor
from draftlab.store.extraction import HiddenStateExtractor, StateSource
from draftlab.store.manifest import MANIFEST, Manifest, StoreIdentity
from draftlab.store.recording_plan import HeldOut, check_same_recording, plan_recording
from draftlab.store.resume import Receipts, lock_folder, resume_plan
from draftlab.store.sample_table import Sample
from draftlab.store.settings import RecordSettings
from draftlab.store.shard_files import (
    METADATA,
    RemoteShardFiles,
    ShardFiles,
    open_shard_files,
    read_copy,
)
from draftlab.store.shard_writer import ShardRecorder
from draftlab.store.store import Store
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target

OpenStateSource = Callable[[Manifest], AbstractContextManager[StateSource]]
"""Opens what computes the states of a plan."""

RecordShards = Callable[[Sequence[int]], Iterator[int]]
"""A function that has other processes record shards of the published plan, given by their numbers.
It yields numbers of tokens as they are computed. It may leave shards out whose process died."""

_VISIBLE_S = 2.0
"""Wait before shards without a receipt are handed out again, in seconds. A network file system
shows what other machines wrote after some time."""


def record(
    target: Target | TargetMetadata,
    samples: Sequence[Sample],
    folder: Path,
    settings: RecordSettings,
    identity: StoreIdentity,
    *,
    monitor: Monitor,
    open_source: OpenStateSource | None = None,
    record_shards: RecordShards | None = None,
    held_out: HeldOut | None = None,
    while_writing: Callable[[], object] = lambda: None,
) -> Store:
    """Record samples into a store, or continue an interrupted recording.

    Whole shards are kept. For a complete store, shards that are missing or have another size are
    recorded again.

    Args:
        samples: in the order in which they are stored.
        settings: dtype and boundaries (unless None) must be the identity's.
        identity: of the store, with its boundaries chosen (`StoreIdentity.of`).
        monitor: receives what is truncated or dropped, and the progress in tokens.
        open_source: opens what computes the states; required for a `TargetMetadata`, and by
            default the target.
        record_shards: records the shards in place of this process.
        held_out: what decides the held-out records of a store with a window; of one whose shards
            come and go only their shards are recorded.
        while_writing: called when this process has computed all missing states, while threads still
            write the last shards; again if shards are missing afterwards. Not with `record_shards`.

    Raises:
        UserError: there is nothing to record, a sample does not fit the vocabulary, states are not
            finite, the disk is too small, or the folder holds another recording or is in use.
    """
    if record_shards is None:
        open_source = open_source or _extractor_of(target)
    plan, recorded = plan_recording(
        target, samples, settings, identity, monitor=monitor, held_out=held_out
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = open_shard_files(folder, settings.url)
    adopt = partial(
        _adopt_manifest, folder, files, lambda other: check_same_recording(other, plan, folder)
    )
    with lock_folder(folder):
        adopted = adopt()
        receipts = Receipts(folder, resume_plan(folder, plan, monitor, files), files)
        receipts.remove_temporary()
        if adopted and receipts.plan.complete:
            monitor.say(f"store: this recording is complete at {files.address}, and is used")
        if not receipts.plan.complete:
            missing = receipts.missing()
            _check_disk(receipts.plan, missing, files, monitor)
            _claim_url(files, receipts.key, adopt, monitor)
            receipts.publish()
            with ExitStack() as stack:
                if record_shards is None:
                    source = stack.enter_context(open_source(receipts.plan))
                    arguments = (source, recorded, receipts, monitor, while_writing)
                    record_shards = partial(_record_here, *arguments)
                while missing:
                    _record_missing(record_shards, receipts.plan, missing, monitor)
                    if missing := receipts.missing():
                        time.sleep(_VISIBLE_S)
                        missing = receipts.missing()
            receipts.complete()
        files.publish(folder)
        files.release()
        receipts.clear()
    if settings.rolls:
        store = Store(folder, Manifest.read(folder / MANIFEST), samples=recorded)
    else:
        store = Store.open(folder, identity, url=settings.url)
    _report_fp8_errors(store.manifest, monitor)
    return store


def _record_missing(
    record_shards: RecordShards, plan: Manifest, missing: Sequence[int], monitor: Monitor
) -> None:
    """Record shards, and report the progress and the speed."""
    total, done, started = int(plan.index.shard_tokens[missing].sum()), 0, time.monotonic()
    with closing(record_shards(missing)) as computed:
        for tokens in computed:
            done += tokens
            rate = done / max(time.monotonic() - started, 1e-9)
            monitor.progress("record", done, total, f"{rate:,.0f} tokens/s")
    seconds = time.monotonic() - started
    size = done * plan.identity.bytes_per_token
    monitor.say(f"recorded {done / seconds:,.0f} tokens/s, {size / seconds / 1e6:,.0f} MB/s")


def _record_here(
    source: StateSource,
    samples: Sequence[Sample],
    receipts: Receipts,
    monitor: Monitor,
    while_writing: Callable[[], object],
    missing: Sequence[int],
) -> Iterator[int]:
    """Record shards in this process; yield the number of tokens of each batch."""
    started = time.monotonic()
    with ShardRecorder(source, samples, receipts) as recorder:
        for number in missing:
            yield from recorder.record(number)
        while_writing()
    waited = recorder.seconds_waited / (time.monotonic() - started)
    monitor.say(f"the target waited for the disk {waited:.0%} of the time")


def open_recorder(
    target: Target | TargetMetadata,
    samples: Sequence[Sample],
    folder: Path,
    settings: RecordSettings,
    identity: StoreIdentity,
    open_source: OpenStateSource | None,
    stack: ExitStack,
    held_out: HeldOut | None = None,
) -> ShardRecorder:
    """Return a recorder, which `stack` ends, of the plan that another process has published.

    That process calls `record` with the same arguments; another plan raises a `UserError`.
    """
    plan, recorded = plan_recording(
        target, samples, settings, identity, monitor=Monitor(), held_out=held_out
    )
    receipts = Receipts.from_published(folder, open_shard_files(folder, settings.url))
    check_same_recording(receipts.plan, plan, folder)
    source = stack.enter_context((open_source or _extractor_of(target))(receipts.plan))
    return stack.enter_context(ShardRecorder(source, recorded, receipts))


def _adopt_manifest(folder: Path, files: ShardFiles, check: Callable[[Manifest], None]) -> bool:
    """Copy the manifest at a URL into a folder that has none; return whether it has been copied.

    So a run whose `record.url` names the store of an equal recording, by another run, uses it. If
    the URL has the store of another recording, `check` raises a `UserError`.
    """
    if not isinstance(files, RemoteShardFiles):
        return False
    content, own = files.read_manifest(), folder / MANIFEST
    if content is None or (own.is_file() and own.read_bytes() == content):
        return False
    with tempfile.TemporaryDirectory(prefix=".shard-manifest.", dir=folder) as copy:
        manifest = read_copy(files, content, Path(copy))
        try:
            check(manifest)
        except UserError as error:
            raise UserError(
                f"the URL has another store: {error.what}",
                where=files.address,
                do="name another folder (record.url), or remove the store there",
            ) from None
        if own.is_file():
            return False
        for name in METADATA:
            if (Path(copy) / name).is_file():
                os.replace(Path(copy) / name, folder / name)
        return True


def _claim_url(files: ShardFiles, plan: str, adopt: Callable[[], bool], monitor: Monitor) -> None:
    """Claim the URL at which shards are about to be written.

    It is released if `adopt` (see `_adopt_manifest`) refuses what another run has completed since.
    """
    if former := files.claim(plan):
        monitor.say(
            f"store: a process ({former}) began this recording and did not complete it; it is "
            "recorded here, and that process ends with an error if it still runs"
        )
    try:
        adopt()
    except UserError:
        files.release()
        raise


def _extractor_of(target: Target | TargetMetadata) -> OpenStateSource:
    if isinstance(target, TargetMetadata):
        raise ValueError("a TargetMetadata computes no states: expected `open_source`")
    return lambda plan: nullcontext(HiddenStateExtractor(target, plan))


def _check_disk(
    plan: Manifest, missing: Sequence[int], files: ShardFiles, monitor: Monitor
) -> None:
    sizes, window = plan.planned_sizes, plan.window
    num_kept, needed = plan.num_kept, int(sizes[missing].sum())
    if window is not None and window.rolls:
        needed += min(window.size, int(sizes[num_kept:].sum()))
    if files.is_local:
        free = shutil.disk_usage(files.folder).free
        if free < needed:
            raise UserError(
                f"expected {size_text(needed)} of free disk for "
                f"{count_text(len(missing), 'shard')}, found {size_text(free)}",
                where=files.folder,
                do="free disk space, make the folder a link to one on another disk, store fp8 "
                "features (record.dtype), or record fewer samples or boundaries",
            )
    committed = num_kept - len(missing)
    monitor.say(
        f"recording {count_text(plan.counts.records, 'record')}, {plan.counts.tokens:,} tokens "
        f"({plan.counts.loss_tokens:,} in answers), {count_text(len(plan.shards), 'shard')}"
        + (f", {committed} of them there already" if committed else "")
        + (f", {window.validation_shards} of them with the held-out records" if window else "")
        + (
            f"; a window of {size_text(window.size)}: training records the others, and deletes them"
            if window is not None and window.rolls
            else f"; {size_text(needed)} to write"
        )
        + ("" if files.is_local else f" to {files.address}")
    )


def _report_fp8_errors(manifest: Manifest, monitor: Monitor) -> None:
    errors = manifest.written.fp8_errors
    known = ~np.isnan(errors).any((1, 2))
    if not manifest.identity.fp8_boundaries or not known.any():
        return
    tokens, errors = manifest.index.shard_tokens[known], errors[known]
    for number, boundary in enumerate(manifest.identity.boundaries):
        error = float(((tokens * errors[:, number, 0] ** 2).sum() / tokens.sum()) ** 0.5)
        worst = float(errors[:, number, 1].max())
        monitor.say(
            f"fp8: relative error {error:.2%} at boundary {boundary} (worst channel {worst:.2%})"
        )
