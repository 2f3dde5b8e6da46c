"""`draftlab train` of a parallel head from a recipe, on the toy target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.heads.folder import load_head
from draftlab.heads.peagle import PeagleHead
from draftlab.pipeline.recipe import load_recipe
from tests.helpers.small_run import copy_of_finished, draftlab

REPOSITORY = Path(__file__).parents[2]
PEAGLE = ("head.family=peagle", "head.num_layers=2", "train.ttt_steps=3")


def test_a_parallel_head_starts_from_the_runs_chain_head(tmp_path: Path) -> None:
    folder = copy_of_finished(tmp_path / "work")
    # A run of another name, with the finished one's answers and store.
    (folder / "runs/small").rename(folder / "runs/parallel")
    (folder / "runs/parallel/head").rename(folder / "chain")
    (folder / "runs/parallel/stages/head.json").unlink()
    for name in ("train", "eval", "export"):
        (folder / "runs/parallel" / name).rename(folder / f"old-{name}")
    asked = ("train", "small.yaml", "name=parallel", *PEAGLE, "head.init=chain")
    result = draftlab(folder, *asked)
    assert result.exit_code == 0, result.output
    for line in (
        "mask token: <|mask|> (id 288)",
        "starts from a trained head (eagle3, 1 layer)",
        "1 more begins as the identity",
        "predicted AL",
    ):
        assert line in " ".join(result.output.split()), line
    head = load_head(
        folder / "runs/parallel/head", embeddings=None, dtype=torch.float32, device="cpu"
    )
    assert isinstance(head, PeagleHead)
    assert (head.config.num_layers, head.config.k_trained, head.mask_token_id) == (2, 3, 288)
    assert not head.t2d[288]
    lines = (folder / "runs/parallel/train/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows[-1]["validation"]["alpha"]) == 3
    assert rows[0]["predictions_per_s"] > 0
    # Again: nothing to do. The head that it began with changed: not the same run any more.
    assert "head: there" in draftlab(folder, *asked).output
    weights = folder / "chain/model.safetensors"
    (folder / "ptd-weights").write_bytes(weights.read_bytes())
    weights.write_bytes((folder / "runs/parallel/head/model.safetensors").read_bytes())
    changed = draftlab(folder, *asked)
    assert changed.exit_code == 2
    assert "head.init.sha256" in changed.output


def test_a_mask_token_that_will_not_do_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    folder = copy_of_finished(tmp_path / "work")
    asked = ("train", "small.yaml", "name=parallel", *PEAGLE, "head.mask_token=<|eot_id|>")
    result = draftlab(folder, *asked)
    assert result.exit_code == 2
    assert "head.mask_token" in result.output
    assert not (folder / "runs/parallel").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("head.num_layers=2",), "at most 1 layer, found num_layers 2"),
        (("head.mask_token=7",), "EAGLE3 heads have no mask_token"),
        (("head.family=peagle", "head.num_layers=5"), "at most 4 layers, found num_layers 5"),
        (("head.family=medusa",), "head.family"),
    ],
)
def test_settings_that_contradict_the_family_are_refused(
    settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(REPOSITORY / "recipes/quickstart.yaml", settings)


def test_the_parallel_quickstart_shares_the_quickstarts_answers_and_store() -> None:
    chain = load_recipe(REPOSITORY / "recipes/quickstart.yaml")
    parallel = load_recipe(REPOSITORY / "recipes/quickstart_peagle.yaml")
    for room in ("seed", "target", "prompts", "regenerate", "record", "draft_vocab", "eval"):
        assert getattr(chain, room) == getattr(parallel, room), room
