"""A target's parts, read from its shards, and its fingerprint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftlab.errors import UserError
from draftlab.files import (
    read_json,
    write_json,
)
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.parts import load_parts, meta_tensor, model_parts, read_tensor
from tests.helpers.zoo import SHAPE, ZOO, load_on_cpu, zoo_folder, zoo_target


@pytest.mark.parametrize(("kind", "shard"), [*((kind, "10KB") for kind in ZOO), ("llama", "1GB")])
def test_parts_from_shards_equal_those_in_memory(kind: str, shard: str, tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, kind, shard=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "10KB")
    actual, expected = load_parts(folder), load_on_cpu(folder).parts
    assert torch.equal(actual.embeddings, expected.embeddings)
    assert torch.equal(actual.lm_head, expected.lm_head)
    assert (actual.scale, actual.softcap) == (expected.scale, expected.softcap)
    last = torch.randn(5, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0))
    logits = actual.logits(last)
    torch.testing.assert_close(logits, expected.logits(last), rtol=0, atol=0)
    rows = torch.tensor([3, 60, 7])
    torch.testing.assert_close(actual.logits(last, rows), logits[:, rows])


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("granite", "logits_scaling", 3.0), ("gemma2", "final_logit_softcapping", 3.0)],
)
def test_other_transformations_of_logits_are_refused(
    kind: str, key: str, value: float, tmp_path: Path
) -> None:
    target = zoo_target(tmp_path, kind)
    target.check_parts()
    setattr(target.model.config, key, value)
    with pytest.raises(UserError, match="transforms logits"):
        target.check_parts()


def test_a_bias_is_refused(tmp_path: Path) -> None:
    model = zoo_target(tmp_path, "llama").model
    model.lm_head.bias = torch.nn.Parameter(torch.ones(SHAPE["vocab_size"]))
    with pytest.raises(UserError, match="bias"):
        model_parts(model)


def test_missing_and_ambiguous_tensors(tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, "llama")
    with pytest.raises(UserError, match="one tensor named absent"):
        read_tensor(folder, "absent.weight")
    with pytest.raises(UserError, match="one tensor named self_attn"):
        read_tensor(folder, "self_attn.q_proj.weight")  # every layer has one
    # Text models prefix their names, older exports shorten them.
    whole = read_tensor(folder, "model.embed_tokens.weight")
    assert torch.equal(read_tensor(folder, "embed_tokens.weight"), whole)
    assert torch.equal(read_tensor(folder, "language_model.model.embed_tokens.weight"), whole)


@pytest.mark.parametrize("shard", ["1GB", "10KB"])
def test_missing_or_broken_shards_are_named(shard: str, tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, "llama", shard=shard)
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match="weights cannot be read"):
        load_parts(folder)
    for file in files:
        file.unlink()
    with pytest.raises(UserError, match="found n"):
        load_parts(folder)


def test_a_tensor_that_an_index_alone_has_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    for read in (read_tensor, meta_tensor):
        with pytest.raises(UserError, match="does not contain tensor b"):
            read(tmp_path, "b", files={"b": "model.safetensors"})


def test_equal_content_has_one_fingerprint(tmp_path: Path) -> None:
    """Shards, file names and library versions do not matter."""
    one = zoo_folder(tmp_path / "one", "llama")
    expected = fingerprint(one)
    assert expected == fingerprint(zoo_folder(tmp_path / "many", "llama", shard="10KB"))
    moved = tmp_path / "moved"
    shutil.copytree(one, moved)
    (moved / "model.safetensors").rename(moved / "weights.safetensors")
    config = read_json(moved / "config.json")
    write_json(
        moved / "config.json",
        dict(reversed(config.items())) | {"transformers_version": "9", "_name_or_path": "x"},
    )
    assert fingerprint(moved) == expected
    assert load_on_cpu(one).fingerprint == expected


def test_a_fine_tune_and_another_config_have_other_fingerprints(tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path / "base", "llama")
    fingerprints = {
        fingerprint(folder),
        fingerprint(zoo_folder(tmp_path / "seed", "llama", seed=1)),
    }
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][0, 0] += 1e-3
    tuned = tmp_path / "tuned"
    shutil.copytree(folder, tuned)
    save_file(weights, tuned / "model.safetensors")
    fingerprints.add(fingerprint(tuned))
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"rms_norm_eps": 1e-3})
    fingerprints.add(fingerprint(folder))
    assert len(fingerprints) == 4


def test_a_change_of_most_rows_is_seen(tmp_path: Path) -> None:
    folder, name = zoo_folder(tmp_path / "base", "llama"), "model.embed_tokens.weight"
    weights = load_file(folder / "model.safetensors")
    weights[name] = torch.randn(1000, 2048).bfloat16()
    save_file(weights, folder / "model.safetensors")
    base = fingerprint(folder)
    for rows in (slice(1, None), slice(500, 520), slice(999, None)):  # all but the first; the last
        changed = weights[name].clone()
        changed[rows] += 1
        save_file(weights | {name: changed}, folder / "model.safetensors")
        assert fingerprint(folder) != base
