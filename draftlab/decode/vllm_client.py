"""Runs an installed vLLM on token ids and reports tokens, counters and times.

`decode/vllm.py` starts a copy of this file with the interpreter that has vLLM, so it imports
nothing of draftlab and nothing of draftlab's environment. It talks in JSON, one object a line: the
setup comes first on standard input and is answered when the engine is ready; every further line
asks for some prompts and is answered when they are decoded; the end of the input ends the program.
Answers go to what was standard output; whatever vLLM prints goes to standard error.

Setup (unknown keys are refused)::

    target               folder of the target model (required)
    draft                folder of the head, speculators or native format; null: no drafting
    method               "eagle3" (default) or another of vLLM's, which would otherwise guess it
    k                    drafted tokens a step
    draft_probs          whether drafts are sampled and verified with the head's probabilities
    parallel_drafting    true for P-EAGLE heads
    dtype                "float32" (default), "bfloat16", …
    max_model_len        positions a request may take
    max_num_seqs         requests that share a batch; 1: one after the other
    speculative_extra, engine_extra   more options of vLLM's speculative_config and LLM()

Ask: prompts (lists of token ids), temperature, top_k, top_p, seed (prompt i is sampled with
seed + i), max_new_tokens, stop_token_ids (all that ends an answer: vLLM knows no eos here).

Counters are vLLM's own. Those of `LLM.get_metrics()` and those of the requests must agree, or this
program fails; a vLLM without counters a request gives them prompt by prompt (max_num_seqs 1).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

# Read when vllm is imported. The caller's own choice wins.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One process: the counters live in it, and corrections made here reach the sampler.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SETUP: dict[str, Any] = {
    "target": None,
    "draft": None,
    "method": "eagle3",
    "k": 0,
    "draft_probs": False,
    "parallel_drafting": False,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 1,
    "speculative_extra": {},
    "engine_extra": {},
}
ASK: dict[str, Any] = {
    "prompts": None,
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "seed": 0,
    "max_new_tokens": 128,
    "stop_token_ids": [],
}
UNUSABLE, NO_VLLM = 2, 3
CORRECTION = (
    "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens replaced by repeat_interleave: the "
    "CPU build's own leaves its output uninitialised at temperatures above 0"
)
COUNTERS = ("drafts", "draft_tokens", "accepted", "accepted_at")


class RequestError(ValueError):
    """What cannot be run; the message says what to change."""


def filled(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`; unknown keys are refused."""
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise RequestError(f"unknown keys {unknown}; known are {', '.join(defaults)}")
    return {**defaults, **given}


def check_setup(setup: dict[str, Any]) -> dict[str, Any]:
    """The setup with defaults, refused where vLLM would fail late or run something else."""
    setup = filled(setup, SETUP)
    for key in ("target", "draft"):
        folder = setup[key]
        if (key == "target" or folder) and not (Path(folder or "") / "config.json").is_file():
            raise RequestError(f"{key}: expected a model folder with a config.json, found {folder}")
    if setup["draft"] and setup["k"] < 1:
        raise RequestError(f"k: expected at least 1 with a draft, found {setup['k']}")
    return setup


def check_ask(ask: dict[str, Any], setup: dict[str, Any]) -> dict[str, Any]:
    """An ask with defaults, refused where vLLM would cut short or count something else."""
    ask = filled(ask, ASK)
    for index, prompt in enumerate(ask["prompts"] or ()):
        if not prompt or not all(type(token) is int and token >= 0 for token in prompt):
            raise RequestError(f"prompts[{index}]: expected a non-empty list of token ids")
        length = len(prompt) + ask["max_new_tokens"]
        if length > setup["max_model_len"]:
            raise RequestError(
                f"prompts[{index}]: {len(prompt)} tokens + {ask['max_new_tokens']} new ones exceed "
                f"the {setup['max_model_len']} positions of max_model_len"
            )
        # vLLM pads such a prompt, where it joins a running batch, with k zeros as its drafts.
        if len(prompt) == 1 and setup["draft"] and setup["max_num_seqs"] > 1:
            raise RequestError(
                f"prompts[{index}]: vLLM miscounts prompts of one token in a batch; take batch 1"
            )
    if not ask["prompts"] or ask["max_new_tokens"] < 1:
        raise RequestError("expected prompts and max_new_tokens of at least 1")
    return ask


