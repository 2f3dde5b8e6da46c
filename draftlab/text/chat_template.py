"""The chat template is applied here, with the target's tokenizer: prompts, stop ids, hashes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from draftlab.errors import UserError
from draftlab.files import canonical_json, read_fields, sha256_text
from draftlab.target_model.image_files import MARK, Images, content_parts
from draftlab.target_model.images import process
from draftlab.target_model.settings import FOLDER, ROWS
from draftlab.text.template_process import BATCH, Fault, render_template

if TYPE_CHECKING:
    from draftlab.text.conversations import Conversation

Messages = Sequence[Mapping[str, Any]]
"""[{"role": "system" | "user" | "assistant" | "tool", "content": text}, …]; an assistant's may also
have `reasoning_content` (text) and `tool_calls` ([{"function": {"name", "arguments": {…}}}])."""
Tools = Sequence[dict[str, Any]]
"""JSON schemas of the functions that the answers may call."""
Arguments = Mapping[str, Any]
"""Values of the template's variables by name."""

QUESTION = "What is 2 + 2?"
"""A user's message whose rendering shows the template."""
# Text that tokenizers split differently: digits, indentation, line ends, contractions, accents.
PROBE = "It's  1234567 OK:\n\n\tdef f(x):\r\n        return x  # naïve “日本語” 👩‍💻\n"


class RenderError(UserError):
    """The error of one conversation that the template cannot render reliably."""


@dataclass(frozen=True)
class Chat:
    """A conversation to render, with the generation prompt if an answer is to follow."""

    messages: Messages
    tools: Tools | None = None
    arguments: Arguments = field(default_factory=dict)
    generation_prompt: bool = False
    images: Images = ()

    @classmethod
    def of(cls, conversation: Conversation, messages: Messages | None = None) -> Chat:
        """Return a conversation with its tools and arguments; `messages` replace its own."""
        own = conversation.messages if messages is None else messages
        arguments, images = conversation.template_arguments, conversation.images
        return cls(own, conversation.tools, arguments, images=images)


@dataclass(frozen=True)
class Encoded:
    """A rendered text, its token ids, and the character range (start, end) of each token.

    A prompt has no ranges, which take as long as the ids.
    """

    text: str
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...] = ()


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the Jinja source of the tokenizer's chat template; raise a `UserError` if the
    tokenizer has no chat template.
    """
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            "expected a target with a chat template, found a tokenizer without a (default) one",
            where=tokenizer.name_or_path,
            do="draftlab renders chats only with the target's own template: use the chat model's "
            "folder, or add the template that it was tuned with as chat_template.jinja",
        ) from None


def render(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]
) -> Iterator[str | RenderError]:
    """Yield the text of each conversation, or why the template has none, in order.

    Many conversations take a third of the time of as many calls. The text is that of
    `apply_chat_template`.

    Raises:
        UserError: the template can render no conversation, or a conversation has it exceed its
            limits or do what a template must not.
    """
    named, source = tokenizer.special_tokens_map, chat_template(tokenizer)
    if not chats:
        return
    try:
        parts = _reads_parts_only(tokenizer, source)
    except Fault as fault:
        raise _template_error(tokenizer, chats[0], fault) from None
    results = render_template(source, (_variables(chat, named, parts=parts) for chat in chats))
    for chat, result in zip(chats, results, strict=True):
        if not chat.messages:
            yield RenderError("expected a turn before the first answer, found none")
        elif isinstance(result, str):
            yield result
        elif result.kind == "conversation":
            reason = f"the target's chat template refuses the conversation: {result.reason}"
            yield RenderError(reason)
        else:
            raise _template_error(tokenizer, chat, result)


def _template_error(tokenizer: PreTrainedTokenizerBase, chat: Chat, fault: Fault) -> UserError:
    where = f"the chat template of {tokenizer.name_or_path}"
    if fault.kind == "syntax":
        what, where = f"is not a Jinja template: {fault.reason}", f"{where}, line {fault.line}"
    else:
        begin = str(chat.messages[-1].get("content") or "")[:40]
        what, where = f"is refused: {fault.reason}", f"{where}, for a chat that ends with {begin!r}"
    return UserError(
        f"the target's chat template {what}",
        where=where,
        do="use the template that the model was published with, as chat_template.jinja in its "
        "folder",
    )


def rendered(result: str | RenderError) -> str:
    """Return what was rendered, or raise why it was not."""
    if isinstance(result, RenderError):
        raise result
    return result


def render_text(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """Return one rendered conversation.

    Raises:
        RenderError: the template cannot render this conversation.
        UserError: as `render`.
    """
    (result,) = render(tokenizer, [chat])
    return rendered(result)


@lru_cache(maxsize=8)
def _reads_parts_only(tokenizer: PreTrainedTokenizerBase, source: str) -> bool:
    """Return whether a template writes the parts of a content and no text, as Idefics 3's does."""
    probe = Chat([{"role": "user", "content": "☃"}], generation_prompt=True)
    for parts in (False, True):
        variables = _variables(probe, tokenizer.special_tokens_map, parts=parts)
        (result,) = render_template(source, [variables])
        if isinstance(result, str):
            if "☃" in result:
                return parts
        elif result.kind != "conversation":
            raise result  # which is not cached
    return False


