"""`draftlab bench`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from draftlab.cli.console import Debug, TrustRemoteCode, monitor, output
from draftlab.cli.errors import guard
from draftlab.cli.plain_text import echo_json
from draftlab.cli.settings_options import SettingsOptions
from draftlab.errors import UserError
from draftlab.servers.settings import BenchSettings

if TYPE_CHECKING:
    from draftlab.evaluate.server_bench import ServerPoint

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
        OPTIONS.apply(BenchSettings(), chosen)
        for address in filter(None, (url, plain)):
            if not _URL.fullmatch(address):
                what = "expected an address such as http://localhost:8000, found another text"
                do = "begin with http:// or https://; name no user, query or fragment"
                raise UserError(what, where="command line", do=do)
        from draftlab.evaluate.server_bench import check_out
        from draftlab.evaluate.server_compare import compare
        from draftlab.run.server_bench import open_bench

        check_out(out)
        bench = open_bench(
            url,
            plain,
            head,
            target,
            lambda defaults: OPTIONS.apply(defaults, chosen),
            trust_remote_code=trust_remote_code,
            monitor=monitor,
        )
        try:
            bench.run()
        finally:
            if bench.points:
                bench.write(out)
                lines = [line for point in bench.points for line in _lines(point)]
                lines += compare(bench)
                if as_json:
                    echo_json(out.read_text(encoding="utf-8"))
                else:
                    _print(lines)
                monitor.say(f"numbers: {out.resolve()}")
        if not any(point.load for point in bench.points):
            raise typer.Exit(1)


def _print(lines: list[str]) -> None:
    """Print lines, wrapped behind their own indent."""
    for line in lines:
        indent = " " * (4 + len(line) - len(line.lstrip()))
        for part in wrap(line, WIDTH, subsequent_indent=indent):
            output.print(Text(part), soft_wrap=True)


def _lines(point: ServerPoint, plain: bool = False) -> Iterator[str]:
    """Yield the console report of a server at one concurrency or rate."""
    from draftlab.report import formatting as fmt

    title = f"{point.concurrency} at once"
    if point.rate:
        title = f"{point.rate:g} a second, idle at first"
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
        for name, values in (("TPOT", load.tpot_ms), ("TTFT", load.ttft_ms)):
            if values:
                middle = fmt.with_interval(values.p50, values.p50_ci, 1)
                yield f"  {name}    p50 {middle}, p90 {values.p90:.1f}, p99 {values.p99:.1f} ms"
    if found := point.acceptance:
        yield (
            f"  AL      {fmt.with_interval(found.acceptance_length, found.acceptance_length_ci)}"
            + f", K = {found.k}" * bool(found.k)
            + f" ({found.source})"
        )
        if found.acceptance_at:
            shares = ", ".join(f"{share:.2f}" for share in found.acceptance_at)
            yield f"  accepted at each position: {shares}"
    for what, reasons in (("failed", point.failures), ("repeated", point.retries)):
        yield from (f"  {what}: {n:,} × {reason}" for reason, n in reasons.items())
    yield from (f"  warning: {text}" for text in point.warnings)
    if point.plain:
        yield from _lines(point.plain, plain=True)
