"""Defaults of head settings that depend on the family, on the exports and on an earlier training.

A recipe leaves such a setting out (None). The pipeline sets it before anything else reads it, so
that the run's recipe.yaml and its stage records hold the value.
"""

from __future__ import annotations

from pathlib import Path

from draftlab.export.layout import Layout
from draftlab.heads.family import get_family
from draftlab.heads.folder import load_config
from draftlab.recipe.recipe import Recipe
from draftlab.run.resolve import find_head
from draftlab.run.stages import STAGES, read_record, record_path

NORM_BEFORE_RESIDUAL = "head.norm_before_residual"


def with_family_defaults(recipe: Recipe, folder: Path) -> tuple[Recipe, str]:
    """Return a recipe with `head.norm_before_residual`, and a sentence on why, or "".

    Args:
        folder: the run folder. A head whose training has begun keeps its value.

    Raises:
        UserError: the recipe leaves the setting out and `head.init` names no head.
    """
    if recipe.head.norm_before_residual is not None:
        return recipe, ""
    value, why = _norm_before_residual(recipe, folder)
    head = recipe.head.model_copy(update={"norm_before_residual": value})
    said = why and f"{NORM_BEFORE_RESIDUAL}: {str(value).lower()}, {why}"
    return recipe.model_copy(update={"head": head}), said


def _norm_before_residual(recipe: Recipe, folder: Path) -> tuple[bool, str]:
    """Return the default of `head.norm_before_residual`, and the rest of a sentence on why."""
    family = get_family(recipe.head.family)
    if "norm_before_residual" not in family.options:
        return False, ""
    if recipe.head.init is not None:
        options = load_config(find_head(recipe.head.init)).options()
        return options.get("norm_before_residual", False), "as in head.init"
    if not family.norms_residual:
        return False, ""
    path = record_path(folder, STAGES["head"])
    inputs = read_record(path)["inputs"] if path.exists() else {}
    if inputs.get("head.family") == family.name and NORM_BEFORE_RESIDUAL in inputs:
        return inputs[NORM_BEFORE_RESIDUAL], "as this run's training began"
    for program in recipe.export.formats:
        layout = family.layouts().get(program)
        if isinstance(layout, Layout) and not layout.reads_norm_before_residual:
            return False, (
                f"which {program} needs (export.formats); true, the default without {program}, "
                "raised AL from 1.54 to 1.71 in a small training (docs/benchmarks.md)"
            )
    return True, "which raises AL and which SGLang cannot serve"
