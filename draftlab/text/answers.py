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
from itertools import islice
from pathlib import Path
from threading import Event, Lock
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
    left_out = Reasons()
    piece = 1 if isinstance(decode, ServerAnswers) else settings.piece
    with answers.open_partial(drafts.ids, piece) as (counts, file):
        throughput = _Throughput(monitor, drafts.num_turns, counts.answers)
        drafts.pieces = range(counts.lines, len(drafts.ids), piece)
        if answer_chunks is not None:
            finished = _in_order(answer_chunks, drafts, throughput)
        else:
            reader = target if isinstance(target, Target) else None
            generator = AnswerGenerator(tokenizer, settings, seed, stops, max_length, reader)
            if isinstance(decode, ServerAnswers):
                finished = _answer_at_server(generator, drafts, decode, throughput)
            else:
                finished = _answer_here(generator, drafts, decode, throughput)
        with throughput.said_if_interrupted(counts, piece), closing(finished):
            for chunk in finished:
                conversations = [_finished(draft) for draft in chunk]
                for draft in chunk:
                    if draft.answers and (turns := len(draft.rounds) - len(draft.answers)):
                        left_out.add(draft.end, draft.prompt.id, turns)
                for conversation in conversations:
                    counts.add(conversation)
                answers.append(file, conversations)
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
    known = counts.answers + counts.dropped_turns + left_out.counts.total()
    if earlier := drafts.num_turns - known:
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
    ahead, working = 2 * server.concurrency, Lock()

    def answer(chunk: list[Draft], stopped: Event) -> list[Draft]:
        def unlocked(requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
            working.release()
            try:
                (generation,) = (server.generate(one, max_length, stopped) for one in requests)
            finally:
                working.acquire()
            if not stopped.is_set():
                yield generation

        with working:
            if not stopped.is_set():
                generator.answer(chunk, unlocked, throughput.add_answer)
        return chunk

    coming = iter(chunks)
    with in_threads(answer, ahead) as submit:
        left = deque(map(submit, islice(coming, ahead)))
        while left:
            answered = list[Draft]()
            while left and (left[0].done() or not answered):
                if answered and left[0].exception():
                    break  # those before it are kept
                answered += left.popleft().result()
            left.extend(map(submit, islice(coming, len(answered))))
            yield answered


def _in_order(
    answer_chunks: AnswerChunks, chunks: Sequence[list[Draft]], throughput: _Throughput
) -> Iterator[list[Draft]]:
    """Yield the chunks in their order after other processes have answered them."""

    def count(chunk: list[Draft]) -> list[Draft]:
        for answer in (answer for draft in chunk for answer in draft.answers):
            throughput.add_answer(len(answer.token_ids))
        return chunk

    with closing(answer_chunks(chunks)) as answered:
        yield from in_order((number, count(chunk)) for number, chunk in answered)


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
) -> tuple[_Drafts, int]:
    """Return a draft per answerable prompt and sample; report and count the dropped prompts."""
    drafts = _Drafts(prompts, settings)
    dropped, omitted = Reasons(), Reasons()
    greedy, repeated = -1, 0  # the last prompt with a greedy answer; how many repeat such an answer
    control = control_tokens(tokenizer)
    chats = (Chat.of(prompt, split_rounds(prompt.messages)[0]) for prompt in prompts)
    rendered = zip(prompts, encode_prompts(tokenizer, chats), strict=True)
    numbered = ((i, s, *pair) for i, pair in enumerate(rendered) for s in range(settings.samples))
    for i, sample, conversation, encoded in numbered:
        id_ = answer_id(conversation.id, sample)
        if isinstance(encoded, RenderError):
            dropped.add(encoded.what, id_)
            continue
        if len(encoded.ids) >= max_length:
            dropped.add(no_room(max_length), id_)
            continue
        draft = drafts.add(i, sample, encoded.ids)
        if not draft.temperature:
            repeated += greedy == i
            greedy = i
        for message in (message for turns in draft.rounds for message in turns):
            if control and (found := control.search(message.get("content") or "")):
                omitted.add(f"their text has {found[0]!r}, read as a control token", id_)
        for role in omitted_roles(encoded.text, draft.rounds[0]):
            omitted.add(f"the chat template leaves out the {role} message", id_)
    for line in dropped.lines("answers: dropped", "prompt"):
        monitor.say(line)
    for line in omitted.lines("warning: answers:", "prompt"):
        monitor.say(line)
    if repeated:
        monitor.say(
            f"warning: answers: {repeated:,} of {len(drafts.ids):,} will repeat another greedy "
            "answer to their prompt: lower regenerate.samples, or add regenerate.temperatures "
            "above 0"
        )
    if not drafts.ids:
        reasons = "; ".join(dropped.counts)
        raise UserError(
            f"expected prompts the target can answer, found none: {reasons}",
            do="change the prompts, or the chat template (target.template_arguments)",
        )
    if len(set(drafts.ids)) < len(drafts.ids):  # one is that of a prompt's second or later answer
        id_ = Counter(drafts.ids).most_common(1)[0][0]
        raise UserError(
            f"expected ids for {settings.samples} answers a prompt that no other prompt has, found "
            f"{id_!r} twice",
            where="regenerate.samples",
            do="rename the prompts whose ids end in ~ and a number",
        )
    return drafts, dropped.counts.total()


class _Drafts(Sequence[list[Draft]]):
    """Pieces of all answerable prompts, which may be millions: each is made when it is taken.

    Attributes:
        ids: of the drafts, in order.
        num_turns: answers that they wait for.
        pieces: where the pieces begin, and how far apart.
    """

    def __init__(self, prompts: Sequence[Conversation], settings: RegenerateSettings) -> None:
        self._prompts, self._settings = prompts, settings
        self.ids, self.num_turns, self.pieces = list[str](), 0, range(0)
        # Of each draft: the number of its prompt, that of its sample, and its first request.
        self._drafts: list[tuple[int, int, array[int]]] = []

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, piece: Any) -> list[Draft]:
        start = self.pieces[piece]
        return [self._draft(n) for n in range(len(self.ids))[start : start + self.pieces.step]]

    def add(self, number: int, sample: int, token_ids: Sequence[int]) -> Draft:
        """Add the next draft, whose first request has these token ids: as every sample of it."""
        first = self._drafts[-1][2] if sample else array("i", token_ids)
        self._drafts.append((number, sample, first))
        draft = self._draft(len(self.ids))
        self.ids.append(draft.prompt.id)
        self.num_turns += len(draft.rounds)
        return draft

    def _draft(self, n: int) -> Draft:
        number, sample, first = self._drafts[n]
        prompt, temperatures = self._prompts[number], self._settings.temperatures
        return Draft(
            replace(prompt, id=answer_id(prompt.id, sample)),
            temperatures[(number + sample) % len(temperatures)],
            split_rounds(prompt.messages),
            first,
        )


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
