"""The last stages of a run: evaluate its head, and export it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.pipeline.recording import Recording
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe
from draftlab.run.api import evaluate_head, export_layouts
from draftlab.run.held_out_prompts import held_out_prompts
from draftlab.run.stages import REPORT, STAGES

if TYPE_CHECKING:
    from draftlab.workers.ray_cluster import RayCluster


def evaluate_run(
    recipe: Recipe,
    run: Path,
    folder: Path,
    recording: Recording,
    monitor: Monitor,
    cluster: RayCluster | None,
) -> None:
    """Evaluate the head of a run, and write the report into a folder.

    Args:
        recording: has the target.
        cluster: evaluates on one of its nodes; None: this process does.
    """
    if cluster is not None:
        from draftlab.pipeline.ray_training import evaluate

        evaluate(cluster, recipe, run, folder, monitor)
        return
    evaluate_head(
        recipe.target,
        run / STAGES["head"].artefact,
        recipe.eval,
        folder,
        monitor=monitor,
        target=recording.target,
        head_name=recipe.name,
        held_out=partial(held_out_prompts, recipe, run),
    )


def export_run(recipe: Recipe, run: Path, folder: Path, monitor: Monitor) -> None:
    """Write the exports of a run's head into a folder."""
    if not recipe.export.formats:
        folder.mkdir(parents=True, exist_ok=True)
        monitor.say("export: nothing is written, since export.formats is empty")
        return
    export_layouts(
        run / STAGES["head"].artefact,
        recipe.target,
        {layout: folder / layout for layout in recipe.export.formats},
        settings=recipe.export,
        report=run / STAGES["eval"].artefact / REPORT,
        monitor=monitor,
    )
