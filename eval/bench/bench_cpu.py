"""Time decoding on one CPU thread: draftlab's engine beside a cached loop of transformers.

    python eval/bench/bench_cpu.py [--prompts 24] [--tokens 64] [--k 2,3,4]

The embedded target and the reference head decode greedily, one prompt at a time, without stop
tokens. The baseline is the loop of `model.generate` without its bookkeeping: one token a call, a
DynamicCache, SDPA, float32. Every prompt is decoded by all methods in an order that rotates, so a
machine that slows down slows all of them. Times are per token after the first (TPOT). Intervals are
bootstrap intervals over prompts, of paired ratios.

The tokens of every method are compared with the baseline's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request
from draftlab.heads.folder import load_head
from draftlab.intervals import bootstrap_interval
from draftlab.pipeline.resolve import find_head
from draftlab.progress import Monitor
from draftlab.target_model.cache import cache_name
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.model import Target
from draftlab.target_model.prepacked_decoder import describe_products
from draftlab.target_model.settings import TargetSettings
from draftlab.text.suites import load_suite

LOOP = "HF loop"
Timed = tuple[float, tuple[int, ...], int]  # seconds a token, tokens, steps
Method = Callable[[Request], Timed]


@torch.inference_mode()
def hf_loop(model: AutoModelForCausalLM, request: Request) -> Timed:
    """Decode greedily with the model's own cache."""
    cache = DynamicCache()
    fed, tokens = torch.tensor([request.prompt_ids]), []
    started = 0.0
    while len(tokens) < request.max_new_tokens:
        output = model(
            input_ids=fed, use_cache=True, logits_to_keep=1, **{cache_name(model.forward): cache}
        )
        tokens.append(int(output.logits[0, -1].argmax()))
        fed = torch.tensor([tokens[-1:]])
        started = started or time.perf_counter()
    seconds = (time.perf_counter() - started) / (len(tokens) - 1)
    return seconds, tuple(tokens), len(tokens) - 1


def decode(engine: Engine, request: Request) -> Timed:
    """Decode one request with an engine."""
    (generation,) = engine.generate([request])
    return generation.tpot_s or float("nan"), generation.token_ids, len(generation.steps)


def methods_of(target: Target, ks: list[int], max_length: int) -> dict[str, Method]:
    """Return every method of decoding by name, the baseline first."""
    model = AutoModelForCausalLM.from_pretrained(
        target.folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    head = load_head(
        find_head("reference"),
        embeddings=target.parts.embeddings,
        dtype=target.dtype,
        device=target.device,
    )
    methods: dict[str, Method] = {LOOP: partial(hf_loop, model)}
    for k in (0, *ks):
        drafter = ChainDrafter(head, k, draft_probs=False) if k else None
        engine = Engine(
            target, drafter, batch=1, max_length=max_length, expect=False, cpu_prepacked=True
        )
        methods[f"K = {k}" if k else "no drafting"] = partial(decode, engine)
    return methods


def interval(above: np.ndarray, below: np.ndarray) -> str:
    """Return Σ above / Σ below with its bootstrap interval over prompts."""
    low, high = bootstrap_interval(lambda i: float(above[i].sum() / below[i].sum()), len(above))
    return f"{above.sum() / below.sum():.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", default="2,3,4")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = TargetSettings(device="cpu", dtype="float32")
    target = load_target(settings)
    suite = load_suite("embedded:heldout", load_tokenizer(settings), Monitor())
    chosen = suite.prompts[: arguments.prompts]
    requests = [Request(id_, ids, arguments.tokens) for id_, ids in chosen]
    longest = max(len(request.prompt_ids) for request in requests) + arguments.tokens + 16
    ks = [int(k) for k in arguments.k.split(",")]
    decoders = methods_of(target, ks, longest)
    names = list(decoders)
    results: dict[str, list[Timed]] = {name: [] for name in names}
    for name in names:  # first calls pay for allocation
        decoders[name](Request("warm-up", requests[0].prompt_ids, 8))
    for number, request in enumerate(requests):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(decoders[name](request))

    sizes = f"{len(requests)} prompts × {arguments.tokens} tokens"
    print(f"torch {torch.__version__}, one thread, {sizes}")
    print(describe_products(target, cpu_prepacked=True))
    print("| | ms a token | speed-up over the loop | step ms | tokens a step | prompts equal |\n"
          "|---|---|---|---|---|---|")  # fmt: skip
    seconds = {name: np.array([result[0] for result in results[name]]) for name in names}
    ones, tokens = np.ones(len(requests)), (arguments.tokens - 1) * len(requests)
    for name in names:
        steps = sum(result[2] for result in results[name])
        step_ms = 1e3 * seconds[name].sum() / len(requests) * tokens / steps
        equal = sum(a[1] == b[1] for a, b in zip(results[name], results[LOOP], strict=True))
        print(
            f"| {name} | {interval(1e3 * seconds[name], ones)} "
            f"| {interval(seconds[LOOP], seconds[name])} | {step_ms:.2f} | {tokens / steps:.2f} "
            f"| {equal} of {len(requests)} |"
        )


if __name__ == "__main__":
    main()
