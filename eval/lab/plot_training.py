"""Plot the predicted AL of training runs by seconds of training and by tokens seen.

    python eval/lab/plot_training.py 'chain=RUN' '2 layers=metrics.jsonl' --out training.png

RUN is a run's folder or its metrics.jsonl. AL is validation's: the teacher-forced walk with as many
drafts as were trained. Seconds are those of optimizer steps, without validation and checkpoints.
The figures are printed as a Markdown table, each beside the first run's at that time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftlab.errors import UserError
from draftlab.files import atomic_path
from draftlab.report.canvas import COLOURS, MARKERS, legend, new_figure, plain, png


@dataclass(frozen=True)
class Curve:
    """The validations of a run.

    Attributes:
        name: the run's name in the plot.
        k: drafts in a step of the walk.
        steps: int64 [N].
        tokens, seconds, lengths: float64 [N]; lengths are AL.
    """

    name: str
    k: int
    steps: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    lengths: np.ndarray

    @classmethod
    def read(cls, name: str, path: Path) -> Curve:
        """Read a run's folder or its metrics.jsonl.

        Raises:
            UserError: the file is missing or damaged, or has no validation.
        """
        file = path / "train" / "metrics.jsonl" if path.is_dir() else path
        try:
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        except FileNotFoundError:
            raise UserError("expected a run's folder or its metrics.jsonl", where=file) from None
        except ValueError as error:
            raise UserError(f"a line is not JSON: {error}", where=file) from None
        trained = [row for row in rows if "tokens_per_s" in row]
        validated = [(row, row["validation"]) for row in rows if "validation" in row]
        if not trained or not validated:
            raise UserError(
                f"expected rows of training and of validation, found {len(trained)} and "
                f"{len(validated)}",
                where=file,
                do="train with train.validation_share above 0",
            )
        # a row's speed is that of the steps since the row before
        ends = np.array([0.0, *(row["tokens_seen"] for row in trained)])
        durations = np.diff(ends) / [row["tokens_per_s"] for row in trained]
        tokens = np.array([row["tokens_seen"] for row, _ in validated], float)
        return cls(
            name,
            len(validated[0][1]["alpha"]),
            np.array([row["step"] for row, _ in validated]),
            tokens,
            np.interp(tokens, ends, np.cumsum([0.0, *durations])),
            np.array([validation["walk_al"] for _, validation in validated]),
        )

    def reached(self, axis: str, at: np.ndarray) -> np.ndarray:
        """Return AL at `at`, interpolated linearly; NaN outside of the validations."""
        return np.interp(at, getattr(self, axis), self.lengths, left=np.nan, right=np.nan)


def table(curves: Sequence[Curve]) -> str:
    """Return every validation, with its share of the first run's AL by time and by tokens."""
    first = curves[0]
    names = ("run", "step", "M tokens seen", "training s", "AL")
    shares = (f"of {first.name}'s then", "of its by tokens", "of its last")
    lines = ["| " + " | ".join([*names, *shares]) + " |", "|---" * 8 + "|"]
    for curve in curves:
        by_time = curve.lengths / first.reached("seconds", curve.seconds)
        by_tokens = curve.lengths / first.reached("tokens", curve.tokens)
        last = curve.lengths / first.lengths[-1]
        for i, step in enumerate(curve.steps):
            cells = [curve.name, f"{step:,}", f"{curve.tokens[i] / 1e6:.1f}"]
            cells += [f"{curve.seconds[i]:.0f}", f"{curve.lengths[i]:.3f}"]
            found = (by_time[i], by_tokens[i], last[i])
            cells += ["" if np.isnan(share) else f"{share:.3f}" for share in found]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(curves: Sequence[Curve], note: str) -> bytes:
    """Return both plots side by side, as PNG.

    Raises:
        UserError: the runs were trained for different K.
    """
    depths = {curve.name: curve.k for curve in curves}
    if len(set(depths.values())) > 1:
        found = ", ".join(f"{k} ({name})" for name, k in depths.items())
        raise UserError(f"expected runs trained for one K (train.ttt_steps), found {found}")
    figure = new_figure(*(f"AL at K = {curves[0].k}, {name}" for name in ("by time", "by data")))
    figure.supxlabel(plain(note), fontsize=8)
    left, right = figure.axes
    for i, curve in enumerate(curves):
        for axes, x in ((left, curve.seconds), (right, curve.tokens / 1e6)):
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            axes.plot(
                x, curve.lengths, color=colour, marker=marker, markersize=4, label=plain(curve.name)
            )
    left.set(xlabel="seconds of training", ylabel="AL of the walk, greedy", xlim=(0, None))
    right.set(xlabel="million tokens seen", xlim=(0, None))
    legend(figure)
    return png(figure)


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=RUN, found {text}")
    return name, Path(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=_named, metavar="NAME=RUN")
    parser.add_argument("--out", type=Path, required=True, help="the PNG file")
    parser.add_argument("--note", default="", help="conditions, written below the plots")
    options = parser.parse_args(arguments)
    try:
        curves = [Curve.read(name, path) for name, path in options.runs]
        picture = draw(curves, options.note)
    except UserError as error:
        print(f"plot_training: {error}", file=sys.stderr)
        return 2
    with atomic_path(options.out) as temporary:
        temporary.write_bytes(picture)
    print(table(curves))
    return 0


if __name__ == "__main__":
    sys.exit(main())
