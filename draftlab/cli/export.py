"""The options of `draftlab export` and `draftlab import`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from draftlab.cli.console import Debug, guard, monitor
from draftlab.cli.settings_options import SettingsOptions
from draftlab.errors import UserError
from draftlab.export.settings import ExportSettings

OPTIONS = SettingsOptions(ExportSettings, "export", names={"formats": ["--to"]})
NOTHING_LEFT = "the folder appears only when it is whole, and the same command starts anew"


@OPTIONS.add_to
def export(
    run_name: Annotated[
        str | None, typer.Option("--run", help="Run whose head is exported.", metavar="RUN")
    ] = None,
    head: Annotated[str | None, typer.Option(help='A head folder, or "reference".')] = None,
    target: Annotated[
        str | None, typer.Option(help="Target of --head: folder, Hub id or embedded.")
    ] = None,
    chosen: Any = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write.")] = None,
    debug: Debug = False,
) -> None:
    """Write a head for other programs. The export is read back and compared with the head."""
    with guard(debug):
        # Mistakes are reported before torch is imported; whether gguf is possible depends on --to.
        OPTIONS.apply(ExportSettings(), chosen if chosen["formats"] else chosen | {"gguf": None})
        from draftlab.pipeline.head_workspace import open_head

        subject = open_head(run_name, head, target)
        subject.export(OPTIONS.apply(subject.exports, chosen), out, monitor=monitor)


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
