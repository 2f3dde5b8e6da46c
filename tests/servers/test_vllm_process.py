"""The process of vLLM: its Python, its log and the options of its target."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.recipe.recipe import load_recipe
from draftlab.run.resolve import recipe_of
from draftlab.servers.vllm_process import PYTHON_VARIABLE, VllmProcess, find_python, log_tail
from draftlab.target_model.settings import VllmSettings
from tests.helpers.fake_vllm import read_log


@pytest.mark.parametrize(
    ("config", "states", "tuning"),
    [
        ({"model_type": "llama"}, {}, None),
        ({"model_type": "llama4_text"}, {}, True),
        (
            {"text_config": {"model_type": "llama4_text", "attn_temperature_tuning": False}},
            {"boundaries": [0, 2]},
            False,
        ),
    ],
)
def test_a_llama4_target_has_its_own_attention_temperature(
    config: dict, states: dict, tuning: bool | None, folder: Path, install_fake: Any
) -> None:
    """In decoding and for hidden states. vLLM by itself ignores the setting in config.json."""
    log = install_fake()
    (folder / "config.json").write_text(json.dumps(config))
    setup = {"target": str(folder), "states_folder": str(folder), "max_model_len": 9} | states
    VllmProcess(setup, VllmSettings()).close()
    (options,) = read_log(log)
    assert ("kv_transfer_config" in options) == bool(states)
    expected = None if tuning is None else {"attn_temperature_tuning": tuning}
    assert options.get("override_generation_config") == expected


def test_errors_far_above_the_end_of_a_log_come_first() -> None:
    cause = "(Worker pid=7) ERROR ValueError: no such layer"
    log = f"{cause}\n{cause}\n" + "at line 1\n" * 400 + "RuntimeError: see above"
    first, second, *_, last = log_tail(log).splitlines()
    assert (first, last) == ("ValueError: no such layer", "RuntimeError: see above")
    assert "ValueError" not in second
    assert log_tail("a\nb") == "a\nb"
    assert log_tail("") == "it printed nothing"


def test_find_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = "draftlab.servers.vllm_process.importlib.util.find_spec"
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(find_spec, lambda _name: None)
    with pytest.raises(UserError, match=f"found none in this Python(.|\n)*{PYTHON_VARIABLE}"):
        find_python()
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.setenv(PYTHON_VARIABLE, str(link))
    assert find_python() == link  # Python finds its environment by the link
    monkeypatch.setattr(find_spec, lambda _name: SimpleNamespace())
    assert find_python() == link
    (tmp_path / "text").write_text("")
    for wrong in ("none", "text"):
        monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / wrong))
        with pytest.raises(UserError, match="found no program"):
            find_python()
    monkeypatch.delenv(PYTHON_VARIABLE)
    assert find_python() == Path(sys.executable)


@pytest.mark.parametrize("section", ["regenerate", "record", "eval"])
def test_a_recipe_names_no_program(section: str, tmp_path: Path) -> None:
    """Neither one that the user runs, nor one that lies in a stranger's run folder."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: q\n{section}: {{vllm: {{python: {tmp_path}/run-me}}}}\n")
    for read in (lambda: load_recipe(path), lambda: recipe_of(tmp_path)):
        with pytest.raises(UserError, match=f"{section}.vllm.python: removed") as caught:
            read()
        assert PYTHON_VARIABLE in caught.value.what
