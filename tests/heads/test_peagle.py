"""PEAGLE heads: the head folder, and heads that start from others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.folder import load_config, load_head, native_config, save_head
from draftlab.heads.initial import fingerprint, start_from
from draftlab.heads.peagle import PeagleHead
from draftlab.pipeline.resolve import reference_head
from tests.helpers.head_toys import PEAGLE, make_config, make_head

FILE, MASK, FEATURES = "model.safetensors", 7, 80


def make_peagle(seed: int = 0, **changed: object) -> PeagleHead:
    head = make_head(seed, **(PEAGLE | changed))
    assert isinstance(head, PeagleHead)
    return head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(tmp_path / "head", make_peagle(qk_norm=True).float(), torch.float32)
    return tmp_path / "head"


def load(folder: Path) -> Eagle3Head:
    return load_head(folder, embeddings=None, dtype=torch.float32, device="cpu")


def test_a_parallel_head_comes_back_whole(folder: Path) -> None:
    head, loaded = make_peagle(qk_norm=True).float(), load(folder)
    assert isinstance(loaded, PeagleHead)
    assert loaded.config == head.config == load_config(folder)
    found = loaded.state_dict()
    for name, tensor in head.state_dict().items():
        if name != "embed_tokens.weight":
            assert torch.equal(found[name], tensor), name
    tokens = torch.arange(50).view(5, 10)
    assert torch.equal(loaded.embed(tokens), head.embed(tokens))
    assert not torch.equal(head.embed(tokens)[0, MASK], head.embed_tokens.weight[MASK])
    assert torch.equal(loaded.mask_state(), head.mask_state())


def test_files_hold_what_servers_read(folder: Path) -> None:
    head, tensors = make_peagle(qk_norm=True).float(), load_file(folder / FILE)
    assert tensors["mask_hidden"].shape == (1, FEATURES)
    assert "mask_embedding" not in tensors
    table = tensors["embed_tokens.weight"]
    assert torch.equal(table[MASK], head.mask_embedding)
    rest = torch.arange(50) != MASK
    assert torch.equal(table[rest], head.embed_tokens.weight[rest])
    # The first layer reads two vectors, the second one; only the first norms a hidden state apart.
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (48, 48)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (48, 24)
    assert tensors["layers.1.self_attn.k_norm.weight"].shape == (8,)
    assert "layers.0.hidden_norm.weight" in tensors
    assert "layers.1.hidden_norm.weight" not in tensors


@pytest.mark.parametrize("qk_norm", [False, True])
def test_config_json_names_the_mask_token_thrice(qk_norm: bool) -> None:
    found = native_config(make_config(**PEAGLE, qk_norm=qk_norm), "bfloat16")
    assert [found[f"{name}"] for name in ("mask_token_id", "ptd_token_id", "pard_token")] == [7] * 3
    assert found["num_hidden_layers"] == 2
    architecture = "Eagle3Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLMEagle3"
    assert found["architectures"] == [architecture]
    assert found["model_type"] == ("qwen3" if qk_norm else "llama")
    chain = native_config(make_config(), "bfloat16")
    assert not {"mask_token_id", "ptd_token_id", "pard_token"} & chain.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 50}, "mask_token_id 50 lies outside the 50 rows"),
        ({"mask_token_id": -1}, "mask_token_id -1 lies outside the 50 rows"),
        ({"mask_token_id": None}, "mask_token_id: expected a whole number"),
        ({"embeddings": "target"}, 'found "target"'),
        ({"num_layers": 5}, "num_layers"),
        ({"num_layers": 0}, "num_layers"),
        ({"family": "eagle3"}, "EAGLE3 heads have no mask_token_id"),
        ({"family": "eagle3", "num_layers": 1}, "no mask_token_id, found 7"),
    ],
)
def test_a_config_that_contradicts_itself_is_named(
    folder: Path, change: dict, message: str
) -> None:
    path = folder / "draftlab.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message) as caught:
        load(folder)
    assert "draftlab.json" in str(caught.value)


def replaced(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / FILE)
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / FILE)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mask_hidden", None, "missing mask_hidden"),
        ("mask_hidden", torch.zeros(1, 60), r"\[1, 80\], found \[1, 60\] \(4 boundaries of 20"),
        ("fc.weight", torch.zeros(24, 60), r"\[24, 80\], found \[24, 60\] \(4 boundaries of 20"),
        ("embed_tokens.weight", None, r"missing embed_tokens\.weight"),
        ("mask_hidden", torch.full((1, 80), torch.nan), "mask_hidden: not finite"),
        ("layers.1.self_attn.q_norm.weight", None, r"missing layers\.1\.self_attn\.q_norm"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    folder: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    replaced(folder, name, tensor)
    with pytest.raises(UserError, match=message):
        load(folder)


def test_a_head_from_before_loads_as_before(tmp_path: Path) -> None:
    """Its draftlab.json knows nothing of families with more than a layer."""
    folder = tmp_path / "before"
    shutil.copytree(reference_head(), folder)
    written = json.loads((folder / "draftlab.json").read_text())
    for name in ("num_layers", "qk_norm", "mask_token_id"):
        del written[name]
    (folder / "draftlab.json").write_text(json.dumps(written))
    config = load_config(folder)
    tensors = load_file(folder / FILE)
    embeddings = torch.zeros(config.vocab_size, config.hidden_size)
    head = load_head(folder, embeddings=embeddings, dtype=torch.bfloat16, device="cpu")
    assert type(head) is Eagle3Head
    assert head.tensors().keys() == tensors.keys() | {"embed_tokens.weight"}
    for name, tensor in tensors.items():
        assert torch.equal(head.tensors()[name], tensor), name
    save_head(tmp_path, head, torch.bfloat16)
    assert (tmp_path / FILE).read_bytes() == (folder / FILE).read_bytes()
    assert (tmp_path / "config.json").read_text() == (folder / "config.json").read_text()


def test_a_head_starts_from_one_with_other_drafts_and_fewer_layers() -> None:
    chain = make_head(seed=1)
    head = make_peagle(seed=2, num_layers=3, draft_vocab_size=30)
    before = head.lm_head.weight.clone()
    masks = head.mask_hidden.clone(), head.mask_embedding.clone()
    said = start_from(head, chain, "head")
    assert torch.equal(head.fc.weight, chain.fc.weight)
    assert torch.equal(head.norm.weight, chain.norm.weight)
    for name, tensor in chain.layer.state_dict().items():
        assert torch.equal(head.layer.state_dict()[name], tensor), name
    theirs = {int(i): row for i, row in enumerate(chain.target_ids(torch.arange(21)))}
    rows = {int(target): i for i, target in theirs.items()}
    shared = 0
    for draft, target in enumerate(head.target_ids(torch.arange(30)).tolist()):
        known = target in rows
        wanted = chain.lm_head.weight[rows[target]] if known else before[draft]
        assert torch.equal(head.lm_head.weight[draft], wanted)
        shared += known
    assert 0 < shared < 30
    assert f"{shared} of 30 rows" in said
    assert "2 more begin as the identity" in said
    hidden = torch.randn(4, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    attended = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for layer in head.layers[1:]:
        assert torch.equal(layer.output(attended, hidden), hidden)
    assert torch.equal(head.mask_hidden, masks[0])
    assert torch.equal(head.mask_embedding, masks[1])


def test_a_deeper_head_takes_over_the_masked_slots_too() -> None:
    shallow, deep = make_peagle(seed=1, num_layers=1), make_peagle(seed=2, num_layers=2)
    start_from(deep, shallow, "head")
    assert torch.equal(deep.mask_hidden, shallow.mask_hidden)
    assert torch.equal(deep.mask_embedding, shallow.mask_embedding)
    assert fingerprint(deep) != fingerprint(shallow)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundaries": (0, 2, 3)}, r"boundaries: the new head has \(0, 2, 3, 5\), this one"),
        ({"intermediate_size": 40}, "intermediate_size: the new head has 36, this one 40"),
        ({"num_layers": 3}, "num_layers: the new head has 2, this one 3"),
        (
            {"target": {**make_config().target.model_dump(), "fingerprint": "other"}},
            "this one for toy",
        ),
    ],
)
def test_a_head_that_differs_is_no_beginning(change: dict, message: str) -> None:
    source = make_peagle(**change)
    with pytest.raises(UserError, match=message):
        start_from(make_peagle(), source, "head")
