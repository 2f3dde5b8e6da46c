"""`draftlab bench`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from draftlab.cli.console import Debug, TrustRemoteCode, guard, monitor, output
from draftlab.cli.plain_text import echo_json
from draftlab.cli.settings_options import SettingsOptions
from draftlab.errors import UserError
from draftlab.servers.settings import BenchSettings

if TYPE_CHECKING:
    from draftlab.evaluate.server_bench import Percentiles, ServerPoint

OPTIONS = SettingsOptions(BenchSettings, "bench", names={"suite": ["--suite", "--prompts"]})
KEPT = "what was measured so far is kept"
WIDTH = 80
_URL = re.compile(r"https?://[^\s?#@]+")


@OPTIONS.add_to
def bench(
    url: Annotated[str, typer.Argument(help="The server: http://HOST:PORT.", metavar="URL")],
    target: Annotated[
        str | None,
        typer.Option(
            help="The served target, whose tokenizer renders the prompts: a folder, GGUF file or "
            "Hub id; by default that of the run of --head."
        ),
    ] = None,
    plain: Annotated[
        str | None,
        typer.Option(help="A server of the same target without drafts.", metavar="URL"),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="A report.json of `draftlab eval`, or its folder, whose AL is put beside the "
            "server's.",
            metavar="REPORT",
        ),
    ] = None,
    chosen: Any = None,
    out: Annotated[Path, typer.Option(help="File for all numbers.")] = Path("bench.json"),
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print bench.json on stdout instead of the report.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure a running vLLM, SGLang or llama.cpp server: AL, TPOT, TTFT and goodput.

    AL and acceptance by position are differences of the server's own counters:
    start llama.cpp with --metrics, and SGLang with --enable-metrics.
    """
    with guard(debug, KEPT):
        # Mistakes are reported before torch is imported.
        settings = OPTIONS.apply(BenchSettings(), chosen)
        for address in filter(None, (url, plain)):
            if not _URL.fullmatch(address):
                what = "expected an address such as http://localhost:8000, found another text"
                do = "begin with http:// or https://; name no user, query or fragment"
                raise UserError(what, where="command line", do=do)
        from draftlab.evaluate.results import Report
        from draftlab.evaluate.server_bench import ServerBench, check_out
        from draftlab.evaluate.server_compare import compare, settings_of
        from draftlab.export.serving_tables import report_path
        from draftlab.run.resolve import recipe_of, run_of
        from draftlab.servers.server_load import LoadedServer
        from draftlab.target_model.loading import load_tokenizer
        from draftlab.target_model.locate import check_named
        from draftlab.target_model.settings import ROWS, TargetSettings, template_modes
        from draftlab.text.suites import load_suite

        check_out(out)
        check_named(target, trust_remote_code)
        path = report_path(Path(head).expanduser()) if head else None
        report = Report.read(path) if path else None
        if report:
            settings = OPTIONS.apply(settings_of(report, settings), chosen)
            if not chosen["suite"]:
                monitor.say(f"bench: the prompts of {settings.suite}, which {path} names")
        run = run_of(path) if path else None
        if (target is None and run is None) or settings.suite is None:
            what = "--target" if settings.suite else "--suite"
            do = "name it, or a report of a run with --head"
            raise UserError(f"expected {what}, found none", where="command line", do=do)
        served = recipe_of(run).target if target is None else TargetSettings(path=target)
        tokenizer = load_tokenizer(
            served.model_copy(update={"trust_remote_code": trust_remote_code})
        )
        arguments = settings.template_arguments
        suite = load_suite(
            settings.suite,
            tokenizer,
            monitor,
            raw=settings.raw,
            modes=served.modes if arguments is None else template_modes(arguments),
            seed=settings.seed,
        )
        servers = [
            LoadedServer(address, settings, getattr(tokenizer, ROWS), monitor.say)
            if address
            else None
            for address in (url, plain)
        ]
        measured = ServerBench(*servers, suite, settings, monitor)
        lines: list[str] = []
        try:
            measured.run()
        finally:
            if measured.points:
                measured.write(out)
                for point in measured.points:
                    lines += _lines(point)
                if report and not any(point.interrupted for point in measured.points):
                    lines += compare(measured, report, tokenizer)
                if as_json:
                    echo_json(out.read_text(encoding="utf-8"))
                else:
                    for line in lines:
                        indent = " " * (4 + len(line) - len(line.lstrip()))
                        for part in wrap(line, WIDTH, subsequent_indent=indent):
                            output.print(Text(part), soft_wrap=True)
                monitor.say(f"numbers: {out.resolve()}")
        if not any(point.load for point in measured.points):
            raise typer.Exit(1)


def _lines(point: ServerPoint, plain: bool = False) -> Iterator[str]:
    """Yield the console report of a server at one concurrency or rate."""
    from draftlab.report import formatting as fmt

    title = (
        f"{point.concurrency} at once"
        if point.concurrency
        else f"{point.rate:g} a second, idle at first"
    )
    failed, retried = sum(point.failures.values()), sum(point.retries.values())
    yield (
        f"{point.url}{' (without drafts)' if plain else ''}, {title}: {point.requests:,} requests"
        + f", {failed:,} failed" * bool(failed)
        + f", {retried:,} repeated" * bool(retried)
        + ", interrupted" * point.interrupted
    )
    if load := point.load:
        speedup = f", {fmt.speedup(load.speedup, load.speedup_ci)} of plain" * bool(load.speedup)
        goodput = fmt.with_interval(load.goodput_tok_s, load.goodput_tok_s_ci, 1)
        yield f"  goodput {goodput} tokens/s{speedup}"
        yield f"  {load.output_tokens:,} tokens ({load.running:.1f} requests at once)"
        if load.tpot_ms:
            yield f"  TPOT    {_percentiles(load.tpot_ms)}"
        if load.ttft_ms:
            yield f"  TTFT    {_percentiles(load.ttft_ms)}"
    if found := point.acceptance:
        yield (
            f"  AL      {fmt.with_interval(found.acceptance_length, found.acceptance_length_ci)}"
            + f", K = {found.k}" * bool(found.k)
            + f" ({found.source})"
        )
        if found.acceptance_at:
            shares = ", ".join(f"{share:.2f}" for share in found.acceptance_at)
            yield f"  accepted at each position: {shares}"
    for number, reasons in ((failed, point.failures), (retried, point.retries)):
        what = "failed" if reasons is point.failures else "repeated"
        yield from (f"  {what}: {n:,} × {reason}" for reason, n in reasons.items() if number)
    yield from (f"  warning: {text}" for text in point.warnings)
    if point.plain:
        yield from _lines(point.plain, plain=True)


def _percentiles(values: Percentiles) -> str:
    """Return "p50 12.1 [11.8, 12.5], p90 14.0, p99 20.1 ms"."""
    from draftlab.report import formatting as fmt

    middle = fmt.with_interval(values.p50, values.p50_ci, 1)
    return f"p50 {middle}, p90 {values.p90:.1f}, p99 {values.p99:.1f} ms"
