"""The engine on a GPU against the reference engine: equal tokens and counters, float32.

    python tests/engine/test_on_gpu.py

Decodes held-out prompts with the embedded target and the reference head, greedily and sampled, with
CUDA graphs, at several batch sizes, and with a pool so small that requests are evicted.
"""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path

import torch

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request, Sampling
from draftlab.heads.folder import load_head
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import stop_ids

torch.backends.cuda.matmul.allow_tf32 = False


def main() -> None:
    settings = TargetSettings(path="embedded", dtype="float32", device="cuda")
    target, tokenizer = load_target(settings), load_tokenizer(settings)
    folder = Path(str(resources.files("draftlab") / "embedded"))
    head = load_head(
        folder / "heads" / "reference",
        embeddings=target.parts.embeddings,
        dtype=torch.float32,
        device="cuda",
    )
    lines = (folder / "prompts" / "heldout.jsonl").read_text().splitlines()[:48]
    prompts = [
        tuple(
            tokenizer.apply_chat_template(
                json.loads(line)["messages"][:1], add_generation_prompt=True, return_dict=False
            )
        )
        for line in lines
    ]
    stops = stop_ids(tokenizer, target.folder)

    def requests(temperature: float, **options: float) -> list[Request]:
        return [
            Request(f"p{i}", ids, 64, Sampling(temperature, **options), stops)
            for i, ids in enumerate(prompts)
        ]

    def run(engine, asked: list[Request]):
        torch.cuda.synchronize()
        started = time.perf_counter()
        done = {g.id: g for g in engine.generate(asked)}
        return done, time.perf_counter() - started

    cases = [(0.0, {}), (0.8, {}), (1.0, {"top_k": 8})]
    for temperature, options in cases:
        asked = requests(temperature, **options)
        probs = temperature > 0
        drafter = lambda: ChainDrafter(head, 4, draft_probs=probs)  # noqa: B023, E731
        expected, slow = run(ReferenceEngine(target, drafter(), batch=8, max_length=400), asked)
        for name, sizes in {
            "batch 1": {"batch": 1},
            "batch 8": {"batch": 8},
            "batch 8, no graphs": {"batch": 8, "graphs": False},
            "batch 48": {"batch": 48},
            "small pool": {"batch": 8, "num_blocks": 45},
        }.items():
            engine = Engine(target, drafter(), max_length=400, **sizes)
            found, wall = run(engine, asked)
            found, wall = run(engine, asked)
            same = sum(found[i].token_ids == g.token_ids for i, g in expected.items())
            steps = sum(found[i].steps == g.steps for i, g in expected.items())
            total = sum(len(g.token_ids) for g in found.values())
            print(
                f"T={temperature:g} {options} {name:20s} tokens equal {same}/{len(asked)}, steps "
                f"equal {steps}/{len(asked)}, {total / wall:8,.0f} tok/s (reference "
                f"{total / slow:,.0f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
