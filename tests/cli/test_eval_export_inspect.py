"""`draftlab eval`, `export` and `inspect`, of runs and of heads by themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from draftlab.evaluate.certificate import certify
from draftlab.evaluate.results import Report
from tests.helpers.small_run import copy_of_finished, draftlab, finished, ran, refused, snapshot


def test_eval_uses_the_latest_run(folder: Path) -> None:
    result = ran(folder, "eval", "--temps", "0,0.7,1.5", "--draft-probs", "on", "--json")
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
    result = ran(tmp_path, "eval", *grid, *times, "--json")
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
    few = ("--temps", "0", "--k", "1", "--compare", "other")
    plain = draftlab(tmp_path, "eval", *few, *times)
    assert plain.stdout.count("few timed prompts") == 1
    assert "small, T = 0 " in plain.stdout


def test_a_failed_certificate_is_exit_code_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def certificate(passed: bool) -> certify.Certificate:
        return certify.Certificate(
            level="L1" if passed else "L3", prompts_equal=1.0, passed=passed, faults=[],
            num_tests=0, arms=[], lines=["line"],
        )  # fmt: skip

    options = ("eval", "--temps", "0", "--certify", "--out", str(tmp_path))
    for passed in (True, False):
        run = lambda *_, passed=passed: certificate(passed)  # noqa: E731
        monkeypatch.setattr(certify.Certification, "run", run)
        result = draftlab(finished(), *options)
        assert result.exit_code == (0 if passed else 1)
        assert "certificate of small:" in result.stdout
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
    result = ran(folder, *options, "--raw", "--compare", "runs/small/head", "--json")
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


@pytest.mark.parametrize("name", ["report.json", "report.html"])
def test_a_report_replaces_no_other_file_of_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    options = ("--run", "small", "--temps", "0", "--out", str(tmp_path))
    assert f"found another {name}" in " ".join(refused(finished(), "eval", *options).split())
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {name: '{"mine": 1}'}


@pytest.mark.parametrize("folder", ["", "head", "store", "export/speculators"])
def test_a_report_is_not_written_into_a_run_or_head(folder: str) -> None:
    out = str(finished() / "runs" / "small" / folder)
    before = snapshot(finished() / "runs")
    assert "expected a folder for a report, found" in refused(finished(), "eval", "--out", out)
    assert snapshot(finished() / "runs") == before


def test_a_head_folder_is_evaluated_with_its_target(tmp_path: Path) -> None:
    head = str(finished() / "runs" / "small" / "head")
    alone = shutil.copytree(head, tmp_path / "alone")  # it belongs to no run, which has a target
    unnamed = refused(finished(), "eval", "--head", str(alone))
    assert "expected --target with the head" in unnamed
    assert "a GGUF file" in unnamed
    assert "found both" in refused(finished(), "eval", "--head", head, "--run", "small")
    (tmp_path / "empty").mkdir()
    for verb in (("eval",), ("export", "--to", "vllm"), ("doctor",)):
        named = ("--head",) if verb != ("doctor",) else ()
        said = refused(finished(), *verb, *named, str(tmp_path / "empty"))
        assert "found one with neither a config nor safetensors" in said
    options = ("--head", head, "--target", "toy", "--prompts", "prompts.jsonl", "--temps", "0")
    short = ("--max-prompts", "1", "--max-new-tokens", "4", "--k", "1", "--out", str(tmp_path))
    result = ran(finished(), "eval", *options, *short, "--json")
    # The head has the name of its run.
    assert {row["head"] for row in json.loads(result.stdout)["rows"]} == {None, "small"}
    assert result.stderr.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"


def test_export_uses_the_run_and_its_options(folder: Path) -> None:
    config = folder / "runs" / "small" / "export" / "speculators" / "config.json"

    def k() -> int:
        (proposal,) = json.loads(config.read_text())["speculators_config"]["proposal_methods"]
        return proposal["speculative_tokens"]

    assert k() == 2
    assert "speculative tokens than the target's" in refused(folder, "export", "--k", "99999")
    assert "export   there, nothing to do" in draftlab(folder, "run", "small.yaml", "--plan").stdout
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
        result = ran(finished(), "inspect", *arguments)
        assert [text for text in output if text not in result.stdout] == []
    for what in ("small", str(run / "store")):  # refused before anything is printed
        said = refused(finished(), "inspect", what, "--sample", "12")
        assert "expected a sample in 0..11" in said
    nothing = refused(finished(), "inspect", "nothing")
    assert "expected a run, a store, a head folder or a report, found none" in nothing
    assert "do: check the path; the runs here are: small" in nothing
    assert "expected a report" in refused(finished(), "inspect", str(run / "eval"), "nothing")
    other = str(run / "provenance.json")
    assert "with its values, found other JSON" in refused(finished(), "inspect", other)
    assert "found another file" in refused(finished(), "inspect", str(run / "answers.jsonl"))
    layout = run / "export" / "speculators"
    for export in (layout, layout.parent, layout / "config.json"):
        output = refused(finished(), "inspect", str(export))
        assert f"`draftlab doctor {layout}`" in output
        assert f"`draftlab import {layout} --to" in output


def test_verbs_without_a_run_say_how_to_start_one(tmp_path: Path) -> None:
    for verb in ("eval", "export", "inspect"):
        assert "`draftlab train recipes/quickstart.yaml` makes one" in refused(tmp_path, verb)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("evla",), "error: No such command 'evla'. Did you mean 'eval'?\nwhere: command line\n"),
        (("train", "small.yaml", "--ofrce"), "error: No such option: --ofrce"),
        (("store", "merge"), "`draftlab store merge --help` explains what it takes"),
        (("train", "small.yaml", "prompts.source=toy", "name=x"), "conversations, found a folder"),
        (("eval", "--suite", "toy"), "expected a prompt suite or a file, found a folder"),
        (
            ("train", "bad.yaml"),
            "not: expected ',' or '}', but got ':', line 2, column 5\nwhere: bad",
        ),
        (("train", "small.yaml", "eval.k=[1,0]"), "\n  eval.k.1: expected a number greater than"),
        (("push", "small", "name"), "write owner and name: OWNER/NAME\n"),
        (("train", "small.yaml", "target=./nowhere"), "where: ./nowhere"),
        (("eval", "--run", "nothing"), "none named 'nothing'"),
        (("chat", "--k", "0"), "--k: expected a number greater than or equal to 1, found '0'\n"),
        (
            ("chat", "--seed", "x"),
            "--seed: expected a whole number, found 'x'\nwhere: command line",
        ),
        (("eval", "--temps", "0,hot"), "--temps: expected a number, found 'hot'"),
        (("eval", "--out", "small.yaml/x"), "expected a folder to write to, found a file"),
        (("eval", "--compare", "nothing"), "expected a head folder"),
    ],
)
def test_a_mistake_is_named_in_few_lines(
    arguments: tuple[str, ...], words: str, folder: Path
) -> None:
    (folder / "bad.yaml").write_text("train: {steps: 3\neval: [\n")
    text = refused(folder, *arguments)
    assert words in text
    assert len(text.splitlines()) <= 5


def test_layouts_are_checked_before_one_is_written(folder: Path) -> None:
    text = refused(folder, "export", "--run", "small", "--to", "vllm,sglang", "--out", "new")
    assert "where: --to sglang" in text
    assert not (folder / "new").exists()


def test_a_folder_of_a_head_names_the_head(folder: Path) -> None:
    result = ran(folder, "inspect", "runs/small/train", code=2)
    assert "`draftlab inspect runs/small/train/best`" in " ".join(result.output.split())
