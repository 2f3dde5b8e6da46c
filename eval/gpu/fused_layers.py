"""Decoder layers of Llama-3.1-8B's shapes on our kernels: checked, and timed against the floor.

    python eval/gpu/fused_layers.py [--layers 8] [--context 512]

Random layers chained in one CUDA graph as `target_model/fused_decoder.py` chains them. Prints
microseconds a
layer, with and without programmatic dependent launch, beside the time of reading the weights once
at 4.15 TB/s, and what single kernels take on their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.kernels import dependent_launch
from draftlab.kernels import linear as skinny
from draftlab.kernels import rope_write as rope
from draftlab.kernels.paged_attention import attend_paged

BANDWIDTH = 4.15e12
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4096, 14336, 32, 8, 128, 64
EPS = 1e-5
WEIGHTS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "out": (HIDDEN, HEADS * HEAD_DIM),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
FLOOR = 2 * sum(n * k for n, k in WEIGHTS.values()) / BANDWIDTH * 1e6


class Layers:
    """Random layers with a paged cache of `context` keys a row."""

    def __init__(self, num_layers: int, num_rows: int, num_tokens: int, context: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int, scale: float) -> Tensor:
            values = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
            return values.normal_(generator=generator) * scale

        self.weights = [
            {name: random(n, k, scale=k**-0.5) for name, (n, k) in WEIGHTS.items()}
            | {name: 1 + random(HIDDEN, scale=0.1) for name in ("first", "second")}
            for _ in range(num_layers)
        ]
        blocks = -(-(context + num_tokens) // BLOCK)
        pool = (num_rows * blocks, BLOCK, KV_HEADS, HEAD_DIM)
        self.pools = [[random(*pool, scale=1.0) for _ in range(2)] for _ in range(num_layers)]
        table = torch.randperm(num_rows * blocks, device="cuda").view(num_rows, blocks)
        self.table = table.to(torch.int32)
        self.positions = context + torch.arange(num_tokens, device="cuda").repeat(num_rows, 1)
        at = self.positions
        self.slots = (table.gather(1, at // BLOCK) * BLOCK + at % BLOCK).flatten()
        self.x = random(num_rows * num_tokens, HIDDEN, scale=1.0)
        exponents = torch.arange(0, HEAD_DIM, 2, device="cuda").float() / HEAD_DIM
        self.inv_freq = 500_000.0**-exponents

    def attend(self, query: Tensor, layer: int, attention: Callable = attend_paged) -> Tensor:
        query = query.view(*self.positions.shape, HEADS, HEAD_DIM)
        options = (
            {"prefetch_weight": self.weights[layer]["out"]} if attention is attend_paged else {}
        )
        return attention(
            query, *self.pools[layer], self.table, self.positions, scale=HEAD_DIM**-0.5, **options
        )

    def run(self, configs: dict[str, skinny.Config] | None = None) -> Tensor:
        """All layers on the kernels, chained as `target_model/fused_decoder.py` chains them.

        Args:
            configs: of the products named; the others get what is chosen by shape.
        """
        config = lambda name: {"config": (configs or {}).get(name)}  # noqa: E731
        x, normed = self.x, None
        angles = rope.rope_angles(self.positions.flatten(), self.inv_freq, 1.0, x.dtype)
        for number, w in enumerate(self.weights):
            if normed is None:
                qkv = skinny.linear(x, w["qkv"], norm_weight=w["first"], eps=EPS)
            else:
                qkv = skinny.linear(normed, w["qkv"], **config("qkv"))
            query = rope.rope_write(qkv, angles, *self.pools[number], self.slots)
            attended = self.attend(query, number).view(len(x), -1)
            x, normed = skinny.linear_then_norm(
                attended, w["out"], w["second"], EPS, residual=x, **config("out")
            )
            inner = skinny.swiglu_linear(normed, w["gate"], w["up"], **config("gate_up"))
            after = self.weights[(number + 1) % len(self.weights)]["first"]
            x, normed = skinny.linear_then_norm(
                inner, w["down"], after, EPS, residual=x, **config("down")
            )
        return x

    def run_reference(self) -> Tensor:
        """The same on the references."""
        x = self.x
        angles = rope.rope_angles(self.positions.flatten(), self.inv_freq, 1.0, x.dtype)
        for number, w in enumerate(self.weights):
            qkv = skinny.linear_reference(x, w["qkv"], norm_weight=w["first"], eps=EPS)
            query = rope.rope_write.reference(qkv, angles, *self.pools[number], self.slots)
            attended = self.attend(query, number, attend_paged.reference).view(len(x), -1)
            x = skinny.linear_reference(attended, w["out"], residual=x)
            inner = skinny.swiglu_linear_reference(
                x, w["gate"], w["up"], norm_weight=w["second"], eps=EPS
            )
            x = skinny.linear_reference(inner, w["down"], residual=x)
        return x


def overlap(on: bool) -> None:
    """Programmatic dependent launch of all kernels, on or off."""
    dependent_launch.ENABLED = on


def graph_of(work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what `work` reads may still be in the making
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = work()
    return graph, result


def microseconds(work: Callable[[], Tensor], replays: int = 30) -> float:
    """Median time of a captured call."""
    graph, _ = graph_of(work)
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times[2:])


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


def check_rope() -> None:
    """Angles of far positions, and norms, on shapes no other run has."""
    generator = torch.Generator("cuda").manual_seed(1)
    draw = lambda *s: torch.randn(*s, generator=generator, device="cuda")  # noqa: E731
    positions = torch.tensor([0, 1, 4095, 131_071, 1_000_000, -1], device="cuda")
    inv_freq = 10_000.0 ** -(torch.arange(0, 80, 2, device="cuda").float() / 80)
    angle = positions.clamp(min=0)[:, None].float() * inv_freq
    angles = rope.rope_angles(positions, inv_freq, 1.3, torch.float32)
    for found, expected in zip(angles, (angle.cos(), angle.sin()), strict=True):
        torch.testing.assert_close(found, expected * 1.3, atol=1e-6, rtol=0)
    slots = torch.tensor([5, 17, 0, -1, 9, -1], device="cuda")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
        qkv, pools = draw(6, 16 * 80).to(dtype), [draw(3, 8, 3, 80).to(dtype) for _ in range(2)]
        norms = {"q_norm": draw(80).to(dtype), "k_norm": draw(80).to(dtype), "eps": 1e-6}
        for options in ({}, norms):
            both = []
            for run in (rope.rope_write, rope.rope_write.reference):
                copies = [pool.clone() for pool in pools]
                cast = tuple(half.to(dtype) for half in angles)
                both.append([run(qkv, cast, *copies, slots, **options), *copies])
            for found, expected in zip(*both, strict=True):
                torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    print("check: rotation, norms and paged writing equal the reference; far angles exact")


def check_layers(layers: Layers) -> None:
    """Against the references; and overlapped launches in a graph against none, bit for bit."""
    expected = layers.run_reference()
    overlap(False)
    apart = layers.run()
    error = difference(apart, expected)
    assert error < 0.03, f"layers differ from the reference by {error:.3g} (relative)"
    overlap(True)
    graph, found = graph_of(layers.run)
    for _ in range(20):
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, apart), "overlapped launches changed a result"
    print(f"check: layers differ from the reference by {error:.4f}; overlap changes no bit")


def parts(layers: Layers) -> dict[str, Callable[[], Tensor]]:
    """Single kernels, each once for every layer, so that weights come from memory."""
    x, numbers = layers.x, range(len(layers.weights))
    qkv = skinny.linear(x, layers.weights[0]["qkv"])
    inner = skinny.swiglu_linear(x, layers.weights[0]["gate"], layers.weights[0]["up"])
    angles = rope.rope_angles(layers.positions.flatten(), layers.inv_freq, 1.0, x.dtype)
    query = rope.rope_write(qkv, angles, *layers.pools[0], layers.slots)

    def each(work: Callable[[int, dict], Tensor]) -> Callable[[], Tensor]:
        return lambda: [work(i, layers.weights[i]) for i in numbers][-1]

    normed = skinny.linear_then_norm(x, layers.weights[0]["out"], layers.weights[0]["first"], EPS)[
        1
    ]
    return {
        "qkv": each(lambda i, w: skinny.linear(normed, w["qkv"])),
        "rope": each(lambda i, w: rope.rope_write(qkv, angles, *layers.pools[i], layers.slots)),
        "attend": each(lambda i, w: layers.attend(query, i)),
        "out": each(lambda i, w: skinny.linear(x, w["out"], residual=x)),
        "gate_up": each(lambda i, w: skinny.swiglu_linear(normed, w["gate"], w["up"])),
        "down": each(lambda i, w: skinny.linear(inner, w["down"], residual=x)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    check_rope()
    check_layers(Layers(2, 3, 5, 100))
    print(f"us a layer; floor {FLOOR:.1f}, bar {1.15 * FLOOR:.1f} (plain decoding)")
    print("rows x tokens | overlapped (of floor) | one by one | kernels on their own, overlapped")
    for num_rows, num_tokens in ((1, 1), (1, 4), (1, 6), (1, 9), (8, 4), (8, 8), (64, 1)):
        layers = Layers(options.layers, num_rows, num_tokens, options.context)
        times = []
        for on in (False, True):
            overlap(on)
            times.append(microseconds(layers.run) / options.layers)
        apart, together = times
        alone = {n: microseconds(work) / options.layers for n, work in parts(layers).items()}
        pieces = "  ".join(f"{name} {t:.1f}" for name, t in alone.items())
        print(
            f"{num_rows:3} x {num_tokens:2}        | {together:7.1f} ({together / FLOOR:.3f}) "
            f"| {apart:7.1f} | {pieces}"
        )
        del layers
    name = "F.linear, F.rms_norm and the other references"
    layers = Layers(options.layers, 1, 1, options.context)
    x, w = layers.x, layers.weights
    plain = microseconds(
        lambda: [
            skinny.linear_reference(
                skinny.swiglu_linear_reference(
                    skinny.linear_reference(
                        skinny.linear_reference(x, a["qkv"], norm_weight=a["first"], eps=EPS)[
                            :, :HIDDEN
                        ],
                        a["out"],
                        residual=x,
                    ),
                    a["gate"],
                    a["up"],
                    norm_weight=a["second"],
                    eps=EPS,
                ),
                a["down"],
                residual=x,
            )
            for a in w
        ][-1]
    )
    print(f"1 x 1, products alone on {name}: {plain / options.layers:.1f}")


if __name__ == "__main__":
    main()
