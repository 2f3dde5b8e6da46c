"""Settings of a diagnosis."""

from __future__ import annotations

from pydantic import Field

from draftlab.settings import Settings


class DoctorSettings(Settings):
    """The prompts and drafts that a head is scored on."""

    prompts: str | None = None
    """A suite, as `eval.suite` names them; None: that of the run's evaluation, and for a head
    without a run "embedded:heldout"."""
    max_prompts: int = Field(default=64, ge=2)
    """Prompts drawn from it; intervals are over these. With too few there is no verdict."""
    max_new_tokens: int = Field(default=64, ge=8)
    """Tokens of each answer."""
    k: int | None = Field(default=None, ge=1)
    """Drafts a step; None: 4, or all slots of a smaller block."""
