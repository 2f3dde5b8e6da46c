"""Prompt suites by name: public benchmarks, a file of conversations, or the embedded held-out set.

What is taken from each benchmark is what `vllm bench` takes: its first turn, and nothing else. The
order is the data's own (`vllm bench` shuffles), so a suite's start may be of one category.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import canonical_json, sha256_file, sha256_text
from draftlab.progress import Monitor
from draftlab.text.benchmark_files import Layout, Source, read_rows
from draftlab.text.conversations import EMBEDDED, PromptSettings, conversation_file, usable_prompts
from draftlab.text.render import RenderError, prompt_ids, template_sha256

__all__ = ["LAYOUTS", "RAW", "load_suite", "parse_source", "suite_sha256"]

RAW = "none (raw text)"
"""What stands for the template's hash where no template was applied."""

LAYOUTS = {
    "mt-bench": Layout("turns", "question_id", hub="philschmid/mt-bench", split="train"),
    "humaneval": Layout("prompt", "task_id", hub="openai/openai_humaneval", split="test"),
    "gsm8k": Layout("question", None, hub="openai/gsm8k", config="main", split="test"),
    "spec-bench": Layout(
        "turns",
        "question_id",
        get="give it as spec-bench:PATH, the question.jsonl of the Spec-Bench repository",
    ),
    "speed-bench": Layout(
        "messages",
        "question_id",
        subset="qualitative",
        get="give it as speed-bench:PATH, the folder that SPEED-Bench's prepare script writes",
        max_new_tokens=4096,
    ),
}
"""The benchmarks known by name."""

_HINT = (
    f"suites are {', '.join(EMBEDDED)}, {', '.join(LAYOUTS)} (each also as NAME:PATH[#category], "
    "speed-bench:FOLDER[#subset[/category]]), or a JSONL file of conversations"
)


@dataclass(frozen=True)
class Suite:
    """Prompts by id, as token ids of the target's template."""

    name: str
    template_sha256: str
    prompts: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def sha256(self) -> str:
        """Of ids and tokens."""
        return sha256_text(canonical_json(self.prompts))


def parse_source(source: str) -> Source | None:
    """A benchmark named by `source`; None for the embedded sets and files of conversations.

    "NAME", "NAME#category", "NAME:PATH", "NAME:PATH#category"; for a folder of SPEED-Bench
    "#subset" or "#subset/category".
    """
    name = next((n for n in LAYOUTS if source == n or source.startswith((f"{n}:", f"{n}#"))), None)
    if name is None:
        return None
    rest = source[len(name) :]
    text, part = rest[1:] if rest.startswith(":") else "", ""
    if rest.startswith("#"):
        part = rest[1:]
    elif "#" in text and not Path(text).expanduser().exists():  # a path may have one of its own
        text, _, part = text.rpartition("#")
    layout, path = LAYOUTS[name], Path(text).expanduser() if text else None
    subset = layout.subset if path is not None and path.is_dir() else None
    if subset is not None and part:
        subset, _, part = part.partition("/")
    return Source(name, layout, path, subset, part or None)


def load_suite(
    source: str,
    tokenizer: Any,
    monitor: Monitor,
    *,
    raw: bool = False,
    longest: int | None = None,
) -> Suite:
    """A prompt suite as token ids.

    Args:
        source: see `parse_source`; else "embedded:heldout" or a JSONL file of conversations, of
            which the turns before the first answer are taken.
        raw: encode the plain text as the tokenizer does by default (usually a bos before it); no
            chat template.
        longest: tokens a prompt may have; longer ones are left out, counted and printed.

    Raises:
        UserError: an unknown suite (the known ones are listed), a file of another layout, a prompt
            the template refuses, or nothing left.
    """
    named = parse_source(source)
    if named is None:
        chats = _conversations(source, monitor)
    else:
        rows = read_rows(named)
        chats = [(i, [{"role": "user", "content": text}]) for i, _, text in rows]
        kinds = Counter(category for _, category, _ in rows if category)
        counted = ", ".join(f"{kind} {count:,}" for kind, count in kinds.items())
        monitor.say(
            f"suite: {len(rows):,} prompts (first turns) of {source}"
            f"{f': {counted}' if counted else ''}; vllm bench lets each have "
            f"{named.layout.max_new_tokens:,} tokens, here eval.max_new_tokens decides"
        )
    encode = _raw_encoder(tokenizer) if raw else _chat_encoder(tokenizer)
    prompts = tuple((i, encode(f"{source}, prompt {i}", messages)) for i, messages in chats)
    return Suite(
        source,
        RAW if raw else template_sha256(tokenizer),
        _short_enough(prompts, longest, source, monitor),
    )


def suite_sha256(source: str) -> str | None:
    """Of the content of a suite's files; None when it comes from the Hub, where only names are."""
    named = parse_source(source)
    if named is None:
        _check_known(source)
        return sha256_file(conversation_file(source))
    files = named.files()
    return None if files is None else sha256_text(canonical_json([sha256_file(f) for f in files]))


def _check_known(source: str) -> None:
    if source not in EMBEDDED and not Path(source).expanduser().is_file():
        raise UserError("expected a prompt suite or a file, found neither", where=source, do=_HINT)


def _conversations(source: str, monitor: Monitor) -> list[tuple[str, list[dict[str, str]]]]:
    """The turns before the first answer of each conversation."""
    _check_known(source)
    chats = []
    for prompt in usable_prompts(PromptSettings(source=source, deduplicate=False), monitor):
        roles = [message["role"] for message in prompt.messages]
        end = roles.index("assistant") if "assistant" in roles else len(roles)
        chats.append((prompt.id, prompt.messages[:end]))
    return chats


Encoder = Callable[[str, list[dict[str, str]]], tuple[int, ...]]


def _chat_encoder(tokenizer: Any) -> Encoder:
    def encode(where: str, messages: list[dict[str, str]]) -> tuple[int, ...]:
        try:
            return prompt_ids(tokenizer, messages)
        except RenderError as error:
            raise UserError(error.what, where=where, do=error.do) from None

    return encode


def _raw_encoder(tokenizer: Any) -> Encoder:
    def encode(where: str, messages: list[dict[str, str]]) -> tuple[int, ...]:
        if [message["role"] for message in messages] != ["user"]:
            raise UserError(
                "expected one user turn as plain text, found "
                + ", ".join(message["role"] for message in messages),
                where=where,
                do="roles have no meaning without a chat template: leave raw off",
            )
        ids = tuple(tokenizer(messages[0]["content"], verbose=False)["input_ids"])
        if not ids:
            raise UserError("expected text, found a prompt without a token", where=where)
        return ids

    return encode


def _short_enough(
    prompts: tuple[tuple[str, tuple[int, ...]], ...],
    longest: int | None,
    source: str,
    monitor: Monitor,
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The prompts of at most `longest` tokens; what is left out is said."""
    if longest is None:
        return prompts
    kept = tuple(prompt for prompt in prompts if len(prompt[1]) <= longest)
    over = [(i, len(ids)) for i, ids in prompts if len(ids) > longest]
    if over:
        shown = ", ".join(f"{i} ({length:,})" for i, length in over[:5])
        line = (
            f"{len(over):,} of {len(prompts):,} prompts have more than the {longest:,} tokens that "
            f"leave room for an answer: {shown}{', …' if len(over) > 5 else ''}"
        )
        if not kept:
            raise UserError(
                f"expected prompts that fit, found none: {line}",
                where=source,
                do="lower eval.max_new_tokens, or take a target with a longer context",
            )
        monitor.say(f"error: suite: left out {line}")
    return kept
