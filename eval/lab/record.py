"""Recording on a GPU: the same numbers as without overlap, and its speed against the bare pass.

    python eval/lab/record.py [--tokens 400000] [--folder DIR]      # Llama-3.1-8B's shapes
    python eval/lab/record.py --tiny                                # the same on a CPU, in seconds

Checks first: what recording stores equals states taken pass by pass with a copy that waits, bit for
bit, in bfloat16 and fp8 (against features quantised on the CPU). Then, twice for both dtypes, after
as much memory was touched as the files take (a virtual machine's grows as it is touched): tokens a
second of `record` (conversations of ragged lengths, from samples to committed shards) beside the
bare forward pass just before (rows of 2,048 tokens without padding, with lm_head at every position)
and the disk (files of a shard's size, written by as many threads and fsynced). The bar is 85 % of
the slower of the two. What a run's end costs, from its last pass to its last commit, is told apart:
a longer recording pays it once too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.progress import Monitor
from draftlab.store.extraction import HiddenStateExtractor, StatesFuture, summarise_logits
from draftlab.store.fp8 import dequantise, quantise
from draftlab.store.manifest import Manifest, Shard, StoreIdentity
from draftlab.store.record import RecordSettings, record
from draftlab.store.shard_writer import SHARDS_AT_ONCE
from draftlab.store.store import Sample, Store, teacher_mask
from draftlab.target_model.attention import ATTENTION
from draftlab.target_model.boundaries import default_boundaries
from draftlab.target_model.model import Target
from draftlab.target_model.packed_rows import PackedRow

BAR = 0.85
RUNS = 2
SHAPES = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
TINY = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


class Said(Monitor):
    """Prints lines, and no progress."""

    def say(self, line: str) -> None:
        print(f"  {line}", flush=True)


def random_target(tiny: bool, device: str) -> Target:
    """A Llama with random weights; nothing is downloaded."""
    config = LlamaConfig(**(TINY if tiny else SHAPES), attn_implementation=ATTENTION)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    target = Target(model.eval().requires_grad_(False), Path("random"), "random")
    target.__dict__["fingerprint"] = "0" * 64  # there is no checkpoint to take it of
    return target


def conversations(tokens: int, target: Target, longest: int) -> list[Sample]:
    """Log-normal lengths (median 735, as UltraChat's), 70 % of each an answer."""
    generator = np.random.default_rng(0)
    samples: list[Sample] = []
    while tokens > 0:
        length = int(np.clip(generator.lognormal(6.6, 0.7), 16, longest))
        ids = tuple(generator.integers(0, target.vocab_size, length).tolist())
        prompt = int(0.3 * length)
        samples.append(Sample(f"s{len(samples)}", ids, (0,) * prompt + (1,) * (length - prompt)))
        tokens -= length
    return samples


def identity(target: Target, dtype: str) -> StoreIdentity:
    return StoreIdentity.of(
        target,
        tokenizer_sha256="",
        template_sha256="",
        boundaries=default_boundaries(target.num_layers),
        dtype=dtype,
    )


class Timed:
    """`HiddenStateExtractor`, with the time at which the device ended the last pass."""

    def __init__(self, target: Target, plan: Manifest) -> None:
        self.capture = HiddenStateExtractor(target, plan)
        self.begun, self.started = time.perf_counter(), mark(target)

    def batches(self, shard: Shard, samples: Sequence[Sample]) -> Iterator[StatesFuture]:
        for pending in self.capture.batches(shard, samples):
            self.ended = mark(self.capture.target)
            yield pending

    def end(self) -> float:
        """When the last pass ended, on the host's clock."""
        if isinstance(self.ended, float):
            return self.ended
        self.ended.synchronize()
        return self.begun + self.started.elapsed_time(self.ended) / 1e3


def mark(target: Target) -> float | torch.cuda.Event:
    """Now, on the device's clock."""
    if target.device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def run(
    target: Target, samples: list[Sample], folder: Path, dtype: str
) -> tuple[Store, float, float]:
    """Records into an empty folder; the store, seconds, and those of them after the last pass."""
    shutil.rmtree(folder, ignore_errors=True)
    settings, sources = RecordSettings(dtype=dtype), []

    def open_source(plan: Manifest) -> nullcontext[Timed]:
        sources.append(Timed(target, plan))
        return nullcontext(sources[-1])

    synchronize(target)
    started = time.perf_counter()
    store = record(
        target,
        samples,
        folder,
        settings,
        identity(target, dtype),
        monitor=Said(),
        open_source=open_source,
    )
    ended = time.perf_counter()
    return store, ended - started, ended - sources[-1].end()


def check(target: Target, samples: list[Sample], folder: Path) -> None:
    """Everything stored, against states taken one batch after the other."""
    for dtype in ("bfloat16", "fp8"):
        store, *_ = run(target, samples, folder, dtype)
        store.verify()
        first = 0
        for shard in store.manifest.shards:
            for batch in shard.batches:
                members = [first + i for i in batch]
                compare(target, store, [samples[i] for i in members], members, dtype)
            first += len(shard.ids)
        print(f"checked: {dtype}, {len(samples)} conversations equal bit for bit", flush=True)


@torch.inference_mode()
def compare(
    target: Target, store: Store, samples: list[Sample], numbers: list[int], dtype: str
) -> None:
    """A pass again, taken alone and copied while the host waits."""
    lengths = [len(s.token_ids) for s in samples]
    ids = torch.tensor([[token for s in samples for token in s.token_ids]], device=target.device)
    packed_row = PackedRow.of(lengths, target.device)
    states = target.states(ids, store.identity.boundaries, packed_row=packed_row)
    asked = [teacher_mask(torch.tensor(s.spans)) for s in samples]
    wanted = states.last[0][torch.cat(asked).to(target.device)]
    sums, tokens = (t.cpu() for t in summarise_logits(target, wanted))
    features, last = states.features[0].cpu(), states.last[0].cpu()
    if dtype == "fp8":
        quantised = quantise(features, len(store.identity.boundaries))
        features = dequantise(quantised.codes, quantised.scales)
    done = 0
    for number, sample, part, mask in zip(numbers, samples, packed_row.slices, asked, strict=True):
        found = store[number]
        assert torch.equal(found.features, features[part]), sample.id
        assert torch.equal(found.last, last[part]), sample.id
        there = slice(done, done + int(mask.sum()))
        assert torch.equal(found.logsumexp[mask], sums[there]), sample.id
        assert torch.equal(found.argmax[mask], tokens[there]), sample.id
        done = there.stop


def bare(target: Target, rows: int, width: int, repeats: int) -> float:
    """Tokens a second of forward passes with lm_head at every position, no padding."""
    ids = torch.randint(target.vocab_size, (rows, width), device=target.device)

    @torch.inference_mode()
    def once() -> None:
        target.model(input_ids=ids, use_cache=False)

    once()
    synchronize(target)
    started = time.perf_counter()
    for _ in range(repeats):
        once()
    synchronize(target)
    return repeats * rows * width / (time.perf_counter() - started)


def synchronize(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def touch(folder: Path, size: int) -> float:
    """Writes a file of `size` bytes and removes it; seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    block, started = memoryview(bytes(2**26)), time.perf_counter()
    with open(folder / "touched", "wb") as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
    (folder / "touched").unlink()
    return time.perf_counter() - started


def disk(folder: Path, size: int, files: int) -> float:
    """Bytes a second of files written and fsynced by as many threads as recording has."""
    folder.mkdir(parents=True, exist_ok=True)
    data = memoryview(np.random.default_rng(0).bytes(size))

    def write(number: int) -> None:
        with open(folder / str(number), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    started = time.perf_counter()
    with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
        list(pool.map(write, range(files)))
    rate = size * files / (time.perf_counter() - started)
    shutil.rmtree(folder)
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=400_000, help="recorded for the timing")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: TMPDIR")
    parser.add_argument("--tiny", action="store_true", help="a tiny target on a CPU")
    options = parser.parse_args()
    if options.tiny:
        options.tokens = min(options.tokens, 20_000)
    target = random_target(options.tiny, "cpu" if options.tiny else "cuda")
    longest, batch = (512, (4, 256)) if options.tiny else (4096, (4, 2048))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name) / "store"
        check(target, conversations(options.tokens // 10, target, longest), folder)
        samples = conversations(options.tokens, target, longest)
        size = options.tokens * identity(target, "bfloat16").bytes_per_token
        print(f"touched {size / 1e9:.1f} GB in {touch(folder, size):.1f} s", flush=True)
        for dtype in ("bfloat16", "fp8"):
            run(target, samples[: len(samples) // 10], folder, dtype)  # warms up
            lines = []
            for number in range(RUNS):
                forward = bare(target, *batch, repeats=3 if options.tiny else 10)
                store, *seconds = run(target, samples, folder, dtype)
                line = measured(store.manifest, target.device, forward, *seconds)
                lines.append(line | {"run": number + 1})
            sizes = [shard.bytes for shard in store.manifest.shards]
            shutil.rmtree(folder)
            written = disk(folder, sum(sizes) // len(sizes), min(len(sizes), 12))
            for line in lines:
                print(json.dumps(line | against(line, written)), flush=True)


def measured(
    plan: Manifest, device: torch.device, forward: float, seconds: float, after: float
) -> dict[str, Any]:
    """A run beside the bare forward pass."""
    cuda, tokens = device.type == "cuda", plan.counts.tokens
    passes = sum(len(shard.batches) for shard in plan.shards)
    size = sum(shard.bytes for shard in plan.shards)
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "dtype": plan.identity.dtype,
        "tokens": tokens,
        "passes": passes,
        "tokens_pass": round(tokens / passes),
        "seconds": round(seconds, 2),
        "after_last_pass_s": round(after, 2),
        "record_tokens_s": round(tokens / seconds),
        "bare_tokens_s": round(forward),
        "of_bare": round(tokens / seconds / forward, 3),
        "of_bare_to_last_pass": round(tokens / (seconds - after) / forward, 3),
        "written_MB_s": round(size / seconds / 1e6),
        "bytes_token": round(size / tokens),
    }


def against(line: dict[str, Any], written: float) -> dict[str, Any]:
    """A run beside the slower of the bare pass and a disk of `written` bytes a second."""
    disk_rate = written / line["bytes_token"]
    of_bound = line["record_tokens_s"] / min(line["bare_tokens_s"], disk_rate)
    return {
        "disk_tokens_s": round(disk_rate),
        "disk_MB_s": round(written / 1e6),
        "of_bound": round(of_bound, 3),
        "bar_met": of_bound >= BAR,
    }


if __name__ == "__main__":
    main()
