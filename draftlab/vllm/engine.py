"""vLLM as an engine: the same prompts through an installed vLLM, with its own counters and times.

vLLM lives in an environment of its own. `vllm/vllm_client/` runs there and answers in JSON
lines; here its answers become the engine's `Generation`s. What vLLM does not tell stays empty:
`expected` is (), and of the steps only the accepted drafts are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request
from draftlab.errors import UserError
from draftlab.files import read_json
from draftlab.progress import Monitor
from draftlab.target_model.settings import VllmSettings
from draftlab.vllm.process import VllmProcess

COUNTERS = ("drafts", "draft_tokens", "accepted", "accepted_at")


def positions(requests: Sequence[Request], k: int, limit: int) -> int:
    """Positions vLLM needs so that its last drafts are real: 2 K + 1 more than answers reach.

    Nearer its limit vLLM verifies zeros in place of drafts and counts them
    (docs/benchmarks.md). `limit` is the target's own.
    """
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    return min(longest + 2 * k + 1, limit)


class VllmEngine:
    """A vLLM with its engine loaded; a context manager that ends it.

    Args:
        target: folder of the model.
        head: folder of the head, draftlab's own or the speculators layout; None decodes plainly.
        k, draft_probs: drafts a step, and whether they are sampled and verified with probabilities.
        dtype: of target and head.
        device: "cuda" sizes its memory; which build of vLLM is installed decides where it runs.
        batch: requests that share a batch; 1: one after the other.
        max_length: positions a request may take, see `positions`.

    Attributes:
        name: as rows call it: version, runner and device, "vllm 0.32.0 (V1, cpu)".
        version, runner: its own. corrections: what was mended in it, one sentence each.

    Raises:
        UserError: no vLLM, or one that does not start; with the end of what it printed.
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
                **_speculation(head),
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
        monitor.say(self._process.line())

    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        """Yields results in the order of the requests, which must ask for the same sampling.

        Counters are vLLM's; steps without drafts and tokens cut off follow from the number of
        tokens. Times run from a request's arrival.
        """
        if not requests:
            return
        first = requests[0]
        asked = {(r.sampling, r.max_new_tokens, r.stop_ids) for r in requests}
        if len(asked) > 1:
            raise ValueError("expected requests of one sampling, limit and set of stop tokens")
        answer = self._process.ask(
            {
                "prompts": [list(r.prompt_ids) for r in requests],
                "temperature": first.sampling.temperature,
                "top_k": first.sampling.top_k,
                "top_p": first.sampling.top_p,
                "seed": first.sampling.seed,
                "max_new_tokens": first.max_new_tokens,
                "stop_token_ids": sorted(first.stop_ids),
            }
        )
        columns = ("outputs", "finish_reasons", "times", "per_prompt")
        for request, *found in zip(requests, *(answer[c] for c in columns), strict=True):
            yield generation(request, self.k, *found)

    def close(self) -> None:
        """Ends the program; closing twice is fine."""
        self._process.close()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def drafting_method(config: dict[str, Any]) -> str:
    """How vLLM drafts with a head, by its config.json: it is not told by it (servers §1.0).

    A causal LM's own name stands for EAGLE's first generation; all others here are EAGLE3's kind.
    """
    names = config.get("architectures") or [""]
    return "eagle" if names[0] in ("LlamaForCausalLM", "Llama4ForCausalLM") else "eagle3"


def _speculation(head: Path | None) -> dict[str, Any]:
    """What a head's config.json, in either layout, says of how it drafts."""
    file = head and head / "config.json"
    if not file or not file.is_file():
        return {}  # the client says what is missing
    config = read_json(file, kind="head's config.json")
    return {
        "method": drafting_method(config),
        "parallel_drafting": config.get("mask_token_id") is not None,
    }


def generation(
    request: Request,
    k: int,
    tokens: list[int],
    finish: str,
    times: list[float] | None,
    counted: dict[str, Any],
) -> Generation:
    """One request's result from vLLM's answer.

    Raises:
        UserError: when vLLM keeps no times of requests.
    """
    if times is None:
        raise UserError(
            "expected vLLM to tell the times of a request, found none",
            where=f"prompt {request.id}",
            do="take a vLLM whose RequestOutput.metrics are filled in",
        )
    counters = Counters(k, *(counted[key] for key in COUNTERS))
    # Each step emits one token beside the accepted ones; the first token is the prefill's.
    surplus = 1 + counters.drafts + counters.accepted - len(tokens)
    counters.truncated_tokens = max(surplus, 0)
    counters.undrafted_steps = max(-surplus, 0)
    return Generation(
        request.id,
        tuple(tokens),
        finish,
        counters,
        (),
        _steps(k, counters, counted["steps"]) + ((0, 0),) * counters.undrafted_steps,
        times[0],
        times[1],
    )


def _steps(k: int, counters: Counters, accepted: list[int] | None) -> tuple[tuple[int, int], ...]:
    """(drafted, accepted) of each step; where vLLM tells no steps, as many empty pairs.

    vLLM tells how much was drafted in all: what is missing to K a step was cut by the length limit,
    so it is missing at the end.
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
