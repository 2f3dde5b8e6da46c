"""The tags of reasoning, for given answers whose chat template leaves them out.

The templates of DeepSeek R1, QwQ and Gemma 4 are made for prompts: of each earlier answer they
write the text alone. The target itself writes its reasoning first, in tags that its generation
prompt may open, or close at once where it is not to reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from draftlab.text.chat_template import Chat, chat_template, render_text

_MARK = "☃"


@dataclass(frozen=True)
class _Tags:
    """What a target writes around its reasoning.

    Attributes:
        mode: a text of the prompts that let the target reason.
    """

    begin: str
    end: str
    mode: str = ""


_TAGS = (
    _Tags("<think>\n", "\n</think>\n\n"),  # DeepSeek R1, QwQ
    _Tags("<think>", "</think>"),  # DeepSeek V3.1
    _Tags("<|channel>thought\n", "\n<channel|>", mode="<|think|>"),  # Gemma 4
)


def written_answer(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, prompt: str, reasoning: Sequence[str], text: str
) -> str | None:
    """Return a conversation's text in which the last answer is as the target writes it.

    Args:
        prompt: the text before the answer, with the generation prompt.
        reasoning, text: the parts of the answer.

    Returns:
        None: the generation prompt does not end in tags, or not in those of such an answer.
    """
    if not text or len(reasoning) > 1 or chat.messages[-1].get("tool_calls"):
        return None
    plain = replace(chat, messages=[*chat.messages[:-1], {"role": "assistant", "content": _MARK}])
    rendered = render_text(tokenizer, plain.messages, plain.tools, plain.arguments)
    header, _, closing = rendered.rpartition(_MARK)
    if not prompt.startswith(header):
        header = header.removesuffix("</think>")
    if not prompt.startswith(header):
        return None
    opened, template = prompt[len(header) :], chat_template(tokenizer)
    for tags in _TAGS:
        if reasoning and opened == tags.begin:
            return f"{prompt}{reasoning[0]}{tags.end}{text}{closing}"
        if reasoning and not opened and tags.end.strip() in template and tags.mode in prompt:
            return f"{prompt}{tags.begin}{reasoning[0]}{tags.end}{text}{closing}"
        if not reasoning and opened in (tags.begin + tags.end, tags.begin + tags.end.lstrip("\n")):
            return f"{prompt}{text}{closing}"
    return None
