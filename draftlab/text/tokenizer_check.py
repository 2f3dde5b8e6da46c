"""A check of a target's tokenizer, stop tokens and template arguments, before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftlab.errors import UserError
from draftlab.text.chat_template import (
    Arguments,
    RenderError,
    encode,
    render_text,
    stop_ids,
    unread_arguments,
)

PADDING = 0.02
"""Share of a vocabulary that may have no token, or of tokens that may have no embedding.

Vocabularies are padded, by 0.5 % in gpt-oss; Gemma 3 has a token for images beyond them."""


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    vocab_size: int,
    modes: Sequence[Arguments],
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
    outside = sorted(i for i in stop_ids(tokenizer, folder) if i >= vocab_size)
    if outside:
        raise UserError(
            f"expected stop tokens in the target's vocabulary of {vocab_size:,}, found {outside}",
            where=folder,
            do="correct eos_token_id in generation_config.json and the tokenizer's eos_token",
        )
    for arguments in modes:
        _check_template(tokenizer, arguments)
    warnings = []
    if not (1 - PADDING) * vocab_size <= len(tokenizer) <= (1 + PADDING) * vocab_size:
        warnings.append(
            f"warning: target: its tokenizer has {len(tokenizer):,} tokens and its vocabulary "
            f"{vocab_size:,}; is it another model's tokenizer?"
        )
    return warnings + [
        f"warning: target.template_arguments: the chat template does not read {name!r}"
        for name in unread_arguments(tokenizer, modes)
    ]


_PROMPT, _ANSWER = "What is 2 + 2?", "It is 4."


def _check_template(tokenizer: PreTrainedTokenizerBase, arguments: Arguments) -> None:
    """Check that a target is asked as it was tuned: its template writes what begins an answer.

    A template may do so without reading `add_generation_prompt`, as Llama 2's with [/INST].

    Raises:
        UserError: it does not, or it refuses every conversation.
    """
    user = {"role": "user", "content": _PROMPT}
    try:
        prompt = render_text(tokenizer, [user], arguments=arguments, generation_prompt=True)
        turns = [user, {"role": "assistant", "content": _ANSWER}]
        whole, plain = (
            render_text(tokenizer, chat, arguments=arguments) for chat in (turns, [user])
        )
    except RenderError:  # it may need a system turn, or none; `regenerate` reports each prompt
        return
    encode(tokenizer, prompt)
    beginning, answer, _ = whole.removeprefix(prompt).partition(_ANSWER)
    if prompt == plain and answer and whole.startswith(prompt) and beginning.strip():
        raise UserError(
            "expected a chat template that begins an answer for a generation prompt, found one "
            f"whose prompt ends before {beginning!r}",
            where=f"the chat template of {tokenizer.name_or_path}",
            do="let it write the beginning `{% if add_generation_prompt %}`, as the template that "
            "the model was published with",
        )
