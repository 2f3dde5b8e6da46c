"""`draftlab doctor`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from draftlab.cli.console import Debug, TrustRemoteCode, monitor, output
from draftlab.cli.errors import guard
from draftlab.cli.plain_text import echo_json
from draftlab.cli.settings_options import SettingsOptions
from draftlab.doctor.settings import DoctorSettings

OPTIONS = SettingsOptions(DoctorSettings, "doctor")
NOTHING_WRITTEN = "a diagnosis writes nothing, and the same command starts over"


@OPTIONS.add_to
def doctor(
    head: Annotated[
        str,
        typer.Argument(
            help='A run, a head folder, an export, another program\'s head, or "reference".',
            metavar="HEAD",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help='Target: a folder, a GGUF file, a Hub id or "embedded"; by default '
            'that of the run, and "embedded" for its heads.'
        ),
    ] = None,
    chosen: Any = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the target: cpu, cuda, cuda:1 …")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the diagnosis as JSON on stdout.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Check a head's files, and whether another reading of them predicts the target better.

    The prompts are by default those of the run's evaluation. The exit code is 0
    for a healthy head, and 1 for one that is weak or has faults, or if the
    prompts are too few for a verdict.
    """
    with guard(debug, NOTHING_WRITTEN):
        # Mistakes are reported before torch is imported.
        OPTIONS.apply(DoctorSettings(), chosen)
        from draftlab.doctor.diagnose import diagnose
        from draftlab.doctor.diagnosis import print_diagnosis
        from draftlab.doctor.target_session import TargetSession
        from draftlab.run.held_out_prompts import default_suite, held_out_prompts
        from draftlab.run.resolve import find_head, find_target, recipe_of, run_of

        folder = find_head(head, any_layout=True)
        target_settings = find_target(
            folder, target, device, trust_remote_code=trust_remote_code, monitor=monitor
        )
        defaults, held_out = DoctorSettings(), None
        if run := run_of(folder):
            recipe = recipe_of(run)
            if suites := recipe.eval.suite or default_suite(recipe.target):
                defaults = DoctorSettings(prompts=suites[0])
            else:
                held_out = partial(held_out_prompts, recipe, run)
        settings = OPTIONS.apply(defaults, chosen)
        session = TargetSession(target_settings, settings, monitor, held_out)
        diagnosis = diagnose(folder, session)
        if as_json:
            echo_json(diagnosis.model_dump_json(by_alias=True, indent=2))
        else:
            print_diagnosis(diagnosis, output)
        raise typer.Exit(0 if diagnosis.healthy else 1)
