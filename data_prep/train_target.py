"""Train and evaluate the embedded target on one GPU, from the pack that `prompts` wrote.

A hand-written Llama (same mathematics and tensor names as transformers', which reads the result)
because a training step of an 11 M model is all overhead: fused projections, one compiled block
used twelve times, no loss on the host. Needs no network.

Shapes: B rows, T tokens a row, H hidden, N heads, D head size, V vocabulary.
"""

from __future__ import annotations

import json
import lzma
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

PART_BYTES = 15 * 2**20  # of a saved model; the way back from a GPU machine may cap file sizes


@dataclass(frozen=True)
class Schedule:
    """Knobs of one run. Times are fractions of the training time; rates are peak rates."""

    minutes: float = 9.0  # from process start to the last step, compiling included
    rows: int = 256
    length: int = 1024
    rate: float = 7e-3  # for Muon; in one-minute runs 6e-3 ended 0.3 nats under 3e-3, AdamW broke
    weight_decay: float = 0.1
    warmup_steps: int = 150
    decay_from: float = 0.4  # constant before, linear to zero after
    chat_share: tuple[float, float] = (0.10, 0.33)  # of rows, before and after `chat_from`
    chat_from: float = 0.6
    optimizer: str = "muon"  # "muon" for the matrices of the blocks (AdamW for the rest) | "adamw"
    seed: int = 0


# --- model --------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in float32, returned in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


