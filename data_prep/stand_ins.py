"""Train small stand-ins for large targets: their architectures in a few million parameters.

    python data_prep/stand_ins.py --pack FOLDER --out FOLDER [--minutes 2.5] [KIND …]

KIND (default: all, one after the other), each a folder below --out that loads as a target:
  llama4   Llama 4's multimodal model: experts, chunks of 128 positions, layers without RoPE, and
           an untrained tower for images; its text model is saved alone too, as llama4_text
  qwen3    Qwen 3: norms on queries and keys, embeddings tied to lm_head
  gpt_oss  gpt-oss: sinks, windows of 128 positions, experts
  qwen3_next  Qwen3-Next: gated delta nets, attention on every fourth layer, no experts
  nemotron_h  Nemotron-H: Mamba-2, feed-forward layers, two of attention without RoPE

--pack is what `embedded_target.py pack` writes: the embedded target's corpus and tokenizer, so its
prompts and suites serve here too. Each training takes --minutes on one GPU and needs no network; on
a CPU it works for a handful of steps (--steps), to see that it does. Files of weights are cut to
12 MB: the way back from a GPU machine may cap their size.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from evaluate_target import evaluate
from token_stream import Stream
from torch import Tensor, nn
from train_target import Muon
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TOKENIZER = Path(__file__).resolve().parents[1] / "draftlab" / "embedded" / "target"
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,  # what recipes record; beyond a row's they are untrained
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA4 = {
    "intermediate_size": 384,  # of an expert, and of the one that all tokens share
    "intermediate_size_mlp": 768,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 4,
    "no_rope_layers": [1, 1, 1, 0] * 2,
    "attention_chunk_size": 128,  # what vLLM's CPU build takes: a multiple of its blocks
    "attn_temperature_tuning": True,
    "floor_scale": 128,
    "attn_scale": 0.1,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "image_size": 56,
    "patch_size": 14,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "vision_output_dim": 64,
}
EVERY_EXPERT = "every_expert"
KINDS: dict[str, dict[str, Any]] = {
    "llama4": LLAMA4,
    "qwen3": {"tie_word_embeddings": True},
    "gpt_oss": {
        "intermediate_size": 384,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        # vLLM reads gpt-oss's RoPE as YaRN alone; by a factor of 1 that is plain RoPE.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 1.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "qwen3_next": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "mlp_only_layers": list(range(8)),
        "tie_word_embeddings": False,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M-*-M-M-*-",
        "num_hidden_layers": 12,
        "mamba_num_heads": 16,
        "mamba_head_dim": 32,
        "ssm_state_size": 64,
        "n_groups": 2,
        "chunk_size": 64,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Schedule:
    """Settings of a training; rates are peak rates, shares of the rows or of the time."""

    minutes: float = 2.5
    steps: int | None = None  # in place of minutes
    rows: int = 96
    length: int = 512
    rate: float = 5e-3
    weight_decay: float = 0.1
    warmup_steps: int = 50
    decay_from: float = 0.4
    chat_share: float = 0.3
    seed: int = 0


def new_model(kind: str, **changes: Any) -> PreTrainedModel:
    """Return an untrained float32 model of the embedded target's vocabulary and special tokens."""
    own = json.loads((TOKENIZER / "config.json").read_text())
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    fields = SHAPE | KINDS[kind] | {name: own[name] for name in names} | changes
    if kind == "llama4":
        config = CONFIG_MAPPING[kind](text_config=fields, vision_config=VISION)
        return AutoModelForImageTextToText.from_config(config).float()
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields)).float()
    if kind == "gpt_oss":
        model.set_experts_implementation(EVERY_EXPERT)
    return model


def every_expert(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """gpt-oss's experts, each on every token [T, H] and weighted by the router: [T, H].

    With a few small ones that is far faster than sorting tokens with the host's help, and grouped
    products have no float32 weights.
    """
    shares = top_k_weights.new_zeros(len(hidden_states), experts.num_experts)
    shares = shares.scatter(1, top_k_index, top_k_weights)
    tokens = hidden_states.expand(experts.num_experts, -1, -1)
    inner = torch.baddbmm(experts.gate_up_proj_bias[:, None], tokens, experts.gate_up_proj)
    inner = experts._apply_gate(inner)
    outputs = torch.baddbmm(experts.down_proj_bias[:, None], inner, experts.down_proj)
    return torch.einsum("eth,te->th", outputs, shares).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EVERY_EXPERT, every_expert)


