"""EAGLE heads by recipe: from prompts to exports, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.heads.folder import load_config
from draftlab.store.store import Store
from draftlab.target_model.parts import check_llama_style
from tests.helpers.small_run import copy_of_finished, draftlab, new_workshop
from tests.helpers.zoo import zoo_folder, zoo_folder_with_tokenizer

EAGLE = ("head.family=eagle", "export.formats=[vllm]")


def said(folder: Path, *arguments: str) -> str:
    return " ".join(draftlab(folder, *arguments).output.split())


def test_a_head_of_the_last_state_needs_no_boundaries(tmp_path: Path) -> None:
    new_workshop(tmp_path)
    text = said(tmp_path, "train", "small.yaml", *EAGLE)
    assert "boundaries: none, eagle heads read only the last state" in text
    assert "draft vocabulary: all 289 tokens, predicted by the target's lm_head" in text
    run = tmp_path / "runs" / "small"
    store, config = Store.open(run / "store"), load_config(run / "head")
    assert store.identity.boundaries == ()
    assert store[0].features.shape == (len(store[0].tokens), 0)
    assert (config.boundaries, config.draft_vocab_size) == ((4,), 289)
    assert "[4] of 4 layers" in said(tmp_path, "inspect", "runs/small/head")
    # The other way round there is nothing to read.
    text = said(tmp_path, "train", "small.yaml", "--force", "head.family=eagle3")
    assert "the store holds only the last state, and eagle3 heads read states" in text


def test_a_store_with_boundaries_serves_it_too(tmp_path: Path) -> None:
    copy_of_finished(tmp_path)
    before = (tmp_path / "runs" / "small" / "store" / "manifest.json").read_bytes()
    result = draftlab(tmp_path, "train", "small.yaml", "--force", *EAGLE)
    assert result.exit_code == 0, result.output
    run = tmp_path / "runs" / "small"
    assert (run / "store" / "manifest.json").read_bytes() == before
    assert load_config(run / "head").boundaries == (4,)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (EAGLE[:1], "speculators cannot hold first-generation EAGLE heads"),
        ((*EAGLE, "record.dtype=fp8"), "fp8 is for features at boundaries"),
        ((*EAGLE, "head.norm_output=true"), "heads have no norm_output"),
        ((*EAGLE, "head.mask_token=5"), "heads have no mask_token"),
        (("head.fc_norm=true", "head.norm_before_fc=true"), "exclude each other"),
        (("head.family=peagle", "head.norm_output=true"), "heads have no norm_output"),
        (("train.loss=kl",), "'soft_ce' or 'lk'"),
    ],
)
def test_contradictions_are_refused_before_anything_runs(
    settings: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    new_workshop(tmp_path)
    result = draftlab(tmp_path, "run", "small.yaml", *settings)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "runs").exists()


def test_targets_whose_logits_it_cannot_make_are_refused(tmp_path: Path) -> None:
    new_workshop(tmp_path)
    zoo_folder_with_tokenizer(tmp_path / "gemma", "gemma2")
    text = said(tmp_path, "train", "small.yaml", "target=gemma", *EAGLE)
    assert "for an EAGLE head, found Gemma2ForCausalLM: its final norm" in text
    assert "(Gemma2RMSNorm) is not Llama's, its logits are capped" in text
    assert not (tmp_path / "runs").exists()
    for kind in ("llama", "qwen3", "mistral", "gpt_oss"):
        zoo_folder(tmp_path / kind, kind)
        check_llama_style(tmp_path / kind)
    zoo_folder(tmp_path / "granite", "granite")
    with pytest.raises(UserError, match="its logits are scaled"):
        check_llama_style(tmp_path / "granite")
