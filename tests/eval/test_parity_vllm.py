"""The comparison behind `make parity-vllm`: it must find every kind of difference."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftlab.engine.counters import Counters
from draftlab.errors import UserError
from tests.helpers.drivers import decoded, load

common, random_heads = load("parity/common"), load("parity/random_heads")
vllm = load("parity/parity_vllm")


DRAFTLAB = [decoded("a", (3, 0, 2)), decoded("b", (1, 1)), decoded("c", ())]
COUNTED = {key: getattr(DRAFTLAB[1].counters, key) for key in vllm.COUNTERS}


def test_sides_that_say_the_same_are_equal() -> None:
    undrafted = replace(DRAFTLAB[0], steps=(*DRAFTLAB[0].steps, (0, 0)), first_token_s=9.0)
    assert vllm.first_difference(DRAFTLAB, [undrafted, *DRAFTLAB[1:]]) is None
    assert vllm.total(DRAFTLAB).accepted_at == [4, 2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": (10, 11, 9, 13)}, "prompt b, token 2: draftlab 12, vLLM 9"),
        ({"token_ids": (10, 11, 12, 13)}, "prompt b, token 4: draftlab 14, vLLM nothing"),
        ({"token_ids": (10, 11, 12, 13, 14, 15)}, "prompt b, token 5: draftlab nothing, vLLM 15"),
        (
            {"steps": ((3, 2), (3, 0))},
            "b, accepted drafts of verify step 0: draftlab 1, vLLM 2",
        ),
        ({"finish": "stop"}, "prompt b, finish: draftlab length, vLLM stop"),
        ({"counters": Counters(3, 2, 5, 2, [2, 0, 0])}, "prompt b, draft_tokens: draftlab 6, vLLM"),
        ({"counters": Counters(3, 2, 6, 2, [1, 1, 0])}, "prompt b, accepted_at: draftlab [2, 0, 0"),
    ],
)
def test_the_first_difference_names_prompt_position_and_both_values(
    change: dict, message: str
) -> None:
    answers = [DRAFTLAB[0], replace(DRAFTLAB[1], **change), replace(DRAFTLAB[2], finish="stop")]
    assert message in (vllm.first_difference(DRAFTLAB, answers) or "")


def test_a_missing_prompt_and_another_order_are_differences() -> None:
    assert vllm.first_difference(DRAFTLAB, DRAFTLAB[:2])
    assert vllm.first_difference(DRAFTLAB, [DRAFTLAB[1], DRAFTLAB[0], DRAFTLAB[2]])


def test_the_interval_of_the_difference_holds_0_for_equal_and_not_for_unequal_acceptance() -> None:
    same = [decoded(str(i), (i % 4, 3 - i % 4)) for i in range(40)]
    lower = [decoded(str(i), (i % 2, 0)) for i in range(40)]
    difference, (low, high) = vllm.acceptance_difference(same, same)
    assert difference == low == high == 0.0
    difference, (low, high) = vllm.acceptance_difference(same, lower)
    assert difference == pytest.approx(1.5 - 0.25)
    assert 0 < low < difference < high
    wider = vllm.acceptance_difference(same, lower, level=0.99)[1]
    assert wider[0] < low < high < wider[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"drafts": [[1, 2, 3], [4, 5, 6], [0, 0, 0]]}, None),  # after the last verified step
        ({"drafts": [[1, 2, 3], [4, 5, 7]]}, "drafts of step 1: draftlab [4, 5, 6], vLLM [4, 5, 7"),
        ({"outputs": [[10, 11, 12, 13, 9]]}, "prompt b: the tokens"),
        ({"per_prompt": [COUNTED | {"drafts": 3}]}, "prompt b, drafts: draftlab 2, vLLM 3"),
        ({"per_prompt": [COUNTED | {"accepted": 1}]}, "prompt b, accepted: draftlab 2, vLLM 1"),
    ],
)
def test_every_draft_of_a_verified_step_is_compared(change: dict, message: str | None) -> None:
    tokens = list(DRAFTLAB[1].token_ids)
    theirs = {"outputs": [tokens], "drafts": [[1, 2, 3], [4, 5, 6]], "per_prompt": [COUNTED]}
    ours = [(DRAFTLAB[1], [[1, 2, 3], [4, 5, 6], [7, 8, 9]])]
    found = vllm.first_draft_difference(ours, [theirs | change])
    assert found is None if message is None else message in (found or "")


def test_a_failed_installation_is_said_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "HERE", tmp_path)
    (tmp_path / "setup_vllm.sh").write_text("echo 'no wheel for this machine' >&2; exit 1\n")
    assert vllm.run(SimpleNamespace()) == common.SKIPPED
    assert "no wheel for this machine" in capsys.readouterr().out
    (tmp_path / "setup_vllm.sh").write_text("echo 'ready: /envs/vllm (torch==1)' >&2\n")
    assert common.prepare("vllm") == Path("/envs/vllm/bin/python")
    (tmp_path / "setup_vllm.sh").write_text("echo 'built: /envs/vllm' >&2; echo torch==1 >&2\n")
    assert common.prepare("vllm") == Path("/envs/vllm/bin/python")


def test_a_client_that_fails_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "HERE", tmp_path)
    (tmp_path / "broken.py").write_text("import sys; sys.exit('the head does not load')\n")
    with pytest.raises(UserError, match="the head does not load"):
        common.client(Path(sys.executable), "broken.py", {tmp_path / "answer.json": {}})
