"""A target's own chat template and tokenizer: texts, ids and their places, identities, stop ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftlab.errors import UserError
from draftlab.files import canonical_json, read_json, sha256_text

Messages = Sequence[Mapping[str, Any]]
"""[{"role": "system" | "user" | "assistant" | "tool", "content": text}, …]; an assistant's may also
have `reasoning_content` (text) and `tool_calls` ([{"function": {"name", "arguments": {…}}}])."""
Tools = Sequence[dict[str, Any]]
"""JSON schemas of the functions that a conversation's answers may call."""

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# What tokenizers disagree about: cases, digits, indentation, line ends, contractions, accents.
_PROBE = "It's  1234567 OK:\n\n\tdef f(x):\r\n        return x  # naïve “日本語” 👩‍💻\n"


class RenderError(UserError):
    """A conversation that cannot be rendered with trusted answer spans; others may be fine."""


@dataclass(frozen=True)
class Encoded:
    """A rendered text, its token ids, and where in the text each token lies: (start, end)."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The Jinja source of the template that chats are rendered with.

    Raises:
        UserError: when the tokenizer has none.
    """
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            "expected a target with a chat template, found a tokenizer without a (default) one",
            where=tokenizer.name_or_path,
            do="draftlab renders chats only with the target's own template: use the chat model's "
            "folder, or put the template it was tuned with beside the tokenizer as "
            "chat_template.jinja",
        ) from None


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools | None = None,
    *,
    generation_prompt: bool = False,
) -> str:
    """The conversation as the template writes it, optionally ready for the next answer."""
    return _jinja(tokenizer, messages, tools, generation_prompt=generation_prompt, marks=False)[0]


def marked_blocks(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools | None = None
) -> list[tuple[int, int]] | None:
    """Character ranges of the text inside `{% generation %}`; None when none was met."""
    return _jinja(tokenizer, messages, tools, generation_prompt=False, marks=True)[1] or None


def _named(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under each of the names that templates read."""
    thoughts = message.get("reasoning_content")
    return dict(message) if thoughts is None else {**message, "thinking": thoughts}


def _jinja(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools | None,
    *,
    generation_prompt: bool,
    marks: bool,
) -> tuple[str, list[tuple[int, int]]]:
    # What `apply_chat_template` calls. Its token mask is not enough here: adjacent answers melt
    # into one run, and an answer whose first character has no token silently loses its mask.
    source = chat_template(tokenizer)
    if not messages:
        raise RenderError("expected a conversation that begins with another turn than an answer")
    try:
        texts, blocks = render_jinja_template(
            conversations=[[_named(message) for message in messages]],
            tools=list(tools) if tools else None,
            chat_template=source,
            return_assistant_tokens_mask=marks and _MARKER.search(source) is not None,
            add_generation_prompt=generation_prompt,
            **tokenizer.special_tokens_map,
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise RenderError(f"the target's chat template refuses the conversation: {error}") from None
    return texts[0], [(start, end) for start, end in blocks[0]] if blocks else []


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """Token ids of a rendered text; nothing is added, the template writes its own specials."""
    if not tokenizer.is_fast:
        raise UserError(
            f"expected a fast tokenizer (tokenizer.json), found {type(tokenizer).__name__}",
            where=tokenizer.name_or_path,
            do="convert it with transformers' AutoTokenizer and save_pretrained",
        )
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = tuple((start, end) for start, end in out["offset_mapping"])
    return Encoded(text, tuple(out["input_ids"]), offsets)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of control tokens: the named specials and every added token marked special."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex SHA-256 of the chat template's source."""
    return sha256_text(chat_template(tokenizer))


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex SHA-256 of vocabulary, special ids and a probe text's ids.

    Not of tokenizer.json: its layout changes with the library's version, its meaning does not.
    """
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    vocabulary = sorted(tokenizer.get_vocab().items())
    return sha256_text(canonical_json([vocabulary, sorted(special_ids(tokenizer)), list(probe)]))


def stop_ids(
    tokenizer: PreTrainedTokenizerBase, source: GenerationConfig | Path | None
) -> frozenset[int]:
    """The ids that end an answer: the tokenizer's eos and the generation config's, as vLLM has it.

    Args:
        source: a generation config, or the target's folder (its generation_config.json, else the
            eos_token_id of its config.json).

    Raises:
        UserError: when there is none, so that no answer would ever end.
    """
    if isinstance(source, Path):
        names = ("generation_config.json", "config.json")
        file = next((source / name for name in names if (source / name).is_file()), None)
        found = read_json(file, kind="target's configuration").get("eos_token_id") if file else None
    else:
        found = source.eos_token_id if source is not None else None
    listed = found if isinstance(found, list) else [found]
    stops = frozenset(int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None)
    if not stops:
        raise UserError(
            "expected an eos_token_id in the target's generation config or tokenizer, found none",
            where=source if isinstance(source, Path) else tokenizer.name_or_path,
            do="name the token that ends its answers in generation_config.json",
        )
    return stops
