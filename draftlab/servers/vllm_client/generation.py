"""Decoding with vLLM, with or without drafts; its own counters and times."""

from __future__ import annotations

import dataclasses
from typing import Any

from .corrections import apply_corrections
from .loading import RequestError, engine_info, load_engine

COUNTERS = ("drafts", "draft_tokens", "accepted", "accepted_at")
_METRICS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


class Decoder:
    """A vLLM engine that decodes prompts."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self.k = setup["k"] if setup["draft"] else 0
        corrections = apply_corrections(setup["method"]) if self.k else []
        import vllm
        from vllm.config import SpeculativeConfig
        from vllm.engine.arg_utils import EngineArgs

        options: dict[str, Any] = {}
        self.per_request = "per_request_spec_decode_metrics" in _fields(EngineArgs)
        if self.k:
            options["speculative_config"] = self._speculative(SpeculativeConfig, vllm.__version__)
            if self.per_request:
                options["per_request_spec_decode_metrics"] = "detailed"
            elif setup["max_num_seqs"] > 1:
                raise RequestError(
                    f"vLLM {vllm.__version__} has no counters per request: use batch 1"
                )
        # Every prompt is prefilled in one piece, with its drafts.
        tokens = max(2048, (setup["max_model_len"] + self.k + 1) * setup["max_num_seqs"])
        self.llm = load_engine(
            setup, disable_log_stats=False, max_num_batched_tokens=tokens, **options
        )
        self.info = engine_info(self.llm, corrections)

    def _speculative(self, config: Any, version: str) -> dict[str, Any]:
        """Return vLLM's speculative_config."""
        setup, fields = self.setup, _fields(config)
        options = {"model": setup["draft"], "method": setup["method"], **setup["speculative_extra"]}
        options["num_speculative_tokens"] = self.k
        if "draft_sample_method" in fields:
            options["draft_sample_method"] = "probabilistic" if setup["draft_probs"] else "greedy"
        elif setup["draft_probs"]:
            raise RequestError(
                f"vLLM {version} does not know draft_sample_method, so it cannot verify with draft "
                "probabilities; use a newer one, or turn them off"
            )
        return options | ({"parallel_drafting": True} if setup["parallel_drafting"] else {})

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Decode the prompts of a request, in batches or one after the other."""
        from vllm import SamplingParams

        check_request(request, self.setup)
        sampling = [
            SamplingParams(
                temperature=options["temperature"],
                top_k=options.get("top_k") or 0,
                top_p=options.get("top_p") or 1.0,
                max_tokens=options["max_new_tokens"],
                seed=options.get("seed", 0) if options["temperature"] > 0 else None,
                stop_token_ids=sorted(options["stop_token_ids"]),
                ignore_eos=True,  # stop_token_ids contains it
                detokenize=False,
            )
            for options in request["sampling"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        size = 1 if self.setup["max_num_seqs"] == 1 else len(prompts)
        start = total = total_counters(self.llm, self.k)
        results, per_prompt = [], []
        for i in range(0, len(prompts), size):
            batch = self.llm.generate(prompts[i : i + size], sampling[i : i + size], use_tqdm=False)
            results += batch
            previous, total = total, total_counters(self.llm, self.k)
            if self.k and not self.per_request:
                per_prompt.append({**difference(previous, total), "steps": None})
            else:
                per_prompt += [request_counters(result.outputs[0], self.k) for result in batch]
        check_counters(difference(start, total), per_prompt)
        return {
            "outputs": [list(result.outputs[0].token_ids) for result in results],
            "finish_reasons": [result.outputs[0].finish_reason for result in results],
            "times": [request_times(result) for result in results],
            "per_prompt": per_prompt,
        }


def check_request(request: dict[str, Any], setup: dict[str, Any]) -> None:
    """Raise RequestError if vLLM would truncate an answer, or return wrong counters."""
    pairs = zip(request["prompts"], request["sampling"], strict=True)
    for index, (prompt, options) in enumerate(pairs):
        if len(prompt) + options["max_new_tokens"] > setup["max_model_len"]:
            raise RequestError(
                f"prompts[{index}]: {len(prompt)} tokens + {options['max_new_tokens']} new ones "
                f"exceed the {setup['max_model_len']} positions of max_model_len"
            )
        # vLLM pads such a prompt, where it joins a running batch, with k zeros as its drafts.
        if len(prompt) == 1 and setup["draft"] and setup["max_num_seqs"] > 1:
            raise RequestError(
                f"prompts[{index}]: vLLM miscounts prompts of one token in a batch; use batch 1"
            )


def _fields(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def total_counters(llm: Any, k: int) -> dict[str, Any]:
    """Return the counters of `LLM.get_metrics()` since the engine started."""
    total: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted": 0, "accepted_at": [0] * k}
    for metric in llm.get_metrics():
        if metric.name in _METRICS:
            total[_METRICS[metric.name]] += int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            pairs = zip(total["accepted_at"], metric.values, strict=True)
            total["accepted_at"] = [count + int(value) for count, value in pairs]
    return total


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the counters between two readings."""
    counts = {key: after[key] - before[key] for key in COUNTERS[:3]}
    pairs = zip(before["accepted_at"], after["accepted_at"], strict=True)
    return {**counts, "accepted_at": [b - a for a, b in pairs]}


def request_counters(completion: Any, k: int) -> dict[str, Any]:
    """Return one request's counters and accepted drafts per step (vLLM's per-request metrics)."""
    metrics = getattr(completion, "spec_decode_metrics", None)  # vLLM 0.20.2: not without drafts
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
    """Raise RuntimeError if vLLM's two sets of counters disagree: neither can be trusted then."""
    for key in COUNTERS:
        counts = [prompt[key] for prompt in per_prompt]
        summed = (
            [sum(c) for c in zip(*counts, strict=True)] if key == "accepted_at" else sum(counts)
        )
        if summed != total[key]:
            raise RuntimeError(
                f"counter {key}: get_metrics() says {total[key]}, the requests add up to {summed}"
            )


def request_times(result: Any) -> tuple[float, float] | None:
    """Return seconds from arrival to the first and to the last token; None if vLLM has none."""
    stats = getattr(result, "metrics", None)
    first = getattr(stats, "first_token_latency", 0.0)
    if not first:
        return None
    return first, first + stats.last_token_ts - stats.first_token_ts
