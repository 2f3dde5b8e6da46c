"""Answers decoded by an installed vLLM, in a process of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from types import TracebackType

from draftlab.engine.sampling import Generation, Request
from draftlab.progress import Monitor
from draftlab.target_model.metadata import TargetMetadata
from draftlab.text.settings import RegenerateSettings
from draftlab.vllm.engine import generation
from draftlab.vllm.process import VllmProcess

PASS_TOKENS = 8192
"""That vLLM computes at once; longer prompts go in pieces."""


class VllmAnswers:
    """A `regenerate.Decode`. vLLM is started when the first answers are asked of it.

    It is started anew when a request is longer than what it was started for, with twice the room
    or more. Leaving the block ends it.
    """

    def __init__(
        self, target: TargetMetadata, settings: RegenerateSettings, monitor: Monitor
    ) -> None:
        self.target, self.settings, self.monitor = target, settings, monitor
        self._process: VllmProcess | None = None
        self._room = 0

    def __enter__(self) -> VllmAnswers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.close()

    def __call__(self, requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        """Yields the answers in the order of the requests, which share all but temperature and
        length; each is sampled with a seed made of its own seed and id, whatever shares its batch.
        """
        process, first = self._started(max_length), requests[0]
        answer = process.ask(
            {
                "prompts": [list(r.prompt_ids) for r in requests],
                "top_k": first.sampling.top_k,
                "top_p": first.sampling.top_p,
                "stop_token_ids": sorted(first.stop_ids),
                "each": [
                    {
                        "temperature": r.sampling.temperature,
                        "seed": _seed(r),
                        "max_new_tokens": r.max_new_tokens,
                    }
                    for r in requests
                ],
            }
        )
        columns = ("outputs", "finish_reasons", "times", "per_prompt")
        for request, *found in zip(requests, *(answer[c] for c in columns), strict=True):
            yield generation(request, 0, *found)

    def _started(self, max_length: int) -> VllmProcess:
        """A vLLM with room for requests of `max_length` positions."""
        if self._process is not None and max_length <= self._room:
            return self._process
        if self._process is not None:
            self._process.close()
            self._process = None
        target = self.target
        self._room = min(1 << (max_length - 1).bit_length(), target.max_length)
        self._process = VllmProcess(
            {
                "target": str(target.folder.resolve()),
                "dtype": str(target.dtype).removeprefix("torch."),
                "max_model_len": self._room,
                "max_num_seqs": self.settings.batch,
                "engine_extra": {
                    "max_num_batched_tokens": max(PASS_TOKENS, self.settings.batch),
                    "enable_prefix_caching": True,  # rounds of a conversation, several samples
                    "trust_remote_code": target.settings.trust_remote_code,
                },
            },
            self.settings.vllm,
            target.device,
            target.settings.gpus,
        )
        self.monitor.say(self._process.line())
        return self._process


def _seed(request: Request) -> int:
    """Of a request's noise, a function of its seed and id."""
    text = f"{request.sampling.seed} {request.id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
