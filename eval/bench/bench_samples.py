"""Measure time and memory to index a file of answers, and to open and plan it in every process.

    python eval/bench/bench_samples.py [--conversations 50000] [--tokens 1000] [--compact]

Writes synthetic answers (random token ids below 150,000, a quarter of them prompt) and opens them
in three processes, one after another, as a recording does: the first makes the index, the others
find it. Each prints its seconds and the peak of its resident memory, which includes torch and
transformers (the first line) and the pages of mapped files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.files import sha256_file, write_json
from draftlab.store.manifest import StoreIdentity
from draftlab.store.receipts import Receipts
from draftlab.store.recording_plan import plan_recording
from draftlab.store.samples import Sample, write_index
from draftlab.store.settings import RecordSettings
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.samples import index_key, open_samples
from eval.measurements import PrintMonitor, now, print_usage

VOCAB = 150_000


def write_answers(path: Path, conversations: int, tokens: int) -> None:
    """Write conversations of one answer each, which begin anywhere in one random sequence."""
    generator = np.random.default_rng(0)
    ids = [str(i) for i in generator.integers(0, VOCAB, 100_000 + tokens)]
    starts = generator.integers(0, 100_000, conversations).tolist()
    text = json.dumps("word " * (tokens // 2))
    with open(path, "w", encoding="utf-8") as file:
        for number, start in enumerate(starts):
            middle = start + tokens // 4
            prompt, answer = ids[start:middle], ids[middle : start + tokens]
            file.write(
                f'{{"id":"prompt-{number}","messages":[{{"role":"user","content":{text}}},'
                f'{{"role":"assistant","content":{text}}}],"source":"bench","temperature":0.8,'
                f'"answers":[{{"prompt_ids":[{",".join(prompt)}],"token_ids":[{",".join(answer)}],'
                '"finish":"stop"}]}\n'
            )
    manifest = {"conversations": conversations, "sha256": sha256_file(path)}
    write_json(path.with_suffix(".json"), manifest)


def write_compact(path: Path, conversations: int, tokens: int) -> None:
    """Write the index of such answers, and in their place an empty file of their size."""
    with open(path, "wb") as file:
        file.truncate(round(11.4 * conversations * tokens))
    generator = np.random.default_rng(0)
    ids = generator.integers(0, VOCAB, 100_000 + tokens, np.int32)
    spans = np.repeat(np.int32([0, 1]), [tokens // 4, tokens - tokens // 4])
    samples = (
        Sample(f"prompt-{number}", ids[start : start + tokens], spans, 0.8)
        for number, start in enumerate(generator.integers(0, 100_000, conversations).tolist())
    )
    key = index_key(path, load_tokenizer(TargetSettings()))
    write_index(samples, path.with_suffix(".index"), key, [])


def open_and_plan(path: Path) -> None:
    """Do what a recording process does before its first forward pass."""
    tokenizer = load_tokenizer(TargetSettings())
    started = now()
    print_usage("imports and tokenizer, not counted below", started)
    samples = open_samples(path, tokenizer, PrintMonitor())
    print_usage(f"opened {len(samples):,} samples", started)
    target: Any = SimpleNamespace(
        name="bench",
        folder=Path("bench"),
        fingerprint="",
        padding_reason=None,
        num_layers=32,
        hidden_size=4096,
        vocab_size=VOCAB,
        max_length=2**17,
        dtype=torch.bfloat16,
    )
    settings, hashes = RecordSettings(), {"tokenizer_sha256": "", "template_sha256": ""}
    identity = StoreIdentity.of(target, **hashes, boundaries=(2, 16, 29), dtype=settings.dtype)
    plan, recorded = plan_recording(target, samples, settings, identity, monitor=PrintMonitor())
    print_usage(f"planned {len(plan.shards):,} shards", started)
    Receipts(path.parent, plan).publish()
    print_usage("wrote the manifest", started)
    tokens = sum(len(sample.token_ids) for sample in recorded[: len(plan.shards[0].ids)])
    print_usage(f"read the first shard's {tokens:,} tokens", started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=1_000, help="of each conversation")
    parser.add_argument("--compact", action="store_true", help="write the index only, not the text")
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        open_and_plan(arguments.open)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path, started = Path(folder) / "answers.jsonl", now()
        write = write_compact if arguments.compact else write_answers
        write(path, arguments.conversations, arguments.tokens)
        print_usage(f"wrote {path.stat().st_size / 1e9:.2f} GB of answers", started)
        for number in (1, 2, 3):
            print(f"process {number}", flush=True)
            subprocess.run([sys.executable, __file__, "--open", str(path)], check=True)
        index = sum(file.stat().st_size for file in path.with_suffix(".index").iterdir())
        print(f"the index takes {index / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
