"""Prompts that the target writes itself: it continues its own user turn (Magpie, arXiv 2406.08464).

The chat template's text up to where a user's content begins is the prompt. What the target writes
up to the end of that turn is a prompt of the run, unless a filter drops it. Tries are numbered, and
the noise of a try depends on its number and the seed alone. They are decoded in pieces of fixed
size, so that neither an interruption nor the number of GPUs changes a prompt.

    prompts.partial.jsonl    what the prompts are made with, and a line for each decoded piece
    prompts.jsonl            conversations of one user turn
    prompts.json             what they are made with, and how many tries were dropped, and why
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from transformers import PreTrainedTokenizerBase

from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.files import canonical_json, parse_json, sha256_file, write_json
from draftlab.progress import Monitor
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.text.chat_template import (
    Arguments,
    Chat,
    control_tokens,
    encode,
    render_text,
    stop_ids,
    template_sha256,
    tokenizer_sha256,
)
from draftlab.text.conversations import Conversation, write_conversations
from draftlab.text.settings import SELF, PromptSettings

SELF_PROMPTS = "prompts.jsonl"
"""Name of the file in a run folder."""
TEMPERATURE = 0.8
"""Of the prompts: at 1.0 a target of 135 M parameters often loses its thread."""
MAX_TOKENS, MIN_TOKENS = 256, 4
"""Of a prompt, without the end of its turn."""
MIN_DISTINCT = 0.6
"""Smallest share of different 4-grams among those of a prompt."""
MOST_TRIES = 10
"""Tries for each prompt that is asked for, after which the run ends."""
_SENTINEL = "Xq7vZk"
"""A user's content that no template has in its own text."""

DecodePieces = Callable[[Sequence[list[Request]]], Iterator[list[Generation]]]
"""A function that decodes each of some pieces independently, and yields them in order."""


@dataclass(frozen=True)
class UserTurn:
    """Where a user's content stands in a chat.

    Attributes:
        prompt_ids: the tokens before it.
        end: the text that ends it: a control token, or the first line of what follows.
        stop_ids: the token that ends it, if one does.
    """

    prompt_ids: tuple[int, ...]
    end: str
    stop_ids: frozenset[int]


def find_user_turn(tokenizer: PreTrainedTokenizerBase, arguments: Arguments) -> UserTurn:
    """Return where a user's content stands in the target's chat template.

    Raises:
        UserError: the template does not show it, or refuses a chat of one user turn.
    """
    message = {"role": "user", "content": _SENTINEL}
    chat = Chat([message], arguments=arguments, generation_prompt=True)
    text = render_text(tokenizer, chat)
    before, *parts = text.split(_SENTINEL)
    if not before or len(parts) != 1 or not (after := parts[0].strip()):
        raise UserError(
            "expected a chat template with text before and after a user's content, so that the "
            f"target can write it, found {text[:200]!r}",
            where=f"prompts, the chat template of {tokenizer.name_or_path}",
            do="give a file of prompts, prompts.source=prompts.jsonl, without prompts.self_written",
        )
    control = control_tokens(tokenizer)
    token = control.match(after) if control else None
    stops = {tokenizer.convert_tokens_to_ids(token[0])} if token else set()
    end = token[0] if token else after.splitlines()[0]
    return UserTurn(encode(tokenizer, before.rstrip(" ")).ids, end, frozenset(stops))


