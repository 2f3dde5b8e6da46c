"""Generate the target's own answers to the prompts (on-policy data), resumable bit by bit.

Prompts are answered in chunks of fixed size (`regenerate.piece`; a server has one at a time) and
order, and each chunk is decoded independently. The answers therefore do not depend on interruptions
between chunks.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Condition, Event, Lock
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.engine.sampling import Generation, Request
from draftlab.errors import UserError
from draftlab.files import sha256_text
from draftlab.formatting import count_text
from draftlab.progress import Monitor
from draftlab.servers.connection import in_threads
from draftlab.servers.openai_answers import ServerAnswers
from draftlab.servers.settings import RegenerateSettings
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.text.answer_file import AnswerCounts, AnswerFile, DroppedPrompt
from draftlab.text.answer_rounds import AnswerGenerator, Draft, no_room
from draftlab.text.chat_template import (
    Chat,
    RenderError,
    control_tokens,
    encode_prompts,
    omitted_roles,
    served_otherwise,
    stop_ids,
    template_sha256,
    tokenizer_sha256,
)
from draftlab.text.conversations import (
    Conversation,
    Reasons,
    answer_id,
    split_rounds,
    write_conversations,
)
from draftlab.text.decode import Decode, engine_decode, in_order
from draftlab.text.prompts import select_answered

AnswerChunks = Callable[[Sequence[list[Draft]]], Iterator[tuple[int, list[Draft]]]]
"""A function that has other processes answer chunks. It yields the number of each chunk and the
answered chunk, in any order."""
MANY_UNFINISHED = 0.25
"""Share of answers that reached their length limit, from which on a line warns of it."""


def regenerate(
    target: Target | TargetMetadata | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Conversation],
    settings: RegenerateSettings,
    path: Path,
    *,
    seed: int,
    monitor: Monitor,
    decode: Decode | ServerAnswers | None = None,
    answer_chunks: AnswerChunks | None = None,
) -> None:
    """Generate the answers to the prompts and write them to `path` (JSONL), in prompt order.

    Every assistant turn is generated anew, in rounds: a later turn answers the target's own earlier
    answers, each as the message that a server would return for it. A second call resumes where the
    first was interrupted. Prompts that the template refuses, or that leave no room for an answer,
    are dropped and counted; so are those that a server refuses as too long.

    Args:
        target: may be None with `enabled: false`; `TargetMetadata` requires `decode`.
        seed: the seed of the sampling noise.
        decode: replaces the target's engine, as `settings.backend` says.
        answer_chunks: answers the chunks in place of this process. The answers do not depend on
            who answers a chunk.

    Raises:
        UserError: the file has answers generated in another way, or no prompt can be answered.
    """
    if not settings.enabled:
        answered = select_answered(prompts, monitor)
        write_conversations(path, answered)
        monitor.say(f"answers: {len(answered):,} given conversations, not the target's own")
        return
    if target is None:
        raise UserError(
            "expected a target to answer the prompts, found none",
            do="set regenerate.enabled=false for given answers",
        )
    if decode is None and answer_chunks is None:
        decode = engine_decode(target, settings.batch, monitor)
    stops, max_length = stop_ids(tokenizer, target.folder), target.max_length
    server: dict[str, Any] = {}
    if isinstance(decode, ServerAnswers):
        server["model"] = decode.model
        if decode.max_length is not None and decode.max_length < max_length:
            monitor.say(
                f"answers: the server allows {decode.max_length:,} tokens of the target's "
                f"{max_length:,}, for a prompt and its answer"
            )
            server["max_length"] = max_length = decode.max_length
        for connection in decode.connections:
            if served_otherwise(tokenizer, partial(connection.template, decode.model)):
                monitor.say(
                    f"warning: answers: the chat template of {connection.url} differs from the "
                    "target's files, by which it is asked here and the head is trained: its chats "
                    "have other prompts"
                )
    identity = {
        "target": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "tokenizer": tokenizer_sha256(tokenizer),
        "template": template_sha256(tokenizer),
        "stop_ids": sorted(stops),
        "prompts": sha256_text("\n".join(prompt.to_json() for prompt in prompts)),
        "seed": seed,
        **settings.model_dump(mode="json", exclude={"enabled", "backend", "vllm", "server"}),
        # Older answer files have no such key.
        **({} if settings.backend == "paged" else {"backend": settings.backend}),
        **server,
    }
    answers = AnswerFile(path, identity, monitor)
    if answers.is_complete():
        return
    drafts, num_dropped = _start_drafts(tokenizer, prompts, settings, max_length, monitor)
    num_turns = sum(len(draft.rounds) for draft in drafts)
    ids = [draft.prompt.id for draft in drafts]
    left_out = Reasons()
    piece = 1 if isinstance(decode, ServerAnswers) else settings.piece
    with answers.open_partial(ids, piece) as (counts, file):
        throughput = _Throughput(monitor, num_turns, counts.answers)
        starts = range(counts.lines, len(drafts), piece)
        chunks = [drafts[start : start + piece] for start in starts]
        del drafts
        if answer_chunks is not None:
            finished = _in_order(answer_chunks, chunks, throughput)
        else:
            generator = AnswerGenerator(tokenizer, settings, seed, stops, max_length)
            if isinstance(decode, ServerAnswers):
                finished = _answer_at_server(generator, chunks, decode, throughput)
            else:
                finished = _answer_here(generator, chunks, decode, throughput)
        with throughput.said_if_interrupted(counts, piece), closing(finished):
            for chunk in finished:
                conversations = [_finished(draft) for draft in chunk]
                for draft in chunk:
                    if draft.answers and (turns := len(draft.rounds) - len(draft.answers)):
                        left_out.add(draft.end, draft.prompt.id, turns)
                for conversation in conversations:
                    counts.add(conversation)
                answers.append(file, conversations)
                chunk.clear()  # the answers are on disk, and there may be millions
        if counts.answers:
            answers.complete(counts, num_dropped)
    for line in counts.dropped.lines("answers: dropped", "prompt"):
        monitor.say(line)
    if not counts.answers:
        reasons = "; ".join(counts.dropped.counts)
        raise UserError(
            f"expected prompts the server can answer, found none: {reasons}",
            where=answers.partial,
            do="shorten the prompts, or start the server with a longer context and delete this "
            "file, so that they are sent again",
        )
    if earlier := num_turns - counts.answers - counts.dropped_turns - left_out.counts.total():
        monitor.say(f"answers: left out {earlier:,} later turns before this command resumed")
    for line in left_out.lines("answers: left out", "later turn"):
        monitor.say(line)
    share = counts.unfinished / counts.answers
    if share >= MANY_UNFINISHED:
        monitor.say(
            f"warning: answers: {share:.0%} were cut at regenerate.max_new_tokens = "
            f"{settings.max_new_tokens:,} or at the target's last position, and a head does not "
            "learn from them how answers end: raise regenerate.max_new_tokens"
        )
    several = counts.answers != counts.conversations
    monitor.say(
        f"answers: {counts.answers:,}"
        + f" in {count_text(counts.conversations, 'conversation')}" * several
        + f", {counts.tokens:,} tokens; {counts.unfinished:,} ({share:.0%}) reached their length "
        "limit unfinished; "
        f"{throughput.rate:,.0f} tokens/s"
    )


def _answer_here(
    generator: AnswerGenerator,
    chunks: Sequence[list[Draft]],
    decode: Decode,
    throughput: _Throughput,
) -> Iterator[list[Draft]]:
    """Yield the chunks after this process has answered them."""
    for chunk in chunks:
        generator.answer(chunk, decode, throughput.add_answer)
        yield chunk


def _answer_at_server(
    generator: AnswerGenerator,
    chunks: Sequence[list[Draft]],
    server: ServerAnswers,
    throughput: _Throughput,
) -> Iterator[list[Draft]]:
    """Yield conversations, each of which is a chunk, in order, as many as are answered by then.

    Others go on behind one that takes long. One thread at a time does anything else than wait for
    the server.
    """
    ahead = 2 * server.concurrency
    room, working, yielded = Condition(), Lock(), 0

    def answer(job: tuple[int, list[Draft]], stopped: Event) -> list[Draft]:
        def unlocked(requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
            working.release()
            try:
                (generation,) = (server.generate(one, max_length, stopped) for one in requests)
            finally:
                working.acquire()
            if not stopped.is_set():
                yield generation

        number, chunk = job
        with room:  # by number: a semaphore could give all places to those after the one awaited
            room.wait_for(lambda: stopped.is_set() or number < yielded + ahead)
        with working:
            if not stopped.is_set():
                generator.answer(chunk, unlocked, throughput.add_answer)
        return chunk

    try:
        with in_threads(answer, list(enumerate(chunks)), ahead) as futures:
            left = deque(futures)
            while left:
                answered = list[Draft]()
                while left and (left[0].done() or not answered):
                    if answered and left[0].exception():
                        break  # those before it are kept
                    chunk = left.popleft().result()
                    answered += chunk
                    chunk.clear()  # the futures keep it
                with room:
                    yielded += len(answered)
                    room.notify_all()
                yield answered
    finally:
        with room:
            room.notify_all()


def _in_order(
    answer_chunks: AnswerChunks, chunks: Sequence[list[Draft]], throughput: _Throughput
) -> Iterator[list[Draft]]:
    """Yield the chunks in their order after other processes have answered them."""
    with closing(answer_chunks(chunks)) as answered:
        yield from in_order(_counted(answered, throughput))


def _counted(
    answered: Iterator[tuple[int, list[Draft]]], throughput: _Throughput
) -> Iterator[tuple[int, list[Draft]]]:
    """Yield what is answered after counting its tokens."""
    for number, chunk in answered:
        for draft in chunk:
            for answer in draft.answers:
                throughput.add_answer(len(answer.token_ids))
        yield number, chunk


def _finished(draft: Draft) -> Conversation | DroppedPrompt:
    """Return what the answer file has of a draft that is not answered any further."""
    if draft.answers:
        return draft.conversation()
    return DroppedPrompt(draft.prompt.id, draft.end, len(draft.rounds))


def _start_drafts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Conversation],
    settings: RegenerateSettings,
    max_length: int,
    monitor: Monitor,
) -> tuple[list[Draft], int]:
    """Return a draft per answerable prompt and sample; report and count the dropped prompts."""
    drafts: list[Draft] = []
    dropped, omitted = Reasons(), Reasons()
    greedy, repeated = -1, 0  # the last prompt with a greedy answer; how many repeat such an answer
    control = control_tokens(tokenizer)
    chats = (Chat.of(prompt, split_rounds(prompt.messages)[0]) for prompt in prompts)
    rendered = zip(prompts, encode_prompts(tokenizer, chats), strict=True)
    numbered = ((i, s, *pair) for i, pair in enumerate(rendered) for s in range(settings.samples))
    for i, sample, conversation, encoded in numbered:
        temperature = settings.temperatures[(i + sample) % len(settings.temperatures)]
        prompt = replace(conversation, id=answer_id(conversation.id, sample))
        if isinstance(encoded, RenderError):
            dropped.add(encoded.what, prompt.id)
            continue
        if len(encoded.ids) >= max_length:
            dropped.add(no_room(max_length), prompt.id)
            continue
        first = array("i", encoded.ids)  # there may be millions of prompts
        draft = Draft(prompt, temperature, split_rounds(prompt.messages), first)
        drafts.append(draft)
        if not temperature:
            repeated += greedy == i
            greedy = i
        for message in (message for turns in draft.rounds for message in turns):
            if control and (found := control.search(message.get("content") or "")):
                omitted.add(f"their text has {found[0]!r}, read as a control token", prompt.id)
        for role in omitted_roles(encoded.text, draft.rounds[0]):
            omitted.add(f"the chat template leaves out the {role} message", prompt.id)
    for line in dropped.lines("answers: dropped", "prompt"):
        monitor.say(line)
    for line in omitted.lines("warning: answers:", "prompt"):
        monitor.say(line)
    if repeated:
        monitor.say(
            f"warning: answers: {repeated:,} of {len(drafts):,} will repeat another greedy answer "
            "to their prompt: lower regenerate.samples, or add regenerate.temperatures above 0"
        )
    if not drafts:
        reasons = "; ".join(dropped.counts)
        raise UserError(
            f"expected prompts the target can answer, found none: {reasons}",
            do="change the prompts, or the chat template (target.template_arguments)",
        )
    id_, count = Counter(draft.prompt.id for draft in drafts).most_common(1)[0]
    if count > 1:  # a prompt has the id of another prompt's second or later answer
        raise UserError(
            f"expected ids for {settings.samples} answers a prompt that no other prompt has, found "
            f"{id_!r} twice",
            where="regenerate.samples",
            do="rename the prompts whose ids end in ~ and a number",
        )
    return drafts, dropped.counts.total()


class _Throughput:
    """Counts finished answers and tokens, and reports the progress."""

    def __init__(self, monitor: Monitor, total: int, done: int) -> None:
        self.monitor, self.total, self.done = monitor, total, done
        self.tokens, self.started = 0, time.perf_counter()

    @property
    def rate(self) -> float:
        """Return the tokens per second since the start of this process's work."""
        return self.tokens / max(time.perf_counter() - self.started, 1e-9)

    @contextmanager
    def said_if_interrupted(self, counts: AnswerCounts, piece: int) -> Iterator[None]:
        """Say what is kept and what is lost if a signal ends the block."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            lost = count_text(self.done - counts.answers, "finished answer")
            self.monitor.say(
                f"answers: {counts.answers:,} of {self.total:,} are kept; {lost} "
                + f"of the pieces of {piece:,} conversations that were being decoded " * (piece > 1)
                + "will be made again, so that the interruption changes no token"
                + " (regenerate.piece)" * (piece > 1)
            )
            raise

    def add_answer(self, tokens: int) -> None:
        """Count one answer."""
        self.done += 1
        self.tokens += tokens
        self.monitor.progress("answers", self.done, self.total, f"{self.rate:,.0f} tokens/s")
