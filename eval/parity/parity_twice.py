"""Compare draftlab with a vLLM that loads a head twice in one process.

    .venv/bin/python eval/parity/parity_twice.py --head FOLDER --target FOLDER [--k 3] [--prompts 8]

Tokens and counters must be equal both times: T = 0, float32, vLLM's own layout, one prompt at a
time. vLLM's loader of Llama 4 drafters changes a config in place, which a second engine of the same
process must not see. The exit status is that of parity_vllm.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from common import (
    DIFFERENT,
    EQUAL,
    SKIPPED,
    client,
    load_subject,
    prepare,
    run_program,
    subject_options,
)
from parity_vllm import Bench, total

from draftlab.files import read_json
from draftlab.vllm.engine import drafting_method
from draftlab.vllm.vllm_client.loading import engine_options


def run(options: argparse.Namespace) -> int:
    """Compare; return the exit status."""
    python = prepare("vllm")
    if python is None:
        return SKIPPED
    subject = load_subject(options.head, options.target, options.prompts)
    bench = Bench(subject, python, options.k, options.max_new_tokens)
    ours = bench.ours(0.0, 1)
    counted = total(ours)
    ours_counted = [counted.drafts, counted.accepted, list(counted.accepted_at)]
    with tempfile.TemporaryDirectory() as place:
        head, answer = Path(place) / "vllm", Path(place) / "answer.json"
        subject.export(head, bench.k, "vllm")
        request = {
            "target": str(subject.target.folder.resolve()),
            "model": str(head),
            "method": drafting_method(read_json(head / "config.json", kind="head's config.json")),
            "num_speculative_tokens": bench.k,
            "max_model_len": bench.max_length,
            "max_new_tokens": options.max_new_tokens,
            "stop_token_ids": sorted(subject.stops),
            "prompts": [list(ids) for _, ids in subject.prompts],
            "engine_options": engine_options(subject.target.folder),
        }
        client(python, "vllm_twice.py", {answer: request})
        loads = json.loads(answer.read_text())
    status = EQUAL
    for number, found in enumerate(loads, 1):
        theirs = [found["drafts"], found["accepted"], found["accepted_at"]]
        equal = found["tokens"] == [list(g.token_ids) for g in ours] and theirs == ours_counted
        figures = [f"{n:,} / {a:,} / {at}" for n, a, at in (ours_counted, theirs)]
        print(
            f"load {number}, vLLM {found['version']}: draftlab {figures[0]}, vLLM {figures[1]}: "
            f"{'EQUAL' if equal else 'DIFFERENT'}",
            flush=True,
        )
        status = status if equal else DIFFERENT
    return status


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    subject_options(parser, prompts=8, random=False, new_tokens=64, k=3)
    return run_program(run, parser)


if __name__ == "__main__":
    sys.exit(main())
