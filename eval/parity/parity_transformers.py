"""Compare greedy answers of draftlab's engine and of transformers' generate, float32, CPU.

    .venv/bin/python eval/parity/parity_transformers.py --head FOLDER --target FOLDER [--k 3]

transformers decodes one prompt at a time with its eager attention and experts. draftlab decodes
eight at once, without drafts and with the head's. All three must give the same tokens. For a target
with windows or chunks, a line says how many answers reach beyond the first border.

Exit status: 0 all is equal; 1 something differs (the first difference is printed); 2 the request
cannot be run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    DIFFERENT,
    EQUAL,
    Subject,
    decoded,
    figures,
    load_subject,
    run_program,
    subject_options,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.engine.counters import Counters
from draftlab.engine.drafter import new_drafter
from draftlab.engine.sampling import Generation
from draftlab.servers.vllm_engine import required_positions
from tests.helpers.zoo import eager_model

BATCH = 8


@torch.inference_mode()
def generated(subject: Subject, new_tokens: int) -> list[tuple[int, ...]]:
    """Return transformers' greedy answers, with a final stop token."""
    model, answers = eager_model(subject.target.folder), []
    model.generation_config.eos_token_id = sorted(subject.stops)
    for _, prompt in subject.prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
        )
        answers.append(tuple(whole[0, len(prompt) :].tolist()))
    return answers


def border(config: Any) -> int | None:
    """Return the positions of the target's windows or chunks; None without any."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    return next((getattr(config, sizes[kind]) for kind in sizes.keys() & kinds), None)


def first_difference(
    expected: Sequence[Sequence[int]], found: Sequence[Generation], name: str
) -> str | None:
    """Return prompt, position and both tokens of the first difference; None if all is equal."""
    for ids, generation in zip(expected, found, strict=True):
        pairs = zip((*ids, None), (*generation.token_ids, None), strict=False)
        for position, (theirs, ours) in enumerate(pairs):
            if theirs != ours:
                where = f"prompt {generation.id}, token {position}"
                return f"{where}: transformers {theirs}, {name} {ours}"
    return None


def run(options: argparse.Namespace) -> int:
    """Compare; return the exit status."""
    subject = load_subject(options.head, options.target, options.prompts, options.suite)
    requests = subject.requests(options.max_new_tokens)
    plain, drafted = (
        decoded(
            subject.target,
            requests,
            new_drafter(subject.head, k) if k else None,
            batch=BATCH,
            max_length=required_positions(requests, k, subject.target.max_length),
        )
        for k in (0, options.k)
    )
    expected = generated(subject, options.max_new_tokens)
    faults = {
        name: first_difference(expected, found, name)
        for name, found in (("undrafted", plain), ("drafted", drafted))
    }
    counted, beyond = Counters.total(g.counters for g in drafted), "no border"
    if size := border(subject.target.config):
        lengths = [len(r.prompt_ids) + len(ids) for r, ids in zip(requests, expected, strict=True)]
        beyond = f"{sum(length > size for length in lengths)} of {len(lengths)} ({size} positions)"
    name, tokens = subject.target.folder.name, f"{sum(map(len, expected)):,}"
    print(
        f"{subject.name} on {name}, K = {options.k}, {len(expected)} prompts, {tokens} tokens, "
        f"beyond the first border: {beyond}; drafts / accepted / accepted_at {figures(counted)}"
    )
    for way, fault in faults.items():
        print(f"  {way}: {'EQUAL' if fault is None else 'DIFFERENT at ' + fault}", flush=True)
    return DIFFERENT if any(faults.values()) else EQUAL


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    subject_options(parser, prompts=16, random=False, new_tokens=128, k=3)
    return run_program(run, parser)


if __name__ == "__main__":
    sys.exit(main())
