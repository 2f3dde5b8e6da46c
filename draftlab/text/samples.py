"""From answered conversations to samples: token ids and answer spans, ready to be recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.store import Sample
from draftlab.text.conversations import Answer, Conversation
from draftlab.text.render import REGENERATE, RenderError, Turn, turns


def samples(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, monitor: Monitor
) -> list[Sample]:
    """Samples of conversations, in order; those without trusted spans are dropped and counted.

    The target's own answers keep the very tokens it read and wrote; given ones are rendered by its
    template. Where a later prompt does not begin with what was answered before (the template drops
    earlier reasoning, trims answers, or they tokenise differently), the later answers are samples
    of their own, `<id>#2`, `<id>#3` …, each with what the target saw.

    Raises:
        UserError: nothing is left.
    """
    taken: list[Sample] = []
    dropped: Counter[str] = Counter()
    first: dict[str, str] = {}
    for conversation in conversations:
        try:
            said = conversation.answers or turns(
                tokenizer, conversation.messages, conversation.tools, where=conversation.id
            )
            taken += _joined(conversation, said)
            if said:
                continue
            reason = "no assistant turn"
        except RenderError as error:
            reason = error.what
        dropped[reason] += 1
        first.setdefault(reason, conversation.id)
    # Reasons quote texts, so there may be many; the frequent ones tell.
    for reason, count in dropped.most_common(5):
        monitor.say(f"samples: dropped {count:,} (first: {first[reason]}): {reason}")
    if len(dropped) > 5:
        monitor.say(f"samples: dropped {dropped.total():,} in all")
    if not taken:
        reason = dropped.most_common(1)[0][0] if dropped else "there are no conversations"
        raise UserError(
            f"expected conversations with answers, found none to learn from: {reason}",
            where=first.get(reason, ""),
            do=REGENERATE,
        )
    twice = [i for i, count in Counter(sample.id for sample in taken).items() if count > 1]
    if twice:
        raise UserError(f"expected unique ids of samples, found {twice[0]!r} twice")
    return taken


def _joined(conversation: Conversation, said: Sequence[Answer | Turn]) -> Iterator[Sample]:
    """Samples of a conversation's answers: as few as exactness allows."""
    tokens: tuple[int, ...] = ()
    spans: list[int] = []
    answers, name = 0, conversation.id
    for number, answer in enumerate(said, 1):
        if tokens and answer.prompt_ids[: len(tokens)] != tokens:
            yield Sample(name, tokens, tuple(spans), conversation.temperature)
            tokens, spans, answers, name = (), [], 0, f"{conversation.id}#{number}"
        answers += 1
        spans += [0] * (len(answer.prompt_ids) - len(tokens)) + [answers] * len(answer.token_ids)
        tokens = answer.prompt_ids + answer.token_ids
    if tokens:
        yield Sample(name, tokens, tuple(spans), conversation.temperature)
