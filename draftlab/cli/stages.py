"""The options of the verbs that run stages, and the run of a recipe that these verbs share."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftlab.cli.console import monitor, plan_lines
from draftlab.cli.plain_text import echo
from draftlab.errors import NoClusterError, UserError
from draftlab.formatting import pip_install

if TYPE_CHECKING:
    from draftlab.pipeline.pipeline import Pipeline
    from draftlab.recipe.hardware import HardwareSettings
    from draftlab.workers.ray_cluster import RayCluster

RecipeArg = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings that replace the recipe's, such as train.steps=200 target=org/name."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Run stages with changed settings again, and all later stages."),
]
Gpus = Annotated[
    int | None,
    typer.Option(help="Number of GPUs that share the work. Each loads the whole target.", min=1),
]
TrainGpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        help="Number of GPUs that train together, with one process each. By default one, with "
        "--ray all of the cluster.",
        min=1,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        help='Run on all nodes of a Ray cluster: "auto", or HOST:PORT of its head node.',
        metavar="ADDRESS",
    ),
]
Plan = Annotated[
    bool,
    typer.Option("--plan", help="Print which stages would run and what they need; run nothing."),
]


def make(
    stages: tuple[str, ...],
    recipe: Path,
    overrides: list[str] | None,
    force: bool,
    plan: bool,
    *,
    gpus: int | None = None,
    ray: str | None = None,
    rehearse: bool = False,
) -> Pipeline | None:
    """Run stages; with `plan` print the plan instead and return None."""
    from draftlab.recipe.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])  # mistakes are reported before torch is imported
    from draftlab.kernels.devices import frozen_gc_heap
    from draftlab.pipeline.pipeline import Pipeline

    if rehearse:
        from draftlab.pipeline.rehearsal import REHEARSALS, RehearsalMonitor, rehearsal_recipe

        small = rehearsal_recipe(loaded, REHEARSALS, monitor)
        pipeline = Pipeline(small, RehearsalMonitor(monitor), REHEARSALS)
    else:
        pipeline = Pipeline(loaded, monitor)
    pipeline.gpus = gpus
    if plan:
        pipeline.on_cluster = ray is not None
        hardware, ray_line = planned_hardware(ray, pipeline.recipe.hardware)
        pipeline.recipe = pipeline.recipe.model_copy(update={"hardware": hardware})
        echo(f"run folder: {pipeline.folder}")
        statuses = pipeline.plan(*stages)
        for line in plan_lines(statuses, force=force):
            echo(line)
        if ray_line:
            echo(ray_line)
        for line in pipeline.estimate(*stages):
            echo(line)
        echo("`draftlab recipe show` with the same arguments prints every setting")
        pipeline.check(statuses, plan=True)
        return None
    # Collections, of 0.2 s each, skip what is imported until the evaluation times steps. A caller
    # in Python that has frozen its own objects keeps them so.
    freezing = nullcontext() if gc.get_freeze_count() else frozen_gc_heap()
    with freezing, connected(ray) as pipeline.cluster:
        pipeline.make(*stages, force=force)
    return pipeline


def launch_verb(
    verb: tuple[str, ...],
    recipe: Path,
    overrides: list[str] | None,
    force: bool,
    debug: bool,
    gpus: int,
    *,
    as_json: bool = False,
) -> int:
    """Run a verb in one process for each GPU; return the exit code."""
    from draftlab.cli.launch import launch
    from draftlab.recipe.recipe import load_recipe
    from draftlab.train.distributed.ranks import check_gpus

    loaded = load_recipe(recipe, overrides or [])
    check_gpus(gpus, loaded.train.device)
    ranks, environment = gpus, {}
    if loaded.record.rolls:
        from draftlab.workers.window.devices import RECORDERS, split_gpus

        ranks, recorders = split_gpus(gpus, loaded.target.gpus)
        environment = {RECORDERS: str(recorders)}
    options = ["--force"] * force + ["--json"] * as_json + ["--debug"] * debug
    arguments = [*verb, str(recipe), *(overrides or []), *options]
    return launch(arguments, ranks, monitor, environment=environment)


@contextmanager
def connected(address: str | None) -> Iterator[RayCluster | None]:
    """Connect this process to a Ray cluster for the duration of the block; without one yield None.

    Raises a `UserError` if Ray is not installed, or this process was launched with others.
    """
    if address is None:
        yield None
        return
    from draftlab.train.distributed.ranks import num_launched

    if num_launched() > 1:
        raise UserError(
            "expected one process that uses the cluster, found several launched together",
            where="--ray",
            do="start it without torchrun or accelerate launch: Ray starts the processes",
        )
    if importlib.util.find_spec("ray") is None:
        raise NoClusterError(
            "expected Ray, found that it is not installed",
            where="--ray",
            do=f"{pip_install('ray')} on all nodes",
        )
    from draftlab.workers.ray_cluster import RayCluster

    with RayCluster.connect(address) as cluster:
        yield cluster


def planned_hardware(
    address: str | None, planned: HardwareSettings
) -> tuple[HardwareSettings, str]:
    """Return the GPUs of a running cluster, for a plan, and a line about them.

    Without a cluster, and of one without GPUs, they are those of the recipe. Raises a `UserError`
    as `connected`, or if the address has another form.
    """
    try:
        with connected(address) as cluster:
            if cluster is None:
                return planned, ""
            line = cluster.describe()
            if cluster.has_gpus:
                return cluster.hardware(planned), f"{line}, for which the plan is"
    except NoClusterError as error:
        line = f"ray: {error.what}"
    return planned, f"{line}; the plan is for `hardware` of the recipe"


def refuse_both(gpus: int | None, address: str | None) -> None:
    """Raise a `UserError` if both --gpus and --ray are given to a verb that does not train."""
    if gpus is not None and address is not None:
        raise UserError(
            "expected --gpus or --ray, found both",
            where="--gpus",
            do="with --ray all GPUs of the cluster answer and record",
        )