def _variables(chat: Chat, named: Mapping[str, str], *, parts: bool) -> dict[str, Any]:
    """Return the variables of a template, among them the named special tokens."""
    return {
        "messages": [_for_template(message, parts) for message in chat.messages],
        "tools": list(chat.tools) if chat.tools else None,
        "documents": None,
        "add_generation_prompt": chat.generation_prompt,
        **named,
        **chat.arguments,
    }


def _for_template(message: Mapping[str, Any], parts: bool) -> dict[str, Any]:
    """Return a message as a template reads it: its reasoning is also under `thinking`.

    Args:
        parts: whether a text without images becomes a list of one part, too.
    """
    found = dict(message)
    if (reasoning := message.get("reasoning_content")) is not None:
        found["thinking"] = reasoning
    content = message.get("content")
    if isinstance(content, str) and MARK in content:
        found["content"] = content_parts(content)
    elif parts and isinstance(content, str):
        found["content"] = [{"type": "text", "text": content}]
    return found


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, offsets: bool = True, images: Images = ()
) -> Encoded:
    """Tokenize a rendered text without adding special tokens: the template has written them.

    The target's processor writes the tokens of its images; all are at the first one's characters.

    Raises:
        RenderError: it has a token without an embedding, as Gemma 3 has one for images; or the
            processor changes other tokens than the images'.
    """
    ((ids, ranges),) = _tokenize(tokenizer, [text], offsets=offsets)
    return _encoded(tokenizer, text, ids, ranges, images)


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, offsets: bool
) -> list[tuple[tuple, tuple]]:
    """Return ids and, if asked for, character ranges of texts, which threads share."""
    if not tokenizer.is_fast:
        raise UserError(
            f"expected a fast tokenizer (tokenizer.json), found {type(tokenizer).__name__}",
            where=tokenizer.name_or_path,
            do="convert it with transformers' AutoTokenizer and save_pretrained",
        )
    if not texts:
        return []
    out = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=offsets, verbose=False)
    ranges = out.get("offset_mapping", [()] * len(texts))
    return [(tuple(i), tuple(map(tuple, r))) for i, r in zip(out["input_ids"], ranges, strict=True)]


def _encoded(tokenizer: Any, text: str, ids: tuple, ranges: tuple, images: Images) -> Encoded:
    """Return a tokenized text, with the tokens of its images."""
    if images:
        ids, ranges = _with_images(tokenizer, text, images, ids, ranges)
    rows = getattr(tokenizer, ROWS, None)
    if rows and (last := max(ids, default=0)) >= rows:
        name = tokenizer.convert_ids_to_tokens(last)
        raise RenderError(f"their text has {name!r}, for which the target has no embedding")
    return Encoded(text, ids, ranges)


def _with_images(tokenizer: Any, text: str, images: Images, ids: tuple, ranges: tuple) -> tuple:
    """Return ids and character ranges of a text with the tokens of its images."""
    try:
        found = tuple(process(getattr(tokenizer, FOLDER), images, text)["input_ids"][0].tolist())
    except UserError as error:
        raise RenderError(error.what, where=error.where, do=error.do) from None
    before = count_equal(ids, found)
    after = count_equal(ids[before:][::-1], found[before:][::-1])
    if not ranges:
        return found, ()
    inner = ranges[before : before + 1] * (len(found) - before - after)
    return found, (*ranges[:before], *inner, *ranges[len(ids) - after :])


