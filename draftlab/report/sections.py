"""The sections of a report, from the verdict to its data, for every renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.calibration.result import Calibration
from draftlab.evaluate.results import Report, Row, headlines, speed
from draftlab.report import details
from draftlab.report import formatting as fmt
from draftlab.report.conditions import report_conditions, row_labels, split_conditions
from draftlab.report.formatting import LEGEND
from draftlab.report.section import NONE, Column, Line, Section, Table, facts, filled
from draftlab.report.verdict import title, verdicts

SHOWN = {
    "L1": "rejection sampling and the output of the engine passed tests of their distribution (L1)",
    "LS": "rejection sampling passed a test of its distribution; the engine around it was not "
    "tested (LS)",
}
"""What a passed test at T > 0 shows, by its level; other levels show no equality."""


def sections(report: Report, *, figures: bool = False, said: Sequence[str] = ()) -> list[Section]:
    """Return the sections of a report in their order.

    Args:
        figures: whether there are figures, which need half a second to import matplotlib.
        said: warnings of the command, which are repeated if they are not of the report.
    """
    rows = report.rows
    if not rows:
        text = "The report has no rows: nothing was evaluated."
        return [Section(title(report), [text], kind="headline")]
    found = [Section(title(report), verdicts(report), kind="headline"), _conditions(report)]
    if any(row.drafts for row in rows):
        name = "What the evaluation shows about the output; nothing else was tested"
        found.append(Section(name, _equality(report)))
    found.append(_results(rows))
    best = [row for _, row in headlines(rows)]
    if any(row.categories for row in best):
        found.append(details.categories("By category", rows, best, "open", every_k=True))
    if figures:
        from draftlab.report.plots import plots

        found += plots(report)
    adviser = report.adviser or {}
    if entries := adviser.get("advice"):
        advice = zip(advice_names(entries), (one["text"] for one in entries), strict=True)
        found.append(Section("How many drafts?", table=facts(advice)))
    if pairs := adviser.get("break_even"):
        compared = [(details.pair_name(rows, one), one["text"]) for one in pairs]
        found.append(Section("Chain and parallel at the same K", table=facts(compared)))
    if report.calibrations:
        ones = [(calibration_name(report, c), _calibration_text(c)) for c in report.calibrations]
        found.append(Section("Confidence of the drafts", table=facts(ones)))
    for head, one in report.environment.get("certificates", {}).items():
        result = f"{one['level']}, {'passed' if one['passed'] else 'FAILED'}"
        found.append(Section(f"Losslessness certificate of {head}: {result}", one["lines"]))
    own = _warnings(report)
    more = [line for line in said if not line.endswith(tuple(own))]
    if own or more:
        found.append(Section("Warnings", [*own.values(), *more], kind="warning"))
    return [*found, *details.details(report)]


def suite_sections(reports: Sequence[Report]) -> list[Section]:
    """Return the conditions and rows of several reports, those of a setting together.

    Raises:
        UserError: the reports have different targets or no rows.
    """
    targets = list(dict.fromkeys(map(fmt.target_name, reports)))
    if len(targets) > 1:
        raise UserError(
            f"expected reports of one target, found {', '.join(targets)}",
            do="print them one at a time",
        )
    rows = [row for report in reports for row in report.rows]
    if not rows:
        raise UserError("expected reports with rows, found none", do="evaluate again")
    settings = [(row.head, row.drafter, row.k, row.temperature, fmt.drafting(row)) for row in rows]
    order = {setting: i for i, setting in enumerate(dict.fromkeys(settings))}
    rows = [rows[i] for i in sorted(range(len(rows)), key=lambda i: order[settings[i]])]
    merged = reports[0].model_copy(update={"rows": rows, "environment": {}})
    return [_conditions(merged), _results(rows)]


def of_head(report: Report, head: str) -> Report:
    """Return what a report says of one head and of plain decoding."""
    adviser = report.adviser and report.adviser | {
        "advice": [one for one in report.adviser["advice"] if one["head"] == head],
        "break_even": [],
    }
    by_head = {
        name: {key: value for key, value in values.items() if key == head}
        for name, values in report.environment.items()
        if name in details.BY_HEAD
    }
    return report.model_copy(
        update={
            "rows": [row for row in report.rows if row.head in (head, None)],
            "calibrations": [one for one in report.calibrations if one.head == head],
            "adviser": adviser,
            "environment": report.environment | by_head,
        }
    )


def _conditions(report: Report) -> Section:
    return Section("Conditions", table=facts(report_conditions(report).items(), packed=True))


def _equality(report: Report) -> list[str]:
    """Return what the evaluation shows about the output.

    These are the tokens that its rows at T = 0 compared, and each test of a head's certificate.
    """
    heads = dict.fromkeys(row.head for row in report.rows if row.drafts)
    equal: dict[tuple[str, str], list[int]] = {}
    for row in report.rows:
        if row.drafts and row.prompts_equal is not None:
            name = f"{row.head}, " * (len(heads) > 1) + f"{row.dtype}, {row.engine}"
            text = f"tokens of {row.prompts_equal:.1%} of {row.prompts} prompts equal those of"
            equal.setdefault((name, text), []).append(row.k)
    lines = [
        f"T = 0, K = {', '.join(map(str, dict.fromkeys(ks)))}, {name}: {text} "
        "decoding without drafts"
        for (name, text), ks in equal.items()
    ]
    certificates = report.environment.get("certificates", {})
    for head in heads:
        where = f"{head}, " * (len(heads) > 1)
        if (one := certificates.get(head)) is None:
            lines.append(f"{where}T > 0: not tested (`draftlab eval --certify` tests it)")
        elif not one["passed"]:
            lines.append(f"{where}the certificate FAILED: {'; '.join(one['faults'])}")
        else:
            lines += [where + line for line in one["lines"] if line.startswith("T = 0,")]
            lines += [where + _tested(arm) for arm in one.get("arms", ())]
    return lines


def _tested(arm: Mapping[str, Any]) -> str:
    """Return what a passed test at T > 0 shows."""
    from draftlab.evaluate.certificate.result import Sampled  # needs torch

    shown = SHOWN.get(arm["level"], f"no equality shown ({arm['level']})")
    return f"{Sampled.model_validate(arm).name}: {shown}"


def _results(rows: Sequence[Row]) -> Section:
    """Return the table of all rows, with a line for each timed batch.

    The fastest of several K's of a head under the same conditions is marked.
    """
    _, varying = split_conditions(rows)
    drafting = {"drafting": varying.pop("drafting")} if "drafting" in varying else {}
    several_batches = any(len(row.timings) > 1 for row in rows)
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        if row.drafts:
            key = (row.suite, row.engine, row.head, row.temperature, fmt.drafting(row))
            groups.setdefault(key, []).append(row)
    best = {id(max(group, key=speed)) for group in groups.values() if len(group) > 1}
    lines = []
    for i, row in enumerate(rows):
        drafted = fmt.has_drafter(row)
        cells = [
            *(values[i] for values in varying.values()),
            f"{row.temperature:g}",
            str(row.k) if drafted else "none",
            *(values[i] for values in drafting.values()),
            fmt.with_interval(row.acceptance_length, row.acceptance_length_ci),
            " ".join(f"{share:.2f}" for share in row.counters.acceptance_at or []),
        ]
        for j, timing in enumerate(row.timings or [row]):
            own = cells if j == 0 else [""] * len(cells)
            times = [
                str(timing.batch) if several_batches else "",
                fmt.with_interval(timing.tpot_ms),
                fmt.with_interval(timing.ttft_ms),
                fmt.speedup(timing.speedup, timing.speedup_ci),
                fmt.number(row.repetition_rate, 2) if j == 0 else "",
            ]
            texts = ["" if text == NONE else text for text in (*own, *times)]
            style = "best" if id(row) in best and j == 0 else "" if drafted else "plain"
            lines.append(Line(texts, style))
    columns = [
        *(Column(name, left=True, room=24) for name in varying),
        Column("T"),
        Column("K"),
        *(Column(name, left=True, meaning=LEGEND["drafting"][0]) for name in drafting),
        Column("AL", meaning=LEGEND["AL"][0]),
        Column("acceptance\nat 1…K", True, room=10, leaves=2, meaning=LEGEND["acceptance"][0]),
        Column("batch"),
        Column("TPOT\nms", meaning=LEGEND["TPOT"][0]),
        Column("TTFT\nms", leaves=3, meaning=LEGEND["TTFT"][0]),
        Column("speed-up", meaning=LEGEND["speed-up"][0]),
        Column("repetition", leaves=1, meaning=LEGEND["repetition"][0]),
    ]
    notes = {row.head: note for row in rows if (note := fmt.HEAD_NOTES.get(row.head or ""))}
    text = [f"{head}: {note}" for head, note in notes.items()]
    return Section("Measurements", text, filled(Table(columns, lines)))


def calibration_name(report: Report, one: Calibration) -> str:
    """Return "reference, T = 0.8, sampled drafts, K = 4"; heads and K only where they differ."""
    heads = {c.head for c in report.calibrations}
    names = [one.head] * (len(heads) > 1)
    text = fmt.conditions_text(one.temperature, one.draft_probs, None, *names)
    several_k = len({c.k for c in report.calibrations}) > 1
    return text + f", K = {one.k}" * several_k


def _calibration_text(one: Calibration) -> str:
    """Return the errors before and after, and what a threshold of the survival saves."""
    worst = max(one.positions, key=lambda p: p.error_after)
    before = max(p.error_before for p in one.positions)
    saving = one.survival_saving
    at = one.confidence_temperature
    source = one.source if at is None else f"{one.source} at T = {at:g}"
    return (
        f"the {source} errs by at most {before:.3f} before and "
        f"{worst.error_after:.3f} after calibration (a perfect predictor shows "
        f"{worst.error_perfect:.3f} there), over {one.blocks:,} steps of "
        f"{one.prompts:,} other prompts; verifying only drafts that survive "
        f"with probability {saving.threshold:g} leaves out {100 * saving.not_verified:.1f} % of "
        f"the drafts and {100 * saving.lost:.1f} % of the accepted"
    )


def advice_names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the conditions of each advice, with the names that differ between them."""
    several = [key for key in ("head", "engine", "suite") if len({one[key] for one in entries}) > 1]
    return [
        fmt.conditions_text(
            one["temperature"],
            one["draft_probs"],
            None,
            *(one[k].rpartition("/")[2] if k == "suite" else one[k] for k in several),
        )
        for one in entries
    ]


def _warnings(report: Report) -> dict[str, str]:
    """Return each distinct warning, with the labels of its rows unless all drafted rows have it."""
    rows = report.rows
    labels_of: dict[str, list[str]] = {}
    for row, label in zip(rows, row_labels(rows), strict=True):
        for text in dict.fromkeys(row.warnings):
            labels_of.setdefault(text, []).append(label)
    drafted = sum(map(fmt.has_drafter, rows))
    return {
        text: text if len(labels) >= drafted else f"{text} ({'; '.join(labels)})"
        for text, labels in labels_of.items()
    }
