"""Time decode steps at the shapes of Llama-3.1-8B, beside their bandwidth floor and vLLM's step.

    python eval/bench/bench_decode.py [--batches 1,8,32] [--k 3,5,8] [--results steps.json]
    python eval/bench/bench_decode.py --heads chain,1,2,4 --k 1,3,5,8 --probs off
    python eval/bench/bench_decode.py --heads dspark --k 3,7
    python eval/bench/bench_decode.py --target small --device cpu --prompt-tokens 8 --tokens 8

Weights are random. The head is an EAGLE3 chain of one layer, with a number in --heads a parallel
head of so many layers, or a DSpark head of five layers; draft vocabularies have 32,000 tokens, but
DSpark's is the target's. Each request has a prompt of 512 random tokens and 256 new tokens.
Acceptance is synthetic, as in the vLLM measurement that it is compared with (vLLM 0.33.0): draft i
passes with probability 0.6 if those before it did. The verifier of random_models.py decides so
after it ran the real one, so a step leaves nothing out. Times are the engine's, host included. The
time to the first token is measured from when a batch of prompts is handed in until the host sees
each one's token.

The floor is the bytes of weights that a step reads over the rate at which they can be streamed:
4.15 TB/s where a copy moves 4.30, scaled by the copy rate measured at the start. vLLM's times are
scaled likewise. A second ratio is to the floor with the keys and values that a step reads in the
middle of the answers. Tokens/s leave out that parallel heads accept fewer drafts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from bandwidth import copy_rate, head_bytes, target_bytes
from random_models import (
    HEADS,
    SMALL_HEAD,
    passing_runs,
    random_head,
    random_target,
    synthetic_verify,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.engine.drafter import HeadDrafter, new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.kv_pool import draft_kv_bytes
from draftlab.engine.sampling import Request, Sampling
from draftlab.evaluate.timing import warm_up, warm_up_batches
from draftlab.heads.head import DraftHead
from draftlab.kernels.verify import verify
from draftlab.target_model.model import Target
from eval.measurements import Measurements, add_options, option_values, require

PROMPT, NEW = 512, 256
FIRSTS = 7  # measurements of the time to the first token
PROBS = {"off": (False,), "on": (True,), "both": (False, True)}
# vLLM 0.33.0 with torch 2.14 on an H200 that copies 4.30 TB/s, a chain with K = 3: by batch
VLLM_STEP_MS = {1: 6.47, 8: 7.28, 32: 9.12}
VLLM_COPY, STREAM = 4.30e12, 4.15e12


@dataclass(frozen=True)
class Measured:
    """Measurements of an engine with a batch.

    Attributes:
        step_ms: milliseconds of a step without prefill.
        tokens_a_step: tokens of a row in a step.
        tokens_s: tokens of all rows per second, after their first tokens.
        ttft_ms: milliseconds to the first token, the mean over the batch; the median of `FIRSTS`.
    """

    step_ms: float
    tokens_a_step: float
    tokens_s: float
    ttft_ms: float


def measure(
    target: Target,
    drafter: HeadDrafter | None,
    batch: int,
    *,
    prompt: int = PROMPT,
    new: int = NEW,
) -> Measured:
    """Measure an engine with `batch` prompts of `prompt` random tokens and `new` new ones."""
    passing_runs(target.device)  # not inside a graph's capture
    engine = Engine(
        target,
        drafter,
        batch=batch,
        max_length=prompt + new + 32,
        verifier=synthetic_verify if drafter else verify,
        expect=False,
    )
    generator = torch.Generator().manual_seed(batch)
    temperature = 1.0 if drafter and drafter.draft_probs else 0.0
    vocab = len(target.parts.embeddings)

    def requests(count: int, new: int, name: str) -> list[Request]:
        ids = torch.randint(10, vocab, (count, prompt), generator=generator).tolist()
        return [
            Request(f"{name}{i}", tuple(row), new, Sampling(temperature))
            for i, row in enumerate(ids)
        ]

    warm_up(engine, warm_up_batches(requests(batch, 16, "warm")))
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    done = list(engine.generate(requests(batch, new, "timed")))
    wall = time.perf_counter() - started
    first = max(g.first_token_s for g in done)
    steps = max(len(g.steps) for g in done)
    tokens = sum(len(g.token_ids) - 1 for g in done)
    each = sum(len(g.token_ids) - 1 for g in done) / sum(len(g.steps) for g in done)
    firsts = [
        fmean(g.first_token_s for g in engine.generate(requests(batch, 1, f"first {number}")))
        for number in range(FIRSTS)
    ]
    return Measured(
        1e3 * (wall - first) / steps, each, tokens / (wall - first), 1e3 * median(firsts)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--heads", default="chain", help="chain, dspark, or layers of parallel heads"
    )
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--k", default="3,5,8")
    parser.add_argument("--probs", choices=PROBS, default="both", help="draft probabilities")
    parser.add_argument("--target", choices=("llama", "small"), default="llama")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT)
    parser.add_argument("--tokens", type=int, default=NEW, help="of an answer")
    parser.add_argument("--device", default="cuda")
    add_options(parser)
    options = parser.parse_args()
    device = torch.device(options.device)
    require(gpus=int(device.type == "cuda"))
    conditions = option_values(options, "target", "prompt_tokens", "tokens")
    parts = Measurements(options, conditions, device)
    # A CPU has no floor; its figures try the program out.
    rate = parts.measure("bytes copied a second", lambda: copy_rate(device) or 1e11)
    print(f"a copy moves {rate / 1e12:.2f} TB/s")
    print("head         batch  K probs  step ms  floor ms  ratio  with KV  vLLM ms  ratio  "
          "tokens/step  tokens/s  TTFT ms")  # fmt: skip

    @cache
    def target() -> Target:
        return random_target(device, options.target)

    @cache
    def head(name: str) -> DraftHead:
        small = SMALL_HEAD if options.target == "small" else {}
        return random_head(target(), device, **head_fields(name) | small)

    for name in options.heads.split(","):
        without = () if head_fields(name).get("num_layers") else (0,)
        for batch in map(int, options.batches.split(",")):
            for k in (*without, *map(int, options.k.split(","))):
                for probs in PROBS[options.probs] if k else (False,):
                    part = f"{name}, batch {batch}, K = {k}{', probabilities' * probs}"
                    arguments = (name, batch, k, probs, rate, options)
                    show(parts.measure(part, row_of(target, head, *arguments)))


def head_fields(name: str) -> dict[str, Any]:
    """Return the config fields of a head's name."""
    return HEADS.get(name) or HEADS["parallel"] | {"num_layers": int(name)}


