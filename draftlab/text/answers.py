"""Generate the target's own answers to the prompts (on-policy data), resumable bit by bit.

Prompts are answered in chunks of fixed size (`regenerate.piece`) and order, and each chunk is
decoded independently. The answers therefore do not depend on interruptions between chunks.
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
from draftlab.text.answer_workers import Decode, engine_decode, map_in_order
from draftlab.text.chat_template import (
    RenderError,
    prompt_ids,
    stop_ids,
    template_sha256,
    tokenizer_sha256,
)
from draftlab.text.conversations import Answer, Conversation, answer_id, write_conversations
from draftlab.text.prompts import select_answered
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
    extra_decoders: Sequence[Decode] = (),
) -> list[Conversation]:
    """Generate the answers to the prompts and write them to `path` (JSONL), in prompt order.

    Every assistant turn is generated anew, in rounds: a later turn answers the target's own earlier
    answers. A second call resumes where the first was interrupted, or reads the complete file.

    Args:
        target: may be None with `enabled: false`; `TargetMetadata` requires `decode`.
        seed: the seed of the sampling noise.
        decode: replaces the target's engine, as `settings.backend` says.
        extra_decoders: work in parallel to it. Each decodes whole chunks, so the answers do not
            depend on which one decodes a chunk.

    Returns:
        The answered conversations. Prompts that the template refuses, or that leave no room for an
        answer, are dropped and counted.

    Raises:
        UserError: the file has answers generated in another way, or no prompt can be answered.
    """
    if not settings.enabled:
        answered = select_answered(prompts, monitor)
        write_conversations(path, answered)
        monitor.say(f"answers: {len(answered):,} given conversations, not the target's own")
        return answered
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
        # Older answer files have no such key.
        **({} if settings.backend == "paged" else {"backend": settings.backend}),
    }
    answers = AnswerFile(path, identity, monitor)
    if (complete := answers.read_complete()) is not None:
        return complete
    drafts, num_dropped = _start_drafts(tokenizer, prompts, settings, target.max_length, monitor)
    num_turns = sum(len(draft.rounds) for draft in drafts)
    ids = [draft.prompt.id for draft in drafts]
    with answers.open_partial(ids, settings.piece) as (done, file):
        throughput = _Throughput(monitor, num_turns, sum(len(c.answers) for c in done))
        generator = _Generator(tokenizer, settings, seed, stops, target.max_length, throughput)
        starts = range(len(done), len(drafts), settings.piece)
        chunks = [drafts[start : start + settings.piece] for start in starts]
        decoders = [decode, *extra_decoders]
        finished = map_in_order(generator.answer, chunks, decoders, generator.stopped.set)
        with closing(finished):
            for chunk in finished:
                conversations = [draft.conversation() for draft in chunk]
                done += conversations
                answers.append(file, conversations)
        counts = _counts(done) | {"dropped": num_dropped}
        answers.complete(done, counts)
    if counts["answers"] < num_turns:
        monitor.say(
            f"answers: {num_turns - counts['answers']:,} later turns were left out: no room, or "
            "the template refuses them"
        )
    monitor.say(
        f"answers: {counts['answers']:,} with {counts['tokens']:,} tokens in "
        f"{counts['conversations']:,} conversations; {counts['unfinished']:,} reached their "
        f"length limit unfinished; {throughput.rate:,.0f} tokens/s"
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
    """A conversation whose answers are being generated.

    Attributes:
        rounds: the turns that precede each answer.
        messages: the conversation so far.
    """

    prompt: Conversation
    temperature: float
    rounds: list[list[dict[str, Any]]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def conversation(self) -> Conversation:
        """Return the answered conversation, without the turns after its last answer."""
        roles = [message["role"] for message in self.messages]
        while roles and roles[-1] != "assistant":
            roles.pop()
        return Conversation(
            self.prompt.id,
            self.messages[: len(roles)],
            self.prompt.source,
            self.temperature,
            tuple(self.answers),
            tools=self.prompt.tools,
        )


def _split_rounds(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the turns before each answer, without given answers.

    A tool's result answers a call that the target may not make, so the rounds end before it.
    """
    rounds: list[list[dict[str, Any]]] = [[]]
    for message in takewhile(lambda m: m["role"] != "tool", messages):
        if message["role"] != "assistant":
            rounds[-1].append(message)
        elif rounds[-1]:
            rounds.append([])
    return rounds if rounds[-1] else rounds[:-1]


