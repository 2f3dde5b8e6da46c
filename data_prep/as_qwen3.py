"""Make a Qwen 3 of the embedded target: its weights, norms on queries and keys, tied embeddings.

    python data_prep/as_qwen3.py runs/quickstart/answers.jsonl --out FOLDER [--steps 60]

Qwen 3 differs from the embedded Llama in those norms alone. They begin with the mean size that
queries and keys had, and a few minutes of distillation on a CPU, on a run's answers, bring the
answers back. It loads as a target: a second architecture to prove exports with, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from stand_ins import TOKENIZER, save
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM


def answered(path: Path) -> list[list[int]]:
    """Return token ids of a run's conversations, prompts and answers."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [
        answer["prompt_ids"] + answer["token_ids"] for line in lines for answer in line["answers"]
    ]


def batches(
    texts: Sequence[list[int]], rows: int, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return ids int64 [rows, S], padded with 0, and bool [rows, S]: which are real."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = [texts[i] for i in torch.randint(len(texts), (rows,), generator=generator)]
        length = max(map(len, chosen))
        ids = torch.tensor([text + [0] * (length - len(text)) for text in chosen])
        yield ids, torch.tensor([[i < len(text) for i in range(length)] for text in chosen])


@torch.no_grad()
def as_qwen3(teacher: LlamaForCausalLM, ids: Tensor) -> Qwen3ForCausalLM:
    """Return the same weights in the other architecture.

    Args:
        ids: int64 [B, S], over which the sizes of queries and keys are measured.
    """
    shared = set(Qwen3Config().to_dict()) - {"model_type", "architectures", "layer_types"}
    fields = {k: v for k, v in teacher.config.to_dict().items() if k in shared}
    student = Qwen3ForCausalLM(Qwen3Config(**fields)).float()
    missing, unknown = student.load_state_dict(teacher.state_dict(), strict=False)
    assert not unknown
    assert all(name.endswith(("q_norm.weight", "k_norm.weight")) for name in missing)
    entering = teacher(input_ids=ids, output_hidden_states=True).hidden_states
    pairs = zip(teacher.model.layers, student.model.layers, strict=True)
    for state, (ours, theirs) in zip(entering, pairs):  # noqa: B905 (the last state enters none)
        normed = ours.input_layernorm(state)
        for x in "qk":
            size = getattr(ours.self_attn, f"{x}_proj")(normed).square().mean().sqrt()
            getattr(theirs.self_attn, f"{x}_norm").weight.fill_(size)
    return student


def divergence(
    teacher: LlamaForCausalLM, student: Qwen3ForCausalLM, ids: Tensor, real: Tensor
) -> Tensor:
    """Return the mean KL(teacher ‖ student) over the real positions, in nats."""
    with torch.no_grad():
        wanted = teacher(input_ids=ids).logits[real].log_softmax(-1)
    found = student(input_ids=ids).logits[real].log_softmax(-1)
    return F.kl_div(found, wanted, log_target=True, reduction="batchmean")


def main() -> None:
    """Convert, distil and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("answers", type=Path, help="answers.jsonl of a run of the embedded target")
    parser.add_argument("--out", type=Path, required=True, help="folder of the target")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=6, help="conversations a step")
    parser.add_argument("--rate", type=float, default=5e-4, help="peak learning rate")
    args = parser.parse_args()
    teacher = AutoModelForCausalLM.from_pretrained(TOKENIZER, dtype=torch.float32).eval()
    stream = batches(answered(args.answers), args.rows)
    torch.manual_seed(0)  # weights that are replaced at once
    student = as_qwen3(teacher, next(stream)[0]).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.rate, weight_decay=0.0)
    began = time.monotonic()
    for step, (ids, real) in zip(range(args.steps), stream):  # noqa: B905 (the stream is endless)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 10, (args.steps - step) / args.steps)
        loss = divergence(teacher, student, ids, real)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step + 1 == args.steps:
            seconds = time.monotonic() - began
            print(f"step {step + 1}: {float(loss.detach()):.3f} nats, {seconds:.0f} s", flush=True)
    save(student, args.out)


if __name__ == "__main__":
    main()
