"""`draftlab new`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from draftlab.cli.console import Debug, monitor
from draftlab.cli.errors import guard
from draftlab.errors import UserError
from draftlab.files import check_folder

CPU = "cpu"


def new(
    path: Annotated[Path, typer.Argument(help="The recipe to write.", metavar="RECIPE")],
    target: Annotated[
        str | None, typer.Option(help='Target: a folder, a GGUF file, a Hub id or "embedded".')
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="As prompts.source: a JSONL file, self, embedded.")
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Number of prompts.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help='Kind of GPU, or "cpu"; by default that of this machine.')
    ] = None,
    family: Annotated[str, typer.Option(help="Family of the head.")] = "eagle3",
    debug: Debug = False,
) -> None:
    """Write a commented recipe whose sizes fit a target, prompts and a GPU.

    On a terminal the target, the prompts and the GPU are asked for, if they are not given.
    """
    with guard(debug):
        if path.exists() or path.is_symlink():
            what, do = "expected a new file, found one that exists", "name another file"
            raise UserError(what, where=path, do=do)
        check_folder(path.parent)
        from draftlab.plan.new_recipe import GPUS, new_recipe, recipe_lines
        from draftlab.plan.preflight import check_before_run
        from draftlab.run.folder import RUNS
        from draftlab.run.stages import STAGES

        target = target or _ask("target", "folder, GGUF file or Hub id", "embedded")
        prompts = prompts or _ask("prompts", "JSONL file, self or embedded", "self")
        gpu = gpu or _ask("gpu", ", ".join((*GPUS, CPU)), _gpu_here(GPUS), needed=False)
        if gpu not in (*GPUS, CPU):
            what = f"expected one of {', '.join((*GPUS, CPU))}, found {gpu!r}"
            raise UserError(what, where="--gpu", do="name the one that is most like it")
        tree: dict[str, Any] = {"name": path.stem, "target": {"path": target}}
        tree["prompts"] = {"source": prompts, "max_prompts": max_prompts}
        tree |= {"head": {"family": family}, "hardware": {"gpu": None if gpu == CPU else gpu}}
        recipe = new_recipe(tree)
        for warning in check_before_run(recipe, STAGES, plan=True):
            monitor.say(warning)
        text = "".join(f"{line}\n" for line in recipe_lines(recipe, RUNS))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
        monitor.say(f"{path}: written for {gpu}; next: draftlab run {path} --rehearse")


def _ask(option: str, kind: str, default: str, *, needed: bool = True) -> str:
    """Return the answer of the user on a terminal; else the default of what is not needed."""
    if sys.stdin.isatty():
        return str(typer.prompt(f"{option} ({kind})", default=default, err=True)).strip()
    if needed:
        what, do = "expected a value, found none", f"give it, such as --{option} {default}"
        raise UserError(f"{what}, and no terminal to ask on", where=f"--{option}", do=do)
    return default


def _gpu_here(kinds: Iterable[str]) -> str:
    """Return the kind of this machine's GPU, or "cpu"."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((kind for kind in kinds if kind in name.replace(" ", "")), CPU)
