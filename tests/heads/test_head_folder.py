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
from draftlab.heads.folder import (
    EMBEDDINGS,
    load_config,
    load_head,
    native_config,
    save_head,
)
from draftlab.heads.head import DraftHead
from tests.helpers.head_toys import (
    EAGLE,
    LLAMA3,
    LLAMA4_ATTENTION,
    LLAMA4_HEAD,
    PEAGLE,
    make_config,
    make_head,
)

DRAFT, VOCAB, HIDDEN = 21, 50, 24
FILE = "model.safetensors"
KINDS: dict[str, dict] = {
    "plain": {},
    "own embeddings": {"embeddings": "own"},
    "whole vocabulary": {"draft_vocab_size": VOCAB},
    "all": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "qk_norm": True},
    "norm_before_fc": {"norm_before_fc": True, "boundaries": (2,)},
    "peagle": PEAGLE | {"qk_norm": True},
    "eagle": EAGLE | {"num_layers": 2},
    "llama4": LLAMA4_HEAD,
}


def save(folder: Path, **fields: object) -> DraftHead:
    head = make_head(**fields).float()
    save_head(folder, head, torch.float32)
    return head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "head", embeddings="own")
    return tmp_path / "head"


def load(folder: Path, embeddings: Tensor | None = None) -> DraftHead:
    shared = {} if embeddings is None else {EMBEDDINGS: embeddings}
    return load_head(folder, target_tensors=shared, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_same_head(kind: str, tmp_path: Path) -> None:
    head = save(tmp_path, **KINDS[kind])
    stored, tensors = load_file(tmp_path / FILE), head.tensors()
    shared = {n: tensors[n] for n in head.shared_tensors()}
    maps = {"d2t", "t2d"} if head.config.draft_vocab_size == VOCAB else set()
    assert stored.keys() == tensors.keys() - shared.keys() - maps
    loaded = load_head(tmp_path, target_tensors=shared, dtype=torch.float32, device="cpu")
    assert type(loaded) is type(head)
    assert loaded.config == head.config == load_config(tmp_path)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    for name, tensor in loaded.tensors().items():
        assert tensor.dtype == tensors[name].dtype, name
        assert torch.equal(tensor, tensors[name]), name
    for name in shared:  # shared, not copied
        assert loaded.get_parameter(name).data_ptr() == shared[name].data_ptr()


def test_a_target_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    head = save(tmp_path)
    for embeddings in (None, torch.zeros(VOCAB, HIDDEN + 1)):
        with pytest.raises(UserError, match="embeddings"):
            load(tmp_path, embeddings)
    head = save(tmp_path, **EAGLE)
    shared = {n: head.tensors()[n] for n in head.shared_tensors()}
    for name, words in (("lm_head.weight", "lm_head"), ("target_norm.weight", "final norm")):
        fewer = {n: t for n, t in shared.items() if n != name}
        with pytest.raises(UserError, match=f"target's {words}, and none were given"):
            load_head(tmp_path, target_tensors=fewer, dtype=torch.float32, device="cpu")
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": shared["lm_head.weight"]}))
    with pytest.raises(UserError, match=r"lm_head\.weight is shared"):
        load_head(tmp_path, target_tensors=shared, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_stored_dtype_is_the_given_one(tmp_path: Path, dtype: torch.dtype) -> None:
    head = make_head(embeddings="own", rope_parameters=LLAMA3).float()
    save_head(tmp_path, head, dtype)
    for name, tensor in load_file(tmp_path / FILE).items():
        stored = {"d2t": torch.int64, "t2d": torch.bool}.get(name, dtype)
        assert tensor.dtype == stored
        assert torch.equal(tensor, head.tensors()[name].to(stored))
    loaded = load_head(tmp_path, dtype=dtype, device="cpu")
    assert loaded.lm_head.weight.dtype == dtype
    assert loaded.rope.frequencies.dtype == torch.float32
    assert torch.equal(loaded.rope.frequencies, head.rope.frequencies)
    assert all(p.dtype == torch.float32 for p in head.parameters())  # saving casts a copy
    name = str(dtype).removeprefix("torch.")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == name


@pytest.mark.parametrize("rope", [LLAMA3, {"rope_theta": 20000.0}])
def test_config_json_is_generated_from_draftlab_json(tmp_path: Path, rope: dict) -> None:
    save_head(tmp_path, make_head(rope_parameters=rope), torch.bfloat16)
    written = json.loads((tmp_path / "config.json").read_text())
    assert native_config(load_config(tmp_path), "bfloat16") == written
    assert written["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3, 5]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 1, 2, 4]
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


def without(name: str) -> Callable:
    return lambda tensors: tensors.pop(name)


def replaced(name: str, make: Callable[[Tensor], Tensor]) -> Callable:
    return lambda tensors: tensors.update({name: make(tensors.get(name, torch.zeros(2)))})


def with_last(value: float) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        tensor.flatten()[-1] = value
        return tensor

    return make


QK = "layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({}, without("layers.0.hidden_norm.weight"), r"missing layers\.0\.hidden_norm\.weight"),
        ({}, without("d2t"), "missing d2t"),
        ({}, without("t2d"), "missing t2d"),
        ({}, without("embed_tokens.weight"), r"missing embed_tokens\.weight"),
        ({}, replaced("fc.bias", lambda t: t), r"unknown fc\.bias"),
        ({}, replaced("midlayer.norm", lambda t: t), r"unknown midlayer\.norm"),
        (
            {},
            replaced("lm_head.weight", lambda t: t[:-1].clone()),
            r"lm_head\.weight: expected shape \[21, 24\], found \[20, 24\]",
        ),
        (
            {},
            replaced("fc.weight", lambda t: t.T.contiguous()),
            r"fc\.weight: expected shape \[24, 80\]",
        ),
        ({}, replaced("norm.weight", with_last(float("nan"))), r"norm\.weight: not finite"),
        ({}, replaced("fc.weight", with_last(float("inf"))), r"fc\.weight: not finite"),
        ({}, replaced("fc.weight", torch.zeros_like), r"fc\.weight holds only zeros"),
        ({}, replaced("norm.weight", torch.zeros_like), r"norm\.weight holds only zeros"),
        ({}, replaced("fc.weight", lambda t: t.char()), r"fc\.weight: expected floating .*int8"),
        (
            {},
            replaced("fc.weight", lambda t: t.to(torch.float8_e4m3fn)),
            r"fc\.weight: expected floating numbers of 16 bits or more, found .*float8",
        ),
        ({}, replaced("d2t", lambda t: t.float()), "d2t: expected integers, found torch.float32"),
        ({}, replaced("d2t", lambda t: t + torch.arange(DRAFT)), "offsets"),
        ({}, replaced("d2t", lambda t: t.flip(0)), "offsets"),
        ({}, replaced("t2d", lambda t: ~t), "offsets"),
        (PEAGLE, without("mask_hidden"), "missing mask_hidden"),
        (
            PEAGLE,
            replaced("mask_hidden", lambda t: t[:, :60].clone()),
            r"\[1, 80\], found \[1, 60\] \(4 boundaries of 20",
        ),
        (
            PEAGLE,
            replaced("fc.weight", lambda t: t[:, :60].clone()),
            r"\[24, 80\], found \[24, 60\] \(4 boundaries of 20",
        ),
        (PEAGLE | {"qk_norm": True}, without(QK), f"missing {QK}"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, fields: dict, change: Callable, message: str
) -> None:
    save(tmp_path, **{"embeddings": "own"} | fields)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_all_faults_are_listed_at_once(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["norm.weight"], tensors["fc.weight"]
        tensors["extra"] = torch.zeros(1)

    rewrite(folder, change)
    with pytest.raises(UserError) as caught:
        load(folder)
    for fault in ("missing fc.weight", "missing norm.weight", "unknown extra"):
        assert fault in str(caught.value)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_weights_are_named(folder: Path, size: int) -> None:
    file = folder / FILE
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError, match="weights cannot be read") as caught:
        load(folder)
    assert FILE in str(caught.value)


def test_a_git_lfs_pointer_is_named(folder: Path) -> None:
    (folder / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match=r"found a git-lfs pointer(?s:.*)git lfs pull"):
        load(folder)


def test_a_layer_that_adds_nothing_loads(folder: Path) -> None:
    """A head's new layers begin with zeros in these."""
    rewrite(folder, replaced("layers.0.self_attn.o_proj.weight", torch.zeros_like))
    load(folder)


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
        ({"schema": 3}, "expected head schema 1, found 3"),
        ({"family": "eagle9"}, "family"),
        ({"colour": "red"}, "colour"),
        ({"head_dim": ...}, "head_dim"),
        ({"target": {"name": "toy"}}, "fingerprint"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"embeddings": "target"}, r"embed_tokens\.weight is shared"),
        ({"provenance": []}, "provenance"),
        ({"provenance": {"imported": 5}}, "provenance"),
        ({"provenance": {"better_validation": "yes"}}, "provenance"),
        ({"provenance": {"validation": {"by_position": [{"stop": 0}]}}}, "provenance"),
    ],
)
def test_a_wrong_draftlab_json_is_named(folder: Path, change: dict, message: str) -> None:
    file = folder / "draftlab.json"
    fields = json.loads(file.read_text()) | change
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    with pytest.raises(UserError, match=message):
        load(folder, torch.zeros(1, 1))
    file.write_text("{")
    with pytest.raises(UserError, match="not JSON") as caught:
        load(folder)
    assert "draftlab.json" in str(caught.value)


