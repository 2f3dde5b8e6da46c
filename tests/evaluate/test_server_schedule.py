"""Drafts by load, of what `draftlab bench` measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.evaluate.server_schedule import read_schedule
from tests.helpers.server_files import drafts_by_batch

TPOT = {
    1: {0: 10.0, 3: 6.0, 7: 5.0},
    8: {0: 12.0, 3: 9.0, 7: 11.0},
    64: {0: 20.0, 3: 25.0, 7: 60.0},
}
"""Milliseconds by requests at once and K."""


def write_benches(folder: Path, **changes: Any) -> list[Path]:
    """Write a bench.json for each K; that of K = 3 has the server without drafts, too."""

    def point(load: int, k: int) -> dict[str, Any]:
        acceptance = {"k": k} if k else None
        fields = {"concurrency": load, "load": {"tpot_ms": {"p50": TPOT[load][k]}}}
        plain = point(load, 0) if k == 3 else None
        return fields | {"acceptance": acceptance, "plain": plain}

    paths = []
    for k in (3, 7):
        paths.append(folder / f"k{k}.json")
        content = {
            "draftlab_bench": 1,
            "suite": {"sha256": "0"},
            "settings": {"temperature": 0.0, "max_new_tokens": 128},
            "points": [point(load, k) for load in TPOT],
        }
        paths[-1].write_text(json.dumps(content | changes))
    return paths


def test_the_fastest_drafts_by_load(tmp_path: Path) -> None:
    paths = write_benches(tmp_path)
    schedule = read_schedule(paths)
    assert schedule == [(1, 2, 7), (3, 22, 3), (23, 64, 0)]
    drafts = drafts_by_batch([*map(list, schedule)], 7, 100)
    for load, times in TPOT.items():
        assert drafts[load - 1] == min(times, key=times.__getitem__)
    assert read_schedule(paths[:1]) == [(1, 22, 3), (23, 64, 0)]  # equal neighbours


def test_what_gives_no_schedule(tmp_path: Path) -> None:
    first, second = write_benches(tmp_path)
    with pytest.raises(UserError, match="found 3 and 1"):
        read_schedule([second])
    content = json.loads(second.read_text())
    second.write_text(json.dumps(content | {"points": content["points"][:1]}))
    with pytest.raises(UserError, match="every K at every concurrency"):
        read_schedule([first, second])
    second.write_text(json.dumps(content | {"suite": {"sha256": "1"}}))
    with pytest.raises(UserError, match="the same prompts"):
        read_schedule([first, second])
    for text in ("{}", "[]", json.dumps(content | {"points": [{}]})):
        second.write_text(text)
        with pytest.raises(UserError, match=r"expected a bench\.json"):
            read_schedule([second])
