"""`draftlab eval`: the one verb with more options than a screen; it parses, calls, prints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from draftlab.cli.console import STARTS_ANEW, Debug, Json, guard, monitor, show

_HELP = "`draftlab eval --help` explains every option"
GRID, PROMPTS, TIMES, MORE = "What is measured", "Prompts and answers", "Times", "Engines, files"


def _option(help_: str, panel: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=panel, metavar=metavar)


def eval_(
    run_name: Annotated[
        str | None, typer.Option("--run", help="Run to evaluate, by name or path.", metavar="RUN")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(help='A head folder instead of a run\'s head; "reference" ships in draftlab.'),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target of --head: folder, Hub id or embedded.")
    ] = None,
    temps: Annotated[
        str | None, _option("Temperatures, such as 0,0.7,1.5.", GRID, metavar="T,T,…")
    ] = None,
    k: Annotated[
        str | None, _option("Drafts a step, such as 4 or 3,5.", GRID, "--k", metavar="K,K,…")
    ] = None,
    draft_probs: Annotated[
        str | None, _option("on, off (vLLM's default) or both.", GRID, metavar="MODE")
    ] = None,
    compare: Annotated[
        str | None,
        _option("Further heads in the same report: folders, reference.", GRID, metavar="HEAD,…"),
    ] = None,
    draft_temperature: Annotated[
        float | None, _option("Of sampled drafts; default: the row's own.", GRID)
    ] = None,
    greedy_below: Annotated[
        float | None, _option("Rows at a lower temperature draft greedily.", GRID)
    ] = None,
    top_k: Annotated[int | None, _option("Keep the k most likely tokens.", GRID)] = None,
    top_p: Annotated[float | None, _option("Keep this probability mass.", GRID)] = None,
    certify: Annotated[
        bool,
        _option("Also test that no output changes; exit code 1 if one does.", GRID, "--certify"),
    ] = False,
    suite: Annotated[
        str | None,
        _option(
            "embedded:heldout, a JSONL of conversations, mt-bench, humaneval, gsm8k, "
            "spec-bench:PATH or speed-bench:PATH.",
            PROMPTS,
            "--suite",
            "--prompts",
        ),
    ] = None,
    raw: Annotated[bool, _option("Plain text: no chat template.", PROMPTS, "--raw")] = False,
    max_prompts: Annotated[int | None, _option("Prompts taken from the start.", PROMPTS)] = None,
    max_new_tokens: Annotated[int | None, _option("Tokens of an answer.", PROMPTS)] = None,
    seed: Annotated[int | None, _option("Of the sampling noise.", PROMPTS)] = None,
    batch: Annotated[int | None, _option("Prompts decoded at once when counted.", TIMES)] = None,
    timing_prompts: Annotated[int | None, _option("Prompts timed; 0: no times.", TIMES)] = None,
    timing_batches: Annotated[
        str | None,
        _option("Prompts decoded at once when timed, such as 1,8,32.", TIMES, metavar="B,B,…"),
    ] = None,
    engine: Annotated[str | None, _option("paged, reference, or vllm (beside ours).", MORE)] = None,
    packed: Annotated[
        bool | None,
        _option(
            "On a CPU: packed products, faster, or the plain ones of parity runs.",
            MORE,
            "--packed/--no-packed",
        ),
    ] = None,
    dtype: Annotated[str | None, _option("auto, float32, bfloat16 or float16.", MORE)] = None,
    out: Annotated[Path | None, _option("Folder of the report.", MORE)] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Decode a prompt suite speculatively and report AL, TPOT and counters.

    Without arguments it takes the head of the latest run and that run's eval settings.
    """
    with guard(debug, STARTS_ANEW):
        from draftlab.evaluate.settings import EvalSettings
        from draftlab.pipeline.recipe import changed
        from draftlab.target_model.settings import TargetSettings

        asked: dict[str, Any] = {
            "engine": engine,
            "suite": suite,
            "raw": raw or None,
            "max_prompts": max_prompts,
            "compare": compare,
            "k": k,
            "temperatures": temps,
            "draft_probs": draft_probs,
            "draft_temperature": draft_temperature,
            "greedy_below": greedy_below,
            "top_k": top_k,
            "top_p": top_p,
            "max_new_tokens": max_new_tokens,
            "batch": batch,
            "timing_prompts": timing_prompts,
            "timing_batches": timing_batches,
            "seed": seed,
            "certify": certify or None,
            "packed": packed,
        }
        names = {key: f"--{key.replace('_', '-')}" for key in [*asked, "dtype"]}
        names["temperatures"] = "--temps"
        check = partial(changed, where="command line", options=names, do=_HELP)
        of_target = {"dtype": dtype}
        check(EvalSettings(), asked)  # a slip is answered before torch is imported
        check(TargetSettings(), of_target)
        from draftlab.pipeline.resolve import eval_subject

        subject = eval_subject(run_name, head, target)
        settings, target_settings = check(subject.settings, asked), check(subject.target, of_target)
        report, folder = subject.evaluate(target_settings, settings, out, monitor=monitor)
        show(report, as_json, folder / "report.json")
        certificates = report.environment.get("certificates", {})
        if not all(certificate["passed"] for certificate in certificates.values()):
            raise typer.Exit(1)
