"""Time training steps by phase, beside other trainers, and compare the loss with an eager one.

    python eval/bench/bench_train.py                        # Llama-3.1-8B's shapes, one JSON line
    python eval/bench/bench_train.py --dense                # every position computed
    python eval/bench/bench_train.py --host                 # batches packed and copied
    python eval/bench/bench_train.py --same-loss 20 --precision float32
    python eval/bench/bench_train.py --precision fp8        # layers' products in 8 bits
    python eval/bench/bench_train.py --peer speculators     # or specforge; prints the ratio
    python eval/bench/bench_train.py --family peagle --layers 2  # a parallel head, 8 depths
    python eval/bench/bench_train.py --family dspark        # a block head of 7 slots
    python eval/bench/bench_train.py --shape embedded --family peagle --layers 4  # a small head
    python eval/bench/bench_train.py --shape tiny --device cpu

Features are random but fixed. The code that `draftlab train` runs is timed, with --host also its
packing and its data loader; without --host the batch is on the device beforehand. Times are the
GPU's own, from events between the phases; on a CPU they are the host's.

--same-loss runs a second trainer, eager and in float32 from whole logits, on the same batches from
the same state. It compares each step's loss, and both gradients at the reference's weights. In
float32 it fails beyond a difference of 1e-4 and below a cosine of 0.9999; otherwise it fails if the
losses of the last tenth of the steps differ by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from train_peers import peer_seconds
from train_work import (
    FAMILIES,
    SHAPES,
    TOGETHER,
    Work,
    all_positions,
    in_family,
    new_work,
    reference_loss,
    step_weights,
    train_settings,
)

from draftlab.train.batch.loader import BatchLoader
from draftlab.train.batch.packing import Batch
from draftlab.train.checkpoint import trainable
from draftlab.train.distillation_module import DistillationModule
from draftlab.train.distributed.backends import TrainBackend
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.flops import StepWork, matrix_rate, mean_context
from draftlab.train.metrics import peak_memory
from draftlab.train.profiler import PhaseTimer
from eval.measurements import Measurements, add_options, option_values, require

RATE = 1e-4
DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.bfloat16, "float32": torch.float32}
LOSS_BOUND, COSINE_BOUND, LATE_BOUND = 1e-4, 0.9999, 0.01


def trainer(work: Work, device: torch.device, options: argparse.Namespace) -> TrainBackend:
    """Return the head of some work wrapped for training."""
    if options.freeze_lm_head:
        work.head.lm_head.weight.requires_grad_(False)
    known = {"auto": "auto", "on": True, "off": False}
    settings = train_settings(
        work.shape,
        precision=options.precision,
        compile=known[options.compile],
        recompute=known[options.recompute],
    )
    distillation = DistillationModule(work.head, work.target, settings, DTYPES[options.precision])
    print(f"how steps are run: {distillation.description}", file=sys.stderr)
    return TrainBackend(distillation, settings, Ranks(0, 1, device))


def step(whole: TrainBackend, batch: Batch, clock: PhaseTimer) -> Tensor:
    """Run one optimizer step without waiting for it; return the loss on the device."""
    weights = step_weights(whole.head.config.family, batch.counts)
    loss, _ = whole.forward(batch, weights, reduce=True)
    clock.mark("forward")
    whole.backward(loss, batch.num_anchors)
    clock.mark("backward")
    whole.step(RATE)
    clock.mark("optimizer")
    return loss.detach() / batch.num_anchors


@contextmanager
def batches(
    work: Work, device: torch.device, options: argparse.Namespace
) -> Iterator[Iterator[Batch]]:
    """Yield the same batch repeatedly: packed and copied each time, or made once."""
    if not options.host:
        yield repeat(work.packed(device).to(device))
        return
    packer = work.packer(device, data_workers=options.data_workers)
    loader = BatchLoader(packer, Ranks(0, 1, device))
    print(f"batches are packed by {loader.describe()}", file=sys.stderr)
    with closing(loader.micro_batches(repeat(work.step))) as micro_batches:
        yield (micro.batch for micro in micro_batches)


def timed(work: Work, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of a step and its phases, speed and memory."""
    started = time.perf_counter()
    whole, clock = trainer(work, device, options), PhaseTimer(device)
    timings: list[dict[str, float]] = []
    clock.start()
    with batches(work, device, options) as fed:
        for number, batch in enumerate(fed):
            clock.mark("data")
            step(whole, batch, clock)
            if number == 0:
                clock.read()
                first = time.perf_counter() - started
            elif number < options.warmup:
                clock.start()
            elif (number - options.warmup + 1) % TOGETHER == 0:
                # As in training, the device is waited for once in some steps (train.log_every).
                phases = clock.read()
                timings.append({name: part / TOGETHER for name, part in phases.items()})
            if len(timings) == options.repeats:
                break
    seconds = {name: median(each.get(name, 0) for each in timings) for name in timings[0]}
    whole_step = median(sum(each.values()) for each in timings)
    shape, ceiling = work.shape, matrix_rate(device, DTYPES[options.precision])
    context = mean_context([shape.row_tokens])
    counted = StepWork(shape.tokens, batch.counts, batch.num_teachers, context)
    flops = whole.head.family.objective().flops(whole.head, counted) / shape.tokens
    return {
        "engine": "draftlab",
        "shape": asdict(shape),
        "step_ms": 1e3 * whole_step,
        "phases_ms": {name: 1e3 * part for name, part in seconds.items()},
        "tokens_per_s": shape.tokens / whole_step,
        "loss_tokens_per_s": batch.num_anchors / whole_step,
        "predictions_per_s": sum(batch.counts) / whole_step,
        "predictions": batch.counts,
        "trained_parameters": sum(p.numel() for p in trainable(whole.head).values()),
        "gflop_a_token": flops / 1e9,
        "ceiling_tflops": ceiling / 1e12,
        "mfu": shape.tokens / whole_step * flops / ceiling,
        "peak_gib": peak_memory(device) / 2**30,
        "first_step_s": first,
    }