class Block(nn.Module):
    """One decoder layer; float32 master weights, activations in x's dtype."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
        kv = config.num_key_value_heads * d
        self.head_dim, self.eps = d, config.rms_norm_eps
        small = 0.02 / math.sqrt(2 * config.num_hidden_layers)
        self.q, self.k, self.v = (_matrix(n, h, 0.02) for n in (h, kv, kv))
        self.o, self.down = _matrix(h, h, small), _matrix(h, i, small)
        self.gate, self.up = _matrix(i, h, 0.02), _matrix(i, h, 0.02)
        self.norm1, self.norm2 = nn.Parameter(torch.ones(h)), nn.Parameter(torch.ones(h))

    def forward(self, x_BTH: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        b, t, h = x_BTH.shape
        y = rms_norm(x_BTH, self.norm1, self.eps)
        y = F.linear(y, torch.cat([self.q, self.k, self.v]).to(y.dtype))
        y = y.view(b, t, -1, self.head_dim).transpose(1, 2)
        heads = h // self.head_dim
        kv_heads = (y.shape[1] - heads) // 2
        rotated, v = y.split([heads + kv_heads, kv_heads], 1)
        left, right = rotated.chunk(2, -1)
        rotated = rotated * cos_TD + torch.cat([-right, left], -1) * sin_TD
        q, k = rotated.split([heads, kv_heads], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BTH = x_BTH + F.linear(y.transpose(1, 2).reshape(b, t, h), self.o.to(y.dtype))
        y = rms_norm(x_BTH, self.norm2, self.eps)
        gate, up = F.linear(y, torch.cat([self.gate, self.up]).to(y.dtype)).chunk(2, -1)
        return x_BTH + F.linear(F.silu(gate) * up, self.down.to(y.dtype))


def _matrix(rows: int, columns: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * std)


class Model(nn.Module):
    """The decoder; `forward` returns the summed loss over the labels that are not -100."""

    def __init__(self, config: LlamaConfig, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed = _matrix(config.vocab_size, config.hidden_size, 0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        theta = config.rope_parameters["rope_theta"]
        inverse = theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(length), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(dtype))
        self.register_buffer("sin", angles.sin().to(dtype))
        self.loss = _loss

    def forward(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        x = F.embedding(ids_BT, self.embed).to(self.dtype)
        t = ids_BT.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:t], self.sin[:t])
        return self.loss(x, self.norm, self.embed, labels_BT, self.config.rms_norm_eps)

    def compile_parts(self) -> None:
        """Compile the block (once, all twelve share it) and the loss."""
        for block in self.blocks:
            block.compile(dynamic=False)
        self.loss = torch.compile(_loss, dynamic=False)

    def tensors(self) -> dict[str, Tensor]:
        """The weights under transformers' names, bfloat16, on the CPU. The output is tied."""
        return {k: v.detach().to(torch.bfloat16).cpu().contiguous()
                for k, v in self._named().items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy in what `tensors` returned; the names must agree."""
        named = self._named()
        if named.keys() != tensors.keys():
            raise ValueError(f"tensor names differ: {sorted(named.keys() ^ tensors.keys())}")
        for name, parameter in named.items():
            parameter.copy_(tensors[name])

    def _named(self) -> dict[str, nn.Parameter]:
        names = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        inner = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
                 "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
                 "down": "mlp.down_proj", "norm1": "input_layernorm",
                 "norm2": "post_attention_layernorm"}
        for i, block in enumerate(self.blocks):
            names |= {f"model.layers.{i}.{theirs}.weight": getattr(block, ours)
                      for ours, theirs in inner.items()}
        return names


def _loss(x: Tensor, norm: Tensor, embed: Tensor, labels: Tensor, eps: float) -> Tensor:
    logits = F.linear(rms_norm(x, norm, eps), embed.to(x.dtype))
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


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


# --- data ---------------------------------------------------------------------------------------


class Stream:
    """Documents in a new random order each epoch, laid end to end and cut into rows.

    `lengths` is [n], or [n, 2] = (prompt, answer) with loss only on the answers. Documents start
    with <bos> and are not masked from each other within a row.
    """

    def __init__(self, pack: Path, name: str, device: torch.device, seed: int = 0) -> None:
        lengths = torch.from_numpy(load_array(pack / f"{name}.len.xz")).long()
        self.ids = torch.from_numpy(load_array(pack / f"{name}.ids.xz").astype(np.int32)).to(device)
        self.lengths = lengths.view(len(lengths), -1).sum(1).to(device)
        self.starts = self.lengths.cumsum(0) - self.lengths
        counted = torch.ones(len(self.ids), dtype=torch.bool, device=device)
        if lengths.dim() == 2:
            kinds = torch.tensor([False, True]).repeat(len(lengths)).to(device)
            counted = kinds.repeat_interleave(lengths.flatten().to(device))
        self.counted = counted
        self.generator = torch.Generator(device).manual_seed(seed)
        self.epochs = -1
        self.index = self.ids[:0]
        self.cursor = 0

    def rows(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Input ids and labels, both int64 [count, length]; label -100 where no loss is taken."""
        need = count * length + 1
        if self.cursor + need > len(self.index):  # the tail of an epoch, under one batch, is left
            order = torch.randperm(len(self.lengths), generator=self.generator,
                                   device=self.ids.device)
            lengths = self.lengths[order]
            shift = self.starts[order] - (lengths.cumsum(0) - lengths)
            self.index = shift.repeat_interleave(lengths) + torch.arange(
                len(self.ids), device=self.ids.device)
            self.cursor = 0
            self.epochs += 1
        index = self.index[self.cursor:self.cursor + need]
        self.cursor += count * length
        ids = self.ids[index].long()
        labels = torch.where(self.counted[index], ids, -100)
        return ids[:-1].view(count, length), labels[1:].view(count, length)


def load_array(path: Path) -> np.ndarray:
    """Read an xz-compressed .npy."""
    with lzma.open(path) as file:
        return np.load(file, allow_pickle=False)


# --- evaluation ---------------------------------------------------------------------------------


def repetition(ids: list[int]) -> float:
    """Share of repeated 4-grams: 1 - distinct / all (0.0 for fewer than 4 tokens)."""
    grams = [tuple(ids[i:i + 4]) for i in range(len(ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@torch.no_grad()
def evaluate(folder: Path, pack: Path, device: torch.device, *, prompts: int = 256,
             new_tokens: int = 192, batches: int = 32) -> tuple[dict, list[dict]]:
    """Metrics of a saved model as transformers runs it, and its answers to the held-out prompts."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    metrics: dict = {}
    for name, rows in (("docs", 32), ("chat", 32)):
        stream = Stream(pack, f"{name}.heldout", device)
        loss = count = 0.0
        for _ in range(batches):
            ids, labels = stream.rows(rows, 1024)
            if stream.epochs > 0:
                break
            logits = model(ids).logits.float().flatten(0, 1)
            loss += F.cross_entropy(logits, labels.flatten(), reduction="sum").item()
            count += (labels != -100).sum().item()
        metrics |= {f"heldout_{name}_loss": loss / max(count, 1), f"heldout_{name}_tokens": count}
    rows = json.loads((pack / "evaluation.json").read_text())[:prompts]
    eot = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    batch = tokenizer.pad({"input_ids": [r["prompt"] for r in rows]}, return_tensors="pt").to(device)
    samples = [{"source": r["source"], "prompt": tokenizer.decode(r["prompt"])} for r in rows]
    metrics["repetition_reference"] = float(np.mean([repetition(r["answer"][:128]) for r in rows]))
    for temperature in (0.0, 0.8):
        torch.manual_seed(0)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        out = model.generate(**batch, max_new_tokens=new_tokens,
                             **(sampling if temperature else {"do_sample": False}))
        ends, shares = [], []
        for sample, ids in zip(samples, out[:, batch["input_ids"].shape[1]:].tolist(), strict=True):
            end = ids.index(eot) if eot in ids else len(ids)
            ends.append(end if end < len(ids) else math.inf)
            sample[f"answer_t{temperature}"] = tokenizer.decode(ids[:end])
            if min(end, 128) >= 4:
                shares.append(repetition(ids[:min(end, 128)]))
        metrics[f"t{temperature}"] = {
            "repetition_128": float(np.mean(shares)), "prompts": len(rows),
            "ended_within_128": float(np.mean([e < 128 for e in ends])),
            "ended_within_192": float(np.mean([e < 192 for e in ends])),
            "mean_tokens": float(np.mean([min(e, new_tokens) for e in ends]))}
    return metrics, samples


# --- the run ------------------------------------------------------------------------------------


def save_model(model: Model, template: Path, folder: Path) -> bytes:
    """A folder transformers can load: the weights of `model`, the small files of `template`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in template.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    model.config.save_pretrained(folder)
    data = save(model.tensors(), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)
    return data


def train(template: Path, pack: Path, out: Path, schedule: Schedule, *,
          init: Path | None = None, config: LlamaConfig | None = None) -> dict:
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
    _compare(model, scratch, pack, device, schedule)
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
        [{"params": [p for p in rest if p.dim() == 2], "weight_decay": schedule.weight_decay},
         {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}],
        lr=schedule.rate, betas=(0.9, 0.95), fused=True)

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
                print(f"step {step} tokens {tokens / 1e6:.0f}M loss {mean:.4f} rate {rate:.2e} "
                      f"{speed / 1e6:.2f}M tok/s {now - began:.0f} s", flush=True)
                if step % 1000 == 0:
                    _write_parts(save_model(model, template, scratch), out)
    _wait(device)
    seconds = time.monotonic() - started
    _write_parts(save_model(model, template, scratch), out)
    metrics, samples = evaluate(scratch, pack, device)
    metrics |= {"steps": step, "tokens_seen": tokens, "seconds": seconds,
                "tokens_per_second": (tokens - 10 * ids.numel()) / seconds,
                "epochs": {"docs": docs.epochs + docs.cursor / len(docs.index),
                           "chat": chat.epochs + chat.cursor / len(chat.index)},
                "pack_tokens": {"docs": len(docs.ids), "chat": len(chat.ids)},
                "schedule": vars(schedule), "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "log": log}
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    (out / "answers.json").write_text(json.dumps(samples, indent=1))
    shutil.rmtree(scratch)
    print(json.dumps({k: v for k, v in metrics.items() if k != "log"}, indent=1), flush=True)
    print(f"done after {time.monotonic() - began:.0f} s")
    return metrics


@torch.no_grad()
def _compare(model: Model, folder: Path, pack: Path, device: torch.device, s: Schedule) -> None:
    """Our forward against transformers' on the same weights: a naming or rotation slip ends here."""
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    ids, labels = Stream(pack, "docs.heldout", device).rows(2, min(s.length, 256))
    x = F.embedding(ids, model.embed).to(model.dtype)
    for block in model.blocks:
        x = Block.forward(block, x, model.cos[:ids.shape[1]], model.sin[:ids.shape[1]])
    ours = _loss(x, model.norm, model.embed, labels, model.config.rms_norm_eps) / labels.numel()
    other = F.cross_entropy(theirs(ids).logits.float().flatten(0, 1), labels.flatten())
    if abs(ours - other) > 0.01:
        raise RuntimeError(f"loss {ours:.4f} here, {other:.4f} in transformers: models differ")


def _write_parts(data: bytes, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for i in range(0, len(data), PART_BYTES):
        (out / f"model.safetensors.part{i // PART_BYTES}").write_bytes(data[i:i + PART_BYTES])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
