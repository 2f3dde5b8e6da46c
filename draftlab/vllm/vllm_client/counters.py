"""vLLM's own counters and times: of all requests, and of each."""

from __future__ import annotations

from typing import Any

COUNTERS = ("drafts", "draft_tokens", "accepted", "accepted_at")


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
