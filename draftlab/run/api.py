"""Evaluate and export a head without a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.evaluator import EvalSettings, Evaluator, NamedHead
from draftlab.evaluate.results import Report
from draftlab.evaluate.vllm_compare import check_heads, check_settings
from draftlab.export.gguf import convert, find_converter
from draftlab.export.settings import ExportSettings
from draftlab.export.write import PlannedExport, plan_export
from draftlab.files import check_folder, read_json
from draftlab.formatting import count_text
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import load_config, load_head
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.report.html import write_html
from draftlab.run.held_out_prompts import (
    NAMED_BY_USER,
    default_suite,
    held_out_prompts,
    trained_prompts,
)
from draftlab.run.resolve import find_head, name_in_reports, recipe_of, run_of
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.locate import local_target, resolve_target
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings, template_modes
from draftlab.text.chat_template import (
    stop_ids,
    template_sha256,
    tokenizer_sha256,
    unread_arguments,
)
from draftlab.text.prompts import describe_arguments
from draftlab.text.suites import conversation_suite, load_suite

HELD_OUT = "held-out prompts of the run"
"""Name of the suite where none is named."""


def check_trained_for(
    head: HeadConfig,
    target: Target,
    tokenizer: Any,
    folder: Path,
    *,
    raw: bool = False,
    base: str | None = None,
) -> None:
    """Check that a head was trained for this target, tokenizer and chat template.

    Args:
        raw: prompts are plain text, so that the chat template is not checked.
        base: fingerprint of the target with another adapter or none, which may also be its own.

    Raises:
        UserError: the head was trained for another one.
    """
    trained = head.target.fingerprint
    pairs = {
        "target": (trained, trained if trained == base else target.fingerprint),
        "tokenizer": (head.target.tokenizer_sha256, tokenizer_sha256(tokenizer)),
    }
    if not raw:
        pairs["chat template"] = (head.target.template_sha256, template_sha256(tokenizer))
    differences = [
        f"{name}: the head was trained with {trained[:12]}, found {actual[:12]}"
        for name, (trained, actual) in pairs.items()
        if trained != actual
    ]
    if differences:
        raise UserError(
            f"the head was trained for {head.target.name}, which is not this target:\n  "
            + "\n  ".join(differences),
            where=folder,
            do="name its target with --target",
        )


def load_trained_head(folder: Path, target: Target, tokenizer: Any, **options: Any) -> DraftHead:
    """Load a head with a target's device and dtype, after `check_trained_for` with its options."""
    check_trained_for(load_config(folder), target, tokenizer, folder, **options)
    return _load(folder, target)


def _load(folder: Path, target: Target) -> DraftHead:
    shared = target.parts.shared_tensors
    return load_head(folder, target_tensors=shared, dtype=target.dtype, device=target.device)


def _trained_on(head: Path, monitor: Monitor) -> frozenset[bytes]:
    """Return the `trained_prompts` of the run that a head belongs to; empty: none, or unknown."""
    run = run_of(head)
    try:
        return trained_prompts(recipe_of(run), run) if run else frozenset()
    except UserError as error:  # it says nothing about the head
        monitor.say(f"warning: eval: the prompts of its training are not known: {error.what}")
        return frozenset()


def _load_compared(
    settings: EvalSettings, names: set[str], target: Target, tokenizer: Any, monitor: Monitor
) -> Iterator[NamedHead]:
    """Yield the heads of `eval.compare`, with a warning for heads that have another target."""
    for source in settings.compare:
        folder = find_head(source)
        config = load_config(folder)
        try:
            check_trained_for(config, target, tokenizer, folder, raw=settings.raw)
        except UserError:
            monitor.say(
                f"warning: eval.compare: {source} is left out, it was trained for "
                f"{config.target.name}"
            )
            continue
        name = name_in_reports(folder, names)
        yield NamedHead(name, _load(folder, target), folder, _trained_on(folder, monitor))


