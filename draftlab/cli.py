"""The command line: a function a verb; it parses, calls, prints. `draftlab VERB --help` is enough.

Heavy imports (torch, transformers) happen inside the verbs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftlab.console import Debug, Json, guard, monitor, output, plan_line, show
from draftlab.eval_cli import eval_

if TYPE_CHECKING:
    from draftlab.pipeline import Pipeline

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

RecipeArg = Annotated[Path, typer.Argument(help="Recipe, a YAML file.", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Knobs to change, such as train.steps=200 target=org/name."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Make stages again whose knobs changed, and what follows.")
]
Plan = Annotated[
    bool, typer.Option("--plan", help="Print the resolved recipe and what would run; do nothing.")
]


def _pipeline(recipe: Path, overrides: list[str] | None) -> Pipeline:
    from draftlab.pipeline import Pipeline
    from draftlab.recipe import load_recipe

    return Pipeline(load_recipe(recipe, overrides or []), monitor)


def _make(
    stages: tuple[str, ...], recipe: Path, overrides: list[str] | None, force: bool, plan: bool
) -> Pipeline | None:
    """Makes stages, or prints the plan and returns None."""
    pipeline = _pipeline(recipe, overrides)
    if plan:
        from draftlab.recipe import to_yaml

        typer.echo(to_yaml(pipeline.recipe))
        typer.echo(f"run folder: {pipeline.run.folder}")
        for status in pipeline.plan(*stages):
            typer.echo(plan_line(status))
        return None
    pipeline.make(*stages, force=force)
    return pipeline


@app.command()
def run(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """From nothing to a measured, exported head: every stage of RECIPE, then the table."""
    with guard(debug):
        pipeline = _make(("head", "eval", "export"), recipe, overrides, force, plan)
        if pipeline:
            from draftlab.results import Report

            path = pipeline.run.folder / "eval" / "report.json"
            show(Report.read(path), as_json, path)
            monitor.say(f"exports: {pipeline.run.folder / 'export'}")


@app.command()
def prepare(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    debug: Debug = False,
) -> None:
    """Have the target answer RECIPE's prompts (answers.jsonl)."""
    with guard(debug):
        _make(("answers",), recipe, overrides, force, plan)


@app.command()
def record(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    debug: Debug = False,
) -> None:
    """Record the target's hidden states over the answers (store/)."""
    with guard(debug):
        _make(("store",), recipe, overrides, force, plan)


@app.command()
def train(
    recipe: RecipeArg,
    overrides: Overrides = None,
    force: Force = False,
    plan: Plan = False,
    debug: Debug = False,
) -> None:
    """Train a head, making first what it needs (head/). Run again, it does what is missing."""
    with guard(debug):
        pipeline = _make(("head",), recipe, overrides, force, plan)
        if pipeline:
            monitor.say(
                f"head: {pipeline.run.folder / 'head'} · next: draftlab eval, draftlab export"
            )


app.command("eval")(eval_)


@app.command()
def export(
    run_name: Annotated[
        str | None, typer.Option("--run", help="Run whose head is exported.", metavar="RUN")
    ] = None,
    head: Annotated[str | None, typer.Option(help='A head folder, or "reference".')] = None,
    target: Annotated[
        str | None, typer.Option(help="Target of --head: folder, Hub id or embedded.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="speculators; default: the run's.", metavar="LAYOUT")
    ] = None,
    k: Annotated[int | None, typer.Option("--k", help="Speculative tokens in its config.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write.")] = None,
    debug: Debug = False,
) -> None:
    """Write a head for other programs; it is read back and compared before success is said."""
    with guard(debug):
        from draftlab.recipe import changed
        from draftlab.subject import eval_subject

        subject = eval_subject(run_name, head, target)
        asked = {"formats": (to,) if to else None, "k": k, "dtype": dtype}
        subject.export(changed(subject.exports, asked, where="command line"), out, monitor=monitor)


@app.command()
def inspect(
    what: Annotated[
        str | None, typer.Argument(help="A run, store, head or report; default: the latest run.")
    ] = None,
    sample: Annotated[
        int, typer.Option(help="Conversation of a run or store to print, coloured by its mask.")
    ] = 0,
    debug: Debug = False,
) -> None:
    """Look into a run, a store or a head: counts, hashes, one conversation with its mask."""
    with guard(debug):
        from draftlab.inspect import inspect_path

        inspect_path(what, sample, output)


@recipe_app.command("schema")
def recipe_schema(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print every knob with meaning, unit, type and default."""
    from draftlab.recipe import Recipe, schema_lines

    if as_json:
        typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
    else:
        for line in schema_lines():
            typer.echo(line)


@recipe_app.command("show")
def recipeshow(recipe: RecipeArg, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print a recipe with every default filled in."""
    with guard(debug):
        from draftlab.recipe import load_recipe, to_yaml

        typer.echo(to_yaml(load_recipe(recipe, overrides or [])), nl=False)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib import metadata

    typer.echo(metadata.version("draftlab"))


def main() -> None:
    """Entry point of the `draftlab` command."""
    app()


if __name__ == "__main__":
    main()