def tower(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text model: the whole model, or a multimodal model's language model."""
    return getattr(model, "language_model", model)


def batches(
    pack: Path, schedule: Schedule, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return ids and labels, int64 [rows, length], of files and conversations' answers."""
    docs = Stream(pack, "docs.target", device, schedule.seed)
    chat = Stream(pack, "chat.target", device, schedule.seed + 1)
    talk = round(schedule.rows * schedule.chat_share)
    while True:
        parts = [docs.rows(schedule.rows - talk, schedule.length), chat.rows(talk, schedule.length)]
        ids, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        yield ids, labels


def loss_of(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy where labels are not −100."""
    device = ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def train(kind: str, pack: Path, out: Path, schedule: Schedule, **changes: Any) -> dict[str, Any]:
    """Train one stand-in into `out`; return the contents of metrics.json.

    Args:
        changes: fields of its (text) config.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(schedule.seed)
    torch.set_float32_matmul_precision("high")
    whole = new_model(kind, **changes)
    model = tower(whole).to(device).train()
    count = sum(p.numel() for p in model.parameters())
    print(f"{kind}: {count:,} parameters on {device}", flush=True)
    save(whole, out)  # a late fault would cost the run
    inner = [
        p
        for layer in model.model.layers
        for name, p in layer.named_parameters()
        if p.dim() > 1 and "router" not in name and not name.endswith("bias")
    ]
    matrices = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in matrices]
    muon = Muon(inner, schedule.weight_decay)
    adam = torch.optim.AdamW(rest, lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.0)
    began, log, sums = time.monotonic(), [], torch.zeros((), device=device)
    for step, (ids, labels) in enumerate(batches(pack, schedule, device)):
        done = time.monotonic() - began
        share = step / schedule.steps if schedule.steps else done / (60 * schedule.minutes)
        if share >= 1:
            break
        rate = schedule.rate * min(1.0, (step + 1) / schedule.warmup_steps)
        rate *= min(1.0, (1 - share) / (1 - schedule.decay_from))
        loss = loss_of(model, ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        muon.step(rate)
        model.zero_grad()
        sums += loss.detach()
        if (step + 1) % 50 == 0 or schedule.steps:
            mean = float(sums) / (50 if not schedule.steps else 1)  # waits for the device
            sums.zero_()
            if not math.isfinite(mean):
                raise RuntimeError(f"loss is {mean} at step {step}")
            log.append({"step": step + 1, "loss": mean, "seconds": time.monotonic() - began})
            if (step + 1) % 200 == 0 or schedule.steps:
                print(f"step {step + 1} loss {mean:.4f} {log[-1]['seconds']:.0f} s", flush=True)
    save(whole, out)
    if model is not whole:
        save(model, out.with_name(f"{out.name}_text"))
    small = {"prompts": 4, "new_tokens": 8, "batches": 1, "rows": 2, "length": schedule.length}
    small = {} if device.type == "cuda" else small
    measured, samples = evaluate(out, pack, device, **small)
    metrics = measured | {
        "kind": kind,
        "parameters": count,
        "steps": step,
        "tokens_seen": step * schedule.rows * schedule.length,
        "schedule": vars(schedule),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "log": log,
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    (out / "answers.json").write_text(json.dumps(samples, indent=1))
    print(json.dumps({k: v for k, v in metrics.items() if k != "log"}, indent=1), flush=True)
    return metrics


def save(model: PreTrainedModel, out: Path) -> None:
    """Write a target's folder: bfloat16 weights; tokenizer, template, stops as embedded."""
    shutil.rmtree(out, ignore_errors=True)
    tied = model.config.get_text_config().tie_word_embeddings
    weights = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    model.save_pretrained(out, state_dict=weights, max_shard_size="12MB")
    config = (out / "config.json").read_text().replace('"float32"', '"bfloat16"')
    (out / "config.json").write_text(config)  # which would say what the model was trained in
    for file in TOKENIZER.iterdir():
        if file.name in ("generation_config.json", "chat_template.jinja") or "token" in file.name:
            shutil.copy(file, out)


def main() -> None:
    """Train the stand-ins that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--pack", type=Path, required=True, help="token arrays of the corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder of all stand-ins")
    parser.add_argument("--minutes", type=float, default=Schedule.minutes, help="of each training")
    parser.add_argument("--steps", type=int, help="in place of minutes")
    parser.add_argument("--rows", type=int, default=Schedule.rows)
    parser.add_argument("--length", type=int, default=Schedule.length)
    parser.add_argument("--rate", type=float, default=Schedule.rate, help="peak learning rate")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"unknown kinds {sorted(unknown)}; there are {', '.join(KINDS)}")
    schedule = Schedule(args.minutes, args.steps, args.rows, args.length, args.rate)
    for kind in args.kinds or KINDS:
        train(kind, args.pack, args.out / kind, schedule)


if __name__ == "__main__":
    main()
