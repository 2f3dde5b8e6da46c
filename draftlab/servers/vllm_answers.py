"""Answers to prompts, decoded by an installed vLLM in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from draftlab.engine.sampling import Generation, Request, request_seed
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers.connection import answer_fault
from draftlab.servers.settings import RegenerateSettings
from draftlab.servers.vllm_engine import generate
from draftlab.servers.vllm_process import VllmProcess
from draftlab.target_model.metadata import TargetMetadata

PASS_TOKENS = 8192
"""Maximum number of tokens of a forward pass; longer prompts are prefilled in chunks."""


class VllmAnswers:
    """A decoder for `draftlab.text.answers`; a context manager that ends vLLM.

    The first call starts vLLM. If a request needs more positions than vLLM was started with, it is
    started again with at least twice as many.
    """

    def __init__(
        self, target: TargetMetadata, settings: RegenerateSettings, monitor: Monitor
    ) -> None:
        self.target, self.settings, self.monitor = target, settings, monitor
        self._process: VllmProcess | None = None
        self._max_length = 0

    def __enter__(self) -> VllmAnswers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def __call__(self, requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        """Yield the answers in the order of the requests, none longer than `max_length` positions.

        A request's seed depends on its own seed and id alone, not on the rest of the batch.
        """
        process = self._process
        if process is None or max_length > self._max_length:
            self.__exit__()
            process = self._process = self._start(max_length)
        seeds = [request_seed(request) for request in requests]
        answers = generate(process, requests, seeds, 0)
        for request, answer in zip(requests, answers, strict=True):
            fault = answer_fault(
                list(answer.token_ids), self.target.vocab_size, request.max_new_tokens
            )
            if fault or answer.finish not in ("stop", "length"):
                raise UserError(
                    f"vLLM's answer to prompt {request.id!r} is none: "
                    + (fault or f"it ended by {answer.finish!r}"),
                    where=process.python,
                    do="answer with another version of vLLM, or with regenerate.backend=paged",
                )
            yield answer

    def _start(self, max_length: int) -> VllmProcess:
        target, batch = self.target, self.settings.batch
        self._max_length = min(1 << (max_length - 1).bit_length(), target.max_length)
        process = VllmProcess(
            {
                "target": str(target.folder.resolve()),
                "dtype": str(target.dtype).removeprefix("torch."),
                "max_model_len": self._max_length,
                "max_num_seqs": batch,
                "engine_extra": {
                    "max_num_batched_tokens": max(PASS_TOKENS, batch),
                    "enable_prefix_caching": True,  # for several turns, and several samples
                    "trust_remote_code": target.settings.trust_remote_code,
                },
            },
            self.settings.vllm,
            target.device,
            target.settings.gpus,
        )
        self.monitor.say(process.describe())
        return process
