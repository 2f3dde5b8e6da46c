"""Recording on a GPU: the same numbers as without overlap, and its speed against the bare pass.

    python eval/gpu/record.py [--tokens 400000] [--folder DIR]      # Llama-3.1-8B's shapes
    python eval/gpu/record.py --tiny                                # the same on a CPU, in seconds

Checks first: what recording stores equals states taken batch by batch with a copy that waits, bit
for bit, in bfloat16 and fp8 (against features quantised on the CPU). Then, for both dtypes: tokens
a second of `record` (conversations of ragged lengths, from samples to committed shards) beside the
bare forward pass (rows of 2,048 tokens without padding, with lm_head at every position) and the
disk (files of a shard's size, written by as many threads and fsynced). The bar is 85 % of the
slower of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.base import Monitor
from draftlab.data.fp8 import dequantise, quantise
from draftlab.data.manifest import StoreIdentity
from draftlab.data.record import RecordKnobs, record
from draftlab.data.shard_writer import SHARDS_AT_ONCE
from draftlab.data.states import summarise
from draftlab.data.store import Sample, Store, teachers
from draftlab.target.attention import ATTENTION
from draftlab.target.model import Target, default_boundaries

BAR = 0.85
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


def run(target: Target, samples: list[Sample], folder: Path, dtype: str) -> tuple[Store, float]:
    """Records into an empty folder; the store, and seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    knobs = RecordKnobs(dtype=dtype)
    started = time.perf_counter()
    store = record(target, samples, folder, knobs, identity(target, dtype), monitor=Said())
    return store, time.perf_counter() - started


def check(target: Target, samples: list[Sample], folder: Path) -> None:
    """Everything stored, against states taken one batch after the other."""
    for dtype in ("bfloat16", "fp8"):
        store, _ = run(target, samples, folder, dtype)
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
    ids = torch.zeros(len(samples), max(len(s.token_ids) for s in samples), dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
    states = target.states(ids.to(target.device), store.identity.boundaries)
    asked = [teachers(torch.tensor(s.spans)) for s in samples]
    wanted: list[Tensor] = [
        states.last[row, : len(s.token_ids)][mask.to(target.device)]
        for row, (s, mask) in enumerate(zip(samples, asked, strict=True))
    ]
    sums, tokens = (t.cpu() for t in summarise(target, torch.cat(wanted)))
    done = 0
    for row, (number, sample, mask) in enumerate(zip(numbers, samples, asked, strict=True)):
        found, length = store[number], len(sample.token_ids)
        features = states.features[row, :length].cpu()
        if dtype == "fp8":
            quantised = quantise(features, len(store.identity.boundaries))
            features = dequantise(quantised.codes, quantised.scales)
        assert torch.equal(found.features, features), sample.id
        assert torch.equal(found.last, states.last[row, :length].cpu()), sample.id
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
        forward = bare(target, *batch, repeats=3 if options.tiny else 20)
        for dtype in ("bfloat16", "fp8"):
            run(target, samples[: len(samples) // 10], folder, dtype)  # warms up
            store, seconds = run(target, samples, folder, dtype)
            tokens = store.manifest.counts.tokens
            shards = store.manifest.shards
            padded = sum(
                len(batch) * max(shard.lengths[i] for i in batch)
                for shard in shards
                for batch in shard.batches
            )
            size = sum(shard.bytes for shard in shards)
            shutil.rmtree(folder)
            written = disk(folder, size // len(shards), min(len(shards), 12))
            bound = min(forward, written / (size / tokens))
            line = {
                "device": torch.cuda.get_device_name() if not options.tiny else "cpu",
                "dtype": dtype,
                "tokens": tokens,
                "record_tokens_s": round(tokens / seconds),
                "bare_tokens_s": round(forward),
                "of_bare": round(tokens / seconds / forward, 3),
                "disk_tokens_s": round(written / (size / tokens)),
                "disk_MB_s": round(written / 1e6),
                "written_MB_s": round(size / seconds / 1e6),
                "bytes_token": round(size / tokens),
                "real_of_padded": round(tokens / padded, 3),
                "of_bound": round(tokens / seconds / bound, 3),
                "bar_met": tokens / seconds >= BAR * bound,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