def evaluate_head(
    target_settings: TargetSettings,
    head_folder: Path | None,
    settings: EvalSettings,
    out: Path,
    *,
    monitor: Monitor,
    target: Target | None = None,
    head_name: str | None = None,
    trained_for: TargetSettings | None = None,
    writing: AbstractContextManager[object] | None = None,
) -> Report:
    """Evaluate a head, and write report.json, report.html and plots into `out`.

    Settings without a suite mean the prompts that the training of the head's run held out.

    Args:
        head_folder: None evaluates plain decoding only.
        target: the loaded target; None: it is loaded.
        head_name: the name in the report; None: the folder's name.
        trained_for: the head's own target; None: `target_settings`. With another adapter it is
            evaluated all the same.
        writing: is entered once all is measured, and left once the report is written.

    Raises:
        UserError: no suite is named, and there is no default.
    """
    check_folder(out)
    local_target(target_settings)  # a wrong path is the first error
    sources = settings.suite or default_suite(target_settings)
    run = None if sources or head_folder is None else run_of(head_folder)
    if not sources and run is None:
        raise UserError(
            "expected a suite of prompts, found none: only a run has prompts that training held "
            "out, and the built-in ones are for the built-in target",
            where="eval.suite",
            do=NAMED_BY_USER,
        )
    if settings.engine == "vllm":
        check_settings(settings)
    if target is None:
        target = load_target(target_settings)
        for note in target.notes:
            monitor.say(note)
    tokenizer = load_tokenizer(target_settings)
    heads = []
    if head_folder is not None:
        base = None
        if trained_for is not None and trained_for.adapter != target_settings.adapter:
            base = fingerprint(resolve_target(trained_for))
            monitor.say(
                f"warning: eval: the head was trained with target.adapter={trained_for.adapter}, "
                f"and is measured with {target_settings.adapter}"
            )
        head = load_trained_head(head_folder, target, tokenizer, raw=settings.raw, base=base)
        name = head_name or name_in_reports(head_folder)
        heads.append(NamedHead(name, head, head_folder, _trained_on(head_folder, monitor)))
        heads += _load_compared(settings, {name}, target, tokenizer, monitor)
    if settings.engine == "vllm":
        check_heads(one.head.config for one in heads)
    max_prompt = target.max_length - max(settings.max_new_tokens, settings.timing_tokens)
    options: dict[str, Any] = {"raw": settings.raw, "max_prompt_tokens": max(max_prompt, 1)}
    options |= {"seed": settings.seed, "modes": target_settings.modes}
    if settings.template_arguments is not None:
        options["modes"] = template_modes(settings.template_arguments)
        for name in unread_arguments(tokenizer, options["modes"]):
            monitor.say(
                f"warning: eval.template_arguments: the chat template does not read {name!r}"
            )
    elif not sources:  # held-out prompts have their own
        options["modes"] = ({},)
    trained = heads[0].head.config.provenance.get("template_arguments") if heads else None
    if trained and (sources or settings.template_arguments is not None):
        for mode in (mode for mode in options["modes"] if mode not in trained):
            monitor.say(
                f"warning: eval: {heads[0].name} was not trained with the template arguments "
                f"{describe_arguments(mode) or 'none'}; eval.template_arguments changes them"
            )
    options["target"] = target if settings.engine != "vllm" and not settings.raw else None
    suites = [load_suite(source, tokenizer, monitor, **options) for source in sources]
    if not suites:
        conversations = held_out_prompts(recipe_of(run), run)
        monitor.say(
            f"eval: {count_text(len(conversations), 'prompt')} that training held out, since "
            "eval.suite names none"
        )
        suites = [conversation_suite(HELD_OUT, conversations, tokenizer, monitor, **options)]
    stops = stop_ids(tokenizer, target.folder)
    report = Evaluator(target, heads, suites, stops, settings, monitor=monitor).run()
    if target_settings.adapter is not None:
        report.target["adapter"] = Path(target_settings.adapter).name
    with writing or nullcontext():
        write_report(report, out)
    return report


def write_report(report: Report, out: Path) -> None:
    """Write report.json, report.html and plots; raise a `UserError` if vLLM failed, so that the
    report has draftlab's rows alone.
    """
    report.write(out / "report.json")
    write_html(report, out)
    if reason := report.environment.get("vllm_failure"):
        raise UserError(
            f"vLLM failed, so the report has draftlab's rows alone: {reason}",
            where=out / "report.json",
            do="mend what vLLM says and repeat the command; `draftlab inspect` prints the report",
        )


def export_head(
    head_folder: Path,
    target_settings: TargetSettings,
    out: Path,
    layout: str,
    *,
    settings: ExportSettings | None = None,
    report: Path | None = None,
    monitor: Monitor,
) -> Path:
    """Export a head to a layout, load the export back and compare it; return its folder.

    The fastest K of the head's evaluation, report.json, is the default.
    """
    places, settings = {layout: out}, settings or ExportSettings()
    return export_layouts(
        head_folder, target_settings, places, settings=settings, report=report, monitor=monitor
    )[0]


def export_layouts(
    head_folder: Path,
    target_settings: TargetSettings,
    places: Mapping[str, Path],
    *,
    settings: ExportSettings,
    report: Path | None = None,
    monitor: Monitor,
    writing: AbstractContextManager[object] | None = None,
) -> list[Path]:
    """Export a head to several layouts, once all of them have been checked; return their folders.

    Args:
        places: layout → folder.
        report: see `export_head`.
        writing: is entered once all layouts are checked, and left once they are written.
    """
    converter = find_converter() if settings.gguf and "llamacpp" in places else None
    target_folder = resolve_target(target_settings)
    say = cache(monitor.say)  # what layouts have in common is said once
    planned = [
        plan_export(
            head_folder,
            target_folder,
            out,
            layout,
            target_name=str(target_folder) if target_settings.adapter else target_settings.path,
            settings=settings,
            report=report,
            say=say,
        )
        for layout, out in places.items()
    ]
    write = partial(PlannedExport.write, trust_remote_code=target_settings.trust_remote_code)
    with writing or nullcontext():
        with ThreadPoolExecutor() as pool:
            written = dict(zip(places, [pool.submit(write, one) for one in planned], strict=True))
        for layout, one in written.items():
            if one.exception() is None:
                monitor.say(
                    f"export: {one.result()} holds the head in {layout} layout; it was loaded back "
                    "and is equal"
                )
        paths = [one.result() for one in written.values()]  # or the first error
        if converter is not None:
            path = written["llamacpp"].result()
            dtype = read_json(path / "config.json")["dtype"]
            convert(converter, path, target_folder, dtype, monitor)
    if better := load_config(head_folder).provenance.get("better_validation"):
        monitor.say(
            f"warning: this head is its training's last; the one after step {better['step']:,} had "
            f"a better validation (predicted AL {better['predicted_al']:.3f}) and is in train/best"
        )
    return paths