class Filter:
    """Decides which tries become prompts, in their order.

    Attributes:
        kept: number of the try and text of each prompt.
        dropped: counts of the other tries, by reason.
        tries: number of both.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end: str, *, deduplicate: bool) -> None:
        self.tokenizer, self.end, self.deduplicate = tokenizer, end, deduplicate
        self.kept: list[tuple[int, str]] = []
        self.dropped, self.tries = Counter[str](), 0
        self._seen: set[str] = set()
        self._control = control_tokens(tokenizer)

    def add(self, token_ids: Sequence[int]) -> None:
        """Judge what the target wrote in the next try."""
        text = self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        text, is_ended, _ = text.partition(self.end)
        if reason := self._fault(text := text.strip(), token_ids, bool(is_ended)):
            self.dropped[reason] += 1
        else:
            self.kept.append((self.tries, text))
            self._seen.add(_words(text))
        self.tries += 1

    def _fault(self, text: str, token_ids: Sequence[int], is_ended: bool) -> str:
        """Return why a try is no prompt, or ""."""
        grams = list(zip(*(token_ids[i:] for i in range(4)), strict=False))
        faults = {
            "special tokens inside": self._control and self._control.search(text),
            f"no end within {MAX_TOKENS} tokens": not is_ended,
            "empty": not _words(text),
            f"fewer than {MIN_TOKENS} tokens": len(token_ids) <= MIN_TOKENS,
            "not valid UTF-8": "\ufffd" in text,
            "repeated 4-grams": len(set(grams)) < MIN_DISTINCT * len(grams),
            "equal to an earlier one": self.deduplicate and _words(text) in self._seen,
        }
        return next((reason for reason, is_fault in faults.items() if is_fault), "")

    def __str__(self) -> str:
        """Return how many tries there were, and how many were dropped, and why."""
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.most_common())
        return f"{self.tries:,} tries, of which were dropped: {dropped or 'none'}"


def _words(text: str) -> str:
    """Return the words of a text, which decide whether two prompts are equal."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def write_self_prompts(
    path: Path,
    target: Target | TargetMetadata,
    tokenizer: PreTrainedTokenizerBase,
    settings: PromptSettings,
    decode: DecodePieces,
    *,
    arguments: Arguments,
    piece: int,
    seed: int,
    monitor: Monitor,
) -> None:
    """Have the target write prompts into `path`, unless they are there.

    A second call resumes after the last whole piece. A piece has at most `piece` tries.

    Raises:
        UserError: too few tries become prompts, or `find_user_turn` raised it.
    """
    turn, number = find_user_turn(tokenizer, arguments), settings.num_self_written
    size = min(piece, math.ceil(1.25 * number))
    made_with = {
        "target": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "tokenizer": tokenizer_sha256(tokenizer),
        "template": template_sha256(tokenizer),
        "filter": [MAX_TOKENS, MIN_TOKENS, MIN_DISTINCT, settings.deduplicate],
        "temperature": TEMPERATURE,
        "seed": seed,
        "piece": size,
        "number": number,
        "prompt_ids": list(turn.prompt_ids),
    }
    manifest, partial = path.with_suffix(".json"), path.with_suffix(".partial.jsonl")
    if manifest.is_file() and path.is_file():
        written = parse_json(manifest.read_bytes())
        if (written["made_with"], written["sha256"]) == (made_with, sha256_file(path)):
            return
    tries = Filter(tokenizer, turn.end, deduplicate=settings.deduplicate)
    stops = turn.stop_ids | stop_ids(tokenizer, target.folder)
    room = min(MAX_TOKENS + 1, target.max_length - len(turn.prompt_ids))

    def requests(first: int) -> list[Request]:
        # The ids of the answers are others: equal ones would have equal noise.
        ids = (f"{SELF}-{number}/prompt" for number in range(first, first + size))
        sampling = Sampling(TEMPERATURE, seed=seed)
        return [Request(id_, turn.prompt_ids, room, sampling, stops) for id_ in ids]

    with open(partial, "a+b") as file:
        for tokens in _written_pieces(file, canonical_json(made_with).encode(), monitor):
            for ids in tokens:
                tries.add(ids)
        while len(tries.kept) < number:
            if tries.tries >= MOST_TRIES * max(number, size):
                raise UserError(
                    f"expected {number:,} prompts, found {len(tries.kept):,} in {tries}",
                    where="prompts",
                    do=f"have it write fewer (prompts.max_prompts with source={SELF}, else "
                    "prompts.self_written), or give a file of prompts",
                )
            share = max(len(tries.kept) / tries.tries, 0.1) if tries.tries else 0.8
            count = math.ceil((number - len(tries.kept)) / share / size)
            pieces = [requests(tries.tries + i * size) for i in range(count)]
            with closing(decode(pieces)) as decoded:
                for asked, generations in zip(pieces, decoded, strict=True):
                    written = {one.id: list(one.token_ids) for one in generations}
                    tokens = [written[request.id] for request in asked]
                    file.write(canonical_json(tokens).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                    for ids in tokens:
                        tries.add(ids)
                    monitor.progress("prompts", min(len(tries.kept), number), number)
                    if len(tries.kept) >= number:
                        break
    kept = ((f"{SELF}-{i}", {"role": "user", "content": text}) for i, text in tries.kept[:number])
    write_conversations(path, (Conversation(id_, [message], SELF) for id_, message in kept))
    counts = {"prompts": number, "tries": tries.tries, "dropped": dict(tries.dropped)}
    write_json(manifest, {"made_with": made_with, **counts, "sha256": sha256_file(path)})
    partial.unlink()
    monitor.say(f"prompts: the target wrote {number:,} as a user, in {tries}")


def _written_pieces(file: BinaryIO, header: bytes, monitor: Monitor) -> list[list[list[int]]]:
    """Return the whole pieces of a partial file; one that was made in another way is emptied."""
    file.seek(0)
    found, *lines = file.read().split(b"\n")[:-1] or [b""]
    try:
        pieces = [parse_json(line) for line in lines]
    except ValueError:
        found, pieces = b"", []
    if found != header:
        if found or lines:
            monitor.say(f"prompts: {file.name} was made in another way, and is written again")
        file.truncate(0)
        file.write(header + b"\n")
        return []
    file.truncate(sum(len(line) + 1 for line in (header, *lines)))
    if pieces:
        monitor.say(f"prompts: resuming after {sum(map(len, pieces)):,} tries")
    return pieces
