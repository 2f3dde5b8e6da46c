"""`draftlab eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from draftlab.cli.console import (
    Debug,
    HeadOption,
    Json,
    RunOption,
    TargetOption,
    TrustRemoteCode,
    monitor,
    show_report,
)
from draftlab.cli.errors import STARTS_OVER, guard
from draftlab.cli.settings_options import SettingsOptions
from draftlab.evaluate.settings import EvalSettings
from draftlab.target_model.settings import TargetSettings

OPTIONS = SettingsOptions(
    EvalSettings,
    "eval",
    names={"temperatures": ["--temps"], "suite": ["--suite", "--prompts"]},
    panels={
        "What is measured": [
            "temperatures",
            "k",
            "draft_probs",
            "verification",
            "compare",
            "top_k",
            "top_p",
            "certify",
            "calibrate",
        ],
        "Prompts and answers": [
            *("suite", "raw", "template_arguments", "max_prompts", "by_length"),
            *("max_new_tokens", "seed"),
        ],
        "Times": [
            *("batch", "timing_prompts", "timing_tokens", "timing_batches"),
        ],
        "Engine": ["engine", "packed"],
    },
)
TARGET_OPTIONS = SettingsOptions(TargetSettings, "eval", panels={"Engine": ["dtype", "adapter"]})


@OPTIONS.add_to
def eval_(
    run_name: RunOption = None,
    head: HeadOption = None,
    target: TargetOption = None,
    chosen: Any = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the target: auto, float32, bfloat16 or float16.",
            rich_help_panel="Engine",
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="LoRA adapter that is merged into the target.", metavar="FOLDER"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; by default eval/ of the run.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a head: acceptance length, time per token and counters over a suite of prompts.

    By default it measures the head of the latest run with the eval settings of its recipe.
    """
    with guard(debug, STARTS_OVER):
        # Mistakes are reported before torch is imported.
        changed = {"dtype": dtype, "adapter": adapter}
        OPTIONS.apply(EvalSettings(), chosen)
        TARGET_OPTIONS.apply(TargetSettings(), changed)
        from draftlab.run.head_workspace import open_head

        workspace = open_head(
            run_name, head, target, trust_remote_code=trust_remote_code, monitor=monitor
        )
        settings = OPTIONS.apply(workspace.settings, chosen)
        target_settings = TARGET_OPTIONS.apply(workspace.target, changed)
        report, folder = workspace.evaluate(target_settings, settings, out, monitor=monitor)
        show_report(report, as_json, folder / "report.json")
        certificates = report.environment.get("certificates", {})
        if not all(certificate["passed"] for certificate in certificates.values()):
            raise typer.Exit(1)
