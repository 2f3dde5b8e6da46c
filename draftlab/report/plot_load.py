"""The plot of measurements under load: what users get against what the machine gives in all."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from draftlab.evaluate.results import Report
from draftlab.report.canvas import GREY, HEIGHT, legend, line_style, new_figure, plain
from draftlab.report.load import by_configuration, load_groups


def goodput_by_speed(report: Report) -> Iterator[Figure]:
    """Yield a Pareto plot for each engine and temperature, with a curve for each configuration.

    A curve's points are concurrencies, and their numbers stand beside them. Up and right is better.
    """
    for title, points in load_groups(report.load).items():
        figure = new_figure(
            f"Goodput and speed of a request, {title}", of=points, height=HEIGHT + 0.6
        )
        axes, number = figure.axes[0], 0
        for name, members in by_configuration(points).items():
            shown = [point for point in members if point.user_tok_s is not None]
            style = {"color": GREY, "marker": "x", "linestyle": "-"}
            if members[0].speedup is not None:
                sampled = members[0].draft_probs and members[0].temperature > 0
                style = line_style(number, sampled=sampled)
                number += 1
            xs, ys = [p.user_tok_s for p in shown], [p.goodput_tok_s for p in shown]
            axes.plot(xs, ys, label=plain(name), **style)
            for point, x, y in zip(shown, xs, ys, strict=True):
                axes.annotate(
                    str(point.concurrency),
                    (x, y),
                    xytext=(4, 3),
                    textcoords="offset points",
                    fontsize=7.5,
                    color=style["color"],
                )
        axes.set(xlabel="tokens/s of one request, after its first token", ylabel="tokens/s in all")
        axes.margins(0.09)  # room for the numbers
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        legend(figure)
        yield figure
