"""Recording: samples → the target's states, in shards that are committed whole.

The plan (which sample lies in which shard, which share a forward pass) is written into the manifest
before anything is computed, so a killed recording goes on after its last committed shard and ends
with the bytes that an uninterrupted one writes. A shard is committed when its receipt, a small JSON
file that names the plan and the shard's checksum, lies beside it; receipts go when all are there.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftlab.base import (
    Knobs,
    Monitor,
    UserError,
    atomic_path,
    canonical_json,
    read_json,
    sha256_file,
    sha256_text,
    write_json,
)
from draftlab.data.manifest import MANIFEST, Manifest, Shard, StoreDtype, StoreIdentity
from draftlab.data.plan import plan_store, refuse_other_plan
from draftlab.data.states import batch_states
from draftlab.data.store import DTYPES, Sample, Store
from draftlab.target.model import Target, check_boundaries


class RecordKnobs(Knobs):
    """What is recorded, in which pieces."""

    boundaries: tuple[int, ...] | None = None
    """Boundaries whose states become the features, ascending; None: the target's default ones."""
    dtype: StoreDtype = "bfloat16"
    """Of the stored states."""
    shard_tokens: Annotated[int, Field(gt=0)] = 32_768
    """Tokens of a shard. A shard is held in memory and is what a killed recording loses."""
    batch_tokens: Annotated[int, Field(gt=0)] = 8_192
    """Tokens of a forward pass, padding included; a longer sample goes alone."""
    max_length: Annotated[int, Field(gt=2)] | None = None
    """Tokens of a sample; None: what the target was built for."""
    overlong: Literal["truncate", "skip"] = "truncate"
    """What happens to samples over max_length: their end is cut off, or they are left out."""


def record(
    target: Target,
    samples: Sequence[Sample],
    folder: Path,
    knobs: RecordKnobs,
    identity: StoreIdentity,
    *,
    monitor: Monitor,
) -> Store:
    """Records samples into a store, or goes on where an interrupted recording stopped.

    Shards that are whole are kept; calling it on a complete store returns that store, after making
    again any shard that is missing or has another size.

    Args:
        target: whose states are recorded.
        samples: in the order they are stored in.
        folder: the store's.
        knobs: see `RecordKnobs`; boundaries, when given, and dtype are those of the identity.
        identity: of the store, with its boundaries decided (`StoreIdentity.of`).
        monitor: told of everything truncated or dropped, and of progress in tokens.

    Raises:
        UserError: nothing to record, a sample that does not fit the vocabulary, states that are not
            finite, too little disk, a folder that holds another recording or is being recorded.
    """
    _check_identity(target, knobs, identity)
    plan, kept = plan_store(
        samples,
        identity,
        max_length=_max_length(target, knobs),
        overlong=knobs.overlong,
        shard_tokens=knobs.shard_tokens,
        batch_tokens=knobs.batch_tokens,
        target_dtype=str(target.dtype).removeprefix("torch."),
        monitor=monitor,
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for leftover in (*folder.glob(".shard-*.tmp"), *folder.glob(f".{MANIFEST}.*.tmp")):
            leftover.unlink()
        plan = _adopt(folder, plan, monitor)
        if not plan.complete:
            _record_missing(target, kept, folder, plan, monitor)
            write_json(folder / MANIFEST, _completed(folder, plan).dump())
        for shard in plan.shards:
            _receipt(folder, shard).unlink(missing_ok=True)
    return Store.open(folder, identity)


def _check_identity(target: Target, knobs: RecordKnobs, identity: StoreIdentity) -> None:
    check_boundaries(identity.boundaries, target.num_layers)
    actual = StoreIdentity.of(
        target,
        tokenizer_sha256=identity.tokenizer_sha256,
        template_sha256=identity.template_sha256,
        boundaries=knobs.boundaries or identity.boundaries,
        dtype=knobs.dtype,
    )
    if replace(identity, target_name=actual.target_name) != actual:
        raise ValueError(f"the identity {identity} is not that of target and knobs: {actual}")


def _max_length(target: Target, knobs: RecordKnobs) -> int:
    if (knobs.max_length or 0) > target.max_length:
        raise UserError(
            f"expected max_length ≤ {target.max_length}, the positions this target was built for; "
            f"found {knobs.max_length}",
            where=target.folder,
            do="lower it, or leave it out",
        )
    return knobs.max_length or target.max_length


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps a second recording out; the system drops the lock when this process dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another process is recording into this store", where=folder, do="wait for it"
            ) from None
        yield
    finally:
        os.close(handle)


def _receipt(folder: Path, shard: Shard) -> Path:
    return (folder / shard.file).with_suffix(".json")


def _key(plan: Manifest) -> str:
    return sha256_text(canonical_json(plan.dump()))


def _committed(folder: Path, plan_key: str, shard: Shard) -> bool:
    """Whether a shard of this plan is whole, by its receipt and its size."""
    receipt = _receipt(folder, shard)
    if not receipt.is_file():
        return False
    fields = read_json(receipt, kind="shard's receipt")
    if fields.get("plan") != plan_key:
        return False
    return shard.model_copy(update={"bytes": fields["bytes"]}).problem(folder) is None


