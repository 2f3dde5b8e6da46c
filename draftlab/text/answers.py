"""The target answers the prompts itself: on-policy conversations, resumable to the same bytes.

Prompts are answered in pieces of fixed size and order, each decoded on its own, so what a piece
contains does not depend on whether the process was interrupted between two of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product, takewhile
from pathlib import Path
from threading import Event, Lock
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.files import sha256_text
from draftlab.progress import Monitor
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.text.answer_file import AnswerFile
from draftlab.text.answer_workers import Decode, engine_decode
from draftlab.text.conversations import (
    Answer,
    Conversation,
    further_id,
    with_answers,
    write_conversations,
)
from draftlab.text.ordered_map import dealt
from draftlab.text.render import (
    RenderError,
    prompt_ids,
    stop_ids,
    template_sha256,
    tokenizer_sha256,
)
from draftlab.text.settings import RegenerateSettings


def regenerate(
    target: Target | TargetMetadata | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Conversation],
    settings: RegenerateSettings,
    path: Path,
    *,
    seed: int,
    monitor: Monitor,
    decode: Decode | None = None,
    others: Sequence[Decode] = (),
) -> list[Conversation]:
    """Answers the prompts and writes them to `path` (JSONL), in prompt order.

    Every assistant turn is written anew, in rounds: later ones answer to the target's own earlier
    ones. Called again, it continues where it stopped, or reads what is complete.

    Args:
        target: may be None with `enabled: false`; an `TargetMetadata` needs `decode`.
        seed: of the sampling noise.
        decode: what decodes instead of the target's engine, as `settings.backend` says.
        others: what decodes beside it. Each takes whole pieces, so who took one changes nothing.

    Returns:
        The answered conversations. Prompts the template refuses or that leave no room for an
        answer are dropped and counted.

    Raises:
        UserError: answers there were made otherwise, or no prompt can be answered.
    """
    if not settings.enabled:
        given = with_answers(prompts, monitor)
        write_conversations(path, given)
        monitor.say(f"answers: {len(given):,} given conversations, not the target's own")
        return given
    if target is None:
        raise UserError("expected a target to answer the prompts, found none")
    decode = decode or engine_decode(target, settings.batch)
    stops = stop_ids(tokenizer, target.folder)
    identity = {
        "target": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "tokenizer": tokenizer_sha256(tokenizer),
        "template": template_sha256(tokenizer),
        "stop_ids": sorted(stops),
        "prompts": sha256_text("\n".join(prompt.to_json() for prompt in prompts)),
        "seed": seed,
        **settings.model_dump(mode="json", exclude={"enabled", "backend", "vllm"}),
        # Answers from before there was another have no such key.
        **({} if settings.backend == "paged" else {"backend": settings.backend}),
    }
    answers = AnswerFile(path, identity, monitor)
    finished = answers.finished()
    if finished is not None:
        return finished
    drafts, dropped = _start(tokenizer, prompts, settings, target.max_length, monitor)
    asked = sum(draft.rounds for draft in drafts)
    with answers.progress([draft.prompt.id for draft in drafts], settings.piece) as (done, file):
        clock = _Clock(monitor, asked, sum(draft.rounds for draft in drafts[: len(done)]))
        writer = _Writer(tokenizer, settings, seed, stops, target.max_length, clock)
        starts = range(len(done), len(drafts), settings.piece)
        pieces = [drafts[start : start + settings.piece] for start in starts]
        with closing(
            dealt(writer.answer, pieces, [decode, *others], writer.stopped.set)
        ) as answered:
            for piece in answered:
                made = [draft.conversation() for draft in piece]
                done += made
                answers.append(file, made)
        counts = _counts(done) | {"dropped": dropped}
        answers.finish(done, counts)
    if counts["answers"] < asked:
        monitor.say(
            f"answers: {asked - counts['answers']:,} later turns were left out: no room, or the "
            "template refuses them"
        )
    monitor.say(
        f"answers: {counts['answers']:,} with {counts['tokens']:,} tokens in "
        f"{counts['conversations']:,} conversations; {counts['unfinished']:,} reached their "
        f"length limit unfinished; {clock.rate:,.0f} tokens/s"
    )
    return done


def _counts(conversations: list[Conversation]) -> dict[str, int]:
    answers = [answer for conversation in conversations for answer in conversation.answers]
    return {
        "conversations": len(conversations),
        "answers": len(answers),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "unfinished": sum(answer.finish == "length" for answer in answers),
    }


@dataclass
class _Draft:
    """A conversation being answered; `said` is what the next answer will answer to."""

    prompt: Conversation
    temperature: float
    groups: list[list[dict[str, Any]]]
    said: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Answers asked for."""
        return len(self.groups)

    def conversation(self) -> Conversation:
        """The answered conversation; turns after the last answer are left out."""
        count = max((i for i, m in enumerate(self.said) if m["role"] == "assistant"), default=-1)
        return Conversation(
            self.prompt.id,
            self.said[: count + 1],
            self.prompt.source,
            self.temperature,
            tuple(self.answers),
            tools=self.prompt.tools,
        )


