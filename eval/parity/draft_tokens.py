"""Every draft token of draftlab and of a real vLLM at T = 0, one prompt at a time.

Counters say little about random heads, whose drafts are not accepted, so parity_vllm.py compares
all drafts of these. Drafts of a step that was not verified, after the last token, are left out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import client, decoded

from draftlab.engine.drafter import new_drafter
from draftlab.engine.sampling import Generation
from draftlab.servers.vllm_engine import COUNTERS, drafting_options
from draftlab.servers.vllm_process import CLIENT

if TYPE_CHECKING:
    from parity_vllm import Bench

Drafts = list[list[int]]


def our_drafts(bench: Bench) -> list[tuple[Generation, Drafts]]:
    """Decode with draftlab's engine; return answers and drafts."""
    results = []
    for request in bench.requests(0.0):
        drafter, drafts = new_drafter(bench.subject.head, bench.k, draft_probs=False), []
        propose = drafter.propose

        def recorded(verified: Any, propose: Any = propose, drafts: Drafts = drafts) -> Any:
            proposal = propose(verified)
            drafts.append(proposal.tokens[0].tolist())
            return proposal

        drafter.propose = recorded
        length = bench.max_length
        answers = decoded(bench.subject.target, [request], drafter, batch=1, max_length=length)
        results.append((answers[0], drafts))
    return results


def their_drafts(bench: Bench, place: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Decode with vLLM; return its description and the answers to the prompts."""
    subject, head, answer = bench.subject, place / "head", place / "answer.json"
    subject.export(head, bench.k, "vllm")
    shutil.copytree(CLIENT, place / "client" / CLIENT.name)
    options = {
        "temperature": 0.0,
        "max_new_tokens": bench.max_new_tokens,
        "stop_token_ids": sorted(subject.stops),
    }
    request = {
        "client": str(place / "client"),
        "setup": {
            "target": str(subject.target.folder.resolve()),
            "draft": str(head),
            "k": bench.k,
            "max_model_len": bench.max_length,
            **drafting_options(head),
        },
        "prompts": [list(ids) for _, ids in subject.prompts],
        "sampling": [options] * len(subject.prompts),
    }
    client(bench.python, "vllm_drafts.py", {answer: request})
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
        for key in COUNTERS:
            a, b = getattr(mine.counters, key), other["per_prompt"][0][key]
            if a != b:
                return f"prompt {mine.id}, {key}: draftlab {a}, vLLM {b}"
    return None
