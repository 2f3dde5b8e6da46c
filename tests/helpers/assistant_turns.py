"""The answers of one conversation."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from draftlab.text.chat_template import Arguments, Chat, Messages, RenderError, Tools
from draftlab.text.conversations import Answer
from draftlab.text.loss_mask import find_turns


def assistant_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools | None = None,
    arguments: Arguments | None = None,
    *,
    where: str = "",
) -> list[Answer]:
    """Return the answers of one conversation, in order.

    Raises:
        RenderError: as `find_turns` yields it.
        UserError: as `find_turns`.
    """
    (result,) = find_turns(tokenizer, [(Chat(messages, tools, arguments or {}), where)])
    if isinstance(result, RenderError):
        raise result
    return result[1]
