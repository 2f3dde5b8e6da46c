"""The comparison behind `make parity-vllm`: it must find every kind of difference."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftlab.base import UserError
from draftlab.results import Counters
from tests.eval.drivers import vllm


def decoded(name: str, steps: tuple[int, ...], k: int = 3) -> vllm.Decoded:
    counters = Counters(k)
    for accepted in steps:
        counters.add_step(k, accepted)
    tokens = tuple(range(1 + len(steps) + sum(steps)))
    return vllm.Decoded(name, tokens, "length", steps, counters)


SIDE = [decoded("a", (3, 0, 2)), decoded("b", (1, 1)), decoded("c", ())]


def answer_of(side: list[vllm.Decoded]) -> dict:
    return {
        "outputs": [list(d.tokens) for d in side],
        "finish_reasons": [d.finish for d in side],
        "per_prompt": [{**d.counted, "steps": list(d.steps)} for d in side],
        "counters": {key: getattr(vllm.total(side), key) for key in side[0].counted},
    }


def test_an_answer_that_says_the_same_is_equal() -> None:
    theirs = vllm.read_answer(answer_of(SIDE), ["a", "b", "c"], 3)
    assert vllm.first_difference(SIDE, theirs) is None
    assert vllm.total(theirs).accepted_at == [4, 2, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": (0, 1, 9, 3, 4)}, "prompt b, token 2: draftlab 2, vLLM 9"),
        ({"tokens": (0, 1, 2, 3)}, "prompt b, token 4: draftlab 4, vLLM nothing"),
        ({"tokens": (0, 1, 2, 3, 4, 5)}, "prompt b, token 5: draftlab nothing, vLLM 5"),
        ({"steps": (2, 0)}, "prompt b, accepted drafts of verify step 0: draftlab 1, vLLM 2"),
        ({"finish": "stop"}, "prompt b, finish: draftlab length, vLLM stop"),
        ({"counters": Counters(3, 2, 5, 2, [2, 0, 0])}, "prompt b, draft_tokens: draftlab 6, vLLM"),
        ({"counters": Counters(3, 2, 6, 2, [1, 1, 0])}, "prompt b, accepted_at: draftlab [2, 0, 0"),
    ],
)
def test_the_first_difference_names_prompt_position_and_both_values(
    change: dict, said: str
) -> None:
    theirs = [SIDE[0], replace(SIDE[1], **change), replace(SIDE[2], finish="stop")]
    assert said in (vllm.first_difference(SIDE, theirs) or "")


def test_a_missing_prompt_and_another_order_are_differences() -> None:
    assert vllm.first_difference(SIDE, SIDE[:2])
    assert vllm.first_difference(SIDE, [SIDE[1], SIDE[0], SIDE[2]])


def test_totals_that_are_not_the_sums_over_prompts_are_refused() -> None:
    answer = answer_of(SIDE)
    answer["counters"]["drafts"] += 1
    with pytest.raises(ValueError, match="total of drafts is 6, its prompts add up to 5"):
        vllm.read_answer(answer, ["a", "b", "c"], 3)


def test_the_interval_of_the_difference_holds_0_for_equal_and_not_for_unequal_acceptance() -> None:
    same = [decoded(str(i), (i % 4, 3 - i % 4)) for i in range(40)]
    lower = [decoded(str(i), (i % 2, 0)) for i in range(40)]
    difference, (low, high) = vllm.acceptance_difference(same, same)
    assert difference == low == high == 0.0
    difference, (low, high) = vllm.acceptance_difference(same, lower)
    assert difference == pytest.approx(1.5 - 0.25)
    assert 0 < low < difference < high


def test_rows_join_their_own_table_and_leave_the_rest_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "parity.md"
    first, second = ("one", ("a", "b")), ("two", ("c",))
    for table, cells in ((first, ["1", "2"]), (second, ["3"]), (first, ["4", "5"])):
        vllm.add_row(page, table, cells)
    text = page.read_text()
    assert "| a | b |\n|---|---|\n| 1 | 2 |\n| 4 | 5 |\n\n## two" in text
    assert text.endswith("| c |\n|---|\n| 3 |\n")


def test_a_failed_installation_is_said_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "HERE", tmp_path)
    (tmp_path / "setup_vllm.sh").write_text("echo 'no wheel for this machine' >&2; exit 1\n")
    assert vllm.run(SimpleNamespace()) == vllm.SKIPPED
    assert "no wheel for this machine" in capsys.readouterr().out
    (tmp_path / "setup_vllm.sh").write_text("echo 'ready: /envs/vllm (torch==1)' >&2\n")
    assert vllm.prepare("vllm") == Path("/envs/vllm/bin/python")
    (tmp_path / "setup_vllm.sh").write_text("echo 'built: /envs/vllm' >&2; echo torch==1 >&2\n")
    assert vllm.prepare("vllm") == Path("/envs/vllm/bin/python")


def test_a_client_that_fails_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "HERE", tmp_path)
    (tmp_path / "broken.py").write_text("import sys; sys.exit('the head does not load')\n")
    with pytest.raises(UserError, match="the head does not load"):
        vllm.client(Path(sys.executable), "broken.py", {}, tmp_path / "answer.json")
