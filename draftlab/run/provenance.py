"""provenance.json of a run: machine, versions, commit, target, seed and hashes of inputs."""

from __future__ import annotations

import torch

from draftlab.evaluate.evaluator import environment
from draftlab.files import write_json
from draftlab.recipe.recipe import Recipe
from draftlab.run.folder import Run
from draftlab.version import git_commit


def write_provenance(recipe: Recipe, run: Run) -> None:
    """Write what a run was made with into its folder."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_json(
        run.folder / "provenance.json",
        {
            "environment": environment(device),
            "draftlab_commit": git_commit(),
            "target": recipe.target.path,
            "target_revision": recipe.target.revision,
            "seed": recipe.seed,
            "inputs": run.files,
        },
    )
