"""An export's K is the fastest that was measured, and the line says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftlab.evaluate.results import Report, Row, fastest_k
from draftlab.export import refusals
from draftlab.export.settings import ExportSettings
from draftlab.export.write import served_k
from draftlab.files import known_sha256
from draftlab.heads.folder import WEIGHTS, load_config
from draftlab.run.api import export_layouts
from draftlab.target_model.settings import TargetSettings
from tests.export.conftest import ExportHead
from tests.helpers import sample_report as sample
from tests.helpers.export_toys import export
from tests.helpers.monitors import RecordingMonitor


def timed(k: int, speedup: float | None, **changes: Any) -> Row:
    interval = None if speedup is None else (0.9 * speedup, 1.1 * speedup)
    return sample.row(k=k, speedup=speedup, speedup_ci=interval, **changes)


def report_of(head: Path, rows: list[Row], digest: str | None = None) -> Report:
    report = sample.report(rows)
    heads = {"runs/quickstart/head": digest or known_sha256(head / WEIGHTS)}
    return report.model_copy(update={"environment": report.environment | {"heads": heads}})


ROWS = [
    sample.baseline(),
    timed(2, 1.4),
    timed(4, 1.6),
    timed(5, 1.5),
    timed(5, 3.0, head="another"),
    timed(5, 2.0, temperature=0.8),  # the verdict is about the lowest temperature
]


def test_an_export_names_the_fastest_measured_k(export_head: ExportHead, tmp_path: Path) -> None:
    exported, monitor = export_head(), RecordingMonitor()
    config, path = load_config(exported.head), tmp_path / "report.json"
    trained = (7, "as the head was trained for; no speed-up with an interval was measured")
    assert served_k(config, exported.head, None, path) == trained  # no report yet
    report_of(exported.head, ROWS).write(path)
    measured = (4, "the fastest measured at T = 0 (1.60×)")
    assert served_k(config, exported.head, None, path) == measured
    report_of(exported.head, ROWS, "0" * 64).write(path)  # of other weights
    assert served_k(config, exported.head, None, path) == trained
    report_of(exported.head, [sample.baseline(), timed(4, None)]).write(path)
    assert served_k(config, exported.head, None, path) == trained
    imported = config.model_copy(update={"provenance": {"imported": {"k": 3}}})
    assert served_k(imported, exported.head, None, None)[0] == 3

    report_of(exported.head, ROWS).write(path)
    options = {"target_name": str(exported.target), "report": path, "monitor": monitor}
    export(exported.head, exported.target, tmp_path / "out", "speculators", **options)
    assert "export: K = 4 speculative tokens, the fastest measured at T = 0 (1.60×)" in monitor.text
    assert '"speculative_tokens": 4' in (tmp_path / "out" / "config.json").read_text()
    export(exported.head, exported.target, tmp_path / "out", "speculators", k=2, **options)
    assert '"speculative_tokens": 2' in (tmp_path / "out" / "config.json").read_text()


OVER_SUITES = [("one", 2, 1.69), ("one", 4, 1.4), ("other", 2, 1.0), ("other", 4, 1.4)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([timed(2, 1.4), timed(4, 1.6)], 4),
        ([timed(2, 1.4).model_copy(update={"speedup_ci": None})], None),
        # the geometric mean over suites: K = 4 has 1.4, K = 2 has 1.3
        (
            [timed(k, s, suite=name) for name, k, s in OVER_SUITES],
            4,
        ),
        # of argmax and sampled drafts with one K the faster counts
        ([timed(2, 1.5), timed(4, 1.6), timed(4, 1.2, draft_probs=True)], 4),
        ([timed(2, 1.5), timed(4, 1.2), timed(4, 1.6, draft_probs=True)], 4),
        # K = 5 was measured on one suite alone
        ([timed(2, 1.2), timed(5, 2.0), timed(2, 1.2, suite="other")], 2),
    ],
)
def test_the_fastest_k(rows: list[Row], expected: int | None) -> None:
    found = fastest_k(rows)
    assert (found and found.k) == expected


VLLM = "vllm (V1, cpu)"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([timed(3, 1.26)], (3, "the only one measured at T = 0 (1.26×)")),
        # vLLM's rows decide, whatever draftlab's engine reaches
        (
            [timed(2, 1.9), timed(3, 1.2, engine=VLLM), timed(2, 1.1, engine=VLLM)],
            (3, f"the fastest measured with {VLLM} at T = 0 (1.20×)"),
        ),
    ],
)
def test_the_reason_says_what_was_measured(
    export_head: ExportHead, tmp_path: Path, rows: list[Row], expected: tuple[int, str]
) -> None:
    head, path = export_head().head, tmp_path / "report.json"
    report_of(head, rows).write(path)
    assert served_k(load_config(head), head, None, path) == expected


def test_what_layouts_have_in_common_is_said_once(
    export_head: ExportHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what only a later one has is said."""
    exported, monitor = export_head(), RecordingMonitor()
    monkeypatch.setattr(refusals, "WITHOUT_EAGLE3", {"llama"})
    places = {name: tmp_path / name for name in ("llamacpp", "vllm", "speculators")}
    target, settings = TargetSettings(path=str(exported.target)), ExportSettings()
    export_layouts(exported.head, target, places, settings=settings, monitor=monitor)
    for line in ("speculative tokens, as the head was", "cannot serve this head: its class"):
        assert monitor.text.count(line) == 1, line
    assert monitor.text.count("it was loaded back and is equal") == len(places)
