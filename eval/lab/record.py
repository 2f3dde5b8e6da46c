"""Time recording on a GPU beside the bare forward pass.

    python eval/lab/record.py [--tokens 400000] [--folder DIR]      # Llama-3.1-8B's shapes, a GPU
    python eval/lab/record.py --tiny                                # the same on a CPU, in seconds

Stores of both dtypes are recorded, from samples of ragged lengths to committed shards. Tokens
a second are printed beside those of the bare forward pass just before: rows of 2,048 tokens without
padding, with lm_head at every position. The first recording warms up; it has the second's size,
because a virtual machine's memory grows as it is touched.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.store.manifest import StoreIdentity
from draftlab.store.record import RecordSettings, record
from draftlab.store.recording_plan import batches_of
from draftlab.store.sample_table import Sample
from draftlab.store.store import Store
from draftlab.target_model.hidden_states import default_boundaries
from draftlab.target_model.model import Target
from eval.bench.random_models import random_target, target_config
from eval.measurements import Measurements, PrintMonitor, add_options, require


def conversations(tokens: int, target: Target, longest: int) -> list[Sample]:
    """Return samples of log-normal lengths (median 735, as UltraChat's), 70 % answer."""
    generator = np.random.default_rng(0)
    samples: list[Sample] = []
    while tokens > 0:
        length = int(np.clip(generator.lognormal(6.6, 0.7), 16, longest))
        ids = tuple(generator.integers(0, target.vocab_size, length).tolist())
        prompt = int(0.3 * length)
        samples.append(Sample(f"s{len(samples)}", ids, (0,) * prompt + (1,) * (length - prompt)))
        tokens -= length
    return samples


def run(target: Target, samples: list[Sample], folder: Path, dtype: str) -> tuple[Store, float]:
    """Record into an empty folder; return the store and the seconds that it took."""
    shutil.rmtree(folder, ignore_errors=True)
    boundaries = default_boundaries(target.num_layers)
    identity = StoreIdentity.of(
        target,
        tokenizer_sha256="",
        template_sha256="",
        boundaries=boundaries,
        dtype=dtype,
    )
    synchronize(target)
    started = time.perf_counter()
    settings, monitor = RecordSettings(dtype=dtype), PrintMonitor()
    store = record(target, samples, folder, settings, identity, monitor=monitor)
    return store, time.perf_counter() - started


def bare_rate(target: Target, rows: int, width: int, repeats: int) -> float:
    """Return tokens a second of forward passes with lm_head at every position, unpadded."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=400_000, help="recorded for the timing")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: TMPDIR")
    parser.add_argument("--tiny", action="store_true", help="a tiny target on a CPU")
    add_options(parser)
    options = parser.parse_args()
    if options.tiny:
        options.tokens = min(options.tokens, 20_000)
    device = torch.device("cpu" if options.tiny else "cuda")
    longest, batch = (512, (4, 256)) if options.tiny else (4096, (4, 2048))
    parts = Measurements(options, {"tokens": options.tokens}, device)
    kind = "tiny" if options.tiny else "llama"
    size = options.tokens * (2 * 4 * target_config(kind).hidden_size + 16)  # bfloat16
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name) / "store"
        require(gpus=int(not options.tiny), disk=(Path(name), size))
        target = random_target(device, kind)
        target.__dict__["fingerprint"] = "0" * 64  # there is no checkpoint to take it of
        samples = conversations(options.tokens, target, longest)
        for dtype in ("bfloat16", "fp8"):

            def timed(dtype: str = dtype) -> dict[str, Any]:
                run(target, samples, folder, dtype)  # warms up
                forward = bare_rate(target, *batch, repeats=3 if options.tiny else 10)
                row = measured(*run(target, samples, folder, dtype), forward)
                print(json.dumps(row), flush=True)
                shutil.rmtree(folder)
                return row

            parts.measure(dtype, timed)


def measured(store: Store, seconds: float, forward: float) -> dict[str, Any]:
    """Return the figures of a run beside the tokens a second of the bare forward pass."""
    plan = store.manifest
    tokens, size = plan.counts.tokens, sum(shard.bytes for shard in plan.shards)
    return {
        "dtype": plan.identity.dtype,
        "tokens": tokens,
        "tokens_pass": round(tokens / sum(len(batches_of(plan, shard)) for shard in plan.shards)),
        "record_tokens_s": round(tokens / seconds),
        "bare_tokens_s": round(forward),
        "of_bare": round(tokens / seconds / forward, 3),
        "written_MB_s": round(size / seconds / 1e6),
        "bytes_token": round(size / tokens),
    }


if __name__ == "__main__":
    main()
