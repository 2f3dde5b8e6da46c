"""Heads of other families by recipe: what is trained, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.heads.folder import load_config, load_head
from draftlab.heads.peagle import PeagleHead
from draftlab.recipe.recipe import load_recipe
from draftlab.store.store import Store
from draftlab.target_model.parts import check_llama_style
from tests.helpers.small_run import RECIPES, copy_of_finished, draftlab, new_workshop
from tests.helpers.zoo import zoo_config, zoo_folder_with_tokenizer

EAGLE = ("head.family=eagle", "export.formats=[vllm]")
PEAGLE = ("head.family=peagle", "head.num_layers=2", "train.ttt_steps=3")


def output_of(folder: Path, *arguments: str) -> str:
    return " ".join(draftlab(folder, *arguments).output.split())


def test_a_head_of_the_last_state_needs_no_boundaries(tmp_path: Path) -> None:
    new_workshop(tmp_path)
    text = output_of(tmp_path, "train", "small.yaml", *EAGLE)
    assert "boundaries: none, eagle heads read only the last state" in text
    assert "draft vocabulary: all 289 tokens, predicted by the target's lm_head" in text
    run = tmp_path / "runs" / "small"
    store, config = Store.open(run / "store"), load_config(run / "head")
    assert store.identity.boundaries == ()
    assert store[0].features.shape == (len(store[0].tokens), 0)
    assert (config.boundaries, config.draft_vocab_size) == ((4,), 289)
    assert "[4] of 4 layers" in output_of(tmp_path, "inspect", "runs/small/head")
    # The other way round there is nothing to read.
    text = output_of(tmp_path, "train", "small.yaml", "--force", "head.family=eagle3")
    assert "the store holds only the last state, and eagle3 heads read states" in text


@pytest.mark.parametrize("family", ["eagle3", "eagle", "peagle", "dspark", "dflash", "dflash2"])
def test_every_family_validates_beside_bfloat16_products(family: str, tmp_path: Path) -> None:
    copy_of_finished(tmp_path)
    settings = (f"head.family={family}", "export.formats=[]", "train.precision=bfloat16")
    steps = ("train.steps=2", "train.validate_every=1", "train.batch_rows=1")
    result = draftlab(tmp_path, "train", "small.yaml", "--force", *settings, *steps)
    assert result.exit_code == 0, result.output
    assert "products in bfloat16" in result.output
    assert result.output.count("validation at step") == 2


def test_a_store_with_boundaries_serves_it_too(tmp_path: Path) -> None:
    copy_of_finished(tmp_path)
    before = (tmp_path / "runs" / "small" / "store" / "manifest.json").read_bytes()
    result = draftlab(tmp_path, "train", "small.yaml", "--force", *EAGLE)
    assert result.exit_code == 0, result.output
    run = tmp_path / "runs" / "small"
    assert (run / "store" / "manifest.json").read_bytes() == before
    assert load_config(run / "head").boundaries == (4,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (EAGLE[:1], "speculators cannot hold first-generation EAGLE heads"),
        ((*EAGLE, "record.dtype=fp8"), "fp8 is for features at boundaries"),
        ((*EAGLE, "head.norm_output=true"), "heads have no norm_output"),
        (("head.fc_norm=true", "head.norm_before_fc=true"), "exclude each other"),
        (("head.num_layers=5",), "at most 4 layers, found num_layers 5"),
        (("head.mask_token=7",), "EAGLE3 heads have no mask_token"),
        (("head.family=peagle", "head.num_layers=5"), "at most 4 layers, found num_layers 5"),
        ((*PEAGLE, "head.mask_token=<|eot_id|>"), "head.mask_token"),
        (("head.family=medusa",), "head.family"),
        (("train.loss=kl",), "'soft_ce' or 'lk'"),
    ],
)
def test_contradictions_are_refused_before_anything_runs(
    settings: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    new_workshop(tmp_path)
    result = draftlab(tmp_path, "run", "small.yaml", *settings)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "runs").exists()


def test_targets_whose_logits_it_cannot_make_are_refused(tmp_path: Path) -> None:
    new_workshop(tmp_path)
    zoo_folder_with_tokenizer(tmp_path / "gemma", "gemma2")
    text = output_of(tmp_path, "train", "small.yaml", "target=gemma", *EAGLE)
    plan = output_of(tmp_path, "train", "small.yaml", "target=gemma", *EAGLE, "--plan")
    assert plan.endswith(text)
    assert "for an EAGLE head, found Gemma2ForCausalLM: its final norm" in text
    assert "(Gemma2RMSNorm) is not Llama's, its logits are capped" in text
    assert not (tmp_path / "runs").exists()
    for kind in ("llama", "qwen3", "mistral", "gpt_oss"):
        check_llama_style(zoo_config(kind), kind)
    with pytest.raises(UserError, match="its logits are scaled"):
        check_llama_style(zoo_config("granite"), "granite")


def test_a_parallel_head_starts_from_the_runs_chain_head(tmp_path: Path) -> None:
    folder = copy_of_finished(tmp_path / "work")
    # A run of another name, with the finished one's answers and store.
    (folder / "runs/small").rename(folder / "runs/parallel")
    (folder / "runs/parallel/head").rename(folder / "chain")
    (folder / "runs/parallel/stages/head.json").unlink()
    for name in ("train", "eval", "export"):
        (folder / "runs/parallel" / name).rename(folder / f"old-{name}")
    arguments = ("train", "small.yaml", "name=parallel", *PEAGLE, "head.init=chain")
    result = draftlab(folder, *arguments)
    assert result.exit_code == 0, result.output
    for line in (
        "mask token: <|mask|> (id 288)",
        "starts from a trained head (eagle3, 1 layer)",
        "1 more begins as the identity",
        "predicted AL",
    ):
        assert line in " ".join(result.output.split()), line
    head = load_head(folder / "runs/parallel/head", dtype=torch.float32, device="cpu")
    assert isinstance(head, PeagleHead)
    assert (head.config.num_layers, head.config.k_trained, head.mask_token_id) == (2, 3, 288)
    assert not head.t2d[288]
    lines = (folder / "runs/parallel/train/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows[-1]["validation"]["alpha"]) == 3
    assert rows[0]["predictions_per_s"] > 0
    # Again: nothing to do. The head that it began with changed: not the same run any more.
    assert "head: there" in draftlab(folder, *arguments).output
    weights = folder / "chain/model.safetensors"
    (folder / "ptd-weights").write_bytes(weights.read_bytes())
    weights.write_bytes((folder / "runs/parallel/head/model.safetensors").read_bytes())
    changed = draftlab(folder, *arguments)
    assert changed.exit_code == 2
    assert "head.init.sha256" in changed.output


def test_the_parallel_quickstart_shares_the_quickstarts_answers_and_store() -> None:
    chain = load_recipe(RECIPES / "quickstart.yaml")
    parallel = load_recipe(RECIPES / "quickstart_peagle.yaml")
    for part in ("seed", "target", "prompts", "regenerate", "record", "draft_vocab", "eval"):
        assert getattr(chain, part) == getattr(parallel, part), part
