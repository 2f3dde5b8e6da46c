"""Train on a window beside a full store: speed, shares of waiting, and the same bits.

    python eval/lab/window.py [--folder DIR] [--tokens 600000] [--window 6GB] [--steps 100]
    python eval/lab/window.py --target embedded --window 400MB --steps 400
    python eval/lab/window.py --gpus 1        # one GPU records and trains
    python eval/lab/window.py --tiny          # the same on a CPU, in a minute
    python eval/lab/window.py --tiny --target embedded record.backend=vllm

A target of Llama-3.1-8B's shapes with random weights is written into DIR (16 GB), or the target is
the embedded one. An EAGLE3 head is trained on random conversations twice: on a full store
(`record.keep=all`, another 33 kB a token) on one GPU, and on a window with `--gpus 2`, where one
GPU trains and the other one records. A line of JSON for each has tokens/s of the training, the
shares of its time in which it waited for shards of the window and for other data, and the share of
its time in which the recording waited for room, all without the first tenth of the steps, in which
code is compiled. The heads must have the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.files import sha256_file
from draftlab.target_model.locate import local_target
from draftlab.target_model.settings import TargetSettings
from eval.bench.random_models import target_config
from eval.measurements import Measurements, add_options, child_environment, require

RECIPE = {
    "prompts": {"source": "prompts.jsonl"},
    "regenerate": {"enabled": False},
    "export": {"formats": []},
}


def write_target(folder: Path, embedded: Path, tokenizer: Any, tiny: bool) -> None:
    """Write a Llama with random weights and the embedded target's tokenizer."""
    special: dict[str, Any] = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")
    }
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        special["vocab_size"] = 128_256
        config = target_config("tiny" if tiny else "llama", **special)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    for path in embedded.iterdir():
        if path.suffix in (".json", ".jinja", ".txt") and not (folder / path.name).exists():
            shutil.copy(path, folder / path.name)


def write_prompts(path: Path, tokens: int, tokenizer: Any, longest: int) -> None:
    """Write conversations of log-normal lengths (median about 735 tokens), 70 % answer."""
    generator = np.random.default_rng(0)
    words = [word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha()]
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        while tokens > 0:
            length = int(np.clip(generator.lognormal(6.6, 0.7), 16, 0.8 * longest))
            texts = [
                " ".join(generator.choice(words, max(2, int(share * length / 1.3))))
                for share in (0.3, 0.7)
            ]
            messages = [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), texts, strict=True)
            ]
            file.write(json.dumps({"id": f"c{count}", "messages": messages}) + "\n")
            count += 1
            tokens -= length


def train(name: str, settings: list[str], options: list[str]) -> float:
    """Train in a process of its own; return its seconds."""
    overrides = [f"name={name}", *settings]
    command = [sys.executable, "-m", "draftlab", "train", "window.yaml", *overrides, *options]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr, env=child_environment())
    return time.perf_counter() - started


def measured(name: str, seconds: float) -> dict[str, Any]:
    """Return the figures of a run's training, without the first tenth of its steps."""
    lines = Path(f"runs/{name}/train/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if "phases" in row]
    rows = [row for row in rows if row["step"] > rows[-1]["step"] / 10]
    times = [1 / row["tokens_per_s"] for row in rows]  # for equally many tokens

    def share(phase: str) -> float:
        parts = zip(rows, times, strict=True)
        return sum(row["phases"].get(phase, 0.0) * t for row, t in parts) / sum(times)

    return {
        "run": name,
        "train_tokens_s": round(len(times) / sum(times)),
        "waited_for_window": round(share("window"), 4),
        "waited_for_data": round(share("data"), 4),
        "recording_waited": rows[-1].get("recording_waited"),
        "seconds_in_all": round(seconds, 1),
        "head_sha256": sha256_file(Path(f"runs/{name}/head/model.safetensors")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: TMPDIR")
    parser.add_argument("--tokens", type=int, default=600_000, help="of the conversations")
    parser.add_argument("--window", default="6GB")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--target", choices=("8b", "embedded"), default="8b")
    parser.add_argument("--tiny", action="store_true", help="a tiny target on a CPU")
    parser.add_argument("settings", nargs="*", help="of the recipe, such as train.batch_rows=16")
    add_options(parser)
    options = parser.parse_args()
    settings = ["record.shard_tokens=8192", "record.max_length=2048"]
    settings += [f"record.window={options.window}"]
    settings += [f"train.steps={options.steps}", "train.log_every=5", "draft_vocab.size=2000"]
    if options.tiny:
        options.tokens = 60_000
        settings = ["record.shard_tokens=1024", "record.window=12MB", "train.steps=40"]
        settings += ["train.row_tokens=512", "train.log_every=2", "record.max_length=512"]
        settings += ["target.device=cpu", "train.device=cpu", "draft_vocab.size=300"]
        settings += ["train.batch_rows=2"]
    settings += options.settings
    device = torch.device("cpu" if options.tiny else "cuda")
    target = "tiny" if options.tiny and options.target == "8b" else options.target
    conditions = {
        "target": target,
        "tokens": options.tokens,
        "gpus": options.gpus,
        "settings": settings,
    }
    if options.results is not None:
        options.results = options.results.absolute()
    parts = Measurements(options, conditions, device)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        size = 34e3 * options.tokens + (17e9 if target == "8b" else 0)
        require(gpus=0 if options.tiny else options.gpus, disk=(Path(name), size))
        os.chdir(name)
        embedded = local_target(TargetSettings(path="embedded"))
        tokenizer = AutoTokenizer.from_pretrained(embedded)
        if target != "embedded":
            write_target(Path("target"), embedded, tokenizer, options.tiny)
        write_prompts(Path("prompts.jsonl"), options.tokens, tokenizer, 2048)
        recipe = {"target": "embedded" if target == "embedded" else "target"} | RECIPE
        Path("window.yaml").write_text(json.dumps(recipe))
        gpus = ["--gpus", str(options.gpus)] if options.gpus > 1 else []

        def part(run: str, own: list[str], words: list[str]) -> dict[str, Any]:
            seconds = train(run, [*settings, *own], words)
            row = measured(run, seconds)
            print(json.dumps(row), flush=True)
            shutil.rmtree(f"runs/{run}/store")
            return row

        full = parts.measure("full", lambda: part("full", ["record.keep=all"], []))
        window = parts.measure("window", lambda: part("window", [], gpus))
        os.chdir("/")
    if not (full and window):
        return 1
    same = full["head_sha256"] == window["head_sha256"]
    print(json.dumps({"same_bytes": same}), flush=True)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
