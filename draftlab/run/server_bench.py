"""The measurement of a running server, with the target, prompts and report that a user names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.evaluate.server_bench import ServerBench
from draftlab.evaluate.server_compare import settings_of
from draftlab.export.serving_tables import report_path
from draftlab.progress import Monitor
from draftlab.run.resolve import recipe_of, run_of
from draftlab.servers.server_load import LoadedServer
from draftlab.servers.settings import BenchSettings
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.locate import check_named
from draftlab.target_model.settings import TargetSettings, template_modes
from draftlab.text.suites import load_suite


def open_bench(
    url: str,
    plain: str | None,
    head: str | None,
    target: str | None,
    choose: Callable[[BenchSettings], BenchSettings],
    *,
    trust_remote_code: bool,
    monitor: Monitor,
) -> ServerBench:
    """Return the measurement of a server, and of one without drafts (`plain`).

    Args:
        head: a report or its folder, which gives the prompts, the target and an AL to compare with.
        target: the served target; None: that of the report's run.
        choose: returns settings with what the user has chosen.

    Raises:
        UserError: target or prompts are not known, or a server cannot be reached.
    """
    check_named(target, trust_remote_code)
    path = report_path(Path(head).expanduser()) if head else None
    report, settings = Report.read(path) if path else None, choose(BenchSettings())
    if report:
        own, settings = settings.suite, choose(settings_of(report, settings))
        if own is None:
            monitor.say(f"bench: the prompts of {settings.suite}, which {path} names")
    run = run_of(path) if path else None
    if (target is None and run is None) or settings.suite is None:
        what = "--target" if settings.suite else "--suite"
        do = "name it, or a report of a run with --head"
        raise UserError(f"expected {what}, found none", where="command line", do=do)
    served = recipe_of(run).target if target is None else TargetSettings(path=target)
    trusted = served.model_copy(update={"trust_remote_code": trust_remote_code})
    tokenizer, arguments = load_tokenizer(trusted), settings.template_arguments
    modes = served.modes if arguments is None else template_modes(arguments)
    raw, seed = settings.raw, settings.seed
    suite = load_suite(settings.suite, tokenizer, monitor, raw=raw, modes=modes, seed=seed)
    server, other = (
        LoadedServer(address, settings, monitor.say) if address else None
        for address in (url, plain)
    )
    return ServerBench(server, other, suite, settings, monitor, report, tokenizer)
