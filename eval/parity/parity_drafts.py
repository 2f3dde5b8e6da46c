"""Compare every draft token of draftlab and a real vLLM at T = 0, in float32.

    .venv/bin/python eval/parity/parity_drafts.py [--head FOLDER|reference] [--random [PATTERN]]

Counters say little about random heads, whose drafts are not accepted: parity_vllm.py compares the
accepted drafts, this program all of them. vLLM reads its own layout, one prompt at a time. Drafts
of a step that was not verified, after the last token, are left out. The exit status and the
environment are those of parity_vllm.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    DIFFERENT,
    EQUAL,
    SKIPPED,
    client,
    decoded,
    prepare,
    run_program,
    subject_options,
)
from parity_vllm import Bench
from random_heads import chosen_subjects

from draftlab.engine.drafter import new_drafter
from draftlab.engine.sampling import Generation
from draftlab.vllm.engine import drafting_options
from draftlab.vllm.process import CLIENT

Drafts = list[list[int]]


class Work(Bench):
    """The comparison of one head's drafts."""

    def our_drafts(self) -> list[tuple[Generation, Drafts]]:
        """Decode with draftlab's engine, one prompt at a time; return answers and drafts."""
        results = []
        for request in self.requests(0.0):
            drafter, drafts = new_drafter(self.subject.head, self.k, draft_probs=False), []
            propose = drafter.propose

            def recorded(verified: Any, propose: Any = propose, drafts: Drafts = drafts) -> Any:
                proposal = propose(verified)
                drafts.append(proposal.tokens[0].tolist())
                return proposal

            drafter.propose = recorded
            length = self.max_length
            answers = decoded(self.subject.target, [request], drafter, batch=1, max_length=length)
            results.append((answers[0], drafts))
        return results

    def their_drafts(self, place: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Decode with vLLM; return its description and the answers to the prompts."""
        head, answer = place / "head", place / "answer.json"
        self.subject.export(head, self.k, "vllm")
        shutil.copytree(CLIENT, place / "client" / CLIENT.name)
        options = {
            "temperature": 0.0,
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": sorted(self.subject.stops),
        }
        request = {
            "client": str(place / "client"),
            "setup": {
                "target": str(self.subject.target.folder.resolve()),
                "draft": str(head),
                "k": self.k,
                "max_model_len": self.max_length,
                **drafting_options(head),
            },
            "prompts": [list(ids) for _, ids in self.subject.prompts],
            "sampling": [options] * len(self.subject.prompts),
        }
        client(self.python, "vllm_drafts.py", {answer: request})
        result = json.loads(answer.read_text())
        return result["info"], result["answers"]


def first_difference(
    ours: Sequence[tuple[Generation, Drafts]], theirs: Sequence[dict[str, Any]]
) -> str | None:
    """Return the first difference (prompt, step, both values); None if all is equal."""
    for (mine, drafts), other in zip(ours, theirs, strict=True):
        if list(mine.token_ids) != other["outputs"][0]:
            return f"prompt {mine.id}: the tokens"
        steps = mine.counters.drafts
        for at, (a, b) in enumerate(zip(drafts[:steps], other["drafts"][:steps], strict=True)):
            if a != b:
                return f"prompt {mine.id}, drafts of step {at}: draftlab {a}, vLLM {b}"
        if steps != other["per_prompt"][0]["drafts"]:
            return f"prompt {mine.id}: the number of steps"
    return None


def run(options: argparse.Namespace) -> int:
    """Compare; return the exit status."""
    python = prepare("vllm")
    if python is None:
        return SKIPPED
    status = EQUAL
    with tempfile.TemporaryDirectory() as place:
        for number, subject in enumerate(chosen_subjects(options, Path(place) / "heads")):
            k = options.k
            if options.random is not None and subject.head.family.freezes_lm_head:
                k = min(k, subject.head.config.k_trained)  # the slots of a block
            work = Work(subject, python, k, options.max_new_tokens)
            ours, folder = work.our_drafts(), Path(place) / str(number)
            folder.mkdir()
            info, theirs = work.their_drafts(folder)
            fault = first_difference(ours, theirs)
            verified = sorted({tuple(d) for g, all_ in ours for d in all_[: g.counters.drafts]})
            steps = sum(g.counters.drafts for g, _ in ours)
            accepted = sum(g.counters.accepted for g, _ in ours)
            print(
                f"{subject.name}, vLLM {info['version']} ({info['runner']}), K={k}: {len(ours)} "
                f"prompts, {steps} steps with {len(verified)} different blocks of drafts, "
                f"{accepted} accepted: {'EQUAL' if fault is None else 'DIFFERENT at ' + fault}",
                flush=True,
            )
            status = status if fault is None else DIFFERENT
    return status


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    subject_options(parser, prompts=4, new_tokens=32)
    return run_program(run, parser)


if __name__ == "__main__":
    sys.exit(main())
