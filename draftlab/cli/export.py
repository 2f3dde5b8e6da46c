"""The options of `draftlab export` and `draftlab import`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from draftlab.cli.console import Debug, guard, monitor
from draftlab.errors import UserError

NOTHING_LEFT = "the folder appears only when it is whole, and the same command starts anew"


def export(
    run_name: Annotated[
        str | None, typer.Option("--run", help="Run whose head is exported.", metavar="RUN")
    ] = None,
    head: Annotated[str | None, typer.Option(help='A head folder, or "reference".')] = None,
    target: Annotated[
        str | None, typer.Option(help="Target of --head: folder, Hub id or embedded.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="speculators, vllm, sglang or llamacpp, one or several; default: the run's.",
            metavar="LAYOUT,…",
        ),
    ] = None,
    k: Annotated[int | None, typer.Option("--k", help="Tokens a server is to draft.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    max_shard: Annotated[
        str | None, typer.Option(help="Size above which weights are split, such as 500MB.")
    ] = None,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="With llamacpp: run its converter too (LLAMA_CPP).")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write.")] = None,
    debug: Debug = False,
) -> None:
    """Write a head for other programs; it is read back and compared before success is said."""
    with guard(debug):
        from draftlab.export.settings import ExportSettings
        from draftlab.pipeline.recipe import changed

        asked = {
            "formats": to,
            "k": k,
            "dtype": dtype,
            "max_shard": max_shard,
            "gguf": gguf or None,
        }
        names = {key: f"--{key.replace('_', '-')}" for key in asked} | {"formats": "--to"}
        check = partial(
            changed, where="command line", options=names, do="`draftlab export --help` says more"
        )
        # A slip is answered before torch is imported; whether gguf can be made may hang on the run.
        check(ExportSettings(), asked if to else asked | {"gguf": None})
        from draftlab.pipeline.resolve import eval_subject

        subject = eval_subject(run_name, head, target)
        subject.export(check(subject.exports, asked), out, monitor=monitor)


def import_(
    source: Annotated[
        str, typer.Argument(help="Folder or Hub id of another program's head.", metavar="HEAD")
    ],
    to: Annotated[Path, typer.Option("--to", help="Head folder to make.", metavar="FOLDER")],
    target: Annotated[
        str | None,
        typer.Option(help="Its target: folder, Hub id or embedded; default: the one it names."),
    ] = None,
    boundaries: Annotated[
        str | None,
        typer.Option(help="Inputs of layers that it reads, such as 2,16,29.", metavar="B,B,…"),
    ] = None,
    norm_before_residual: Annotated[
        bool | None,
        typer.Option(
            "--norm-before-residual/--no-norm-before-residual",
            help="Where its config does not say.",
        ),
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", help="Drafts it was trained for; default 7.", min=1)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; default: the file's.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", help="Config key known to change nothing.", metavar="KEY"),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code shipped with the target run.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Make a head folder of a head in speculators, vLLM, SGLang, SpecForge or SafeAILab layout."""
    with guard(debug, NOTHING_LEFT):
        from draftlab.export.importing import import_head
        from draftlab.heads.folder import load_config

        import_head(
            source,
            to,
            target=target,
            boundaries=_boundaries(boundaries),
            norm_before_residual=norm_before_residual,
            k=k,
            dtype=dtype,
            ignore=frozenset(ignore or ()),
            trust_remote_code=trust_remote_code,
            monitor=monitor,
        )
        there, of = quote(str(to)), quote(target or load_config(to).target.name)
        monitor.say(f"next: draftlab doctor {there}, draftlab eval --head {there} --target {of}")


def _boundaries(text: str | None) -> tuple[int, ...] | None:
    """Of "2,16,29"."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"expected boundaries such as 2,16,29, found {text!r}", where="--boundaries"
        ) from None