def _start_drafts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Conversation],
    settings: RegenerateSettings,
    max_length: int,
    monitor: Monitor,
) -> tuple[list[_Draft], int]:
    """Return a draft per answerable prompt and sample; report and count the dropped prompts."""
    drafts: list[_Draft] = []
    dropped: Counter[str] = Counter()
    first: dict[str, str] = {}
    for (i, conversation), sample in product(enumerate(prompts), range(settings.samples)):
        temperature = settings.temperatures[(i + sample) % len(settings.temperatures)]
        prompt = replace(conversation, id=answer_id(conversation.id, sample))
        draft = _Draft(prompt, temperature, _split_rounds(prompt.messages))
        try:
            if len(prompt_ids(tokenizer, draft.rounds[0], prompt.tools)) < max_length:
                drafts.append(draft)
                continue
            reason = f"no room for an answer in the target's {max_length:,} positions"
        except RenderError as error:
            reason = error.what
        dropped[reason] += 1
        first.setdefault(reason, prompt.id)
    for reason, count in dropped.items():
        monitor.say(f"answers: dropped {count:,} prompts (first: {first[reason]}): {reason}")
    if not drafts:
        raise UserError("expected prompts the target can answer, found none: " + "; ".join(dropped))
    id_, count = Counter(draft.prompt.id for draft in drafts).most_common(1)[0]
    if count > 1:  # a prompt has the id of another prompt's second or later answer
        raise UserError(
            f"expected ids for {settings.samples} answers a prompt that no other prompt has, found "
            f"{id_!r} twice",
            where="regenerate.samples",
            do="rename the prompts whose ids end in ~ and a number",
        )
    return drafts, dropped.total()


class _Throughput:
    """Counts finished answers and tokens, and reports the progress. Threads may share it."""

    def __init__(self, monitor: Monitor, total: int, done: int) -> None:
        self.monitor, self.total, self.done = monitor, total, done
        self.tokens, self.started = 0, time.perf_counter()
        self._lock = Lock()

    @property
    def rate(self) -> float:
        """Return the tokens per second since the start of this process's work."""
        return self.tokens / max(time.perf_counter() - self.started, 1e-9)

    def add_answer(self, tokens: int) -> None:
        """Count one answer."""
        with self._lock:
            self.done += 1
            self.tokens += tokens
            self.monitor.progress("answers", self.done, self.total, f"{self.rate:,.0f} tokens/s")


@dataclass(frozen=True)
class _Generator:
    """Generates the answers of one chunk at a time; `stopped` makes it return early."""

    tokenizer: PreTrainedTokenizerBase
    settings: RegenerateSettings
    seed: int
    stops: frozenset[int]
    max_length: int
    throughput: _Throughput
    stopped: Event = field(default_factory=Event)

    def answer(self, chunk: list[_Draft], decode: Decode) -> None:
        """Generate the answers of a chunk, round by round."""
        for number in range(max(len(draft.rounds) for draft in chunk)):
            pending: dict[str, tuple[_Draft, Request]] = {}
            for draft in chunk:
                if request := self._request(draft, number):
                    pending[request.id] = draft, request
            if not pending:
                return
            requests = [request for _, request in pending.values()]
            max_length = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
            for generation in decode(requests, max_length):
                if self.stopped.is_set():
                    return
                self._add_answer(*pending[generation.id], generation)
                self.throughput.add_answer(len(generation.token_ids))

    def _request(self, draft: _Draft, number: int) -> Request | None:
        """Return the request of round `number`; None once a round could not be answered."""
        if not len(draft.answers) == number < len(draft.rounds):
            return None
        draft.messages += draft.rounds[number]
        try:
            ids = prompt_ids(self.tokenizer, draft.messages, draft.prompt.tools)
        except RenderError:
            return None
        room = self.max_length - len(ids)
        if room < 1:
            return None
        return Request(
            # The id is a key of the sampling noise, so each round has its own.
            f"{draft.prompt.id}/{number}" if number else draft.prompt.id,
            ids,
            min(self.settings.max_new_tokens, room),
            Sampling(draft.temperature, self.settings.top_k, self.settings.top_p, self.seed),
            self.stops,
        )

    def _add_answer(self, draft: _Draft, request: Request, generation: Generation) -> None:
        ids = generation.token_ids
        finish = "stop" if generation.finish == "stop" else "length"
        text = self.tokenizer.decode(
            list(ids[:-1] if finish == "stop" else ids),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        draft.messages.append({"role": "assistant", "content": text})
        draft.answers.append(Answer(request.prompt_ids, ids, finish))
