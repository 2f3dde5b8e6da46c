"""Which configurations of the four products make a chain of decoder layers fastest.

    python eval/lab/tune_linear.py [--tokens 4,9] [--layers 8] [--rounds 2] [--workers 14]

A product's best configuration on its own need not be the best between its neighbours, whose tails
and heads it overlaps. So each candidate is timed inside the chain of `fused_layers.py`, the other
three products as chosen so far, twice round. Kernels are compiled beforehand by several processes.
Prints each product's three best, and the chain before and after.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from fused_layers import FLOOR, WEIGHTS, Layers, microseconds

from draftlab.kernels.linear_launch import Config, choose

_PLAIN = [
    Config(16, 256, 1, 1, 5),
    Config(16, 512, 1, 1, 4),
    Config(16, 256, 2, 1, 5),
    Config(16, 128, 1, 1, 8),
    Config(32, 256, 1, 2, 4),
    Config(32, 256, 2, 2, 4),
    Config(32, 128, 2, 2, 6),
]
_GATED = [
    Config(16, 256, 1, 1, 4),
    Config(16, 128, 1, 1, 6),
    Config(32, 128, 1, 2, 5),
    Config(32, 128, 1, 2, 6),
    Config(32, 64, 1, 2, 8),
    Config(64, 64, 1, 4, 6),
]
PRODUCTS = ("qkv", "out", "gate_up", "down")
_AHEAD = (0, 512, 1024, 2048)


def candidates(product: str) -> list[Config]:
    if product == "gate_up":
        return [replace(c, prefetch=p) for c in _GATED for p in (0, 512, 1024)]
    most = 2048 if product == "down" else 1024
    return [replace(c, prefetch=p) for c in _PLAIN for p in _AHEAD if p <= most]


def compile_all(work: tuple[int, list[tuple[str, Config]]]) -> list[tuple[str, Config]]:
    """Launches the candidates once; returns those that do not run (too much shared memory)."""
    tokens, share = work
    layers, failed = Layers(2, 1, tokens, 512), []
    for product, config in share:
        try:
            # Readers of a norm are compiled for the number of parts that its maker's tiles give.
            for maker in (Config(16, 256, 1, 1), Config(32, 256, 1, 2)):
                layers.run({"out": maker, "down": maker} | {product: config})
            torch.cuda.synchronize()
        except Exception as error:  # whatever Triton raises for a configuration that cannot be
            print(f"{product} {config}: {str(error).splitlines()[0][:100]}", flush=True)
            failed.append((product, config))
    return failed


def describe(config: Config) -> str:
    return ", ".join(str(v) for v in vars(config).values())


def tune(tokens: int, num_layers: int, rounds: int, failed: set) -> None:
    """Coordinate descent over the products' configurations for one row of `tokens` tokens."""
    layers = Layers(num_layers, 1, tokens, 512)

    def time(configs: dict[str, Config]) -> float:
        return microseconds(lambda: layers.run(configs)) / num_layers

    best = {}
    for product in PRODUCTS:
        shape = WEIGHTS.get(product, WEIGHTS["gate"])
        best[product] = choose(tokens, *shape, product == "gate_up", False)
    print(f"{tokens} tokens: {time(best):.1f} as chosen by shape")
    for turn in range(rounds):
        for product in PRODUCTS:
            tried = [c for c in candidates(product) if (tokens, product, c) not in failed]
            times = sorted((time(best | {product: c}), describe(c), c) for c in tried)
            best[product] = times[0][2]
            top = "; ".join(f"{t:.1f} ({name})" for t, name, _ in times[:3])
            print(f"  {turn} {product:8s} {top}; worst {times[-1][0]:.1f}", flush=True)
    print(f"{tokens} tokens: {time(best):.1f} with the best ({time(best) / FLOOR:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="4,9")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    sizes = [int(t) for t in options.tokens.split(",")]
    everything = [(p, c) for p in PRODUCTS for c in candidates(p)]
    shares = [(t, everything[w :: options.workers]) for t in sizes for w in range(options.workers)]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        failed = {
            (work[0], *bad)
            for work, found in zip(shares, pool.map(compile_all, shares), strict=True)
            for bad in found
        }
    print(f"us a layer, configurations as tile, depth, split, warps, stages, prefetch; {FLOOR:.1f}")
    for tokens in sizes:
        tune(tokens, options.layers, options.rounds, failed)


if __name__ == "__main__":
    main()