def _groups(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The turns before each answer; given answers are left out, adjacent ones count once.

    A tool's result answers to a call that the target may not make: nothing is asked from there on.
    """
    groups: list[list[dict[str, Any]]] = [[]]
    for message in takewhile(lambda m: m["role"] != "tool", messages):
        if message["role"] != "assistant":
            groups[-1].append(message)
        elif groups[-1]:
            groups.append([])
    return groups if groups[-1] else groups[:-1]


def _start(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Conversation],
    settings: RegenerateSettings,
    max_length: int,
    monitor: Monitor,
) -> tuple[list[_Draft], int]:
    """The prompts that can be answered, and how many were dropped (reasons are printed)."""
    drafts: list[_Draft] = []
    dropped: Counter[str] = Counter()
    first: dict[str, str] = {}
    for (i, given), sample in product(enumerate(prompts), range(settings.samples)):
        temperature = settings.temperatures[(i + sample) % len(settings.temperatures)]
        prompt = replace(given, id=further_id(given.id, sample))
        draft = _Draft(prompt, temperature, _groups(prompt.messages))
        try:
            length = len(prompt_ids(tokenizer, draft.groups[0], prompt.tools))
        except RenderError as error:
            reason = error.what
        else:
            reason = f"no room for an answer in the target's {max_length:,} positions"
            if length < max_length:
                drafts.append(draft)
                continue
        dropped[reason] += 1
        first.setdefault(reason, prompt.id)
    for reason, count in dropped.items():
        monitor.say(f"answers: dropped {count:,} prompts (first: {first[reason]}): {reason}")
    if not drafts:
        raise UserError("expected prompts the target can answer, found none: " + "; ".join(dropped))
    id_, count = Counter(draft.prompt.id for draft in drafts).most_common(1)[0]
    if count > 1:  # ids of prompts are unique: it is a further answer's, too
        raise UserError(
            f"expected ids for {settings.samples} answers a prompt that no other prompt has, found "
            f"{id_!r} twice",
            where="regenerate.samples",
            do="rename the prompts whose ids end in ~ and a number",
        )
    return drafts, dropped.total()


@dataclass(frozen=True)
class _Writer:
    """What answers are written with; `stopped`: who writes stops, whatever is left undone."""

    tokenizer: PreTrainedTokenizerBase
    settings: RegenerateSettings
    seed: int
    stops: frozenset[int]
    max_length: int
    clock: _Clock
    stopped: Event = field(default_factory=Event)

    def answer(self, piece: list[_Draft], decode: Decode) -> None:
        """Writes a piece's answers, round by round."""
        for number in range(max(draft.rounds for draft in piece)):
            asked: dict[str, tuple[_Draft, Request]] = {}
            for draft in piece:
                request = self._request(draft, number)
                if request:
                    asked[request.id] = draft, request
            if not asked:
                return
            requests = [request for _, request in asked.values()]
            longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
            for generation in decode(requests, longest):
                if self.stopped.is_set():
                    return
                self._take(*asked[generation.id], generation)
                self.clock.tick(len(generation.token_ids))

    def _request(self, draft: _Draft, number: int) -> Request | None:
        # A turn that could not be answered ends its conversation.
        if not len(draft.answers) == number < draft.rounds:
            return None
        draft.said += draft.groups[number]
        try:
            ids = prompt_ids(self.tokenizer, draft.said, draft.prompt.tools)
        except RenderError:
            return None
        room = self.max_length - len(ids)
        if room < 1:
            return None
        return Request(
            # The noise's name: another one in each round.
            f"{draft.prompt.id}/{number}" if number else draft.prompt.id,
            ids,
            min(self.settings.max_new_tokens, room),
            Sampling(draft.temperature, self.settings.top_k, self.settings.top_p, self.seed),
            self.stops,
        )

    def _take(self, draft: _Draft, request: Request, generation: Generation) -> None:
        ids = generation.token_ids
        said = ids[:-1] if generation.finish == "stop" else ids
        text = self.tokenizer.decode(
            list(said), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        draft.said.append({"role": "assistant", "content": text})
        finish = "stop" if generation.finish == "stop" else "length"
        draft.answers.append(Answer(request.prompt_ids, ids, finish))


class _Clock:
    """Answers done and tokens per second of this process."""

    def __init__(self, monitor: Monitor, total: int, done: int) -> None:
        self.monitor, self.total, self.done = monitor, total, done
        self.tokens, self.started = 0, time.perf_counter()
        self._turn = Lock()

    @property
    def rate(self) -> float:
        """Tokens a second, of all the time since it began."""
        return self.tokens / max(time.perf_counter() - self.started, 1e-9)

    def tick(self, tokens: int) -> None:
        """Counts an answer, of whichever thread."""
        with self._turn:
            self.done += 1
            self.tokens += tokens
            self.monitor.progress("answers", self.done, self.total, f"{self.rate:,.0f} tokens/s")
