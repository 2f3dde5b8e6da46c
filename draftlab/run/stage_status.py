"""The state of a stage of a run under a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftlab.run.stages import Stage

State = Literal["done", "unfinished", "missing", "changed", "unneeded"]


@dataclass(frozen=True)
class Status:
    """The state of a stage of a run under a recipe.

    Attributes:
        state: "done"; "unfinished": started with the same inputs, or its files are damaged;
            "missing"; "changed": it has other inputs; "unneeded": not complete, but all that
            reads it is.
        changes: setting → (value in the run, value in the recipe), if the state is "changed".
        missing_input: a file that the stage reads and that does not exist, or "".
        damage: which file of a complete stage has changed since, and how, or "".
        elsewhere: where the shards of a complete store are, if that is not `record.url`, or "".
    """

    stage: Stage
    state: State
    changes: dict[str, tuple[Any, Any]]
    missing_input: str = ""
    damage: str = ""
    elsewhere: str = ""

    @property
    def runs(self) -> bool:
        """Return whether the stage has to run."""
        return self.state not in ("done", "unneeded")

    def lines(self, folder: Path) -> list[str]:
        """Return what the console says of the stage before it runs, or why it does not run.

        Args:
            folder: of the run.
        """
        name = self.stage.name
        if self.runs and self.damage:
            return [f"{name}: damaged, made again ({self.damage})"]
        if self.runs:
            changes = self.changes.items()
            return [f"{name}: {key} was {former!r}, is {now!r}" for key, (former, now) in changes]
        state = "damaged" if self.damage else "not there"
        state = "elsewhere" if self.elsewhere else state
        state = "there" if self.state == "done" else f"{state}, and not needed"
        detail = self.elsewhere or self.damage or folder / self.stage.artefact
        return [f"{name}: {state} ({detail})"]
