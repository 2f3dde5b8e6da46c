"""Decoding on one CPU thread: draftlab's engine beside a cached loop of Hugging Face's model.

    python eval/bench/bench_cpu.py [--prompts 24] [--start 0] [--tokens 64] [--k 2,3,4] [--plain]

The embedded target and the reference head, greedy, one prompt at a time, stop tokens ignored. The
baseline is the loop that `model.generate` runs, without its bookkeeping: one token a call, a
DynamicCache, attention through SDPA, float32. For every prompt all ways take their turn, in an
order that rotates, so a machine that slows down slows all of them. Times are per token after the
first one (TPOT); intervals are bootstrap intervals over prompts, of ratios in pairs.

In float32 the tokens of every way are compared with the loop's. GB/s is what reading the target's
weights once a step would move in the step's time; the copy rate is what one thread moves of a
tensor no cache holds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request
from draftlab.evaluate.bandwidth import target_bytes
from draftlab.evaluate.statistics import bootstrap_interval
from draftlab.heads.folder import load_head
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.model import Target
from draftlab.target_model.prepacked_decoder import describe_products
from draftlab.target_model.settings import TargetSettings
from draftlab.text.suites import load_suite

LOOP = "HF loop"
Timed = tuple[float, tuple[int, ...], int]  # seconds a token, tokens, steps
Way = Callable[[Request], Timed]


@torch.inference_mode()
def hf_loop(model: AutoModelForCausalLM, request: Request) -> Timed:
    """Greedy decoding with the model's own cache."""
    cache = DynamicCache()
    fed, tokens = torch.tensor([request.prompt_ids]), []
    started = 0.0
    while len(tokens) < request.max_new_tokens:
        output = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens.append(int(output.logits[0, -1].argmax()))
        fed = torch.tensor([tokens[-1:]])
        started = started or time.perf_counter()
    seconds = (time.perf_counter() - started) / (len(tokens) - 1)
    return seconds, tuple(tokens), len(tokens) - 1


def decode(engine: Engine, request: Request) -> Timed:
    """One request through an engine."""
    (found,) = engine.generate([request])
    return found.tpot_s or float("nan"), found.token_ids, len(found.steps)


def ways(target: Target, ks: list[int], max_length: int, *, plain: bool) -> dict[str, Way]:
    """Every way of decoding, by name, the baseline first."""
    model = AutoModelForCausalLM.from_pretrained(
        target.folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    folder = Path(str(resources.files("draftlab") / "embedded" / "heads" / "reference"))
    head = load_head(
        folder, embeddings=target.parts.embeddings, dtype=target.dtype, device=target.device
    )

    def engine(k: int, packed: bool) -> Way:
        drafter = ChainDrafter(head, k, draft_probs=False) if k else None
        made = Engine(target, drafter, batch=1, max_length=max_length, expect=False, cpu_prepacked=packed)
        return partial(decode, made)

    found: dict[str, Way] = {LOOP: partial(hf_loop, model)}
    for packed in (True, False) if plain else (True,):
        for k in (0, *ks):
            name = f"K = {k}" if k else "no drafting"
            found[f"{name}, {'packed' if packed else 'plain'}"] = engine(k, packed)
    return found


def interval(above: np.ndarray, below: np.ndarray) -> str:
    """Σ above / Σ below with its bootstrap interval over prompts."""
    low, high = bootstrap_interval(lambda i: float(above[i].sum() / below[i].sum()), len(above))
    return f"{above.sum() / below.sum():.2f} [{low:.2f}, {high:.2f}]"


def copy_rate() -> float:
    """Bytes a second that one thread copies, reads and writes counted; the best of 10."""
    source = torch.empty(2**27, dtype=torch.uint8)
    copy, times = torch.empty_like(source), []
    for _ in range(10):
        started = time.perf_counter()
        copy.copy_(source)
        times.append(time.perf_counter() - started)
    return 2 * len(source) / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--start", type=int, default=0, help="prompts of the suite left out")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", default="2,3,4")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--plain", action="store_true", help="also without packing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = TargetSettings(device="cpu", dtype=arguments.dtype)
    target = load_target(settings)
    suite = load_suite("embedded:heldout", load_tokenizer(settings), Monitor())
    chosen = suite.prompts[arguments.start :][: arguments.prompts]
    asked = [Request(id_, ids, arguments.tokens) for id_, ids in chosen]
    longest = max(len(request.prompt_ids) for request in asked) + arguments.tokens + 16
    ks = [int(k) for k in arguments.k.split(",")]
    decoders = ways(target, ks, longest, plain=arguments.plain)
    names = list(decoders)
    taken: dict[str, list[Timed]] = {name: [] for name in names}
    for name in names:  # first calls pay for allocation
        decoders[name](Request("warm-up", asked[0].prompt_ids, 8))
    for turn, request in enumerate(asked):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(decoders[name](request))

    print(
        f"torch {torch.__version__}, one thread, {len(asked)} prompts × {arguments.tokens} tokens"
    )
    print(f"{describe_products(target, cpu_prepacked=True)}; a copy moves {copy_rate() / 1e9:.1f} GB/s")
    print("| | ms a token | speed-up over the loop | step ms | GB/s of weights | tokens a step | "
          "prompts equal |\n|---|---|---|---|---|---|---|")  # fmt: skip
    seconds = {name: np.array([found[0] for found in taken[name]]) for name in names}
    ones = np.ones(len(asked))
    for name in names:
        tokens = (arguments.tokens - 1) * len(asked)
        steps = sum(found[2] for found in taken[name])
        step_s = seconds[name].sum() / len(asked) * tokens / steps
        equal = sum(a[1] == b[1] for a, b in zip(taken[name], taken[LOOP], strict=True))
        size = (target_bytes(target) or 0) * (
            2 if name == LOOP and settings.dtype != "float32" else 1
        )
        print(
            f"| {name} | {interval(1e3 * seconds[name], ones)} "
            f"| {interval(seconds[LOOP], seconds[name])} | {1e3 * step_s:.2f} "
            f"| {size / step_s / 1e9:.1f} | {tokens / steps:.2f} | {equal} of {len(asked)} |"
        )


if __name__ == "__main__":
    main()
