"""Time configurations of the skinny products, the table in `kernels/linear_launch.choose`.

    python eval/lab/tune_linear.py layers [--rows 4,9] [--layers 8] [--rounds 2]
    python eval/lab/tune_linear.py alone  [--rows 4,9,32,64]

`layers` times each configuration inside a chain of Llama-3.1-8B's decoder layers, because a product
overlaps its neighbours; the other products keep the best configurations so far. `alone` times each
shape by itself, over copies of its weights that exceed L2. Both print microseconds, beside the time
to read the weights once at 4.15 TB/s (an H200's streaming rate).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.kernels.linear import linear, linear_then_norm, swiglu_linear
from draftlab.kernels.linear_launch import Config, choose
from draftlab.kernels.paged_attention import attend_paged
from draftlab.kernels.rope_write import rope_angles, rope_write
from tests.helpers.gpu import capture

RATE, EPS = 4.15e12, 1e-5
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK, CONTEXT = 4096, 14_336, 32, 8, 128, 64, 512
LAYER = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "out": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
ALONE = LAYER | {
    "lm_head": (128_256, HIDDEN),
    "draft_lm_head": (32_000, HIDDEN),
    "draft_qkv": (6144, 2 * HIDDEN),
    "draft_fc": (HIDDEN, 3 * HIDDEN),
}
CONFIGS = [
    Config(16, 128, 1, 1, 8),
    Config(16, 256, 1, 1, 5),
    Config(16, 512, 1, 1, 4),
    Config(16, 256, 2, 1, 5),
    Config(32, 64, 1, 2, 8),
    Config(32, 128, 1, 2, 6),
    Config(32, 128, 2, 2, 6),
    Config(32, 256, 1, 2, 4),
    Config(32, 256, 2, 2, 4),
    Config(64, 64, 1, 4, 6),
    Config(64, 64, 4, 4, 6),
    Config(64, 128, 2, 4, 4),
    Config(128, 64, 1, 4, 5),
]


def candidates(product: str, num_rows: int) -> list[Config]:
    """Return configurations to time, the chosen one first; gated products are never split."""
    gated, size_in = product == "gate_up", ALONE[product][1]
    configs = [choose(num_rows, *ALONE[product], gated, product == "lm_head")]
    for config in CONFIGS:
        if config.split == 1 or not gated:
            most = size_in // config.split
            configs += [replace(config, prefetch=p) for p in (0, 512, 1024, 2048) if p <= most]
    return list(dict.fromkeys(configs))


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


class Layers:
    """Random decoder layers with a paged cache, chained as `target_model/fused_decoder.py` does."""

    def __init__(self, num_layers: int, num_rows: int) -> None:
        self.weights = [
            {name: random(*shape, scale=0.02) for name, shape in LAYER.items()}
            | {"up": random(INNER, HIDDEN, scale=0.02), "norm": 1 + random(HIDDEN, scale=0.1)}
            for _ in range(num_layers)
        ]
        blocks = -(-(CONTEXT + num_rows) // BLOCK)
        self.pools = [
            [random(blocks, BLOCK, KV_HEADS, HEAD_DIM) for _ in range(2)] for _ in range(num_layers)
        ]
        self.table = torch.arange(blocks, device="cuda", dtype=torch.int32)[None]
        self.positions = CONTEXT + torch.arange(num_rows, device="cuda")
        self.x = random(num_rows, HIDDEN)
        self.inv_freq = 5e5 ** -(torch.arange(0, HEAD_DIM, 2, device="cuda").float() / HEAD_DIM)

    def run(self, configs: dict[str, Config]) -> Tensor:
        """Return the output of all layers; `configs` by product."""
        x, rows = self.x, len(self.x)
        normed = linear_then_norm(x, self.weights[0]["out"], self.weights[0]["norm"], EPS)[1]
        angles = rope_angles(self.positions, self.inv_freq, 1.0, x.dtype)
        for w, pools in zip(self.weights, self.pools, strict=True):
            qkv = linear(normed, w["qkv"], config=configs["qkv"])
            query = rope_write(qkv, angles, *pools, self.positions)
            query = query.view(1, rows, HEADS, HEAD_DIM)
            attended = attend_paged(
                query, *pools, self.table, self.positions[None], scale=HEAD_DIM**-0.5,
                prefetch_weight=w["out"],
            )  # fmt: skip
            attended = attended.view(rows, -1)
            x, normed = linear_then_norm(
                attended, w["out"], w["norm"], EPS, residual=x, config=configs["out"]
            )
            inner = swiglu_linear(normed, w["gate_up"], w["up"], config=configs["gate_up"])
            x, normed = linear_then_norm(
                inner, w["down"], w["norm"], EPS, residual=x, config=configs["down"]
            )
        return x


def microseconds(work: Callable[[], object], replays: int = 20) -> float:
    """Return the median time of a captured call; infinity if a configuration does not fit."""
    try:
        graph, _ = capture(work)
    except Exception as error:  # whatever Triton raises for too much shared memory
        print(f"  left out: {str(error).splitlines()[0][:100]}", flush=True)
        return float("inf")
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times[2:])


def report(title: str, times: list[tuple[float, Config]]) -> None:
    """Print the first time, which is the chosen configuration's, and the three best."""
    best = sorted(times, key=lambda pair: pair[0])[:3]
    listed = "; ".join(f"{time:.2f} {astuple(config)}" for time, config in best)
    print(f"{title}: chosen {times[0][0]:.2f} {astuple(times[0][1])}; best {listed}", flush=True)


def tune_layers(num_rows: int, num_layers: int, rounds: int) -> None:
    """Improve one product's configuration after the other for one row of `num_rows` tokens."""
    layers = Layers(num_layers, num_rows)
    best = {product: candidates(product, num_rows)[0] for product in LAYER}
    for turn in range(rounds):
        for product in LAYER:
            times = []
            for config in candidates(product, num_rows):
                work = lambda c=config, p=product: layers.run(best | {p: c})  # noqa: E731
                times.append((microseconds(work) / num_layers, config))
            report(f"{num_rows} rows, round {turn}, {product}, us a layer", times)
            best[product] = min(times, key=lambda pair: pair[0])[1]


def tune_alone(num_rows: int) -> None:
    """Time every shape by itself."""
    for product, (num_out, size_in) in ALONE.items():
        matrices = 2 if product == "gate_up" else 1
        size = 2 * num_out * size_in * matrices
        copies = max(2, -(-400_000_000 // size))
        weights = [
            [random(num_out, size_in, scale=0.02) for _ in range(matrices)] for _ in range(copies)
        ]
        x, norm, times = random(num_rows, size_in), 1 + random(size_in, scale=0.1), []
        options = {"norm_weight": norm, "eps": EPS} if product == "lm_head" else {}
        call = swiglu_linear if matrices == 2 else linear
        for config in candidates(product, num_rows):
            work = lambda c=config: [call(x, *w, config=c, **options) for w in weights]  # noqa: B023, E731
            times.append((microseconds(work) / copies, config))
        report(f"{num_rows} rows, {product}, us (floor {size / RATE * 1e6:.2f})", times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("layers", "alone"))
    parser.add_argument("--rows", help="rows of a product, separated by commas")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    default = "4,9" if options.kind == "layers" else "4,9,32,64"
    for num_rows in map(int, (options.rows or default).split(",")):
        if options.kind == "layers":
            tune_layers(num_rows, options.layers, options.rounds)
        else:
            tune_alone(num_rows)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
