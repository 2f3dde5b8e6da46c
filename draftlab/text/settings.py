"""The settings of prompts and of the draft vocabulary.

Like every settings module it imports neither torch nor transformers, so that a typing error is
reported immediately.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from draftlab.settings import Settings

SELF = "self"
"""Source of the prompts that the target writes itself."""


class PromptSettings(Settings):
    """Which prompts the target answers."""

    source: str = "embedded"
    """A JSONL file of conversations, or a data set on the Hub (org/name[/configuration][@split], or
    a short name such as ultrachat), or "embedded" (Python functions to write, for training a head),
    or "embedded:heldout" (the same from other files, for evaluation), or "self": the target writes
    max_prompts prompts, as it continues a user's turn of its chat template."""
    revision: str | None = None
    """Commit, tag or branch of a data set on the Hub; None: the default branch's commit when this
    machine first read it."""
    max_prompts: Annotated[int, Field(ge=1)] | None = None
    """Number of conversations, from the start of the source; None: all."""
    self_written: Annotated[int, Field(ge=1)] | None = None
    """Number of prompts that the target writes in addition to those of the source; None: none."""
    deduplicate: bool = True
    """Whether to drop conversations that repeat an earlier one."""

    @model_validator(mode="after")
    def _number_is_known(self) -> PromptSettings:
        if self.source == SELF and self.max_prompts is None:
            raise ValueError(
                f"source={SELF} has the target write prompts: expected their number in "
                "max_prompts, found none"
            )
        if self.source == SELF and self.self_written:
            raise ValueError(
                f"self_written: with source={SELF} expected all prompts in max_prompts, found "
                f"{self.self_written} more"
            )
        return self

    @property
    def num_self_written(self) -> int:
        """Return how many prompts the target writes."""
        return (self.max_prompts if self.source == SELF else self.self_written) or 0


class DraftVocabSettings(Settings):
    """How many of the target's tokens a head can draft."""

    size: Annotated[int, Field(gt=0)] | None = None
    """Number of tokens; None: all of the target's. A head cannot draft any other token."""
