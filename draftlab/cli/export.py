"""`draftlab export` and `draftlab import`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from draftlab.cli.console import (
    Debug,
    HeadOption,
    RunOption,
    TargetOption,
    TrustRemoteCode,
    monitor,
)
from draftlab.cli.errors import guard
from draftlab.cli.settings_options import SettingsOptions
from draftlab.errors import UserError
from draftlab.export.settings import ExportSettings

OPTIONS = SettingsOptions(ExportSettings, "export", names={"formats": ["--to"]})
NOTHING_LEFT = "the folder appears only when it is complete, and the same command starts over"


@OPTIONS.add_to
def export(
    run_name: RunOption = None,
    head: HeadOption = None,
    target: TargetOption = None,
    chosen: Any = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; by default export/ of the run.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Write a head for other programs. The export is loaded back and compared with the head."""
    with guard(debug):
        # Mistakes are reported before torch is imported; whether gguf is possible depends on --to.
        OPTIONS.apply(ExportSettings(), chosen if chosen["formats"] else chosen | {"gguf": None})
        from draftlab.run.head_workspace import open_head

        workspace = open_head(
            run_name, head, target, trust_remote_code=trust_remote_code, monitor=monitor
        )
        workspace.export(OPTIONS.apply(workspace.exports, chosen), out, monitor=monitor)


def import_(
    source: Annotated[
        str, typer.Argument(help="Folder or Hub id of another program's head.", metavar="HEAD")
    ],
    to: Annotated[Path, typer.Option("--to", help="Head folder to write.", metavar="FOLDER")],
    target: Annotated[
        str | None,
        typer.Option(
            help='Its target: a folder, a GGUF file, a Hub id or "embedded"; by default that of '
            "its config."
        ),
    ] = None,
    boundaries: Annotated[
        str | None,
        typer.Option(
            help="Boundaries (inputs of layers) that it reads, such as 2,16,29.", metavar="B,B,…"
        ),
    ] = None,
    norm_before_residual: Annotated[
        bool | None,
        typer.Option(
            "--norm-before-residual/--no-norm-before-residual",
            help="Position of the norm, if its config does not say it.",
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option(
            "--k",
            help="Draft tokens that it was trained for; by default what its config or launch.md "
            "names, else 7.",
            min=1,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; by default that of its files.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", help="Unknown config key that may be ignored.", metavar="KEY"),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Convert a speculators, vLLM, SGLang, SpecForge or SafeAILab head to a head folder."""
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
        folder, name = quote(str(to)), quote(target or load_config(to).target.name)
        monitor.say(
            f"next: draftlab doctor {folder}, draftlab eval --head {folder} --target {name}"
            + ("" if target == "embedded" else " --suite PROMPTS.jsonl")
        )


def _boundaries(text: str | None) -> tuple[int, ...] | None:
    """Return boundaries from a text such as "2,16,29"."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"expected boundaries such as 2,16,29, found {text!r}",
            where="--boundaries",
            do="give numbers of layers in ascending order, separated by commas",
        ) from None
