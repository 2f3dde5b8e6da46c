"""Parallel heads on a GPU: the engine against the reference engine, then step times by K.

    python eval/gpu/parallel.py [--layers 1,2,4] [--k 1,3,5,8] [--batches 1,8,32] [--head FOLDER]
    python eval/gpu/parallel.py --steps-only --probs off       # times alone, of greedy drafts alone

First in float32 with the embedded target and `--head` (without: random weights): tokens and steps
of the engine, with CUDA graphs, at several batch sizes and with a pool so small that requests are
evicted, are the reference engine's. Then at the shapes of Llama-3.1-8B with random weights, as in
eval/bench/bench_decode.py: a step with a parallel head of each number of layers beside the
chain's, over
their floors (the head's weights are read once whatever K, the chain's K times) and over the fastest
K of the same head; tokens a second, all accepted alike (so what a parallel head accepts less is not
in them); and the time to first token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from bench_decode import STREAM, VLLM_COPY, copy_rate, measure, random_head, random_target

from draftlab.engine.drafter import HeadDrafter, new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.evaluate.bandwidth import head_bytes, target_bytes
from draftlab.heads.config import make_head_config
from draftlab.heads.folder import load_config, load_head, new_head
from draftlab.heads.peagle import PeagleHead
from draftlab.pipeline.resolve import REFERENCE, find_head
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from draftlab.text.suites import load_suite

MASK = 128_255  # of the random target; any will do
PROBS = {"off": [False], "on": [True], "both": [False, True]}
VLLM_STEP_MS = 5.4  # vLLM 0.20.2, parallel, K = 8, one layer, at its copy rate


def embedded_head(target: Target, folder: Path | None) -> PeagleHead:
    """The head in `folder`, or an untrained one in the shape of the reference head."""
    if folder is not None:
        head = load_head(folder, embeddings=None, dtype=torch.float32, device="cuda")
        assert isinstance(head, PeagleHead), f"{folder} holds no parallel head"
        return head
    reference = load_config(find_head(REFERENCE))
    parallel = {"family": "peagle", "embeddings": "own", "mask_token_id": 3, "num_layers": 2}
    head = new_head(make_head_config(**(reference.model_dump(by_alias=True) | parallel)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" not in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        head.embed_tokens.weight.copy_(target.parts.embeddings)
    head.set_draft_vocabulary(torch.arange(reference.draft_vocab_size))
    assert isinstance(head, PeagleHead)
    return head.to("cuda").eval().requires_grad_(False)


def check(folder: Path | None) -> None:
    """Engine against reference engine."""
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = TargetSettings(path="embedded", dtype="float32", device="cuda")
    target = load_target(settings)
    head = embedded_head(target, folder)
    prompts = load_suite("embedded:heldout", load_tokenizer(settings), Monitor()).prompts[:48]
    for temperature, options in ((0.0, {}), (0.8, {}), (1.0, {"top_k": 8})):
        sampling = Sampling(temperature, **options)
        asked = [Request(id_, ids, 64, sampling) for id_, ids in prompts]

        def drafter() -> HeadDrafter:
            return new_drafter(head, 5, draft_probs=temperature > 0)  # noqa: B023

        reference = ReferenceEngine(target, drafter(), batch=8, max_length=400)
        expected = _done(reference.generate(asked))
        for name, sizes in {
            "batch 1": {"batch": 1},
            "batch 8": {"batch": 8},
            "batch 8, no graphs": {"batch": 8, "graphs": False},
            "batch 48": {"batch": 48},
            "small pool": {"batch": 8, "num_blocks": 45},
        }.items():
            engine = Engine(target, drafter(), max_length=400, **sizes)
            found = _done(engine.generate(asked))
            tokens, steps = (
                sum(getattr(found[i], of) == getattr(g, of) for i, g in expected.items())
                for of in ("token_ids", "steps")
            )
            print(
                f"T={temperature:g} {options} {name:20s} tokens equal {tokens}/{len(asked)}, steps "
                f"equal {steps}/{len(asked)}",
                flush=True,
            )


def _done(generations: Iterator[Generation]) -> dict[str, Generation]:
    return {g.id: g for g in generations}


def times(layers: list[int], ks: list[int], batches: list[int], kinds: list[bool]) -> None:
    """Steps at the shapes of Llama-3.1-8B, by whether there are draft probabilities."""
    device = torch.device("cuda")
    rate = copy_rate(device)
    target = random_target(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s")
    print(
        "head            batch  K probs  step ms  floor ms  ratio  over fastest K  tokens/s  "
        "TTFT ms  over vLLM"
    )
    for count in (0, *layers):
        family = {
            "family": "peagle",
            "embeddings": "own",
            "mask_token_id": MASK,
            "num_layers": count,
        }
        head = random_head(target, device, **(family if count else {}))
        name = f"parallel, {count}" if count else "chain"
        for batch in batches:
            for probs in kinds:
                found = {
                    k: measure(target, new_drafter(head, k, draft_probs=probs), batch) for k in ks
                }
                fastest = min(each.step_ms for each in found.values())
                for k, each in found.items():
                    step = each.step_ms
                    moved = (target_bytes(target) or 0) + head_bytes(head, k)
                    floor = 1e3 * moved * VLLM_COPY / (STREAM * rate)
                    vllm = VLLM_STEP_MS * VLLM_COPY / rate
                    known = batch == 1 and k == 8 and count == 1
                    print(
                        f"{name:14s} {batch:6d} {k:2d} {'on ' if probs else 'off'}   {step:8.3f} "
                        f"{floor:8.3f} {step / floor:7.3f} {step / fastest:12.3f}   "
                        f"{each.tokens_s:9,.0f} {each.ttft_ms:9.2f} "
                        + (f"{step / vllm:9.3f}" if known else ""),
                        flush=True,
                    )
        del head
        torch.cuda.empty_cache()


def main() -> None:
    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=counts, default=[1, 2, 4])
    parser.add_argument("--k", type=counts, default=[1, 3, 5, 8])
    parser.add_argument("--batches", type=counts, default=[1, 8, 32])
    parser.add_argument("--head", type=Path, help="a parallel head of the embedded target")
    parser.add_argument("--probs", choices=PROBS, default="both", help="draft probabilities")
    parser.add_argument("--steps-only", action="store_true", help="no comparison before the times")
    arguments = parser.parse_args()
    if not arguments.steps_only:
        check(arguments.head)
    times(arguments.layers, arguments.k, arguments.batches, PROBS[arguments.probs])


if __name__ == "__main__":
    main()