@pytest.mark.parametrize("name", ["intermediate_size", "vocab_size"])
def test_sizes_that_no_machine_holds_are_refused_before_memory_is_taken(
    folder: Path, name: str
) -> None:
    file = folder / "draftlab.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: 2**28, "hidden_size": 2**20}))
    with pytest.raises(UserError, match="expected shape"):
        load(folder)  # a petabyte of weights


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


def test_a_config_keeps_only_the_rope_that_heads_use(tmp_path: Path) -> None:
    """Servers would apply the target's partial_rotary_factor, which heads do not."""
    rope = {"rope_type": "default", "rope_theta": 5e5}
    foreign = {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    save(tmp_path, rope_parameters=rope | foreign)
    assert load_config(tmp_path).rope_parameters == rope
    assert native_config(load_config(tmp_path), torch.float32)["rope_parameters"] == rope


INCOMPLETE = {name: value for name, value in LLAMA4_ATTENTION.items() if name != "attn_scale"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": 3}, "expected head schema 1, found 3"),
        ({"boundaries": (2, 2, 3)}, "sorted unique"),
        ({"boundaries": (0, 2, 6)}, r"0\.\.5"),
        ({"boundaries": ()}, "boundaries"),
        ({"boundary_meaning": "output-of-layer"}, "boundary_meaning"),
        ({"draft_vocab_size": 51}, "exceeds vocab_size"),
        ({"num_key_value_heads": 4}, "multiple"),
        ({"norm_before_residual": None}, "norm_before_residual"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"mask_token_id": 7}, "EAGLE3 heads have no mask_token_id, found 7"),
        ({"llama4": LLAMA4_ATTENTION}, "heads have no llama4"),
        (PEAGLE | {"norm_output": True}, "feeds"),
        (PEAGLE | {"mask_token_id": 50}, "mask_token_id 50 lies outside the 50 rows"),
        (PEAGLE | {"mask_token_id": -1}, "mask_token_id -1 lies outside the 50 rows"),
        (PEAGLE | {"mask_token_id": None}, "mask_token_id"),
        (PEAGLE | {"embeddings": "target"}, "embeddings"),
        (PEAGLE | {"num_layers": 5}, "num_layers"),
        (PEAGLE | {"num_layers": 0}, "num_layers"),
        (EAGLE | {"boundaries": (4,)}, r"last state, boundaries \[5\], found \[4\]"),
        (EAGLE | {"target_hidden_size": 20}, r"as wide as their target \(20\).* found .* 24"),
        (EAGLE | {"draft_vocab_size": 21}, "all 50 tokens, found draft_vocab_size 21"),
        (EAGLE | {"norm_output": True, "qk_norm": True}, "EAGLE heads have no norm_output"),
        (EAGLE | {"mask_token_id": 7}, "EAGLE heads have no mask_token_id, found 7"),
        (EAGLE | {"llama4": LLAMA4_ATTENTION}, "heads have no llama4"),
        (LLAMA4_HEAD | {"llama4": None}, "llama4"),
        (LLAMA4_HEAD | {"num_layers": 3}, "one number for each of the head's 3 layers"),
        (LLAMA4_HEAD | {"qk_norm": True}, "heads have no qk_norm"),
        (
            LLAMA4_HEAD | {"llama4": LLAMA4_ATTENTION | {"no_rope_layers": (2, 1)}},
            "no_rope_layers",
        ),
        (LLAMA4_HEAD | {"llama4": INCOMPLETE}, "attn_scale"),
    ],
)
def test_contradictions_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**fields)


def test_the_config_knows_its_feature_width() -> None:
    assert make_config().feature_size == 4 * 20
