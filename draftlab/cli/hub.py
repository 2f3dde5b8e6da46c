"""The options of `draftlab push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftlab.cli.console import Debug, guard, monitor

_HELP = "`draftlab push --help` explains every option"
UNSENT = "the same command goes on: what the Hub has whole is not sent again"


def push(
    run_name: Annotated[str, typer.Argument(help="Run whose head is pushed.", metavar="RUN")],
    repo: Annotated[str, typer.Argument(help="Repository to push to.", metavar="ORG/NAME")],
    to: Annotated[
        str,
        typer.Option("--to", help="speculators, vllm, sglang or llamacpp.", metavar="LAYOUT"),
    ] = "speculators",
    base_model: Annotated[
        str | None,
        typer.Option(help="The target's Hub id; default: the run's target, if it is one."),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", help="As the Hub names it, such as apache-2.0."),
    ] = None,
    k: Annotated[int | None, typer.Option("--k", help="Speculative tokens in its config.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    public: Annotated[
        bool, typer.Option("--public", help="A new repository is seen by all; default: private.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder, and send nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where the folder is written; default: RUN/hub/ORG--NAME.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Put a run's head on the Hugging Face Hub, with a model card made of its report.

    The repository is private unless --public. The login is that of `hf auth login` or HF_TOKEN.
    """
    with guard(debug, UNSENT):
        from draftlab.export.settings import ExportSettings
        from draftlab.hub.upload import check_repo_id
        from draftlab.settings import update_settings

        check_repo_id(repo)  # before torch is imported
        asked = {"formats": (to,), "k": k, "dtype": dtype}
        options = {"formats": "--to", "k": "--k", "dtype": "--dtype"}
        exports = update_settings(
            ExportSettings(), asked, where="command line", options=options, do=_HELP
        )
        from draftlab.hub.upload import upload
        from draftlab.hub.upload_folder import PushSettings, write_upload_folder
        from draftlab.pipeline.head_workspace import open_head

        subject = open_head(run_name, None, None)
        place = out or subject.folder / "hub" / repo.replace("/", "--")
        settings = PushSettings(repo, exports, base_model, licence)
        folder = write_upload_folder(subject, settings, place, monitor)
        if dry_run:
            monitor.say(f"push: {folder} is what would be sent to {repo}; nothing was")
            return
        monitor.say(f"push: {upload(folder, repo, public=public, monitor=monitor)}")
