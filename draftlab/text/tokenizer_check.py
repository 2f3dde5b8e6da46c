"""A check of a target's tokenizer, stop tokens and template arguments, before they are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from draftlab.errors import UserError
from draftlab.text.chat_template import (
    PROBE,
    QUESTION,
    Arguments,
    Chat,
    RenderError,
    encode,
    render_text,
    special_ids,
    stop_ids,
    unread_arguments,
)

PADDING = 0.02
"""Share of a vocabulary that may have no token, or of tokens that may have no embedding.

Vocabularies are padded, by 0.5 % in gpt-oss; Gemma 3 has a token for images beyond them."""


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: Path, vocab_size: int, modes: Sequence[Arguments]
) -> list[str]:
    """Return warnings about what a target's tokenizer and chat template do not fit.

    Args:
        folder: the target's.
        vocab_size: V of the target.
        modes: template arguments, those of `target.template_arguments`.

    Raises:
        UserError: no token ends an answer, or one that does is outside the target's vocabulary;
            there is no chat template, or it does not begin answers; the tokenizer is a slow one.
    """
    stops = stop_ids(tokenizer, folder)
    outside = sorted(i for i in stops if i >= vocab_size)
    if outside:
        raise UserError(
            f"expected stop tokens in the target's vocabulary of {vocab_size:,}, found {outside}",
            where=folder,
            do="correct eos_token_id in generation_config.json and the tokenizer's eos_token",
        )
    found = [_check_template(tokenizer, arguments, stops) for arguments in modes]
    warnings = [*dict.fromkeys(filter(None, found)), *_check_class(tokenizer, folder)]
    if not (1 - PADDING) * vocab_size <= len(tokenizer) <= (1 + PADDING) * vocab_size:
        warnings.append(
            f"warning: target: its tokenizer has {len(tokenizer):,} tokens and its vocabulary "
            f"{vocab_size:,}; is it another model's tokenizer?"
        )
    return warnings + [
        f"warning: target.template_arguments: the chat template does not read {name!r}"
        for name in unread_arguments(tokenizer, modes)
    ]


_ANSWER = "It is 4."


def _check_class(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Iterator[str]:
    """Yield a warning if transformers splits text otherwise than the target's tokenizer.json.

    It reads only the vocabulary of that file where tokenizer_config.json names a class of its own.
    """
    if not (file := folder / "tokenizer.json").is_file():
        return
    own = Tokenizer.from_file(str(file)).encode(PROBE, add_special_tokens=False).ids
    if own != tokenizer(PROBE, add_special_tokens=False, verbose=False)["input_ids"]:
        yield (
            f"warning: target: transformers reads its tokenizer as {type(tokenizer).__name__}, "
            "which gives other tokens than its tokenizer.json; if the target was trained with that "
            'file, write "tokenizer_class": "TokenizersBackend" into tokenizer_config.json'
        )


def _check_template(
    tokenizer: PreTrainedTokenizerBase, arguments: Arguments, stops: frozenset[int]
) -> str | None:
    """Check that a target is asked as it was tuned: its template writes what begins an answer.

    A template may do so without reading `add_generation_prompt`, as Llama 2's with [/INST].

    Returns:
        A warning if no token that the template writes behind an answer stops one.

    Raises:
        UserError: it does not, or it refuses every conversation.
    """
    user = {"role": "user", "content": QUESTION}
    try:
        asked = Chat([user], arguments=arguments)
        answered = replace(asked, messages=[user, {"role": "assistant", "content": _ANSWER}])
        chats = replace(asked, generation_prompt=True), answered, asked
        prompt, whole, plain = (render_text(tokenizer, chat) for chat in chats)
    except RenderError:  # it may need a system turn, or none; `regenerate` reports each prompt
        return None
    encode(tokenizer, prompt)
    beginning, answer, closing = whole.removeprefix(prompt).partition(_ANSWER)
    if prompt == plain and answer and whole.startswith(prompt) and beginning.strip():
        raise UserError(
            "expected a chat template that begins an answer for a generation prompt, found one "
            f"whose prompt ends before {beginning!r}",
            where=f"the chat template of {tokenizer.name_or_path}",
            do="let it write the beginning `{% if add_generation_prompt %}`, as the template that "
            "the model was published with",
        )
    behind = set(encode(tokenizer, closing).ids)
    if not answer or special_ids(tokenizer).isdisjoint(behind) or not stops.isdisjoint(behind):
        return None
    return (
        f"warning: target: its chat template ends answers with {closing.strip()!r}, which is no "
        "stop token, so that answers run on, as they do in servers: name the token in the "
        "eos_token_id of generation_config.json"
    )
