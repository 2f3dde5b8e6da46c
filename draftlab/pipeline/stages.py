"""The stages of a run: what each reads and makes, and which settings decide that."""

from __future__ import annotations

from dataclasses import dataclass

from draftlab.heads.folder import CONFIG, WEIGHTS
from draftlab.store.manifest import MANIFEST
from draftlab.target_model.settings import VllmSettings
from draftlab.train.settings import FREE_SETTINGS


@dataclass(frozen=True)
class Stage:
    """A step of the pipeline.

    Attributes:
        name: also the name of its record in `stages/`.
        after: the stage whose artefact it reads.
        settings: prefixes of the recipe's settings that decide what it makes.
        artefact: file or folder in the run folder.
        files: in that folder; without one of them it is not whole.
        cheap: made again without asking when a setting changed.
    """

    name: str
    after: str | None
    settings: tuple[str, ...]
    artefact: str
    files: tuple[str, ...] = ()
    cheap: bool = False


STAGES = {
    stage.name: stage
    for stage in (
        Stage("answers", None, ("seed", "target", "prompts", "regenerate"), "answers.jsonl"),
        Stage("store", "answers", ("record",), "store", (MANIFEST,)),
        Stage("head", "store", ("seed", "draft_vocab", "head", "train"), "head", (CONFIG, WEIGHTS)),
        Stage("eval", "head", ("eval",), "eval", ("report.json",), cheap=True),
        Stage("export", "head", ("export",), "export", cheap=True),
    )
}
FREE = {"target.device", "target.gpus", "target.compile"}
FREE |= {f"train.{setting}" for setting in FREE_SETTINGS}
FREE |= {
    f"{s}.vllm.{setting}" for s in ("regenerate", "record") for setting in VllmSettings.model_fields
}
"""Settings that change how a stage runs, never what it makes."""
ADDED = {
    "prompts.deduplicate": False,
    "prompts.per_source": None,
    "regenerate.backend": "paged",
    "record.backend": "transformers",
}
"""Settings that came later, with what they were before; books from then have no such key."""