def correct_expand() -> None:
    """Replaces the CPU build's batch-to-token expansion (see CORRECTION)."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
        expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)
        if replace_from != replace_to:
            expanded = expanded.masked_fill(expanded == replace_from, replace_to)
        return expanded

    if not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        raise RequestError("expected rejection_sampler.expand_batch_to_tokens in this CPU build")
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def total_counters(llm: Any, k: int) -> dict[str, Any]:
    """Counters of `LLM.get_metrics()` since the engine started."""
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
    }
    found: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted": 0, "accepted_at": [0] * k}
    for metric in llm.get_metrics():
        if metric.name in names:
            found[names[metric.name]] += int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            pairs = zip(found["accepted_at"], metric.values, strict=True)
            found["accepted_at"] = [a + int(value) for a, value in pairs]
    return found


def since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Counters between two readings."""
    found = {key: after[key] - before[key] for key in COUNTERS[:3]}
    at = zip(before["accepted_at"], after["accepted_at"], strict=True)
    return {**found, "accepted_at": [b - a for a, b in at]}


def request_counters(completion: Any, k: int) -> dict[str, Any]:
    """One request's counters and accepted drafts a step, from vLLM's per-request metrics."""
    metrics = completion.spec_decode_metrics
    if metrics is None:  # no draft, or an answer that ended with the prefill's token
        return {"drafts": 0, "draft_tokens": 0, "accepted": 0, "accepted_at": [0] * k, "steps": []}
    histogram = list(metrics.histogram)
    return {
        "drafts": sum(histogram),
        "draft_tokens": int(metrics.num_draft_tokens),
        "accepted": sum(count * steps for count, steps in enumerate(histogram)),
        "accepted_at": [sum(histogram[position + 1 :]) for position in range(k)],
        "steps": list(metrics.per_step_accepted),
    }


def check_counters(total: dict[str, Any], per_prompt: list[dict[str, Any]]) -> None:
    """Fails when vLLM's two sets of counters disagree: then neither can be trusted."""
    for key in COUNTERS:
        parts = [prompt[key] for prompt in per_prompt]
        found = [sum(c) for c in zip(*parts, strict=True)] if key == "accepted_at" else sum(parts)
        if found != total[key]:
            raise RuntimeError(
                f"counter {key}: get_metrics() says {total[key]}, the requests add up to {found}"
            )


def request_times(result: Any) -> tuple[float, float] | None:
    """Seconds from arrival to the first and to the last token; None where vLLM tells none."""
    stats = getattr(result, "metrics", None)
    first = getattr(stats, "first_token_latency", 0.0)
    if not first:
        return None
    return first, first + stats.last_token_ts - stats.first_token_ts


