"""vLLM as a decoding engine: prompts through an installed vLLM, with its own counters and times.

vLLM runs in an environment of its own: `vllm_client/` is the program there, and its answers
become `Generation`s here. What vLLM does not report stays empty: `expected` is (), and of the steps
only the accepted drafts are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request, request_seed
from draftlab.errors import UserError
from draftlab.files import read_json
from draftlab.heads.family import families
from draftlab.progress import Monitor
from draftlab.servers.connection import answer_fault
from draftlab.servers.settings import RegenerateSettings
from draftlab.servers.vllm_client.generation import COUNTERS
from draftlab.servers.vllm_process import VllmProcess
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.settings import VllmSettings


def required_positions(requests: Sequence[Request], k: int, limit: int) -> int:
    """Return the positions that vLLM needs for real drafts at the end: 2 K + 1 after the answers.

    Closer to its limit, vLLM verifies zeros in place of drafts and counts them
    (docs/benchmarks.md). `limit` is the target's number of positions.
    """
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    return min(longest + 2 * k + 1, limit)


class VllmEngine:
    """A loaded vLLM engine; a context manager that ends its process.

    Args:
        target: folder of the model.
        head: folder of the head, in draftlab's own or the speculators layout; None: no drafting.
        k, draft_probs: drafts per step, and whether they are sampled and verified with the head's
            probabilities.
        dtype: of target and head.
        device: "cuda" limits its memory; the installed build of vLLM decides the device.
        batch: batch size; 1: one request after the other.
        max_length: maximum number of positions of a request, see `required_positions`.

    Attributes:
        name: version, runner and device as in reports: "vllm 0.32.0 (V1, cpu)".
        version, runner: vLLM's.
        corrections: the corrections made to vLLM, one sentence each.

    Raises:
        UserError: there is no vLLM, or it does not start; with the end of its output.
    """

    def __init__(
        self,
        target: Path,
        head: Path | None = None,
        *,
        k: int = 0,
        draft_probs: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        batch: int = 1,
        max_length: int,
        settings: VllmSettings | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        settings, monitor = settings or VllmSettings(), monitor or Monitor()
        self.k = k if head else 0
        self._process = VllmProcess(
            {
                "target": str(target.resolve()),
                "draft": str(head.resolve()) if head else None,
                "k": self.k,
                "draft_probs": draft_probs,
                **drafting_options(head),
                "dtype": str(dtype).removeprefix("torch."),
                "max_model_len": max_length,
                "max_num_seqs": batch,
            },
            settings,
            device,
        )
        info = self._process.info
        self.version, self.runner = info["version"], info["runner"]
        self.name = self._process.name
        self.corrections: tuple[str, ...] = tuple(info["corrections"])
        monitor.say(self._process.describe())

    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        """Yield the results in the order of the requests.

        Counters are vLLM's; steps without drafts and truncated tokens follow from the number of
        tokens. Times run from a request's arrival. Request i is sampled with the seed + i.
        """
        seeds = [request.sampling.seed + i for i, request in enumerate(requests)]
        yield from generate(self._process, requests, seeds, self.k)

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()


def drafting_method(config: dict[str, Any]) -> str:
    """Return vLLM's drafting method, which a head's config.json does not contain (servers §1.0).

    Heads of EAGLE's first generation have a causal LM's architecture. Architectures that no family
    names are EAGLE3's.
    """
    architecture = (config.get("architectures") or [""])[0]
    if architecture in ("LlamaForCausalLM", "Llama4ForCausalLM"):
        return "eagle"
    kind = config.get("speculators_model_type")
    for family in families():
        if architecture in family.architectures or (kind and kind == family.speculators_type):
            return family.vllm_method
    return "eagle3"


def drafting_options(head: Path | None) -> dict[str, Any]:
    """Return options of the client's setup by the config.json of a head in any layout."""
    if head is None:
        return {}
    config = read_json(head / "config.json", kind="head's config.json")
    return {
        "method": drafting_method(config),
        "parallel_drafting": config.get("mask_token_id") is not None,
    }


def generate(
    process: VllmProcess, requests: Sequence[Request], seeds: Sequence[int], k: int
) -> Iterator[Generation]:
    """Decode requests in a vLLM process, each with its seed, and yield the results in order."""
    if not requests:
        return
    answer = process.request(
        {
            "prompts": [list(request.prompt_ids) for request in requests],
            "sampling": [
                {
                    "temperature": request.sampling.temperature,
                    "top_k": request.sampling.top_k,
                    "top_p": request.sampling.top_p,
                    "seed": seed,
                    "max_new_tokens": request.max_new_tokens,
                    "stop_token_ids": sorted(request.stop_ids),
                }
                for request, seed in zip(requests, seeds, strict=True)
            ],
        }
    )
    columns = (answer[name] for name in ("outputs", "finish_reasons", "times", "per_prompt"))
    for request, *results in zip(requests, *columns, strict=True):
        yield to_generation(request, k, *results)


def to_generation(
    request: Request,
    k: int,
    tokens: list[int],
    finish: str,
    times: list[float] | None,
    counts: dict[str, Any],
) -> Generation:
    """Return one request's result from vLLM's answer.

    Raises:
        UserError: vLLM reports no times of requests.
    """
    if times is None:
        raise UserError(
            "expected vLLM to report the times of a request, found none",
            where=f"prompt {request.id}",
            do="use a vLLM that fills in RequestOutput.metrics",
        )
    counters = Counters(k, *(counts[key] for key in COUNTERS))
    # Each step emits one token after the accepted ones; the first token is the prefill's.
    surplus = 1 + counters.drafts + counters.accepted - len(tokens)
    counters.truncated_tokens = max(surplus, 0)
    counters.undrafted_steps = max(-surplus, 0)
    steps = _steps(k, counters, counts["steps"]) + ((0, 0),) * counters.undrafted_steps
    return Generation(request.id, tuple(tokens), finish, counters, (), steps, *times)


def _steps(k: int, counters: Counters, accepted: list[int] | None) -> tuple[tuple[int, int], ...]:
    """Return (drafted, accepted) of each step, or (0, 0) for each if vLLM reports no steps.

    vLLM reports the drafted tokens of all steps together. Those missing from K a step were cut by
    the length limit, so they are missing at the end.
    """
    if accepted is None:
        return ((0, 0),) * counters.drafts
    missing = k * counters.drafts - counters.draft_tokens
    steps = []
    for count in reversed(accepted):
        cut = min(missing, k - count)
        missing -= cut
        steps.append((k - cut, count))
    return tuple(reversed(steps))


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
