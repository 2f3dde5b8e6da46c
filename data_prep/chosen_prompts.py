"""Which of the corpus's functions become prompts, of training and held out."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

EMBEDDED = Path(__file__).resolve().parents[1] / "draftlab" / "embedded"
ANSWER_TOKENS = (20, 220)
PROMPT_TOKENS = 250
HELDOUT_PROMPTS = 256


def load_tokenizer():
    """Return the embedded target's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(EMBEDDED / "target")


def functions_of(work: Path, split: str) -> list[dict]:
    """Return a split's functions whose answer and prompt fit: `prompt`, `prompt_ids`, `answer_ids`.

    Functions that repeat themselves (tables, long runs of assignments) are left out: a small
    model learns loops from them.
    """
    from evaluate_target import repetition

    tokenizer, kept = load_tokenizer(), []
    for row in read_jsonl(work / f"functions.{split}.jsonl"):
        answer = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        if not ANSWER_TOKENS[0] <= len(answer) <= ANSWER_TOKENS[1] or repetition(answer) > 0.35:
            continue
        for prompt in (row["prompt"], row["short_prompt"]):
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) <= PROMPT_TOKENS:
                kept.append(
                    {
                        "source": row["source"],
                        "prompt": prompt,
                        "prompt_ids": ids,
                        "answer_ids": answer,
                    }
                )
                break
    print(f"{split}: {len(kept)} functions of fitting length")
    return kept


def unshared(rows: list[dict], work: Path, others: list[str]) -> list[dict]:
    """Return rows with unique prompts that are none of `others`' (full or short).

    Two functions may differ in full and still share signature and first paragraph.
    """
    taken = {
        row[key]
        for split in others
        for row in read_jsonl(work / f"functions.{split}.jsonl")
        for key in ("prompt", "short_prompt")
    }
    fresh = []
    for row in rows:
        if row["prompt"] not in taken:
            taken.add(row["prompt"])
            fresh.append(row)
    return fresh


def held_out(work: Path, rows: list[dict]) -> list[dict]:
    """Return the held-out prompts: packages in turn, answers of some length."""
    rows = unshared(rows, work, ["target", "head"])
    return _round_robin([row for row in rows if len(row["answer_ids"]) >= 30])[:HELDOUT_PROMPTS]


def by_hash(row: dict) -> str:
    """Return a key that shuffles a row independently of other rows."""
    return hashlib.sha256(("draftlab" + row["prompt"]).encode()).hexdigest()


def _round_robin(rows: list[dict]) -> list[dict]:
    """Return rows in a fixed shuffled order, packages in turn, so a prefix is diverse."""
    by_package = defaultdict(list)
    for row in sorted(rows, key=by_hash):
        by_package[row["source"].split("/")[0]].append(row)
    ranked = [
        (rank, package, row)
        for package, group in by_package.items()
        for rank, row in enumerate(group)
    ]
    return [row for _, _, row in sorted(ranked, key=lambda item: item[:2])]


def prompt_lines(rows: list[dict], name: str) -> list[str]:
    """Return rows as lines of a file that recipes read as prompts.source."""
    return [
        json.dumps(
            {
                "id": f"{name}-{i:05d}",
                "messages": [{"role": "user", "content": row["prompt"]}],
                "source": row["source"],
            }
        )
        + "\n"
        for i, row in enumerate(rows)
    ]


def read_jsonl(path: Path) -> Iterator:
    """Return the rows that `write_jsonl` wrote."""
    with path.open() as file:
        yield from map(json.loads, file)


def write_jsonl(path: Path, rows) -> None:
    """Write a row a line."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
