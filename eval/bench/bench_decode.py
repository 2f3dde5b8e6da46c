"""Time decode steps at the shapes of Llama-3.1-8B, beside their bandwidth floor and vLLM's step.

    python eval/bench/bench_decode.py [--batches 1,8,32] [--k 3,5,8] [--out steps.csv]
    python eval/bench/bench_decode.py --heads chain,1,2,4 --k 1,3,5,8 --probs off
    python eval/bench/bench_decode.py --heads dspark --k 3,7
    python eval/bench/bench_decode.py --target hybrid --k 1,3,7 --probs off [--graphs off]

The hybrid target has transformers' default shapes of Qwen3.5 (32 layers of width 4096, gated delta
nets but for every fourth) with the vocabulary of the other. Weights are random. The head is an
EAGLE3 chain of one layer, with a number in --heads a parallel head of so many layers, or a DSpark
head of five layers; draft vocabularies have 32,000 tokens, but DSpark's is the target's. Each
request has a prompt of 512 random tokens and 256 new tokens. Acceptance is synthetic, as in the
vLLM measurement that it is compared with (vLLM 0.20.2): draft i passes with probability 0.6 if
those before it did. The verifier of random_models.py decides so after it ran the real one, so a
step leaves nothing out. Times are the engine's, host included. The time to the first token is
measured from when a batch of prompts is handed in until the host sees each one's token.

The floor is the bytes of weights that a step reads over the rate at which they can be streamed:
4.15 TB/s where a copy moves 4.30, scaled by the copy rate measured at the start. vLLM's times are
scaled likewise. Tokens/s leave out that parallel heads accept fewer drafts.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, median

import torch
from random_models import HEADS, coins, random_head, random_target, synthetic_verify

from draftlab.engine.drafter import HeadDrafter, new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling
from draftlab.errors import UserError
from draftlab.evaluate.bandwidth import head_bytes, target_bytes
from draftlab.evaluate.timing import warm_up_batches
from draftlab.kernels.verify import verify
from draftlab.target_model.model import Target

PROMPT, NEW = 512, 256
FIRSTS = 7  # measurements of the time to the first token
PROBS = {"off": (False,), "on": (True,), "both": (False, True)}
# vLLM 0.20.2 on an H200 that copies 4.30 TB/s, batch 1: (layers of a parallel head or 0, K)
VLLM_STEP_MS = {(0, 0): 4.99, (0, 3): 6.51, (0, 5): 7.30, (0, 8): 8.41, (1, 8): 5.4}
VLLM_COPY, STREAM = 4.30e12, 4.15e12


@dataclass(frozen=True)
class Bench:
    """A row of the CSV file: one measured configuration, times in milliseconds."""

    batch: int
    k: int
    draft_probs: bool
    step_ms: float
    floor_ms: float
    vllm_ms: float | None
    accepted: float
    tokens_s: float
    ttft_ms: float


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


def copy_rate(device: torch.device) -> float:
    """Return the bytes read plus written per second by a large copy on the device."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.numel() / sorted(times)[len(times) // 2]


def measure(
    target: Target,
    drafter: HeadDrafter | None,
    batch: int,
    *,
    prompt: int = PROMPT,
    new: int = NEW,
    graphs: bool | None = None,
) -> Measured:
    """Measure an engine with `batch` prompts of `prompt` random tokens and `new` new ones."""
    coins(target.device)  # not inside a graph's capture
    engine = Engine(
        target,
        drafter,
        batch=batch,
        max_length=prompt + new + 32,
        verifier=synthetic_verify if drafter else verify,
        expect=False,
        graphs=graphs,
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

    for warm_up in warm_up_batches(requests(batch, 16, "warm")):
        list(engine.generate(warm_up))
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
    parser.add_argument("--out", type=Path, help="a CSV file that gets the chain's rows")
    parser.add_argument(
        "--heads", default="chain", help="chain, dspark, or layers of parallel heads"
    )
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--k", default="3,5,8")
    parser.add_argument("--probs", choices=PROBS, default="both", help="draft probabilities")
    parser.add_argument("--layers", type=int, default=32, help="of the target")
    parser.add_argument("--target", choices=("llama", "hybrid"), default="llama")
    parser.add_argument("--graphs", choices=("on", "off"), default="on", help="CUDA graphs")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    rate = copy_rate(device)
    target = random_target(device, arguments.target, arguments.layers)
    gpu, graphs = torch.cuda.get_device_name(), None if arguments.graphs == "on" else False
    print(f"{gpu}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s")
    print("head        batch  K probs  step ms  floor ms  ratio  vLLM ms  ratio  tokens/step  "
          "tokens/s  TTFT ms")  # fmt: skip
    rows: list[Bench] = []
    for name in arguments.heads.split(","):
        changed = HEADS.get(name) or HEADS["parallel"] | {"num_layers": int(name)}
        layers = changed.get("num_layers", 0)
        head = random_head(target, device, **changed)
        without = () if layers else (0,)
        for batch in map(int, arguments.batches.split(",")):
            for k in (*without, *map(int, arguments.k.split(","))):
                for probs in PROBS[arguments.probs] if k else (False,):
                    drafter = new_drafter(head, k, draft_probs=probs) if k else None
                    result = measure(target, drafter, batch, graphs=graphs)
                    moved = (target_bytes(target) or 0) + (head_bytes(head, k) if k else 0)
                    if target.recurrent:
                        moved += 2 * batch * sum(target.state_bytes.values())
                    measured = batch == 1 and name != "dspark" and arguments.target == "llama"
                    vllm = VLLM_STEP_MS.get((layers, k)) if measured else None
                    row = Bench(
                        batch,
                        k,
                        probs,
                        result.step_ms,
                        1e3 * moved * VLLM_COPY / (STREAM * rate),
                        vllm and vllm * VLLM_COPY / rate,
                        result.tokens_a_step - 1,
                        result.tokens_s,
                        result.ttft_ms,
                    )
                    rows += [] if layers else [row]
                    show(f"parallel, {name}" if name.isdigit() else name, row)
    if arguments.out:
        write(arguments.out, rows, gpu, rate)


def show(name: str, row: Bench) -> None:
    """Print a line of the table."""
    vllm = row.vllm_ms or float("nan")
    print(
        f"{name:11} {row.batch:5d} {row.k:2d} {'on ' if row.draft_probs else 'off'}   "
        f"{row.step_ms:8.3f} {row.floor_ms:8.3f} {row.step_ms / row.floor_ms:7.3f} {vllm:8.2f} "
        f"{row.step_ms / vllm:6.3f} {row.accepted + 1:8.2f} {row.tokens_s:12,.0f} "
        f"{row.ttft_ms:8.2f}",
        flush=True,
    )


def write(path: Path, rows: list[Bench], gpu: str, rate: float) -> None:
    """Append the rows to a CSV file, with date, GPU, torch and copy rate."""
    names = [*Bench.__dataclass_fields__]
    columns = ["date", "gpu", "torch", "copy_tb_s", *names]
    lines = path.read_text().splitlines() if path.exists() else []
    if lines and lines[0].split(",") != columns:
        raise UserError(
            f"expected the columns {','.join(columns)}, found {lines[0]}",
            where=path,
            do="write to another file",
        )
    with open(path, "a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not lines:
            writer.writerow(columns)
        for row in rows:
            values = [getattr(row, name) for name in names]
            writer.writerow(
                [date.today(), gpu, torch.__version__, f"{rate / 1e12:.3f}"]
                + [f"{v:.4f}" if isinstance(v, float) else v for v in values]
            )


if __name__ == "__main__":
    main()
