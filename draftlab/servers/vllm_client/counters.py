"""vLLM's own counters and times, of all requests and of each request."""

from __future__ import annotations

from typing import Any

COUNTERS = ("drafts", "draft_tokens", "accepted", "accepted_at")
_METRICS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


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