def gradients(whole: TrainBackend) -> Tensor:
    """Return all gradients, flat; a parameter without one has zeros."""
    weights = trainable(whole.head).values()
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in weights]
    )


@contextmanager
def swapped_weights(to: TrainBackend, of: TrainBackend) -> Iterator[None]:
    """Give one trainer another's weights inside the block.

    Gradients are compared there, because AdamW turns rounding errors into steps: after some steps
    two correct trainers have different weights.
    """
    weights, others = (list(trainable(each.head).values()) for each in (to, of))
    with torch.no_grad():
        before = [weight.clone() for weight in weights]
        for weight, other in zip(weights, others, strict=True):
            weight.copy_(other)
    yield
    with torch.no_grad():
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)


def same_loss(work: Work, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Compare loss and gradient of each step with those of the reference trainer."""
    plain = replace(work, head=deepcopy(work.head))
    plain.head.embed_tokens.float()
    fast = trainer(work, device, options)
    off = argparse.Namespace(**{**vars(options), "compile": "off", "precision": "float32"})
    reference, batch = trainer(plain, device, off), work.packed(device).to(device)
    apart_rows = work.packed(device, one_row=False).to(device)
    weights = step_weights(work.shape.family, batch.counts)
    losses, cosines = [], []

    def learn() -> Tensor:
        total, _ = fast.forward(batch, weights, reduce=True)
        fast.backward(total, batch.num_anchors)
        return total.detach()

    for _ in range(options.same_loss):
        expected = reference_loss(plain.head, plain.target, apart_rows)
        expected.backward()
        with swapped_weights(fast, reference):
            learn()
            pair = gradients(fast), gradients(reference)
            cosines.append(float(torch.nn.functional.cosine_similarity(*pair, dim=0)))
            fast.optimizer.zero_grad(set_to_none=True)
        losses.append((float(learn()) / batch.num_anchors, float(expected.detach())))
        for each in (fast, reference):
            each.step(RATE * options.rate)
    apart = [abs(a - b) / abs(b) for a, b in losses]
    late = losses[-max(1, len(losses) // 10) :]
    drift = abs(sum(a for a, _ in late) / sum(b for _, b in late) - 1)
    exact = options.precision == "float32"
    return {
        "steps": len(losses),
        "first_losses": losses[0],
        "last_losses": losses[-1],
        "worst_loss_difference": max(apart),
        "late_loss_difference": drift,
        "first_cosine": cosines[0],
        "least_cosine": min(cosines),
        "same": max(apart) <= LOSS_BOUND and min(cosines) > COSINE_BOUND
        if exact
        else drift <= LATE_BOUND,
    }


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--family", choices=FAMILIES, default="eagle3")
    for name, value in vars(SHAPES["8b"]).items():
        if name != "family":
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, type=type(value), help="replaces the shape's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=6, help="measurements of four steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--dense", action="store_true", help="compute every position")
    parser.add_argument("--freeze-lm-head", action="store_true", help="as speculators does")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--recompute", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--host", action="store_true", help="batches from the host's memory")
    parser.add_argument("--data-workers", type=int, help="--host: train.data_workers")
    parser.add_argument("--same-loss", type=int, default=0, metavar="STEPS")
    parser.add_argument("--rate", type=float, default=1.0, help="--same-loss: times 1e-4")
    parser.add_argument(
        "--peer", default="", help="speculators[:fused,frozen] or specforge[:compact]"
    )
    add_options(parser)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> dict[str, Any]:
    options = arguments(words)
    if options.data_workers is not None and not options.host:
        raise SystemExit("--data-workers goes with --host")
    device = torch.device(options.device)
    require(gpus=int(device.type == "cuda"))
    shape = in_family(SHAPES[options.shape], options.family)
    if options.same_loss and shape.family == "dspark":
        raise SystemExit("--same-loss goes with eagle3 and peagle: tests compare block heads")
    chosen = {name: getattr(options, name) for name in vars(shape)}
    shape = replace(shape, **{name: value for name, value in chosen.items() if value is not None})
    names = "precision dense freeze_lm_head compile recompute host same_loss"
    conditions = asdict(shape) | option_values(options, *names.split())
    parts = Measurements(options, conditions, device)

    @cache
    def work() -> Work:
        recorded = new_work(shape, device, DTYPES[options.precision])
        return all_positions(recorded) if options.dense else recorded

    if options.same_loss:
        return show(parts.measure("loss", lambda: same_loss(work(), device, options)))
    row = show(parts.measure("draftlab", lambda: timed(work(), device, options)))
    if options.peer and row:
        peer = options.peer
        beside = show(parts.measure(peer, lambda: peer_seconds(peer, work(), device, options)))
        speeds = [name for name in ("tokens_per_s", "predictions_per_s") if name in beside]
        show({f"{name}, of the peer's": row[name] / beside[name] for name in speeds})
    return row


def show(row: dict[str, Any] | None) -> dict[str, Any]:
    """Print the results of a part as a line of JSON; return them, or nothing if there are none."""
    if row is not None:
        print(json.dumps(row), flush=True)
    return dict(row or {})


if __name__ == "__main__":
    raise SystemExit(0 if main().get("same", True) else 1)
