"""Decode steps at the shapes of Llama-3.1-8B, beside their bandwidth floor and vLLM's step.

    python eval/bench/bench_decode.py [--out docs/data/decode_steps.csv] [--batches 1,8,32] [--k
    3,5,8]

Random weights, an EAGLE3 head of one layer with a draft vocabulary of 32,000, prompts of 512 random
tokens, 256 new tokens a request. Acceptance is synthetic (draft i passes with probability 0.6 given
that those before it did), as in the vLLM measurement it is compared with (vLLM 0.20.2 on
the same GPU model); the verifier that decides so is passed in by this file and runs the real one
first, so nothing is left out of the step. Times are the engine's own, host included; the time to
first token is that of so many prompts handed in together, from then to the host's sight of each.

Floor: bytes of the target's weights once and of the head's K times (fc in the first pass only),
over the rate at which weights can be streamed: 4.15 TB/s where a copy moves 4.30, scaled
by the copy rate measured at the start. vLLM's times are scaled likewise.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftlab.engine.drafter import ChainDrafter, HeadDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling
from draftlab.errors import UserError
from draftlab.heads.config import TargetIdentity, make_head_config
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.folder import new_head
from draftlab.kernels.noise import Purpose, keyed_uniform
from draftlab.kernels.sampling_types import VerifyResult
from draftlab.kernels.verify import verify
from draftlab.target_model.attention import ATTENTION
from draftlab.target_model.model import Target

PROMPT, NEW = 512, 256
FIRSTS = 7  # times that the time to first token is taken
SYNTHETIC = 0.6
VLLM_STEP_MS = {0: 4.99, 3: 6.51, 5: 7.30, 8: 8.41}  # vLLM 0.20.2 on an H200 at 4.30 TB/s copy
VLLM_COPY, STREAM = 4.30e12, 4.15e12


@dataclass(frozen=True)
class Bench:
    """One measured configuration; times in milliseconds."""

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
    """What an engine does with a batch.

    Attributes:
        step_ms: of a step, prefill left out.
        tokens_a_step: of a row.
        tokens_s: of all rows, behind their first tokens.
        ttft_ms: until a prompt's first token, the mean of the prompts that came together; the
            median of `FIRSTS` times.
    """

    step_ms: float
    tokens_a_step: float
    tokens_s: float
    ttft_ms: float


def synthetic_verify(
    logits: Tensor, drafts: Tensor, num_drafts: Tensor, *rest: Any, **options: Any
) -> VerifyResult:
    """The real verifier's work, then acceptance by a coin of `SYNTHETIC` for each draft."""
    found = verify(logits, drafts, num_drafts, *rest, **options)
    positions, rows = rest[1], rest[2]
    depth = torch.arange(drafts.shape[1], device=drafts.device)
    coin = keyed_uniform(
        rows.seed[:, None], rows.prompt[:, None], positions[:, None] + depth, Purpose.ACCEPT
    )
    passed = (coin < SYNTHETIC) & (depth < num_drafts[:, None])
    accepted = passed.long().cumprod(-1).sum(-1)
    # + 0 · …: the real verdict stays part of the captured graph
    return VerifyResult(accepted + 0 * found.accepted, found.emitted, found.probability)


def random_target(device: torch.device, layers: int = 32) -> Target:
    """Llama-3.1-8B's shapes with random bfloat16 weights."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        attn_implementation=ATTENTION,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return Target(model.eval().requires_grad_(False), Path("random"), "random Llama-3.1-8B shapes")


def random_head(target: Target, device: torch.device, **changed: Any) -> Eagle3Head:
    """A one-layer EAGLE3 head for it, draft vocabulary 32,000; `changed`: fields of its config."""
    layers = target.num_layers
    config = make_head_config(
        **changed,
        schema=1,
        boundaries=(2, layers // 2, layers - 3),
        target_num_layers=layers,
        target_hidden_size=4096,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        max_position_embeddings=8192,
        vocab_size=128256,
        draft_vocab_size=32000,
        k_trained=8,
        target=TargetIdentity(
            name="random", fingerprint="", architecture="", tokenizer_sha256="", template_sha256=""
        ),
    )
    with device:
        head = new_head(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
    head.set_draft_vocabulary(torch.arange(32000, device=device) * 4)
    return head.eval().requires_grad_(False)


def copy_rate(device: torch.device) -> float:
    """Bytes read plus written per second by a large device-to-device copy."""
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


def weight_bytes(target: Target, head: Eagle3Head) -> tuple[int, int, int]:
    """Bytes that one step streams: the target's weights, a head pass's, and fc's in its first."""
    size = lambda module: sum(p.numel() * p.element_size() for p in module.parameters())  # noqa: E731
    streamed = size(target.model) - size(target.model.get_input_embeddings())
    head_pass = size(head) - size(head.embed_tokens) - size(head.fc)
    return streamed, head_pass, size(head.fc)


def measure(
    target: Target, drafter: HeadDrafter | None, batch: int, *, prompt: int = PROMPT, new: int = NEW
) -> Measured:
    """What an engine does with `batch` prompts of `prompt` random tokens and `new` new ones."""
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

    list(engine.generate(requests(batch, 16, "warm")))
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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--k", default="3,5,8")
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    rate = copy_rate(device)
    target = random_target(device, arguments.layers)
    head = random_head(target, device)
    streamed, head_pass, fc = weight_bytes(target, head)
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s")
    print(
        "batch  K probs  step ms  floor ms  ratio  vLLM ms  ratio  tokens/step  tokens/s  TTFT ms"
    )
    rows = []
    for batch in map(int, arguments.batches.split(",")):
        for k in (0, *map(int, arguments.k.split(","))):
            for probs in (False, True) if k else (False,):
                drafter = ChainDrafter(head, k, draft_probs=probs) if k else None
                found = measure(target, drafter, batch)
                moved = streamed + k * head_pass + (fc if k else 0)
                floor = 1e3 * moved * VLLM_COPY / (STREAM * rate)
                vllm = VLLM_STEP_MS.get(k) if batch == 1 else None
                vllm = vllm and vllm * VLLM_COPY / rate
                step, each, speed = found.step_ms, found.tokens_a_step, found.tokens_s
                row = Bench(batch, k, probs, step, floor, vllm, each - 1, speed, found.ttft_ms)
                rows.append(row)
                print(
                    f"{batch:5d} {k:2d} {'on ' if probs else 'off'}   {step:8.3f} {floor:8.3f} "
                    f"{step / floor:7.3f} {vllm or float('nan'):8.2f} "
                    f"{step / vllm if vllm else float('nan'):6.3f} {each:8.2f} {speed:12,.0f} "
                    f"{found.ttft_ms:8.2f}",
                    flush=True,
                )
    if arguments.out:
        write(arguments.out, rows, gpu, rate)


def write(path: Path, rows: list[Bench], gpu: str, rate: float) -> None:
    """Appends the rows to a CSV, with what they were measured on."""
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
