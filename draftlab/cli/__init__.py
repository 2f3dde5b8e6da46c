"""The command line: one function for each verb, which parses, calls the package and prints.

The verbs import torch and transformers themselves, so that `--help` and errors in the arguments are
shown at once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftlab.cli.console import Debug, Json, guard, monitor, output, plan_lines, show_report
from draftlab.cli.doctor import doctor
from draftlab.cli.eval import eval_
from draftlab.cli.export import export, import_
from draftlab.cli.hub import push
from draftlab.cli.ray import connected, refuse_both
from draftlab.cli.store import store_app
from draftlab.errors import UserError

if TYPE_CHECKING:
    from draftlab.pipeline.pipeline import Pipeline

# OpenMP reads these when torch is imported. Threads that spin while they wait slow a busy machine.
# Values that the user has set are kept.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

app = typer.Typer(
    name="draftlab",
    help="Train, evaluate and export draft heads for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipe_app = typer.Typer(help="Print recipes and their settings.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")
app.add_typer(store_app, name="store")

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


def _pipeline(recipe: Path, overrides: list[str] | None, *, rehearse: bool = False) -> Pipeline:
    from draftlab.pipeline.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])  # mistakes are reported before torch is imported
    from draftlab.pipeline.pipeline import Pipeline

    if rehearse:
        from draftlab.pipeline.rehearsal import REHEARSALS, rehearsal_recipe

        return Pipeline(rehearsal_recipe(loaded, REHEARSALS, monitor), monitor, REHEARSALS)
    return Pipeline(loaded, monitor)


def _make(
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
    pipeline = _pipeline(recipe, overrides, rehearse=rehearse)
    pipeline.gpus = gpus
    if plan:
        typer.echo(f"run folder: {pipeline.folder}")
        statuses = pipeline.plan(*stages)
        for line in plan_lines(statuses, force=force):
            typer.echo(line)
        for line in pipeline.estimate(*stages, on_cluster=ray is not None):
            typer.echo(line)
        typer.echo("`draftlab recipe show` with the same arguments prints every setting")
        pipeline.check(statuses, plan=True)
        return None
    with connected(ray) as pipeline.cluster:
        pipeline.make(*stages, force=force)
    return pipeline


def _launch(
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
    from draftlab.pipeline.recipe import load_recipe
    from draftlab.train.distributed.ranks import check_gpus

    check_gpus(gpus, load_recipe(recipe, overrides or []).train.device)
    options = ["--force"] * force + ["--json"] * as_json + ["--debug"] * debug
    return launch([*verb, str(recipe), *(overrides or []), *options], gpus, monitor)


@app.command()
def run(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Run all stages in minutes, in one process, on a tiny random target of the same "
            "architecture.",
        ),
    ] = False,
    gpus: TrainGpus = None,
    ray: Ray = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run all stages of RECIPE, up to a measured and exported head, and print the report.

    Complete stages are not run again. With --gpus all GPUs answer, record and train, and the first
    one evaluates; with --ray those of a cluster do.
    """
    with guard(debug):
        if (gpus or 1) > 1 and not (plan or rehearse or ray):
            raise typer.Exit(
                _launch(("run",), recipe, overrides, force, debug, gpus, as_json=as_json)
            )
        stages = ("head", "eval", "export")
        pipeline = _make(
            stages, recipe, overrides, force, plan, gpus=gpus, ray=ray, rehearse=rehearse
        )
        if pipeline and pipeline.is_main:
            from draftlab.evaluate.results import Report

            path = pipeline.folder / "eval" / "report.json"
            show_report(Report.read(path), as_json, path)
            monitor.say(f"exports: {pipeline.folder.resolve() / 'export'}")
            if rehearse:
                monitor.say(f"the rehearsal ran every stage; `draftlab run {recipe}` is the run")


@app.command()
def prepare(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    gpus: Gpus = None,
    ray: Ray = None,
    debug: Debug = False,
) -> None:
    """Let the target answer the prompts of RECIPE; write answers.jsonl."""
    with guard(debug):
        refuse_both(gpus, ray)
        _make(("answers",), recipe, overrides, force, plan, gpus=gpus, ray=ray)


@app.command()
def record(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    gpus: Gpus = None,
    ray: Ray = None,
    join: Annotated[bool, typer.Option("--join", hidden=True)] = False,
    debug: Debug = False,
) -> None:
    """Record the target's hidden states for the answers; write store/."""
    with guard(debug):
        if join or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                "expected one process that records, found "
                + ("--join" if join else "several that were launched together"),
                where="draftlab record",
                do="--gpus N records on the GPUs of this machine, --ray ADDRESS on those of a "
                "cluster",
            )
        refuse_both(gpus, ray)
        _make(("store",), recipe, overrides, force, plan, gpus=gpus, ray=ray)


@app.command()
def train(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    gpus: TrainGpus = None,
    ray: Ray = None,
    debug: Debug = False,
) -> None:
    """Train a head; write head/. Missing answers and states are computed first.

    An interrupted training continues when the command is repeated. Processes that `torchrun` or
    `accelerate launch` started train together.
    """
    with guard(debug):
        if (gpus or 1) > 1 and not (plan or ray):
            raise typer.Exit(_launch(("train",), recipe, overrides, force, debug, gpus))
        pipeline = _make(("head",), recipe, overrides, force, plan, gpus=gpus, ray=ray)
        if pipeline and pipeline.is_main:
            monitor.say(f"head: {pipeline.folder.resolve() / 'head'}; next: draftlab eval")


app.command("eval")(eval_)
app.command()(export)
app.command("import")(import_)
app.command()(doctor)
app.command()(push)


@app.command()
def inspect(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help='A run, a store, a head, a report or "reference"; by default the latest run. '
            "Several reports are printed in one table.",
            metavar="WHAT",
        ),
    ] = None,
    sample: Annotated[
        int, typer.Option(help="Number of the conversation to print. The answer is coloured.")
    ] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the hashes of a store's shards.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Print what a run, a store, a head or a report contains."""
    with guard(debug):
        from draftlab.pipeline.inspect import inspect_path, inspect_reports

        if names and len(names) > 1:
            inspect_reports(names, output)
        else:
            inspect_path(names[0] if names else None, sample, output, verify=verify)


@recipe_app.command("schema")
def recipe_schema(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON schema.")] = False,
) -> None:
    """Print every setting with its meaning, unit, type and default."""
    from draftlab.pipeline.recipe import Recipe, schema_lines

    if as_json:
        typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
    else:
        for line in schema_lines():
            typer.echo(line)


@recipe_app.command("show")
def recipe_show(recipe: RecipeArg, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print a recipe with all settings, including defaults."""
    with guard(debug):
        from draftlab.pipeline.recipe import load_recipe, to_yaml

        typer.echo(to_yaml(load_recipe(recipe, overrides or [])), nl=False)


@app.command()
def version() -> None:
    """Print draftlab's version."""
    from draftlab.version import package_version

    typer.echo(package_version())


def main() -> None:
    """Run the `draftlab` command."""
    app()
