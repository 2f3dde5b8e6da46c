"""A window with other options gives the bits of a full store, too, or is refused before a run."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from draftlab.errors import UserError
from draftlab.plan import preflight
from draftlab.recipe.recipe import load_recipe
from draftlab.servers import vllm_hidden_states as hidden_states
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings
from draftlab.workers.window import devices as window_training
from draftlab.workers.window.devices import RECORDERS, check_memory_for_vllm, recording_devices
from tests.helpers.small_run import RECIPES, new_workshop, ran, write_prompts
from tests.helpers.thread_pool import ThreadPool
from tests.helpers.vllm_stand_in import StandIn

SETTINGS = (
    "record.shard_tokens=32",
    "record.window=200KB",
    "train.row_tokens=64",
    "train.batch_rows=1",
    "train.steps=24",
    "train.checkpoint_every=50",
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "fp8": ("record.dtype=fp8", "record.window=140KB"),
    "vllm": ("record.backend=vllm",),
}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory whose run `full` has answers."""
    folder = new_workshop(tmp_path_factory.mktemp("answered"))
    write_prompts(folder / "prompts.jsonl", [f"def f{i}(use): the user {i}" for i in range(32)])
    ran(folder, "prepare", "small.yaml", "name=full")
    shutil.copytree(folder / "runs/full", folder / "runs/small")
    return folder


@pytest.fixture
def workshop(answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of `answered`, whose windows are recorded by a thread."""
    monkeypatch.setattr(window_training, "LocalPool", partial(ThreadPool, num_workers=1))
    return shutil.copytree(answered, tmp_path / "work", symlinks=True)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_window_gives_the_bits_of_a_full_store(
    workshop: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setups: list[dict[str, Any]] = []
    if option == "vllm":
        target = load_target(TargetSettings(path=str(workshop / "toy"), device="cpu"))

        def start(setup: dict[str, Any], *_: Any) -> StandIn:
            setups.append(setup)
            return StandIn(target, [])(setup)

        monkeypatch.setattr(hidden_states, "VllmProcess", start)
        monkeypatch.setattr(preflight, "find_python", lambda: None)
    heads = []
    for run, keep in (("full", "all"), ("small", "window")):
        arguments = (f"name={run}", *SETTINGS, *OPTIONS[option], f"record.keep={keep}")
        result = ran(workshop, "train", "small.yaml", *arguments)
        assert ("window: the training waited" in result.output) is (keep == "window")
        folder = workshop / "runs" / run / "head"
        heads.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert heads[0] == heads[1]
    # Shards that are recorded again have the same bytes if no pass has several requests.
    assert {setup["max_num_seqs"] for setup in setups} == ({1} if option == "vllm" else set())
    again = re.search(r"in \d+ shards, (\d+) of them again", result.output)
    assert again is not None, result.output
    assert int(again[1]) > 0


@pytest.mark.parametrize(
    ("available", "overrides", "num_train", "recorders", "expected"),
    [
        (1, [], 1, 0, ["cuda:0"]),
        (2, [], 1, 0, ["cuda:1"]),
        (2, ["train.device=cuda:1"], 1, 0, ["cuda:0"]),
        (2, [], 2, 0, ["cuda:0"]),
        (8, [], 4, 4, ["cuda:4", "cuda:5", "cuda:6", "cuda:7"]),
        (8, ["target.gpus=2"], 4, 4, ["cuda:4", "cuda:6"]),
        (2, ["target.gpus=2"], 1, 0, ["cuda:0"]),  # both GPUs hold it, and the first one trains
        (3, ["target.gpus=2"], 1, 0, ["cuda:1"]),
    ],
)
def test_gpus_that_record_are_others_than_those_that_train_if_there_are_enough(
    available: int,
    overrides: list[str],
    num_train: int,
    recorders: int,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(RECORDERS, str(recorders))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_train))
    settings = ["record.window=10GB", "record.backend=vllm", *overrides]
    recipe = load_recipe(RECIPES / "llama3_eagle3.yaml", settings)
    device = torch.device("cuda", 1) if "train.device=cuda:1" in overrides else torch.device("cuda")
    assert recording_devices(recipe, device, num_train) == expected
    if expected != ["cuda:0"] or device.index == 1:
        check_memory_for_vllm(recipe, device)
        return
    with pytest.raises(UserError, match="cuda:0 trains and records the window by vLLM") as caught:
        check_memory_for_vllm(recipe, device)
    assert caught.value.where == "record.vllm.memory_share"
    shared = load_recipe(
        RECIPES / "llama3_eagle3.yaml", [*settings, "record.vllm.memory_share=0.4"]
    )
    check_memory_for_vllm(shared, device)