def row_of(
    target: Callable[[], Target],
    head: Callable[[str], DraftHead],
    name: str,
    batch: int,
    k: int,
    probs: bool,
    rate: float,
    options: argparse.Namespace,
) -> Callable[[], dict[str, Any]]:
    """Return a function that measures one configuration; target and head are made in it."""

    def measured() -> dict[str, Any]:
        drafter = new_drafter(head(name), k, draft_probs=probs) if k else None
        result = measure(
            target(),
            drafter,
            batch,
            prompt=options.prompt_tokens,
            new=options.tokens,
        )
        moved = target_bytes(target()) + (head_bytes(head(name), k) if k else 0)
        position = sum(target().kv_bytes.values())
        if k:
            chain = head(name).family.drafting == "chain"
            position += draft_kv_bytes(head(name)) * (k if chain else 1)
        cached = batch * (options.prompt_tokens + options.tokens // 2) * position
        compared = name == "chain" and k == 3 and options.target == "llama"
        vllm = VLLM_STEP_MS.get(batch) if compared else None
        scale = 1e3 * VLLM_COPY / (STREAM * rate)
        return asdict(result) | {
            "head": name,
            "batch": batch,
            "k": k,
            "draft_probs": probs,
            "floor_ms": moved * scale,
            "kv_floor_ms": (moved + cached) * scale,
            "vllm_ms": vllm and vllm * VLLM_COPY / rate,
        }

    return measured


def show(row: dict[str, Any]) -> None:
    """Print a line of the table; the floors are times to read the weights, and keys and values."""
    r = argparse.Namespace(**row)
    vllm = r.vllm_ms or float("nan")
    name = f"parallel, {r.head}" if r.head.isdigit() else r.head
    print(
        f"{name:12} {r.batch:5d} {r.k:2d} {'on ' if r.draft_probs else 'off'}   "
        f"{r.step_ms:8.3f} {r.floor_ms:8.3f} {r.step_ms / r.floor_ms:7.3f} "
        f"{r.step_ms / r.kv_floor_ms:7.3f} {vllm:8.2f} {r.step_ms / vllm:6.3f} "
        f"{r.tokens_a_step:8.2f} {r.tokens_s:12,.0f} {r.ttft_ms:8.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
