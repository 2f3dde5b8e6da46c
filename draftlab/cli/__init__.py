"""The command line: one function for each verb, which parses, calls the package and prints.

The verbs import torch and transformers themselves, so that `--help` and errors in the arguments are
shown at once.
"""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from draftlab.cli.bench import bench
from draftlab.cli.chat import chat
from draftlab.cli.console import Debug, Json, monitor, output, show_report
from draftlab.cli.doctor import doctor
from draftlab.cli.errors import Verbs, guard
from draftlab.cli.eval import eval_
from draftlab.cli.export import export, import_
from draftlab.cli.hub import push
from draftlab.cli.new import new
from draftlab.cli.plain_text import clean_library_messages, echo, echo_json, prepare_streams
from draftlab.cli.serve import serve
from draftlab.cli.stages import (
    Force,
    Gpus,
    Overrides,
    Plan,
    Ray,
    RecipeArg,
    TrainGpus,
    launch_verb,
    make,
    refuse_both,
)
from draftlab.cli.store import store_app
from draftlab.errors import UserError
from draftlab.formatting import visible
from draftlab.process_environment import PROCESS_ENVIRONMENT, launched_number
from draftlab.signals import end_with_parent

for _variable, _value in PROCESS_ENVIRONMENT.items():
    os.environ.setdefault(_variable, _value)  # what the user has set is kept

app = typer.Typer(
    name="draftlab",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipe_app = typer.Typer(help="Print recipes and their settings.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")
app.add_typer(store_app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        from draftlab.version import package_version

        echo(package_version())
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print draftlab's version."
        ),
    ] = False,
) -> None:
    """Train, evaluate and export draft heads for speculative decoding."""


app.command()(new)


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

    Complete stages are not run again. With --gpus all GPUs answer, record and
    train, and the first one evaluates; with --ray those of a cluster do.
    """
    with guard(debug):
        if (gpus or 1) > 1 and not (plan or rehearse or ray):
            raise typer.Exit(
                launch_verb(("run",), recipe, overrides, force, debug, gpus, as_json=as_json)
            )
        stages = ("head", "eval", "export")
        pipeline = make(
            stages, recipe, overrides, force, plan, gpus=gpus, ray=ray, rehearse=rehearse
        )
        if pipeline and pipeline.is_main:
            from draftlab.evaluate.results import Report

            path = pipeline.folder / "eval" / "report.json"
            show_report(Report.read(path), as_json, path)
            if pipeline.recipe.export.formats:
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
        make(("answers",), recipe, overrides, force, plan, gpus=gpus, ray=ray)


@app.command()
def record(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    gpus: Gpus = None,
    ray: Ray = None,
    debug: Debug = False,
) -> None:
    """Record the target's hidden states for the answers; write store/."""
    with guard(debug):
        if launched_number("WORLD_SIZE", 1) > 1:
            raise UserError(
                "expected one process that records, found several that were launched together",
                where="draftlab record",
                do="--gpus N records on the GPUs of this machine, --ray ADDRESS on those of a "
                "cluster",
            )
        refuse_both(gpus, ray)
        make(("store",), recipe, overrides, force, plan, gpus=gpus, ray=ray)


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

    An interrupted training continues when the command is repeated. Processes
    that `torchrun` or `accelerate launch` started train together.
    """
    with guard(debug):
        if (gpus or 1) > 1 and not (plan or ray):
            raise typer.Exit(launch_verb(("train",), recipe, overrides, force, debug, gpus))
        pipeline = make(("head",), recipe, overrides, force, plan, gpus=gpus, ray=ray)
        if pipeline and pipeline.is_main:
            monitor.say(f"head: {pipeline.folder.resolve() / 'head'}; next: draftlab eval")


app.command("eval")(eval_)
app.command()(serve)
app.command()(bench)
app.command()(chat)
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
        from draftlab.run.inspect import inspect_path, inspect_reports

        if names and len(names) > 1:
            inspect_reports(names, output)
        else:
            inspect_path(names[0] if names else None, sample, output, verify=verify)


@recipe_app.command("schema")
def recipe_schema(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON schema.")] = False,
) -> None:
    """Print every setting with its meaning, unit, type and default."""
    from draftlab.recipe.commented_yaml import schema_lines
    from draftlab.recipe.recipe import Recipe

    if as_json:
        echo_json(json.dumps(Recipe.model_json_schema(), indent=2))
    else:
        for line in schema_lines(Recipe):
            echo(line)


@recipe_app.command("show")
def recipe_show(recipe: RecipeArg, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print the settings of a recipe, and as comments those that it leaves at their defaults."""
    with guard(debug):
        from draftlab.recipe.commented_yaml import shown_lines
        from draftlab.recipe.recipe import load_recipe

        text = visible("\n".join(shown_lines(load_recipe(recipe, overrides or []))))
        typer.echo(text.encode())  # UTF-8, as recipes are read


@app.command()
def version() -> None:
    """Print draftlab's version."""
    _print_version(True)


def main() -> None:
    """Run the `draftlab` command."""
    end_with_parent()
    prepare_streams()
    clean_library_messages()
    app(prog_name="draftlab")
