"""Long prompts are as long as they say, and hide what they ask for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.prompts import prompt_file
from draftlab.text.suites import load_suite
from tests.helpers.drivers import load

SCRIPT = load("data_prep/long_prompts")
long_prompts = SCRIPT.long_prompts
SOURCE = prompt_file("embedded:heldout")


def test_prompts_fill_their_lengths_and_have_their_facts_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TargetSettings(path="embedded"))
    lines = long_prompts(SOURCE, tokenizer, [512, 2048], 3, 0)
    assert lines == long_prompts(SOURCE, tokenizer, [512, 2048], 3, 0)
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    suite = load_suite(str(file), tokenizer, Monitor())
    assert len(suite.prompts) == len(lines) == 12
    for (id_, ids), line in zip(suite.prompts, lines, strict=True):
        kind, length, _ = id_.split("-")
        assert 0.75 * int(length) < len(ids) <= int(length)
        *turns, question = line["messages"][0]["content"].split("\n\nUser: ")
        assert "\n\n".join(turns).count("The code of the archive is") == (kind == "retrieval")
        assert question not in turns
    # A question that is too long for a length is not asked there.
    long = json.dumps({"messages": [{"role": "user", "content": "a question " * 200}]})
    file.write_text(f"{long}\n" * 20 + SOURCE.read_text())
    assert len(long_prompts(file, tokenizer, [512], 20, 0)) == 40
    file.write_text(json.dumps({"id": "a", "messages": [{"role": "user", "content": ""}]}))
    with pytest.raises(UserError, match="expected turns of users, found none"):
        long_prompts(file, tokenizer, [512], 1, 0)
    with pytest.raises(UserError, match="expected turns for prompts of 10,000,000 tokens"):
        long_prompts(SOURCE, tokenizer, [10_000_000], 1, 0)


def test_the_folder_is_made_and_numbers_below_one_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "long.jsonl"
    arguments = [str(SOURCE), "--target", "embedded", "--lengths", "512", "--out", str(out)]
    for option, value in (("--count", "0"), ("--lengths", "-1"), ("--lengths", "x")):
        monkeypatch.setattr(sys, "argv", ["long_prompts.py", *arguments, f"{option}={value}"])
        with pytest.raises(SystemExit):
            SCRIPT.main()
        said = f"{option}: expected a number greater than or equal to 1, found '{value}'"
        assert said in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["long_prompts.py", *arguments, "--count", "1"])
    SCRIPT.main()
    assert len(out.read_text().splitlines()) == 2