def _adopt(folder: Path, plan: Manifest, monitor: Monitor) -> Manifest:
    """The plan to follow: the folder's own when it has one, for the batches it was begun with.

    A complete store whose shards are all there is returned as it is. One that lost shards is taken
    back to its plan and the receipts of the good ones.
    """
    path = folder / MANIFEST
    if not path.exists():
        return plan
    found = Manifest.read(path)
    refuse_other_plan(found, plan, folder)
    problems = {shard.file: shard.problem(folder) for shard in found.shards}
    if not found.complete or not any(problems.values()):
        return found
    blank = [shard.model_copy(update={"bytes": None, "sha256": None}) for shard in found.shards]
    plan = found.model_copy(update={"complete": False, "shards": blank})
    for shard in found.shards:
        if problems[shard.file]:
            monitor.say(f"{shard.file}: {problems[shard.file]}; it is recorded again")
        else:
            fields = {"plan": _key(plan), "bytes": shard.bytes, "sha256": shard.sha256}
            write_json(_receipt(folder, shard), fields)
    return plan


def _completed(folder: Path, plan: Manifest) -> Manifest:
    """The plan with every shard's size and checksum, from the receipts."""
    shards = []
    for shard in plan.shards:
        receipt = read_json(_receipt(folder, shard), kind="shard's receipt")
        update = {"bytes": receipt["bytes"], "sha256": receipt["sha256"]}
        shards.append(shard.model_copy(update=update))
    return plan.model_copy(update={"complete": True, "shards": shards})


def _record_missing(
    target: Target, samples: list[Sample], folder: Path, plan: Manifest, monitor: Monitor
) -> None:
    """Writes the manifest's plan and every shard that is not committed."""
    key, rest = _key(plan), iter(samples)
    pieces = [(shard, list(itertools.islice(rest, len(shard.ids)))) for shard in plan.shards]
    missing = [(shard, mine) for shard, mine in pieces if not _committed(folder, key, shard)]
    if not missing:
        return
    _check_disk(folder, plan, [shard for shard, _ in missing], monitor)
    write_json(folder / MANIFEST, plan.dump())
    total = plan.counts.tokens
    done = resumed = total - sum(shard.tokens for shard, _ in missing)
    started = time.monotonic()

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        rate = (done - resumed) / max(time.monotonic() - started, 1e-9)
        monitor.progress("record", done, total, f"{rate:,.0f} tokens/s")

    for shard, mine in missing:
        # A receipt of an earlier life of this shard must not vouch for the new one.
        _receipt(folder, shard).unlink(missing_ok=True)
        tensors = _compute(target, mine, shard, plan.identity, advance)
        path = folder / shard.file
        try:
            with atomic_path(path) as temporary:
                save_file(tensors, temporary)
        except (OSError, SafetensorError) as error:
            raise UserError(f"a shard could not be written: {error}", where=path) from None
        fields = {"plan": key, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
        write_json(_receipt(folder, shard), fields)


def _check_disk(folder: Path, plan: Manifest, missing: list[Shard], monitor: Monitor) -> None:
    identity = plan.identity
    width = (len(identity.boundaries) + 1) * identity.hidden_size * DTYPES[identity.dtype].itemsize
    needed = sum(shard.tokens * (width + 16) + 8 * len(shard.ids) + 1024 for shard in missing)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"expected {needed / 2**30:.2f} GiB of free disk for {len(missing)} shards, found "
            f"{free / 2**30:.2f} GiB",
            where=folder,
            do="free some, name a folder elsewhere, or record fewer samples or boundaries",
        )
    there = len(plan.shards) - len(missing)
    monitor.say(
        f"recording {plan.counts.records:,} records, {plan.counts.tokens:,} tokens "
        f"({plan.counts.loss_tokens:,} in answers), {len(plan.shards)} shards"
        + (f", {there} of them there already" if there else "")
        + f"; {needed / 2**30:.2f} GiB to write"
    )


def _compute(
    target: Target,
    samples: list[Sample],
    shard: Shard,
    identity: StoreIdentity,
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    """A shard's tensors, from the forward passes its plan lists."""
    dtype = DTYPES[identity.dtype]
    offsets = torch.tensor([0, *shard.lengths]).cumsum(0)
    shapes = identity.shapes(shard)
    tensors = {
        "offsets": offsets,
        "tokens": torch.tensor([i for s in samples for i in s.token_ids], dtype=torch.int32),
        "spans": torch.tensor([i for s in samples for i in s.spans], dtype=torch.int32),
        "features": torch.empty(shapes["features"], dtype=dtype),
        "last": torch.empty(shapes["last"], dtype=dtype),
        "logsumexp": torch.empty(shapes["logsumexp"], dtype=torch.float32),
        "argmax": torch.empty(shapes["argmax"], dtype=torch.int32),
    }
    for batch in shard.batches:
        mine = [samples[i] for i in batch]
        lengths = [len(s.token_ids) for s in mine]
        for name, values in batch_states(target, mine, identity).items():
            for i, piece in zip(batch, values.split(lengths), strict=True):
                tensors[name][offsets[i] : offsets[i + 1]] = piece
        advance(sum(lengths))
    return tensors
