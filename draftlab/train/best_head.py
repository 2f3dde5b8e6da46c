"""The head with the highest predicted AL of a training's validations, in train/best/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftlab.files import read_fields, write_json
from draftlab.heads.folder import save_head
from draftlab.heads.head import DraftHead
from draftlab.train.validation import Validation

STATE = "best.json"


@dataclass
class BestHead:
    """The best head so far of the training `key`, in a head folder, which every command reads.

    Attributes:
        step, al: the step of the best validation (0: there was none yet), and its predicted AL.
        better: for the provenance, if the last step's head is clearly worse: step and predicted AL.
    """

    folder: Path
    key: str
    step: int = field(default=0, init=False)
    al: float = field(default=0.0, init=False)
    better: dict[str, Any] | None = field(default=None, init=False)

    def resume(self, step: int) -> None:
        """Read the best head of a training that resumes after `step`.

        One of a later step is dropped: the resumed training validates at that step again.
        """
        if not (self.folder / STATE).is_file():
            return
        state = read_fields(
            self.folder / STATE,
            {"key": str, "step": int, "al": float | int},
            kind="best.json",
            do=f"remove {self.folder}: the training then keeps the best head from here on",
        )
        if state["key"] == self.key and state["step"] <= step:
            self.step, self.al = state["step"], state["al"]

    def update(
        self, step: int, validation: Validation, head: Callable[[], DraftHead], *, write: bool
    ) -> None:
        """Keep the head of a validation if it is the best so far; every rank calls `head`, and one
        of them is to `write` it.
        """
        al = validation.predicted_al()
        if self.step and al <= self.al:
            return
        self.step, self.al = step, al
        best = head()
        if write:
            (self.folder / STATE).unlink(missing_ok=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            provenance = {"steps": step, "validation": validation.metrics()}
            config = best.config
            best.config = config.model_copy(update={"provenance": config.provenance | provenance})
            save_head(self.folder, best, torch.bfloat16)
            best.config = config
            write_json(self.folder / STATE, {"key": self.key, "step": step, "al": al})

    def compare(self, last: Validation, say: Callable[[str], None]) -> None:
        """Say so if the best validation's predicted AL is 1 % above the last step's."""
        al = last.predicted_al()
        if self.al >= 1.01 * al:
            self.better = {"step": self.step, "predicted_al": self.al}
            say(
                f"validation was better at step {self.step:,} (predicted AL {self.al:.3f}, now "
                f"{al:.3f}), so the head may overfit: that head is in {self.folder}; fewer steps "
                "or more conversations help"
            )
