"""The command line: a function a verb; it parses, calls, prints. `draftlab VERB --help` is enough.

Heavy imports (torch, transformers) happen inside the verbs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftlab.cli.console import Debug, Json, guard, monitor, output, plan_lines, show
from draftlab.cli.doctor import doctor
from draftlab.cli.eval import eval_
from draftlab.cli.export import export, import_
from draftlab.cli.hub import push
from draftlab.cli.store import store_app

if TYPE_CHECKING:
    from draftlab.pipeline.pipeline import Pipeline

# Read when torch is loaded. Threads that wait by spinning cost a busy machine most of its speed;
# whoever sets these keeps them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

app = typer.Typer(
    name="draftlab",
    help="Train, evaluate and export draft heads for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipe_app = typer.Typer(help="Look at recipes.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")
app.add_typer(store_app, name="store")

RecipeArg = Annotated[Path, typer.Argument(help="Recipe, a YAML file.", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to change, such as train.steps=200 target=org/name."),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Make stages again whose settings changed, and what follows."),
]
Gpus = Annotated[
    int, typer.Option(help="GPUs that share the work; each holds the whole target.", min=1)
]
Together = Annotated[
    int, typer.Option("--gpus", help="GPUs that train together, a process each.", min=1)
]
Plan = Annotated[
    bool, typer.Option("--plan", help="Print what would run and what that needs; do nothing.")
]


def _pipeline(recipe: Path, overrides: list[str] | None) -> Pipeline:
    from draftlab.pipeline.recipe import load_recipe

    asked = load_recipe(recipe, overrides or [])  # a slip is answered before torch is imported
    from draftlab.pipeline.pipeline import Pipeline

    return Pipeline(asked, monitor)


def _make(
    stages: tuple[str, ...],
    recipe: Path,
    overrides: list[str] | None,
    force: bool,
    plan: bool,
    *,
    gpus: int = 1,
) -> Pipeline | None:
    """Makes stages, or prints the plan and returns None."""
    pipeline = _pipeline(recipe, overrides)
    pipeline.gpus = gpus
    if plan:
        typer.echo(f"run folder: {pipeline.runs / pipeline.recipe.name}")
        for line in plan_lines(pipeline.plan(*stages), force=force):
            typer.echo(line)
        for line in pipeline.estimate(*stages):
            typer.echo(line)
        typer.echo(
            "`draftlab recipe show`, with the same recipe and settings, prints every setting"
        )
        return None
    pipeline.make(*stages, force=force)
    return pipeline


def _launched(
    verb: tuple[str, ...],
    recipe: Path,
    overrides: list[str] | None,
    force: bool,
    debug: bool,
    gpus: int,
    *,
    as_json: bool = False,
) -> int:
    """Runs a verb in as many processes as GPUs were asked for; returns the exit code."""
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
    gpus: Together = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """From nothing to a measured, exported head: every stage of RECIPE, then the table.

    With --gpus all answer, record and train, and the first one evaluates.
    """
    with guard(debug):
        if gpus > 1 and not plan:
            raise typer.Exit(
                _launched(("run",), recipe, overrides, force, debug, gpus, as_json=as_json)
            )
        pipeline = _make(("head", "eval", "export"), recipe, overrides, force, plan)
        if pipeline and pipeline.leads:
            from draftlab.evaluate.results import Report

            path = pipeline.run.folder / "eval" / "report.json"
            show(Report.read(path), as_json, path)
            monitor.say(f"exports: {pipeline.run.folder / 'export'}")


@app.command()
def prepare(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    gpus: Gpus = 1,
    debug: Debug = False,
) -> None:
    """Have the target answer RECIPE's prompts (answers.jsonl)."""
    with guard(debug):
        _make(("answers",), recipe, overrides, force, plan, gpus=gpus)


@app.command()
def record(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    gpus: Gpus = 1,
    join: Annotated[
        bool, typer.Option("--join", help="Share the work of a process that records this run.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Record the target's hidden states over the answers (store/).

    Processes of `accelerate launch` or `torchrun` share the work, and any number may --join later,
    from every machine that sees the run folder.
    """
    with guard(debug):
        from draftlab.pipeline.gpu_workers import launched_helper

        launched = launched_helper()
        if (join or launched is not None) and not plan:
            _pipeline(recipe, [*(overrides or []), *(launched or [])]).join_recording()
        else:
            _make(("store",), recipe, overrides, force, plan, gpus=gpus)


@app.command()
def train(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    gpus: Together = 1,
    debug: Debug = False,
) -> None:
    """Train a head, making first what it needs (head/). Run again, it does what is missing.

    Processes of `torchrun` or `accelerate launch` train together, too.
    """
    with guard(debug):
        if gpus > 1 and not plan:
            raise typer.Exit(_launched(("train",), recipe, overrides, force, debug, gpus))
        pipeline = _make(("head",), recipe, overrides, force, plan)
        if pipeline and pipeline.leads:
            monitor.say(
                f"head: {pipeline.run.folder / 'head'} · next: draftlab eval, draftlab export"
            )


app.command("eval")(eval_)
app.command()(export)
app.command("import")(import_)
app.command()(doctor)
app.command()(push)


@app.command()
def inspect(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help='A run, store, head or report, or "reference"; default: the latest run. Several '
            "reports: one table."
        ),
    ] = None,
    sample: Annotated[
        int, typer.Option(help="Conversation of a run or store to print, coloured by its mask.")
    ] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every byte of a store again.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Look into a run, a store, a head or a report: counts, hashes, a conversation's mask."""
    with guard(debug):
        from draftlab.pipeline.inspect import inspect_path, inspect_reports

        if what and len(what) > 1:
            inspect_reports(what, output)
        else:
            inspect_path(what[0] if what else None, sample, output, verify=verify)


@recipe_app.command("schema")
def recipe_schema(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print every setting with meaning, unit, type and default."""
    from draftlab.pipeline.recipe import Recipe, schema_lines

    if as_json:
        typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
    else:
        for line in schema_lines():
            typer.echo(line)


@recipe_app.command("show")
def recipe_show(recipe: RecipeArg, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print a recipe with every default filled in."""
    with guard(debug):
        from draftlab.pipeline.recipe import load_recipe, to_yaml

        typer.echo(to_yaml(load_recipe(recipe, overrides or [])), nl=False)


@app.command()
def version() -> None:
    """Print the version."""
    from draftlab.version import package_version

    typer.echo(package_version())


def main() -> None:
    """Entry point of the `draftlab` command."""
    app()
