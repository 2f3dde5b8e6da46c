"""Generate answers with a fake decoder, whose answers are a function of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request
from draftlab.progress import Monitor
from draftlab.servers.settings import RegenerateSettings
from draftlab.text.answers import regenerate
from draftlab.text.conversations import Conversation
from tests.helpers.messages import assistant, read_conversations, user
from tests.helpers.toys import toy_tokenizer

STOP = 285
SETTINGS = RegenerateSettings(piece=4, batch=2, max_new_tokens=6)


class FakeDecoder:
    """A decoder that records its requests and completes them in reverse order.

    An answer also depends on the other requests of its call, as rounding does on real machines:
    chunks must not depend on interruptions.
    """

    def __init__(self, *, fail_after: int | None = None) -> None:
        self.requests: list[Request] = []
        self.remaining = fail_after

    def __call__(self, requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        for request in reversed(requests):
            if self.remaining is not None:
                self.remaining -= 1
                if self.remaining < 0:
                    raise KeyboardInterrupt
            assert len(request.prompt_ids) + request.max_new_tokens <= max_length
            self.requests.append(request)
            call_key = sum(r.id.encode()[-1] for r in requests) + len(requests)
            temperature = int(request.sampling.temperature * 10)
            key = [sum(request.id.encode()), temperature, len(request.prompt_ids), call_key]
            rng = np.random.default_rng(key)
            ids = rng.integers(256, 281, size=int(rng.integers(0, 9))).tolist()
            ids = ([*ids, STOP])[: request.max_new_tokens]
            finish = "stop" if ids[-1] == STOP else "length"
            yield Generation(request.id, tuple(ids), finish, Counters(0), (), (), 0.0, 0.0)


def fake_target(max_length: int = 512) -> Any:
    return SimpleNamespace(
        folder=Path("nowhere"), fingerprint="f", dtype=torch.float32, max_length=max_length
    )


def prompts(count: int = 10) -> list[Conversation]:
    """Return conversations; every third has two rounds and a given answer."""
    extra = [assistant("given"), user("again")]
    return [
        Conversation(f"p{i}", [user(f"write {i}"), *(extra if i % 3 == 1 else [])], "test")
        for i in range(count)
    ]


def generate(path: Path, decoder: FakeDecoder | None = None, **changes: Any) -> list[Conversation]:
    """Write answers with a fake target and decoder, and read them.

    `changes` replace arguments of `regenerate`.
    """
    arguments = {
        "target": fake_target(),
        "tokenizer": toy_tokenizer(),
        "prompts": prompts(),
        "settings": SETTINGS,
        "seed": 1,
        "monitor": Monitor(),
        "decode": decoder or FakeDecoder(),
    }
    regenerate(path=path, **arguments | changes)
    return read_conversations(path)
