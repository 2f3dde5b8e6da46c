"""`draftlab push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from draftlab.cli.console import Debug, TargetOption, TrustRemoteCode, monitor
from draftlab.cli.errors import guard
from draftlab.cli.settings_options import SettingsOptions
from draftlab.export.settings import ExportSettings

OPTIONS = SettingsOptions(
    ExportSettings, "push", names={"formats": ["--to"]}, panels={"": ["k", "dtype"]}
)
RESUMES = "the same command continues: complete files on the Hub are not sent again"


@OPTIONS.add_to
def push(
    run_name: Annotated[
        str, typer.Argument(help="Run whose head is pushed, by name or path.", metavar="RUN")
    ],
    repo: Annotated[str, typer.Argument(help="Repository to push to.", metavar="ORG/NAME")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="Layout: speculators, vllm, sglang or llamacpp.", metavar="LAYOUT"
        ),
    ] = "speculators",
    target: TargetOption = None,
    chosen: Any = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="The target's Hub id; by default the run's target, if it is a Hub id."),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", help="Licence as the Hub names it, such as apache-2.0."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder and send nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; by default RUN/hub/ORG--NAME.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Upload a run's head to the Hugging Face Hub, with a model card from its report.

    The repository is private unless --public. The login is that of `hf auth login` or HF_TOKEN.
    """
    with guard(debug, RESUMES):
        from draftlab.hub.upload import check_repo_id

        check_repo_id(repo)  # before torch is imported
        exports = OPTIONS.apply(ExportSettings(), chosen | {"formats": (to,)})
        from draftlab.hub.upload import upload
        from draftlab.hub.upload_folder import write_upload_folder
        from draftlab.run.head_workspace import open_head

        workspace = open_head(
            run_name, None, target, trust_remote_code=trust_remote_code, monitor=monitor
        )
        path = out or workspace.folder / "hub" / repo.replace("/", "--")
        folder = write_upload_folder(
            workspace, repo, exports, path, monitor, base_model=base_model, licence=licence
        )
        if dry_run:
            monitor.say(f"push: {folder} would be sent to {repo}; nothing was sent")
            return
        monitor.say(f"push: {upload(folder, repo, public=public, monitor=monitor)}")
