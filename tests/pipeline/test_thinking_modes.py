"""One head for a target with two thinking modes, from prompts to a report of each mode."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from draftlab.evaluate.results import Report
from draftlab.export.launch import stated_k
from draftlab.store.store import Store
from tests.helpers.messages import read_conversations
from tests.helpers.small_run import draftlab, new_workshop, ran, refused, snapshot
from tests.helpers.template_families import QWEN3
from tests.helpers.toys import toy_tokenizer
from tests.helpers.zoo import zoo_folder_with_tokenizer

THINK, PLAIN = {"enable_thinking": True}, {"enable_thinking": False}
MIX = f"target.template_arguments={json.dumps([THINK, PLAIN])}"
MODES = {"enable_thinking=true", "enable_thinking=false"}
OVERRIDES = ("target=qwen", "export.formats=[]", "eval.suite=null", "train.validation_share=0.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run `small`, whose prompts are answered in either mode."""
    folder = new_workshop(tmp_path_factory.mktemp("modes"))
    zoo_folder_with_tokenizer(folder / "qwen", "qwen3", unused_rows=0)
    toy_tokenizer(QWEN3, eos="<|im_end|>").save_pretrained(folder / "qwen")
    result = ran(folder, "run", "small.yaml", MIX, *OVERRIDES)
    assert "template arguments: enable_thinking=true for 6, enable_thinking=false for 6" in (
        " ".join(result.output.split())
    )
    return folder


def categories(report: Path) -> set[str]:
    return {one.category for row in Report.read(report).rows for one in row.categories}


def test_a_mix_is_answered_recorded_and_evaluated(folder: Path) -> None:
    tokenizer, answered = (
        toy_tokenizer(QWEN3),
        read_conversations(folder / "runs/small/answers.jsonl"),
    )
    assert Counter(str(one.template_arguments) for one in answered) == {
        str(THINK): 6,
        str(PLAIN): 6,
    }
    for one in answered:
        text = tokenizer.decode(one.answers[0].prompt_ids)
        assert text.endswith("</think>\n\n") == (one.template_arguments == PLAIN)
    modes = Store.open(folder / "runs/small/store").manifest.template_arguments
    assert sorted(modes, key=str) == [PLAIN, THINK]
    shown = "".join(draftlab(folder, "inspect", "runs/small").stdout.split())  # it wraps
    assert shown.count("".join(json.dumps(modes).split())) == 2
    assert categories(folder / "runs/small/eval/report.json") == MODES


def test_an_export_says_what_requests_send(folder: Path) -> None:
    assert draftlab(folder, "export", "--to", "vllm", "--out", "served").exit_code == 0
    launch = (folder / "served/launch.md").read_text().splitlines()
    assert [line for line in launch if "chat_template_kwargs" in line] == [
        json.dumps({"chat_template_kwargs": mode})
        for mode in Store.open(folder / "runs/small/store").manifest.template_arguments
    ]
    assert stated_k("\n".join(launch)) == 2


def test_a_suite_in_both_modes_has_al_and_speed_up_of_each(folder: Path) -> None:
    words = ("--suite", "prompts.jsonl", "--max-prompts", "12", "--out", "both")
    words += ("--template-arguments", json.dumps([THINK, PLAIN]))
    ran(folder, "eval", *words, "--timing-prompts", "6", "--temps", "0")
    (row,) = [row for row in Report.read(folder / "both/report.json").rows if row.head]
    assert row.suite == "prompts.jsonl"
    assert {one.category for one in row.categories} == MODES
    assert [one.prompts for one in row.categories] == [6, 6]
    assert all(one.speedup for one in row.categories)
    page = (folder / "both/report.html").read_text()
    assert all(mode in page for mode in MODES)


def test_a_suite_in_one_mode_is_named_after_it(folder: Path) -> None:
    words = ("--template-arguments", json.dumps(THINK), "--out", "one", "--temps", "0")
    result = ran(folder, "eval", *words)  # of the held-out prompts, whatever their mode was
    assert "was not trained" not in result.output
    rows = Report.read(folder / "one/report.json").rows
    assert {row.suite for row in rows} == {"held-out prompts of the run (enable_thinking=true)"}
    words = ("--template-arguments", '{"enable_thought": true}', "--out", "none", "--temps", "0")
    result = draftlab(folder, "eval", *words)
    output = " ".join(result.output.split())
    assert "eval.template_arguments: the chat template does not read 'enable_thought'" in output
    assert "was not trained with the template arguments enable_thought=true" in output


def test_changed_arguments_start_over_what_they_change(folder: Path) -> None:
    run = folder / "runs/small"
    before = {name: snapshot(run / name) for name in ("store", "head", "eval")}
    answers = (run / "answers.jsonl").stat().st_mtime_ns
    assert "target.template_arguments: [{'enable_thinking': True}" in " ".join(
        refused(folder, "run", "small.yaml", *OVERRIDES).split()
    )
    changed = f"eval.template_arguments={json.dumps(PLAIN)}"
    ran(folder, "run", "small.yaml", MIX, changed, *OVERRIDES)
    assert (run / "answers.jsonl").stat().st_mtime_ns == answers
    after = {name: snapshot(run / name) for name in before}
    assert [name for name in before if before[name] != after[name]] == ["eval"]
