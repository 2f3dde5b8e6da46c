"""All plots of a report as sections; each is drawn if the rows allow it."""

from __future__ import annotations

from draftlab.evaluate.results import Report
from draftlab.report.plot_acceptance import acceptance_by_position, acceptance_length
from draftlab.report.plot_calibration import FEWEST, reliability
from draftlab.report.plot_load import goodput_by_speed
from draftlab.report.plot_times import speedup_by_batch, tpot_by_k
from draftlab.report.section import Plot, Section

PLOTS = {
    "acceptance_length": (
        lambda report: acceptance_length(report.rows),
        "Tokens that a verify step of the target emits, with 95 % intervals over prompts.",
    ),
    "acceptance_by_position": (
        lambda report: acceptance_by_position(report.rows),
        "Share of drafts whose first i tokens are all accepted, at the largest K.",
    ),
    "tpot_by_k": (
        tpot_by_k,
        "Points: measured, with 95 % intervals over prompts. Lines: the adviser's prediction. "
        "Grey: without drafting.",
    ),
    "speedup_by_batch": (
        lambda report: speedup_by_batch(report.rows),
        "Against decoding without drafts, by the number of prompts decoded at once, with 95 % "
        "intervals over prompts. Below 1 drafting costs time.",
    ),
    "goodput": (
        goodput_by_speed,
        "Under load: output tokens per second of all requests against those of one, by the number "
        "of requests that always run (beside the points). Up and to the right is better.",
    ),
    "reliability": (
        reliability,
        "Confidence that the first k drafts of a step are accepted, against the share of steps in "
        "which they were, on prompts that the calibration was not fitted on. On the dotted line "
        f"both are equal. Bins of fewer than {FEWEST} steps are left out.",
    ),
}
"""What draws the figures of a name, and the text below them."""


def plots(report: Report) -> list[Section]:
    """Return a section for each figure."""
    found = []
    for name, (draw, text) in PLOTS.items():
        figures = list(draw(report))
        for i, figure in enumerate(figures, 1):
            file = name if len(figures) == 1 else f"{name}_{i}"
            texts = [f"{text} {figure.get_label()}"]
            found.append(Section(file.replace("_", " "), texts, figure=Plot(file, figure)))
    return found