class Served:
    """vLLM with its engine loaded, and what it is called."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import vllm
        from vllm.config import SpeculativeConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform

        self.vllm, self.setup = vllm, setup
        self.k = setup["k"] if setup["draft"] else 0
        on_cpu = current_platform.is_cpu()
        self.corrections = []
        if on_cpu and self.k:  # greedy decoding passes it by
            correct_expand()
            self.corrections.append(CORRECTION)
        options: dict[str, Any] = {}
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        self.per_request = "per_request_spec_decode_metrics" in known
        if self.k:
            options["speculative_config"] = self._speculative(SpeculativeConfig)
            if self.per_request:
                options["per_request_spec_decode_metrics"] = "detailed"
            elif setup["max_num_seqs"] > 1:
                raise RequestError(
                    f"vLLM {vllm.__version__} counts no single request: take batch 1"
                )
        self.llm = vllm.LLM(
            model=setup["target"],
            dtype=setup["dtype"],
            enforce_eager=on_cpu,
            enable_prefix_caching=False,
            disable_log_stats=False,
            skip_tokenizer_init=True,  # ids in, ids out
            generation_config="vllm",  # the model's own sampling defaults must not leak in
            max_model_len=setup["max_model_len"],
            max_num_seqs=setup["max_num_seqs"],
            # Room for every prompt in one piece, with its drafts.
            max_num_batched_tokens=max(
                2048, (setup["max_model_len"] + self.k + 1) * setup["max_num_seqs"]
            ),
            **options,
            **setup["engine_extra"],
        )
        second = getattr(self.llm.llm_engine.vllm_config, "use_v2_model_runner", False)
        self.info = {
            "version": vllm.__version__,
            "runner": "V2" if second else "V1",
            "device": current_platform.device_type,
            "corrections": self.corrections,
        }

    def _speculative(self, config: Any) -> dict[str, Any]:
        setup, known = self.setup, {field.name for field in dataclasses.fields(config)}
        chosen = {"model": setup["draft"], "method": setup["method"], **setup["speculative_extra"]}
        chosen["num_speculative_tokens"] = self.k
        if "draft_sample_method" in known:
            chosen["draft_sample_method"] = "probabilistic" if setup["draft_probs"] else "greedy"
        elif setup["draft_probs"]:
            raise RequestError(
                f"vLLM {self.vllm.__version__} does not know draft_sample_method, so it cannot "
                "verify with draft probabilities; take a newer one, or turn them off"
            )
        return chosen | ({"parallel_drafting": True} if setup["parallel_drafting"] else {})

    def decode(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Decodes one ask: in batches, or one prompt after the other."""
        sampling = [
            self.vllm.SamplingParams(
                temperature=ask["temperature"],
                top_k=ask["top_k"] or 0,
                top_p=ask["top_p"] or 1.0,
                max_tokens=ask["max_new_tokens"],
                seed=ask["seed"] + index if ask["temperature"] > 0 else None,
                stop_token_ids=sorted(ask["stop_token_ids"]),
                ignore_eos=True,  # stop_token_ids says it all
                detokenize=False,
            )
            for index in range(len(ask["prompts"]))
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in ask["prompts"]]
        size = 1 if self.setup["max_num_seqs"] == 1 else len(prompts)
        start = reading = total_counters(self.llm, self.k)
        results, per_prompt = [], []
        for at in range(0, len(prompts), size):
            done = self.llm.generate(
                prompts[at : at + size], sampling[at : at + size], use_tqdm=False
            )
            results += done
            last, reading = reading, total_counters(self.llm, self.k)
            if self.k and not self.per_request:
                per_prompt.append({**since(last, reading), "steps": None})
            else:
                per_prompt += [request_counters(result.outputs[0], self.k) for result in done]
        check_counters(since(start, reading), per_prompt)
        return {
            "outputs": [list(result.outputs[0].token_ids) for result in results],
            "finish_reasons": [result.outputs[0].finish_reason for result in results],
            "times": [request_times(result) for result in results],
            "per_prompt": per_prompt,
        }


def serve(lines: TextIO, answer: Callable[[dict[str, Any]], None]) -> int:
    """Reads the setup and asks from `lines` until they end; returns the exit status."""
    try:
        setup = check_setup(json.loads(lines.readline()))
        served = Served(setup)
        answer(served.info)
        for line in lines:
            answer(served.decode(check_ask(json.loads(line), setup)))
    except RequestError as error:
        print(f"vllm_client: {error}", file=sys.stderr)
        return UNUSABLE
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "vllm"):
            raise
        print(f"vllm_client: {error} in {sys.executable}", file=sys.stderr)
        return NO_VLLM
    return 0


def main() -> int:
    """Takes standard output for the answers, and sends everybody else's to standard error."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return serve(sys.stdin, lambda value: print(json.dumps(value), file=answers, flush=True))


if __name__ == "__main__":
    sys.exit(main())
