"""Measure time and memory to open a large store, and to make the order of a training on it.

    python eval/bench/bench_manifest.py [--shards 1000000] [--records 100000000] [--answers 4]

Writes a synthetic store, whose shards are files of one byte. Another process opens it, holds
validation records out and makes the order of an epoch. Each line has the seconds of the step, its
CPU seconds, and the peak of the process's resident memory so far, which includes imports and the
pages of mapped files. With --answers above 1 records are answers to fewer prompts (`prompt-7~1`),
so that prompts have to be found by their ids.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.progress import Monitor
from draftlab.store.columns import Texts
from draftlab.store.manifest import MANIFEST, Counts, Dropped, Manifest
from draftlab.store.record_index import RecordIndex
from draftlab.store.shard import shard_file
from draftlab.store.shard_table import ShardTable
from draftlab.store.store import Store, StoreIdentity
from draftlab.train.batch.order import batches, epoch_rows
from draftlab.train.settings import TrainSettings
from draftlab.train.validation import split_records
from eval.measurements import now, print_usage

CHUNK = 1_000_000
LONGEST = 4096


def synthetic_ids(records: int, answers: int) -> Texts:
    """Return the ids of records, so many answers a prompt, side by side."""
    suffixes = ["", *(f"~{answer}" for answer in range(1, answers))]
    parts = []
    for start in range(0, records, CHUNK):
        numbers = range(start, min(start + CHUNK, records))
        parts.append(Texts.of([f"prompt-{n // answers}{suffixes[n % answers]}" for n in numbers]))
    return Texts.join(parts)


def write_store(folder: Path, shards: int, records: int, answers: int) -> None:
    """Write a store with lengths around 600 tokens and without states."""
    generator, ids = np.random.default_rng(0), synthetic_ids(records, answers)
    lengths = generator.lognormal(6.3, 0.7, records).clip(20, LONGEST).astype(np.int32)
    shard_records = np.diff(np.linspace(0, records, shards + 1).astype(np.int64))
    unknown = np.full(records, -1, np.int32), np.zeros(records, np.uint8)
    temperatures = np.full(records, 0.8)
    index = RecordIndex(ids.utf8, ids.ends, lengths, temperatures, *unknown, shard_records)
    tokens = int(lengths.sum(dtype=np.int64))
    plan = Manifest.plan(
        index,
        identity=StoreIdentity("bench", "0" * 64, "", "", (2, 16, 29), 32, 4096, 150_000, "fp8"),
        samples_sha256="0" * 64,
        settings={},
        counts=Counts(records=records, tokens=tokens, loss_tokens=tokens // 2),
        dropped=Dropped(),
        truncated=0,
    )
    nothing = np.zeros(0, np.int64)
    table = ShardTable(
        np.ones(shards, np.int64),
        generator.integers(0, 256, (shards, 32), np.uint8),
        generator.random((shards, 3, 2)),
        nothing,
        nothing.astype(np.uint8),
        nothing,
    )
    plan.completed(table).write(folder)
    for number in range(shards):
        (folder / shard_file(number)).write_bytes(b"\0")


def measure(folder: Path) -> None:
    """Open a store, and make the order of a training."""
    settings = TrainSettings(row_tokens=LONGEST)
    print_usage("imports, whose time is not counted", now())
    started = now()
    store = Store.open(folder)
    print_usage(f"opened {len(store.manifest.shards):,} shards, {len(store):,} records", started)
    started = split_started = now()
    training, held_out = split_records(store, settings, 0, Monitor())
    print_usage(f"held out {len(store) - len(training):,} records, read {len(held_out):,}", started)
    started = now()
    lengths = np.asarray(store.lengths)[training]
    rows = epoch_rows(lengths, settings.row_tokens, seed=0, epoch=0)
    print_usage(f"made the {len(rows):,} rows of an epoch", started)
    full = int(lengths.sum(dtype=np.int64)) / (len(rows) * settings.row_tokens)
    print_usage(f"both, with rows {full:.1%} full", split_started)
    del rows
    started, step = now(), len(store) // 1000
    order = batches(lengths, settings.row_tokens, settings.batch_rows, seed=0, first=step)
    drawn = sum(len(row) for batch in islice(order, 100) for row in batch)
    print_usage(f"resumed at step {step:,} and drew {drawn:,} records of 100 steps", started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--records", type=int, default=100_000_000)
    parser.add_argument("--answers", type=int, default=4, help="to each prompt")
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder, started = Path(name), now()
        write_store(folder, arguments.shards, arguments.records, arguments.answers)
        print_usage("wrote the store", started)
        print(f"manifest.json has {(folder / MANIFEST).stat().st_size:,} bytes")
        for file in ("records.safetensors", "shards.safetensors"):
            print(f"{file} has {(folder / file).stat().st_size / 1e9:.2f} GB")
        subprocess.run([sys.executable, __file__, "--measure", name], check=True)


if __name__ == "__main__":
    main()
