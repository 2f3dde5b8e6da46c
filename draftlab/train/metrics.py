"""metrics.jsonl, and Weights & Biases when asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftlab.base import UserError
from draftlab.train.knobs import TrainKnobs


class MetricsLog:
    """Appends rows to `folder`/metrics.jsonl and to a tracker.

    Args:
        folder: the run's train/ folder.
        knobs: say whether there is a tracker.
    """

    def __init__(self, folder: Path, knobs: TrainKnobs) -> None:
        self.path = folder / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.tracker = _wandb_run(knobs, folder)

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row; `step` is its place."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self.tracker is not None:
            self.tracker.log(_flat(row), step=row["step"])

    def close(self) -> None:
        """Finishes the tracker."""
        if self.tracker is not None:
            self.tracker.finish()


def truncate_metrics(path: Path, step: int) -> None:
    """Drops rows written after the checkpoint that training resumes from, and a torn last one."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    path.write_text("".join(kept), encoding="utf-8")


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested numbers and lists under slash-separated names."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            flat |= {f"{prefix}{key}/{i}": v for i, v in enumerate(value)}
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def _wandb_run(knobs: TrainKnobs, folder: Path) -> Any:
    """A Weights & Biases run when asked for."""
    if knobs.wandb is None:
        return None
    try:
        import wandb
    except ImportError:
        raise UserError(
            "train.wandb is set, and wandb is not installed", do="pip install 'draftlab[wandb]'"
        ) from None
    return wandb.init(
        project=knobs.wandb, name=folder.parent.name, config=knobs.model_dump(), dir=str(folder)
    )
