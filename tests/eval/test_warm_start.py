"""The driver that measures starting from an older target's head."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from tests.helpers.drivers import load

warm_start = load("lab/warm_start")


def test_conversations_are_functions_with_their_docstrings() -> None:
    conversations = list(warm_start.functions())
    assert len(conversations) > 500
    for user, assistant in conversations[:50]:
        head = user["content"].split("```python\n")[1].removesuffix("\n```")
        assert assistant["content"].removeprefix("```python\n").startswith(head)
        assert head.rstrip().endswith('"""')


@pytest.mark.slow
def test_heads_start_from_the_older_targets_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (
        "prompts.max_prompts=16 regenerate.max_new_tokens=16 train.steps=20 train.row_tokens=512"
    )
    small += " train.batch_rows=1 train.micro_rows=null train.validation_share=0"
    arguments = ["--out", "runs", "--tuning-steps", "2", "--prompts", "2"]
    with contextlib.chdir(tmp_path):
        warm_start.main([*arguments, *small.split(), "eval.max_new_tokens=8"])
    assert capsys.readouterr().out.count("| from the older target's head | ") == 3
    names = ("older", "scratch", "warm-5", "warm-20", "warm-100")
    files = [tmp_path / "runs" / name / "head/draftlab.json" for name in names]
    older, scratch, *warm = (json.loads(file.read_text()) for file in files)
    assert older["target"]["fingerprint"] != scratch["target"]["fingerprint"]
    assert [config["provenance"]["steps"] for config in warm] == [1, 4, 20]
    for config in warm:
        assert config["target"]["fingerprint"] == scratch["target"]["fingerprint"]
        assert config["provenance"]["initial_head"]["target"] == older["target"]
