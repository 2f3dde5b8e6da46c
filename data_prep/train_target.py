"""Train the embedded target on one GPU, from the pack that `pack` wrote. Needs no network."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from evaluate_target import evaluate
from safetensors.torch import load_file
from target_model import Block, Model, save_model, summed_loss
from token_stream import Stream
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

PART_BYTES = 15 * 2**20  # of a saved model; the way back from a GPU machine may cap file sizes


@dataclass(frozen=True)
class Schedule:
    """Settings of one run. Times are fractions of the training time; rates are peak rates."""

    minutes: float = 9.0  # from process start to the last step, compiling included
    rows: int = 256
    length: int = 1024
    # Held-out loss of one-minute runs: Muon 2.33 at 3e-3 (131 M tokens), 1.99 at 6e-3 (152 M);
    # AdamW 2.28 at 3e-3 (151 M), 2.70 at 6e-3 (153 M).
    rate: float = 7e-3
    weight_decay: float = 0.1
    warmup_steps: int = 150
    decay_from: float = 0.4  # constant before, linear to zero after
    chat_share: tuple[float, float] = (0.10, 0.33)  # of rows, before and after `chat_from`
    chat_from: float = 0.6
    optimizer: str = "muon"  # "muon" for the matrices of the blocks (AdamW for the rest) | "adamw"
    seed: int = 0


# --- optimizer ----------------------------------------------------------------------------------


def orthogonalise(x: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of a batch [n, rows, columns], by Newton-Schulz.

    The quintic of Jordan et al. (Muon, 2024): singular values end in about 0.7..1.2, which is as
    good as 1 here and takes five steps in bfloat16.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = y @ y.mT
        y = a * y + (b * s + c * s @ s) @ y
    return (y.mT if tall else y).to(x.dtype)


class Muon:
    """Momentum, orthogonalised, for matrices: one batched update for each shape.

    The update is scaled to AdamW's usual root mean square (0.2 sqrt(max(rows, columns)), Moonshot
    2025), so both optimizers share one rate and weight decay.
    """

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        shapes = {p.shape for p in parameters}
        self.groups = [[p for p in parameters if p.shape == shape] for shape in sorted(shapes)]
        self.momenta = [torch.stack([torch.zeros_like(p) for p in g]) for g in self.groups]
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in group])
            momentum.lerp_(gradient, 0.05)
            update = orthogonalise(gradient.lerp(momentum, 0.95))
            scale = 0.2 * math.sqrt(max(update.shape[-2:]))
            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate * scale)


# --- the run ------------------------------------------------------------------------------------


def train(
    template: Path,
    pack: Path,
    out: Path,
    schedule: Schedule,
    *,
    init: Path | None = None,
    config: LlamaConfig | None = None,
) -> dict:
    """Train for the schedule's minutes; write model parts, metrics.json, answers.json to `out`.

    `template` holds config.json and the tokenizer; `init`, a folder with the model.safetensors of
    an earlier run to go on from. Every later step (save, load, evaluate, generate) is rehearsed on
    the untrained model first, so that a late fault costs no run.
    """
    began = time.monotonic()
    scratch = out / "scratch"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(schedule.seed)
    torch.set_float32_matmul_precision("high")
    config = config or LlamaConfig.from_pretrained(template)
    model = Model(config, schedule.length, torch.bfloat16).to(device)
    if init:
        model.load(load_file(init / "model.safetensors"))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    if device.type == "cuda":
        model.compile_parts()
    save_model(model, template, scratch)
    rehearsal, _ = evaluate(scratch, pack, device, prompts=8, new_tokens=8, batches=1)
    difference = _difference(model, scratch, pack, device)
    if difference > 0.01:
        raise RuntimeError(f"loss differs from transformers' by {difference:.4f}: models differ")
    print("rehearsed:", json.dumps(rehearsal), f"{time.monotonic() - began:.0f} s", flush=True)

    docs = Stream(pack, "docs.target", device, schedule.seed)
    chat = Stream(pack, "chat.target", device, schedule.seed + 1)
    matrices = [p for n, p in model.blocks.named_parameters() if p.dim() == 2]
    if schedule.optimizer == "adamw":
        matrices = []
    in_muon = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in in_muon]
    muon = Muon(matrices, schedule.weight_decay)
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.dim() == 2], "weight_decay": schedule.weight_decay},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=schedule.rate,
        betas=(0.9, 0.95),
        fused=True,
    )

    step, tokens, log, loss_sum, loss_count = 0, 0, [], 0.0, 0.0
    started = marked = 0.0
    deadline = began + schedule.minutes * 60
    while True:
        if step == 10:  # compiled by now; the schedule runs from here
            _wait(device)
            started = marked = time.monotonic()
        fraction = (time.monotonic() - started) / (deadline - started) if step >= 10 else 0.0
        if fraction >= 1:
            break
        rate = schedule.rate * min(1.0, (step + 1) / schedule.warmup_steps)
        rate *= min(1.0, (1 - fraction) / (1 - schedule.decay_from))
        share = schedule.chat_share[fraction >= schedule.chat_from]
        talk = round(schedule.rows * share)
        parts = [docs.rows(schedule.rows - talk, schedule.length), chat.rows(talk, schedule.length)]
        ids, labels = (torch.cat(p) for p in zip(*parts, strict=True))
        count = (labels != -100).sum()
        loss = model(ids, labels) / count
        loss.backward()
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        muon.step(rate)
        adam.zero_grad()
        for p in matrices:
            p.grad = None
        loss_sum, loss_count = loss_sum + loss.detach(), loss_count + 1
        step, tokens = step + 1, tokens + ids.numel()
        if step % 20 == 0:  # also keeps the host from running far ahead of the device's clock
            mean = float(loss_sum) / loss_count
            if not math.isfinite(mean):
                raise RuntimeError(f"loss is {mean} at step {step}")
            loss_sum, loss_count = 0.0, 0.0
            if step % 200 == 0:
                now = time.monotonic()
                speed = 200 * ids.numel() / (now - marked)
                marked = now
                log.append({"step": step, "tokens": tokens, "loss": mean, "rate": rate})
                print(
                    f"step {step} tokens {tokens / 1e6:.0f}M loss {mean:.4f} rate {rate:.2e} "
                    f"{speed / 1e6:.2f}M tok/s {now - began:.0f} s",
                    flush=True,
                )
                if step % 1000 == 0:
                    _write_parts(save_model(model, template, scratch), out)
    _wait(device)
    seconds = time.monotonic() - started
    _write_parts(save_model(model, template, scratch), out)
    metrics, samples = evaluate(scratch, pack, device)
    metrics |= {
        "loss_difference": _difference(model, scratch, pack, device),
        "steps": step,
        "tokens_seen": tokens,
        "seconds": seconds,
        "tokens_per_second": (tokens - 10 * ids.numel()) / seconds,
        "epochs": {
            "docs": docs.epochs + docs.cursor / len(docs.index),
            "chat": chat.epochs + chat.cursor / len(chat.index),
        },
        "pack_tokens": {"docs": len(docs.ids), "chat": len(chat.ids)},
        "schedule": vars(schedule),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "log": log,
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    (out / "answers.json").write_text(json.dumps(samples, indent=1))
    shutil.rmtree(scratch)
    print(json.dumps({k: v for k, v in metrics.items() if k != "log"}, indent=1), flush=True)
    print(f"done after {time.monotonic() - began:.0f} s")
    return metrics


@torch.no_grad()
def _difference(model: Model, folder: Path, pack: Path, device: torch.device) -> float:
    """Our loss less that of transformers on the same (bfloat16) weights, absolute, nats a token.

    On untrained weights it finds wrong names and shapes; positions only tell once trained.
    """
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    ids, labels = Stream(pack, "docs.heldout", device).rows(2, min(256, len(model.cos)))
    x = F.embedding(ids, model.embed).to(model.dtype)
    for block in model.blocks:
        x = Block.forward(block, x, model.cos[: ids.shape[1]], model.sin[: ids.shape[1]])
    eps = model.config.rms_norm_eps
    ours = summed_loss(x, model.norm, model.embed, labels, eps) / labels.numel()
    other = F.cross_entropy(theirs(ids).logits.float().flatten(0, 1), labels.flatten())
    return abs(ours - other).item()


def _write_parts(data: bytes, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for i in range(0, len(data), PART_BYTES):
        (out / f"model.safetensors.part{i // PART_BYTES}").write_bytes(data[i : i + PART_BYTES])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
