"""Settings of a diagnosis."""

from __future__ import annotations

from pydantic import Field

from draftlab.settings import Settings


class DoctorSettings(Settings):
    """The prompts and drafts that a head is scored on."""

    prompts: str = "embedded:heldout"
    """A suite, as `eval.suite` names them; on the command line by default that of the run."""
    max_prompts: int = Field(default=16, ge=2)
    """Prompts taken from its start; intervals are over these."""
    max_new_tokens: int = Field(default=64, ge=8)
    """Tokens of each answer."""
    k: int | None = Field(default=None, ge=1)
    """Drafts a step; None: as `eval.k`."""
