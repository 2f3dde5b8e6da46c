"""Drafts a step by load, chosen by what `draftlab bench` measured at one server."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.server_bench import KIND
from draftlab.files import read_json

Schedule = Sequence[tuple[int, int, int]]
"""(first, last number of requests at once, drafts a step), as vLLM reads it (servers §13)."""


def read_schedule(paths: Sequence[Path]) -> Schedule:
    """Return the drafts a step with the lowest TPOT at each number of requests at once.

    A number between two measured ones has the drafts of the nearer one, by their ratio.

    Args:
        paths: bench.json files of the same prompts, each of a server with another K; what they
            measured without drafts counts as K = 0.

    Raises:
        UserError: a file is none, they have other prompts or settings, or fewer than two numbers
            of requests or one K were measured.
    """
    times: dict[int, dict[int, float]] = defaultdict(dict)
    same: dict[tuple[Any, ...], Path] = {}
    for path in paths:
        content = read_json(path, kind="bench.json")
        try:
            settings = content["settings"] if content[KIND] else {}
            names = ("temperature", "max_new_tokens")
            same[content["suite"]["sha256"], *(settings[name] for name in names)] = path
            for point in content["points"]:
                _add(times, point, int((point["acceptance"] or {}).get("k", 0)))
                if point["plain"]:
                    _add(times, point["plain"], 0)
        except (KeyError, TypeError, ValueError, AttributeError):
            what = "expected a bench.json of draftlab, found another file"
            raise UserError(what, where=path, do="`draftlab bench` writes one") from None
    again = "bench a server of each K with the same prompts and concurrencies, such as 1,8,32"
    if len(same) > 1:
        what = "expected measurements of the same prompts, temperature and tokens, found others"
        raise UserError(what, where=list(same.values())[1], do=again)
    loads = sorted(times)
    if len(loads) < 2 or len({k for one in times.values() for k in one}) < 2:
        found = f"{len(loads)} and {len({k for one in times.values() for k in one})}"
        what = f"expected two concurrencies and two K (0: --plain) or more, found {found}"
        raise UserError(what, where=", ".join(map(str, paths)), do=again)
    if any(times[load].keys() != times[loads[0]].keys() for load in loads):
        what = "expected every K at every concurrency, found some missing"
        raise UserError(what, where=", ".join(map(str, paths)), do=again)
    schedule: list[tuple[int, int, int]] = []
    ends = [math.isqrt(a * b) for a, b in pairwise(loads)] + loads[-1:]
    for load, end in zip(loads, ends, strict=True):
        best = min(times[load], key=times[load].__getitem__)
        first = schedule[-1][1] + 1 if schedule else 1
        if schedule and schedule[-1][2] == best:
            first = schedule.pop()[0]
        schedule.append((first, end, best))
    return schedule


def sglang_schedule(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as SGLang's adaptive config: each size's drafts hold up to the next."""
    return {str(first): {"candidate_steps": [k]} for first, _, k in schedule}


def _add(times: dict[int, dict[int, float]], point: dict[str, Any], k: int) -> None:
    """Add the median TPOT of a point in a closed loop."""
    if point["concurrency"] and point["load"] and point["load"]["tpot_ms"]:
        of_load = times[point["concurrency"]]
        of_load[k] = min(of_load.get(k, math.inf), float(point["load"]["tpot_ms"]["p50"]))
