from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
import yaml
from rich.console import Console

from draftlab.cli import app
from draftlab.cli.console import ConsoleMonitor, guard
from draftlab.errors import UserError
from draftlab.evaluate.certificate import certify
from draftlab.evaluate.evaluator import Evaluator
from draftlab.evaluate.results import SCHEMA_VERSION, Report
from draftlab.pipeline import pipeline
from draftlab.signals import ENDING_SIGNALS, deliver_ending_signal, on_ending_signal
from tests.helpers.small_run import copy_of_finished, draftlab, finished, half_written, snapshot

# fmt: off
VERBS = (
    "run", "prepare", "record", "train", "eval", "doctor", "export", "import", "push", "inspect",
    "recipe", "store", "version",
)
# fmt: on
THERE = [f"{s}: there" for s in ("answers", "store", "head", "eval", "export")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the finished run that a test can change."""
    return copy_of_finished(tmp_path)


def refused(folder: Path, *arguments: str) -> str:
    """Run a command that must fail with one user error; return stderr."""
    result = draftlab(folder, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    assert half_written(folder) == []
    return result.stderr


def test_a_run_writes_all_artefacts() -> None:
    run = finished() / "runs" / "small"
    expected = (
        "answers.jsonl recipe.yaml provenance.json store/manifest.json train/metrics.jsonl "
        "head/draftlab.json head/model.safetensors head/config.json eval/report.json "
        "eval/report.html export/speculators/config.json export/speculators/model.safetensors"
    )
    assert [name for name in expected.split() if not (run / name).is_file()] == []
    assert (run.parent / "latest").resolve() == run.resolve()
    assert half_written(run) == []
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["target"] == "toy"
    assert "prompts.sha256" in provenance["inputs"]["answers"]
    rows = Report.read(run / "eval" / "report.json").rows
    assert {(row.temperature, row.drafter) for row in rows} == {
        (t, d) for t in (0.0, 0.8) for d in ("none", "chain")
    }
    assert {row.prompts for row in rows} == {3}


def test_a_complete_run_is_not_run_again() -> None:
    before = snapshot(finished() / "runs")
    result = draftlab(finished(), "run", "small.yaml")
    assert result.exit_code == 0
    output = [line for line in result.stderr.splitlines() if ": there" in line]
    assert [line.partition(" (")[0] for line in output] == THERE
    assert "acceptance" in result.stdout  # the table is shown again
    assert snapshot(finished() / "runs") == before
    for verb in ("train", "record", "prepare"):
        assert draftlab(finished(), verb, "small.yaml").exit_code == 0
    assert snapshot(finished() / "runs") == before


def test_plan_prints_stages_and_writes_nothing() -> None:
    before = snapshot(finished())
    done = draftlab(finished(), "run", "small.yaml", "--plan")
    assert done.stdout.startswith("run folder: ")
    assert done.stdout.count("nothing to do") == 5
    recipe = yaml.safe_load(draftlab(finished(), "recipe", "show", "small.yaml").stdout)
    assert (recipe["train"]["steps"], recipe["train"]["clip"]) == (6, 0.5)  # defaults, too
    change = ("run", "small.yaml", "train.steps=7", "eval.seed=1", "--plan")
    changed = draftlab(finished(), *change)
    assert changed.exit_code == 0
    assert "head     settings changed: train.steps 6 → 7\n" in changed.stdout
    assert "eval     settings changed: eval.seed 0 → 1\n" in changed.stdout
    assert "refused: --force runs head and all later stages again" in changed.stdout
    forced = draftlab(finished(), *change, "--force").stdout
    assert "head     would run again, settings changed: train.steps 6 → 7\n" in forced
    assert "export   would run again, an earlier stage changed\n" in forced
    assert "refused" not in forced
    other = draftlab(finished(), "train", "small.yaml", "name=other", "--plan")
    assert other.stdout.count("would run") == 3
    assert "eval " not in other.stdout.partition("run folder")[2]
    settings = ("name=other", "prompts.source=no.jsonl", "--plan")
    lacking = draftlab(finished(), "train", "small.yaml", *settings)
    assert "answers  would run; it needs no.jsonl, which is not there yet\n" in lacking.stdout
    assert lacking.exit_code == 2
    assert snapshot(finished()) == before
    assert not (finished() / "runs" / "other").exists()


def test_a_changed_setting_is_refused_by_name() -> None:
    before = snapshot(finished() / "runs")
    output = refused(finished(), "run", "small.yaml", "train.steps=7", "record.dtype=float32")
    assert "stage 'store'" in output
    assert "record.dtype: 'bfloat16' in the run, 'float32' now" in output
    output = refused(finished(), "train", "small.yaml", "train.steps=7")
    assert "train.steps: 6 in the run, 7 now" in output
    assert "--force" in output
    assert "name=other" in output
    assert snapshot(finished() / "runs") == before


def test_force_runs_only_changed_and_later_stages_again(folder: Path) -> None:
    run = folder / "runs" / "small"
    before = snapshot(run)
    result = draftlab(folder, "run", "small.yaml", "train.steps=7", "--force")
    assert result.exit_code == 0, result.output
    after = snapshot(run)
    unchanged = [n for n in before if n.startswith(("answers", "store/", "stages/answers"))]
    assert unchanged
    assert {n: after[n] for n in unchanged} == {n: before[n] for n in unchanged}
    for name in ("head/model.safetensors", "eval/report.json", "export/speculators/config.json"):
        assert after[name] != before[name]
    steps = [json.loads(x) for x in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if "loss" in s] == list(range(1, 8))
    assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["steps"] == 7
    assert draftlab(folder, "train", "small.yaml", "train.steps=7").exit_code == 0
    refused(folder, "train", "small.yaml")


def test_a_changed_prompt_file_is_refused(folder: Path) -> None:
    prompts = folder / "prompts.jsonl"
    text = prompts.read_text()
    prompts.write_text(text.replace("def f3", "def g3"))
    assert "prompts.sha256" in refused(folder, "train", "small.yaml")
    prompts.write_text(text)
    assert draftlab(folder, "train", "small.yaml").exit_code == 0


def test_changed_eval_settings_need_no_force(folder: Path) -> None:
    head = snapshot(folder / "runs" / "small" / "head")
    changed = ("eval.k=1", "eval.temperatures=[0]", "--json")
    result = draftlab(folder, "run", "small.yaml", *changed)
    assert result.exit_code == 0, result.output
    assert {row["k"] for row in json.loads(result.stdout)["rows"]} == {0, 1}
    assert snapshot(folder / "runs" / "small" / "head") == head


def test_eval_uses_the_latest_run(folder: Path) -> None:
    result = draftlab(folder, "eval", "--temps", "0,0.7,1.5", "--draft-probs", "on", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert sorted({row["temperature"] for row in rows}) == [0.0, 0.7, 1.5]
    assert {row["head"] for row in rows} == {"small", None}
    report = folder / "runs" / "small" / "eval" / "report.json"
    assert result.stdout == report.read_text()
    # The run has recorded that its report has other settings than its recipe.
    plan = draftlab(folder, "run", "small.yaml", "--plan").stdout
    assert "eval     would run again, settings changed" in plan
    assert "refused" not in plan
    assert "eval.temperatures [0.0, 0.7, 1.5] → [0.0, 0.8]" in plan
    again = draftlab(folder, "run", "small.yaml", "--json")
    assert {row["temperature"] for row in json.loads(again.stdout)["rows"]} == {0.0, 0.8}


def test_eval_of_several_heads_k_and_temperatures(tmp_path: Path) -> None:
    other = copy_of_finished(tmp_path) / "other"
    shutil.copytree(tmp_path / "runs" / "small" / "head", other)
    grid = ("--temps", "0,1", "--k", "1,2", "--draft-probs", "both", "--compare", "other,reference")
    times = ("--timing-prompts", "1", "--timing-batches", "1,2", "--max-new-tokens", "8")
    result = draftlab(tmp_path, "eval", *grid, *times, "--json")
    assert result.exit_code == 0, result.output
    # "reference" has another target
    assert "eval.compare: reference is left out, it was trained for embedded" in result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert {(row["head"], row["k"]) for row in rows} == {
        (None, 0), *((head, k) for head in ("small", "other") for k in (1, 2)),
    }  # fmt: skip
    assert len(rows) == 2 + 4 + 8
    assert all([t["batch"] for t in row["timings"]] == [1, 2] for row in rows)
    folder = tmp_path / "runs" / "small" / "eval"
    assert {path.stem for path in folder.glob("*.png")} >= {"tpot_by_k_1", "speedup_by_batch_2"}
    plain = draftlab(tmp_path, "eval", *grid, *times)
    assert (plain.stdout + plain.stderr).count("few timed prompts") == 1
    assert "advice, small, T = 0" in plain.stdout


def test_a_failed_certificate_is_exit_code_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def certificate(passed: bool) -> certify.Certificate:
        return certify.Certificate(
            level="L1" if passed else "L3", prompts_equal=1.0, passed=passed, faults=[], arms=[],
            lines=["line"],
        )  # fmt: skip

    options = ("eval", "--temps", "0", "--certify", "--out", str(tmp_path))
    for passed in (True, False):
        monkeypatch.setattr(certify, "certify", lambda *_, passed=passed, **__: certificate(passed))
        result = draftlab(finished(), *options)
        assert result.exit_code == (0 if passed else 1)
        assert "certificate, small:" in result.stdout
        assert ("FAILED" in result.stdout) is not passed


def test_raw_prompts_need_no_chat_template(folder: Path) -> None:
    """The target may have none, or another one than the head was trained with."""
    config = folder / "toy" / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    fields.pop("chat_template", None)
    config.write_text(json.dumps(fields))
    (folder / "toy" / "chat_template.jinja").unlink(missing_ok=True)
    options = ("eval", "--temps", "0", "--out", str(folder / "out"))
    assert "template" in refused(folder, *options)
    result = draftlab(folder, *options, "--raw", "--compare", "runs/small/head", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {row["template"] for row in rows} == {"none (raw text)"}
    assert {row["head"] for row in rows} == {None, "small", "runs/small"}
    for file in (folder / "out").iterdir():  # reports and plots name no folders of the machine
        assert str(folder).encode() not in file.read_bytes(), file


def test_eval_with_out_leaves_the_run_unchanged(tmp_path: Path) -> None:
    before = snapshot(finished() / "runs")
    options = ("--run", "small", "--temps", "0", "--out", str(tmp_path / "out"))
    assert draftlab(finished(), "eval", *options).exit_code == 0
    assert Report.read(tmp_path / "out" / "report.json").rows
    assert (tmp_path / "out" / "report.html").is_file()
    assert snapshot(finished() / "runs") == before


def test_a_head_folder_is_evaluated_with_its_target(tmp_path: Path) -> None:
    head = str(finished() / "runs" / "small" / "head")
    alone = shutil.copytree(head, tmp_path / "alone")  # it belongs to no run, which has a target
    assert "expected --target with the head" in refused(finished(), "eval", "--head", str(alone))
    assert "found both" in refused(finished(), "eval", "--head", head, "--run", "small")
    options = ("--head", head, "--target", "toy", "--prompts", "prompts.jsonl", "--temps", "0")
    short = ("--max-prompts", "1", "--max-new-tokens", "4", "--out", str(tmp_path))
    result = draftlab(finished(), "eval", *options, *short, "--json")
    assert result.exit_code == 0, result.output
    # The head has the name of its run.
    assert {row["head"] for row in json.loads(result.stdout)["rows"]} == {None, "small"}
    assert result.stderr.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"


def test_export_uses_the_run_and_its_options(folder: Path) -> None:
    config = folder / "runs" / "small" / "export" / "speculators" / "config.json"

    def k() -> int:
        (proposal,) = json.loads(config.read_text())["speculators_config"]["proposal_methods"]
        return proposal["speculative_tokens"]

    assert k() == 2
    assert draftlab(folder, "export", "--to", "speculators", "--k", "1").exit_code == 0
    assert k() == 1
    assert "export.k 1 → None" in draftlab(folder, "run", "small.yaml", "--plan").stdout
    assert draftlab(folder, "run", "small.yaml", "export.k=1").exit_code == 0
    assert draftlab(folder, "export").exit_code == 0
    assert k() == 1  # as in the run's recipe
    elsewhere = folder / "elsewhere"
    assert draftlab(folder, "export", "--k", "2", "--out", str(elsewhere)).exit_code == 0
    assert k() == 1
    assert (elsewhere / "model.safetensors").is_file()
    assert "did you mean 'speculators'?" in refused(folder, "export", "--to", "speculator")


def test_inspect_shows_run_store_head_and_report() -> None:
    run = finished() / "runs" / "small"
    for arguments, output in (
        ((), ("boundaries", "draft vocabulary", "12 in 3 shards", "conversation p0", "user")),
        (("small", "--sample", "1"), ("conversation p1",)),
        ((str(run / "store"),), ("12 in 3 shards", "conversation p0")),
        ((str(run / "head"),), ("trained K", "LlamaForCausalLM", "tokens seen")),
        ((str(run / "head" / "model.safetensors"),), ("trained K", "15 tensors, ")),
        ((str(run / "eval" / "report.json"),), ("acceptance length = 1 + accepted",)),
        ((str(run / "eval"),), ("acceptance length = 1 + accepted",)),
        ((str(run / "eval" / "report.html"),), ("acceptance length = 1 + accepted",)),
        (("reference",), ("embedded",)),
        ((str(run / "eval"), str(run / "eval" / "report.html")), ("suite", "prompts", "AL")),
    ):
        result = draftlab(finished(), "inspect", *arguments)
        assert result.exit_code == 0, result.output
        assert [text for text in output if text not in result.stdout] == []
    assert "expected a sample in 0..11" in draftlab(finished(), "inspect", "--sample", "12").stderr
    assert "expected a run, found none" in refused(finished(), "inspect", "nothing")
    assert "expected a report" in refused(finished(), "inspect", str(run / "eval"), "nothing")
    other = str(run / "provenance.json")
    assert "report.json of draftlab, found other JSON" in refused(finished(), "inspect", other)
    assert "found another file" in refused(finished(), "inspect", str(run / "answers.jsonl"))
    layout = run / "export" / "speculators"
    for export in (layout, layout.parent, layout / "config.json"):
        output = refused(finished(), "inspect", str(export))
        assert f"`draftlab doctor {layout}`" in output
        assert f"`draftlab import {layout} --to" in output


def test_inspect_refuses_a_truncated_head(tmp_path: Path) -> None:
    shutil.copytree(finished() / "runs" / "small" / "head", tmp_path / "head")
    weights = tmp_path / "head" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 4)
    assert "weights are unreadable" in refused(tmp_path, "inspect", "head")
    weights.unlink()
    assert "expected the head's weights, found nothing" in refused(tmp_path, "inspect", "head")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("train", "none.yaml"), ("expected a recipe", "where: none.yaml")),
        (("train", "small.yaml", "train.stepz=3"), ("did you mean train.steps?", "recipe schema")),
        (("train", "small.yaml", "target=./nowhere"), ("config.json", "where: nowhere")),
        (("train", "small.yaml", "prompts.source=no.jsonl"), ("no.jsonl",)),
        (("eval", "--run", "nothing"), ("expected a run, found none", "none named 'nothing'")),
        (("eval", "--temps", "0,hot"), ("--temps: expected a number, found 'hot'", "eval --help")),
        (
            ("eval", "--k", "0"),
            ("--k: expected a number greater", "found '0'", "command line", "eval --help"),
        ),
        (("eval", "--timing-batches", "8,0"), ("--timing-batches: expected ", "found '0'")),
        (("eval", "--out", "small.yaml/x"), ("expected a folder to write to, found a file",)),
        (("eval", "--k", "3,x"), ("--k: expected a whole number, found 'x'",)),
        (("eval", "--temps", "0,,0.7"), ("--temps", "0,,0.7")),
        (("eval", "--compare", "nothing"), ("expected a head folder", "nothing")),
        (("eval", "--draft-probs", "maybe"), ("--draft-probs: expected 'on', ", "'maybe'")),
        (("eval", "--head", "nothing"), ("expected a head folder", "nothing")),
        (("recipe", "show", "none.yaml"), ("expected a recipe",)),
    ],
)
def test_mistakes_are_one_message(arguments: tuple[str, ...], messages: tuple[str, ...]) -> None:
    output = refused(finished(), *arguments)
    assert [text for text in messages if text not in output] == []


def test_verbs_without_a_run_say_how_to_start_one(tmp_path: Path) -> None:
    for verb in ("eval", "export", "inspect"):
        assert "`draftlab train recipes/quickstart.yaml` makes one" in refused(tmp_path, verb)
    assert list(tmp_path.iterdir()) == []


def test_debug_prints_the_traceback_of_a_mistake() -> None:
    result = draftlab(finished(), "train", "none.yaml", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: expected a recipe" in result.stderr


def raises(error: BaseException) -> Callable[..., None]:
    """Return a function that raises an error."""

    def function(*_: object, **__: object) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (ZeroDivisionError("oh"), 1, "internal error: ZeroDivisionError: oh"),
        (KeyboardInterrupt(), 130, "continues where it stopped"),
    ],
)
def test_internal_errors_and_interruptions(
    error: BaseException, exit_code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished()  # must exist before `make` is broken
    monkeypatch.setattr(pipeline.Pipeline, "make", raises(error))
    result = draftlab(folder, "train", "small.yaml")
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    result = draftlab(folder, "train", "small.yaml", "--debug")
    assert result.exit_code == exit_code
    assert "Traceback" in result.stderr


def test_an_interrupted_evaluation_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = finished()
    before = snapshot(folder / "runs")
    monkeypatch.setattr(Evaluator, "run", raises(KeyboardInterrupt()))
    for where in ("--out", str(tmp_path / "out")), ():
        result = draftlab(folder, "eval", "--temps", "1", *where)
        assert result.exit_code == 130
        assert "nothing was written" in result.stderr
    assert not (tmp_path / "out").exists()
    assert snapshot(folder / "runs") == before  # the former report and its record


def test_a_broken_suite_leaves_the_run_unchanged(folder: Path) -> None:
    (folder / "bad.jsonl").write_text('{"text": "no messages"}\n')
    before = snapshot(folder / "runs")
    output = refused(folder, "eval", "--suite", "bad.jsonl")
    assert "expected messages, found text" in output
    assert "bad.jsonl:1" in output
    assert snapshot(folder / "runs") == before


def test_broken_prompts_leave_no_run_folder(folder: Path) -> None:
    (folder / "bad.jsonl").write_text("not json\n")
    before = snapshot(folder / "runs")
    refused(folder, "run", "small.yaml", "name=other", "prompts.source=bad.jsonl")
    assert snapshot(folder / "runs") == before
    assert not (folder / "runs" / "other").exists()


def test_an_error_removes_the_progress_bar() -> None:
    # A progress bar hides the cursor, and only its end shows it again.
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monitor = ConsoleMonitor(console)
    monitor.progress("record", 1, 9, "7 tokens/s")
    with pytest.raises(typer.Exit), guard(False, monitor=monitor):
        raise UserError("expected this", where="there", do="that")
    shown = console.file.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert shown.index("expected this") > shown.rindex("7 tokens/s")


@pytest.mark.parametrize(
    ("number", "path", "where", "do"),
    [
        (errno.ENOSPC, "runs/a/report.json", "runs/a/report.json", "free some disk"),
        (errno.ENOSPC, None, "a file under ", "free some disk"),
        (errno.EACCES, "runs/a/x", "runs/a/x", "let this user write there"),
    ],
)
def test_a_full_or_read_only_disk_is_a_user_error(
    number: int, path: str | None, where: str, do: str
) -> None:
    console = Console(file=io.StringIO(), width=100)
    with pytest.raises(typer.Exit) as ended, guard(False, monitor=ConsoleMonitor(console)):
        raise OSError(number, os.strerror(number), path)
    assert ended.value.exit_code == 2
    first, second, third = console.file.getvalue().splitlines()
    assert first == f"error: expected to write a file, found: {os.strerror(number)}"
    assert second.startswith(f"where: {where}")
    assert third == f"do: {do}; the same command continues where it stopped"


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_a_signal_ends_the_process_with_a_line(number: signal.Signals) -> None:
    console = Console(file=io.StringIO(), width=100)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, guard(False, monitor=ConsoleMonitor(console)):
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    line = f"{number.name}; the same command continues where it stopped\n"
    assert console.file.getvalue() == line
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("error", [UserError("expected x", do="y"), TypeError("no shape"), None])
def test_a_signal_whose_exception_a_library_replaces_ends_the_process(
    error: Exception | None,
) -> None:
    """As torch does if the signal comes while it reads a tensor."""

    def library() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            if error is not None:
                raise error from None

    console = Console(file=io.StringIO(), width=100)
    with pytest.raises(SystemExit) as ended, guard(False, monitor=ConsoleMonitor(console)):
        library()
    assert ended.value.code == 128 + signal.SIGTERM
    assert console.file.getvalue().startswith("SIGTERM; the same")
    assert "error" not in console.file.getvalue()


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_ending_signal(lambda number: pytest.fail("handled")):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_gets_the_signals_of_another_process() -> None:
    """As a rank of Ray Train, which is no main thread, gets the driver's."""
    received: list[int] = []
    in_block, may_end = threading.Event(), threading.Event()

    def train() -> None:
        with on_ending_signal(received.append):
            in_block.set()
            may_end.wait(60)

    assert not deliver_ending_signal(signal.SIGTERM)
    thread = threading.Thread(target=train)
    thread.start()
    assert in_block.wait(60)
    assert deliver_ending_signal(signal.SIGHUP)
    may_end.set()
    thread.join()
    assert received == [signal.SIGHUP]
    assert not deliver_ending_signal(signal.SIGTERM)


def test_long_lines_are_not_wrapped_in_a_log() -> None:
    console = Console(file=io.StringIO(), width=40)
    monitor = ConsoleMonitor(console)
    path = "/a/folder/[with]/brackets/" + "long/" * 20
    monitor.say(f"head: {path}")
    with pytest.raises(typer.Exit) as ended, guard(False, monitor=monitor):
        raise UserError("no head", where=path)
    assert ended.value.exit_code == 2
    assert console.file.getvalue() == f"head: {path}\nerror: no head\nwhere: {path}\n"


@pytest.mark.parametrize("verb", [*VERBS, "recipe schema", "recipe show"])
def test_help_of_every_verb(verb: str, tmp_path: Path) -> None:
    result = draftlab(tmp_path, *verb.split(), "--help")
    assert result.exit_code == 0
    assert "Usage: draftlab" in result.stdout


def test_the_list_of_verbs_is_complete(tmp_path: Path) -> None:
    names = {c.name or c.callback.__name__ for c in app.registered_commands}
    assert names | {g.name for g in app.registered_groups} == set(VERBS)
    assert draftlab(tmp_path, "evla").exit_code == 2
    assert draftlab(tmp_path, "recipe", "schema").stdout.count("\n") > 100
    assert "properties" in json.loads(draftlab(tmp_path, "recipe", "schema", "--json").stdout)


def test_mistakes_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    """`--help` and errors in arguments must not wait seconds for imports."""
    (tmp_path / "small.yaml").write_text("train: {steps: 1}")
    commands = [
        "--help", "eval --help", "evla", "eval --foo", "eval --temps 0,hot", "eval --k 0",
        "eval --engine fast", "eval --dtype float8", "export --to ggfu", "export --k 0",
        "train none.yaml", "train small.yaml train.stepz=1", "run small.yaml eval.k=[0]",
        "train small.yaml --gpu x", "doctor x --k 0", "push x noname", "push x a/b --to ggfu",
        "recipe show small.yaml", "recipe schema", "version",
    ]  # fmt: skip
    code = (
        "import shlex, sys; from draftlab.cli import app\n"
        "for line in sys.stdin:\n"
        "    try: app(shlex.split(line), prog_name='draftlab')\n"
        "    except SystemExit as end: print('exit', end.code or 0)\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'matplotlib', 'numpy', 'tokenizers'}\n"
        "print('heavy', sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(commands), capture_output=True, text=True,
        check=True, cwd=tmp_path,
    )  # fmt: skip
    ends = [line for line in done.stdout.splitlines() if line.startswith(("exit ", "heavy "))]
    valid = {"--help", "eval --help", "recipe show small.yaml", "recipe schema", "version"}
    assert ends == [f"exit {0 if line in valid else 2}" for line in commands] + ["heavy []"]
    assert "Usage: draftlab" in done.stdout
    for output in ("--to: expected a layout", "--k: expected a number", "--dtype: expected 'auto'"):
        assert output in done.stderr


def test_stdout_of_a_process_has_only_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "draftlab.cli", "run", "small.yaml", "--json"],
        cwd=finished(),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (finished() / "runs/small/eval/report.json").read_text()
    assert json.loads(done.stdout)["schema"] == SCHEMA_VERSION
    assert "eval: there (runs/small/eval)" in done.stderr