def count_equal(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many first items are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, chats: Iterable[Chat]
) -> Iterator[Encoded | RenderError]:
    """Yield conversations with the generation prompt, as `render`, of which there may be many."""
    prompts = (replace(chat, generation_prompt=True) for chat in chats)
    while batch := list(islice(prompts, BATCH)):
        results = list(render(tokenizer, batch))
        texts = [one for one in results if isinstance(one, str)]
        tokenized = iter(_tokenize(tokenizer, texts, offsets=False))
        for chat, result in zip(batch, results, strict=True):
            try:
                text = rendered(result)
                yield _encoded(tokenizer, text, *next(tokenized), chat.images)
            except RenderError as error:
                yield error


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools | None = None,
    arguments: Arguments | None = None,
) -> tuple[int, ...]:
    """Return the token ids of the conversation with the generation prompt."""
    text = render_text(tokenizer, Chat(messages, tools, arguments or {}, generation_prompt=True))
    return encode(tokenizer, text, offsets=False).ids


def served_otherwise(
    tokenizer: PreTrainedTokenizerBase, served: Callable[[str], str | list[int] | None]
) -> bool:
    """Return whether a server has another chat template; False if that does not show.

    Args:
        served: returns a user's message in its template, as text or as token ids.
    """
    theirs, messages = served(QUESTION), [{"role": "user", "content": QUESTION}]
    try:
        if isinstance(theirs, str):
            bos = tokenizer.bos_token or ""
            ours = render_text(tokenizer, Chat(messages, generation_prompt=True))
            return theirs.removeprefix(bos) != ours.removeprefix(bos)
        return theirs is not None and theirs != list(prompt_ids(tokenizer, messages))
    except RenderError:  # some templates require a system message
        return False


def omitted_roles(text: str, messages: Messages) -> list[str]:
    """Return the roles of the messages whose content is not in a rendered text."""
    roles = {}
    for message in messages:
        content = (message.get("content") or "").rpartition("</think>")[2].strip()
        for part in map(str.strip, content.split(MARK)):
            if part not in text and json.dumps(part, ensure_ascii=False)[1:-1] not in text:
                roles[message["role"]] = True
    return list(roles)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens' names, which have their meaning in any text, too."""
    names = tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the named special tokens and of every added token marked special."""
    return _special_ids(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)  # some tokenizers have thousands, which take 13 ms to list
def _special_ids(tokenizer: PreTrainedTokenizerBase, _: int) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}


def unread_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Iterable[Arguments]
) -> list[str]:
    """Return the names among template arguments that the chat template does not read."""
    template = chat_template(tokenizer)
    names = dict.fromkeys(name for one in arguments for name in one)
    return [name for name in names if not re.search(rf"\b{name}\b", template)]


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hex SHA-256 of the chat template's source, without template arguments."""
    return sha256_text(chat_template(tokenizer))


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hex SHA-256 of the vocabulary, the special ids and a probe text's ids.

    The file tokenizer.json is not hashed, because its layout changes with the library's version.
    """
    return _tokenizer_sha256(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)  # a vocabulary of 128,256 tokens takes 0.4 s, in each stage
def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase, _: int) -> str:
    probe = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    vocabulary = sorted(tokenizer.get_vocab().items())
    return sha256_text(canonical_json([vocabulary, sorted(special_ids(tokenizer)), list(probe)]))


def answer_stops(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the stop ids of a loaded target's tokenizer; of another tokenizer its own one."""
    return _answer_stops(tokenizer, getattr(tokenizer, FOLDER, None))


@lru_cache(maxsize=8)
def _answer_stops(tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> frozenset[int]:
    if folder is None and tokenizer.eos_token_id is None:
        return frozenset()
    return stop_ids(tokenizer, folder)


def stop_ids(tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> frozenset[int]:
    """Return the ids that end an answer: the tokenizer's and the generation config's, as in vLLM.

    Args:
        folder: the target's; its generation_config.json, else its config.json, has eos_token_id.

    Raises:
        UserError: there is none, so no answer would ever end.
    """
    files = (folder / name for name in ("generation_config.json", "config.json") if folder)
    file, kind = next(filter(Path.is_file, files), None), "target's configuration"
    eos = read_fields(file, {}, kind=kind).get("eos_token_id") if file else None
    eos_ids = eos if isinstance(eos, list) else [eos]
    ids = (*eos_ids, tokenizer.eos_token_id)
    stops = frozenset(i for i in ids if type(i) is int and i >= 0)  # some write -1 for none
    if not stops:
        raise UserError(
            "expected an eos_token_id in the target's generation config or tokenizer, found none",
            where=folder or tokenizer.name_or_path,
            do="name the token that ends its answers in generation_config.json",
        )
    return stops
