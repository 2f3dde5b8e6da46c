"""Loss and answers of a saved target on the corpus's held-out split, as transformers runs it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from token_stream import Stream
from transformers import AutoModelForCausalLM, AutoTokenizer


def repetition(ids: list[int]) -> float:
    """Return the share of repeated 4-grams: 1 - distinct / all (0.0 for fewer than 4 tokens)."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@torch.no_grad()
def evaluate(
    folder: Path,
    pack: Path,
    device: torch.device,
    *,
    prompts: int = 256,
    new_tokens: int = 192,
    batches: int = 32,
    rows: int = 32,
    length: int = 1024,
) -> tuple[dict, list[dict]]:
    """Return metrics of a saved model in transformers and its held-out answers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    metrics: dict = {}
    for name in ("docs", "chat"):
        stream = Stream(pack, f"{name}.heldout", device)
        loss = count = 0.0
        for _ in range(batches):
            ids, labels = stream.rows(rows, length)
            if stream.epochs > 0:
                break
            logits = model(ids).logits.float().flatten(0, 1)
            loss += F.cross_entropy(logits, labels.flatten(), reduction="sum").item()
            count += (labels != -100).sum().item()
        metrics |= {f"heldout_{name}_loss": loss / max(count, 1), f"heldout_{name}_tokens": count}
    asked = json.loads((pack / "evaluation.json").read_text())[:prompts]
    eot = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    batch = tokenizer.pad({"input_ids": [r["prompt"] for r in asked]}, return_tensors="pt")
    batch = batch.to(device)
    samples = [{"source": r["source"], "prompt": tokenizer.decode(r["prompt"])} for r in asked]
    metrics["repetition_reference"] = float(np.mean([repetition(r["answer"][:128]) for r in asked]))
    for temperature in (0.0, 0.8):
        torch.manual_seed(0)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        out = model.generate(
            **batch,
            max_new_tokens=new_tokens,
            **(sampling if temperature else {"do_sample": False}),
        )
        ends, shares = [], []
        for sample, ids in zip(
            samples, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True
        ):
            end = ids.index(eot) if eot in ids else len(ids)
            ends.append(end if end < len(ids) else math.inf)
            sample[f"answer_t{temperature}"] = tokenizer.decode(ids[:end])
            if min(end, 128) >= 4:
                shares.append(repetition(ids[: min(end, 128)]))
        metrics[f"t{temperature}"] = {
            "repetition_128": float(np.mean(shares)),
            "prompts": len(asked),
            "ended_within_128": float(np.mean([e < 128 for e in ends])),
            "ended_within_192": float(np.mean([e < 192 for e in ends])),
            "mean_tokens": float(np.mean([min(e, new_tokens) for e in ends])),
        }
    return metrics, samples
