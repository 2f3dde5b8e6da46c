"""Lines of text about what adaptive verification measured and chose."""

from __future__ import annotations

from collections import Counter

from draftlab.engine.adaptive_costs import padded_size
from draftlab.engine.adaptive_policy import AdaptivePolicy
from draftlab.engine.engine import Engine
from draftlab.evaluate.load import LoadRun


def choices(engine: Engine, run: LoadRun) -> list[str]:
    """Return the numbers of drafts of the measured steps, and the costs and lengths behind them."""
    policy = engine.adaptive and engine.adaptive.policy
    if not isinstance(policy, AdaptivePolicy):
        return []
    steps = Counter(drafts for g in run.measured for drafts, _ in g.steps)
    total = max(steps.total(), 1)
    shares = ", ".join(f"{k}: {100 * n / total:.0f} %" for k, n in sorted(steps.items()))
    rows = padded_size(engine.input_batch, engine.input_batch.num_slots)
    whole = [f for f in policy.families if f.share == 1 and not f.confidence]
    ms = ", ".join(f"{f.k}: {policy.costs.ms(f, rows):.3f}" for f in whole)
    costs = policy.admissions
    admissions = "; ".join(
        f"{k}: " + ", ".join(f"{n} {ms:.2f} / {costs.host[k][n]:.2f}" for n, ms in each.items())
        for k, each in sorted(costs.device.items())
    )
    ratios = ", ".join(f"{f.k}: {policy.times.ratio(f, rows):.2f}" for f in whole)
    return [
        f"steps by their drafts: {shares}; answers of {policy.answer_tokens:.0f} tokens",
        f"measured ms of a step by K: {ms}; of the host: {policy.host_ms:.3f}",
        f"measured ms of admissions by K and requests, device / host: {admissions}",
        f"wall time over modelled time by K: {ratios}",
    ]
