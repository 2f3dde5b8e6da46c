"""The counters of a running vLLM, SGLang or llama.cpp: its Prometheus page, and differences of it.

Counters are totals of all requests since the server's start, whoever sent them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_POSITIONS = 1024
PROGRAMS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
"""Names of the programs, by the prefix of their metrics; /v1/models has it in `owned_by`."""
_SPEC = {
    "drafts": "spec_decode_num_drafts_total",
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "requests": "request_success_total",
        "tokens": "generation_tokens_total",
        "running": "num_requests_running",
        **_SPEC,
    },
    # SGLang counts the verify steps of all requests, and no accepted tokens.
    "sglang": {
        "requests": "num_requests_total",
        "tokens": "generation_tokens_total",
        "running": "num_running_reqs",
        "verify_steps": "spec_verify_calls_total",
    },
    "llamacpp": {"tokens": "tokens_predicted_total", "running": "requests_processing", **_SPEC},
}
_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_STARTED = "process_start_time_seconds"
_CACHE = re.compile(r'^vllm:cache_config_info\{(?:.*,)?cache_dtype="([\w.]{1,40})"', re.MULTILINE)
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")
_POSITION = re.compile(r'\bposition="(\d{1,6})"')
_SIX_DIGITS = 1e6
"""llama.cpp writes six digits of a counter, so that those above this are rounded."""


class CountersRestarted(Exception):
    """A counter is lower than before, or the server has another time of start."""


@dataclass(frozen=True)
class ServerCounters:
    """One reading of a server's counters, or the difference of two.

    Attributes:
        program: key of `PROGRAMS`.
        values: counters by the names that `Counters` has; `requests`, `tokens` (output) and
            `verify_steps`; and the gauge `running`. What the server does not state is missing.
        accepted_at: accepted drafts at each position.
        started: the server's time of start; None: it does not say.
        cache_dtype: of the KV cache, as vLLM says; "": unknown.
    """

    program: str
    values: Mapping[str, int]
    accepted_at: tuple[int, ...] = ()
    started: float | None = None
    cache_dtype: str = ""

    @property
    def rounded(self) -> bool:
        """Whether the server has rounded counters."""
        return self.program == "llamacpp" and max(self.values.values(), default=0) >= _SIX_DIGITS

    def since(self, before: ServerCounters) -> ServerCounters:
        """Return the difference to an earlier reading; the gauge is this reading's.

        Raises:
            CountersRestarted: the server restarted in between.
        """
        if before.program != self.program or before.started != self.started:
            raise CountersRestarted
        # llama.cpp has a position from its first accepted draft on, and other counters likewise.
        earlier = before.accepted_at + (0,) * (len(self.accepted_at) - len(before.accepted_at))
        if len(earlier) > len(self.accepted_at) or before.values.keys() - self.values.keys():
            raise CountersRestarted
        values = {
            name: value - (0 if name == "running" else before.values.get(name, 0))
            for name, value in self.values.items()
        }
        accepted_at = tuple(b - a for a, b in zip(earlier, self.accepted_at, strict=True))
        if min((*values.values(), *accepted_at), default=0) < 0:
            raise CountersRestarted
        return ServerCounters(self.program, values, accepted_at)

    def check_least(self, requests: int, tokens: int) -> None:
        """Check that a difference has at least so many of ours.

        Raises:
            CountersRestarted: it has fewer.
        """
        for name, ours in (("requests", requests), ("tokens", tokens)):
            if self.values.get(name, ours) < ours:
                raise CountersRestarted


def parse_counters(page: str) -> ServerCounters | None:
    """Return the counters of a Prometheus page; None: it is not of a known program.

    Samples of one name, such as those of several engines, are added.

    Raises:
        ValueError: a counter is no whole number, or a position is too large.
    """
    found: dict[str, float] = {}
    accepted: dict[int, int] = {}
    for line in page.splitlines():
        sample = _SAMPLE.fullmatch(line)
        prefix, _, name = sample[1].rpartition(":") if sample else ("", "", "")
        if sample is None or not (prefix in _NAMES or name == _STARTED):
            continue
        if name != _STARTED and name != _BY_POSITION and name not in _NAMES[prefix].values():
            continue
        value = float(sample[3])
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"expected {sample[1]} to be a counter, found {sample[3]}")
        if name == _BY_POSITION:
            position = _POSITION.search(sample[2] or "")
            if position is None or int(position[1]) >= MAX_POSITIONS:
                raise ValueError(f"expected {sample[1]} with a position, found {sample[2]!r:.80}")
            accepted[int(position[1])] = accepted.get(int(position[1]), 0) + int(value)
        else:
            found[sample[1]] = found.get(sample[1], 0.0) + value
    program = next((p for p in _NAMES if any(name.startswith(f"{p}:") for name in found)), None)
    if program is None:
        return None
    values = {
        field: int(found[f"{program}:{name}"])
        for field, name in _NAMES[program].items()
        if f"{program}:{name}" in found
    }
    positions = tuple(accepted.get(i, 0) for i in range(max(accepted, default=-1) + 1))
    cache = _CACHE.search(page)
    return ServerCounters(
        program, values, positions, found.get(_STARTED), cache[1] if cache else ""
    )
