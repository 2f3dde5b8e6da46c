"""draftlab/heads/folder.py: what is written comes back, and nothing else loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from draftlab.errors import UserError
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.folder import head_tensors, load_config, load_head, native_config, save_head
from tests.helpers.head_toys import LLAMA3, make_config, make_head

DRAFT, VOCAB, HIDDEN = 21, 50, 24
FILE = "model.safetensors"


@pytest.fixture
def head() -> Eagle3Head:
    return make_head(embeddings="own").float()


@pytest.fixture
def folder(head: Eagle3Head, tmp_path: Path) -> Path:
    save_head(tmp_path / "head", head, torch.float32)
    return tmp_path / "head"


def load(folder: Path, embeddings: Tensor | None = None) -> Eagle3Head:
    return load_head(folder, embeddings=embeddings, dtype=torch.float32, device="cpu")


def same(left: Eagle3Head, right: Eagle3Head) -> None:
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


def test_a_head_comes_back_whole(head: Eagle3Head, folder: Path) -> None:
    loaded = load(folder)
    same(loaded, head)
    assert loaded.config == head.config == load_config(folder)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_stored_dtype_is_the_asked_one(tmp_path: Path, dtype: torch.dtype) -> None:
    head = make_head(embeddings="own", rope_parameters=LLAMA3).float()
    save_head(tmp_path, head, dtype)
    for name, tensor in load_file(tmp_path / FILE).items():
        assert tensor.dtype == {"d2t": torch.int64, "t2d": torch.bool}.get(name, dtype)
        assert torch.equal(tensor, head_tensors(head, dtype)[name])
    loaded = load_head(tmp_path, embeddings=None, dtype=dtype, device="cpu")
    assert loaded.lm_head.weight.dtype == dtype
    assert loaded.rope.frequencies.dtype == torch.float32
    assert torch.equal(loaded.rope.frequencies, head.rope.frequencies)
    assert all(p.dtype == torch.float32 for p in head.parameters())  # saving casts a copy
    name = str(dtype).removeprefix("torch.")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == name


def test_embeddings_of_the_target_are_not_stored(tmp_path: Path) -> None:
    head = make_head(embeddings="target").float()
    save_head(tmp_path, head, torch.float32)
    assert "embed_tokens.weight" not in load_file(tmp_path / FILE)
    same(load(tmp_path, head.embed_tokens.weight.clone()), head)
    with pytest.raises(UserError, match="embeddings"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"embeddings in shape \[50, 24\]"):
        load(tmp_path, torch.zeros(VOCAB, HIDDEN + 1))


def test_a_whole_vocabulary_stores_no_maps(tmp_path: Path) -> None:
    head = make_head(embeddings="own", draft_vocab_size=VOCAB).float()
    save_head(tmp_path, head, torch.float32)
    assert not {"d2t", "t2d"} & load_file(tmp_path / FILE).keys()
    loaded = load(tmp_path)
    same(loaded, head)
    assert torch.equal(loaded.target_ids(torch.arange(VOCAB)), torch.arange(VOCAB))
    assert bool(loaded.t2d.all())


@pytest.mark.parametrize("rope", [LLAMA3, {"rope_theta": 20000.0}])
@pytest.mark.parametrize("before", [False, True])
def test_config_json_is_generated_from_draftlab_json(
    tmp_path: Path, rope: dict, before: bool
) -> None:
    head = make_head(rope_parameters=rope, norm_before_residual=before)
    save_head(tmp_path, head, torch.bfloat16)
    written = json.loads((tmp_path / "config.json").read_text())
    assert native_config(load_config(tmp_path), "bfloat16") == written
    # servers §8, the keys a reader would otherwise fill in silently.
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3, 5]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 1, 2, 4]
    assert written["num_aux_hidden_states"] == 4
    assert written["norm_before_residual"] is before
    assert (written["vocab_size"], written["draft_vocab_size"]) == (VOCAB, DRAFT)
    # Both readers of rope, transformers 5's and the older spelling's, see the head's.
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, LlamaConfig)
    assert config.rope_parameters == {"rope_type": "default"} | rope
    assert config.head_dim == 8
    older = {k: v for k, v in rope.items() if k != "rope_theta"}
    assert (written["rope_theta"], written["rope_scaling"]) == (rope["rope_theta"], older or None)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def _pop(name: str) -> Callable:
    return lambda tensors: tensors.pop(name)


def _put(name: str, make: Callable[[Tensor], Tensor]) -> Callable:
    return lambda tensors: tensors.update({name: make(tensors.get(name, torch.zeros(2)))})


def _spoil(value: float) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        tensor.flatten()[-1] = value
        return tensor

    return make


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_pop("layers.0.hidden_norm.weight"), r"missing layers\.0\.hidden_norm\.weight"),
        (_pop("d2t"), "missing d2t"),
        (_pop("t2d"), "missing t2d"),
        (_pop("embed_tokens.weight"), r"missing embed_tokens\.weight"),
        (_put("fc.bias", lambda t: t), r"unknown fc\.bias"),
        (_put("midlayer.norm", lambda t: t), r"unknown midlayer\.norm"),
        (
            _put("lm_head.weight", lambda t: t[:-1].clone()),
            r"lm_head\.weight: expected shape \[21, 24\], found \[20, 24\]",
        ),
        (_put("fc.weight", lambda t: t.T.contiguous()), r"fc\.weight: expected shape \[24, 80\]"),
        (_put("norm.weight", _spoil(float("nan"))), r"norm\.weight: not finite"),
        (_put("fc.weight", _spoil(float("inf"))), r"fc\.weight: not finite"),
        (_put("d2t", lambda t: t + torch.arange(DRAFT)), "offsets"),
        (_put("d2t", lambda t: t.flip(0)), "offsets"),
        (_put("t2d", lambda t: ~t), "offsets"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, change: Callable, message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(UserError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_all_faults_are_listed_at_once(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["norm.weight"], tensors["fc.weight"]
        tensors["extra"] = torch.zeros(1)

    rewrite(folder, change)
    with pytest.raises(UserError) as caught:
        load(folder)
    for fault in ("missing fc.weight", "missing norm.weight", "unknown extra"):
        assert fault in str(caught.value)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights_are_named(folder: Path, kept: int) -> None:
    file = folder / FILE
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match="unreadable") as caught:
        load(folder)
    assert FILE in str(caught.value)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / FILE).unlink()
    with pytest.raises(UserError, match=FILE):
        load(folder)
    (folder / "draftlab.json").unlink()
    with pytest.raises(UserError, match=r"draftlab\.json"):
        load(folder)
    with pytest.raises(UserError, match="nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 3}, "expected head schema 2, found 3"),
        ({"family": "eagle9"}, "family"),
        ({"colour": "red"}, "colour"),
        ({"boundaries": [2, 2, 3]}, "sorted and unique"),
        ({"boundaries": [0, 2, 6]}, r"0\.\.5"),
        ({"boundaries": []}, "boundaries"),
        ({"boundary_meaning": "output-of-layer"}, "boundary_meaning"),
        ({"draft_vocab_size": VOCAB + 1}, "exceeds vocab_size"),
        ({"num_key_value_heads": 4}, "multiple"),
        ({"norm_before_residual": None}, "norm_before_residual"),
        ({"head_dim": ...}, "head_dim"),
        ({"target": {"name": "toy"}}, "fingerprint"),
    ],
)
def test_a_wrong_draftlab_json_is_named(folder: Path, change: dict, message: str) -> None:
    file = folder / "draftlab.json"
    fields = json.loads(file.read_text()) | change
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    with pytest.raises(UserError, match=message) as caught:
        load(folder)
    assert "draftlab.json" in str(caught.value)


def test_a_draftlab_json_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "draftlab.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load(folder)


def test_draftlab_json_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while saving leaves a folder that says it is no head."""

    def crash(*_: object) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftlab.heads.folder.native_config", crash)
    with pytest.raises(KeyboardInterrupt):
        save_head(tmp_path, make_head(), torch.float32)
    assert (tmp_path / FILE).exists()
    with pytest.raises(UserError, match=r"draftlab\.json"):
        load(tmp_path, torch.zeros(VOCAB, HIDDEN))


def test_the_config_knows_its_feature_width() -> None:
    assert make_config().feature_size == 4 * 20
    with pytest.raises(ValueError, match="schema"):
        make_config(schema=3)


def test_a_rope_that_cannot_be_computed_is_named(folder: Path) -> None:
    path = folder / "draftlab.json"
    fields = json.loads(path.read_text())
    fields["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 1e4}
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="factor"):
        load_config(folder)


def test_embeddings_that_are_said_to_be_the_targets_are_not_replaced(folder: Path) -> None:
    path = folder / "draftlab.json"
    fields = json.loads(path.read_text()) | {"embeddings": "target"}
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"embed_tokens\.weight is shared"):
        load(folder, torch.zeros(1, 1))
