"""Import of other programs' heads: the same bits, and refusals where a file is ambiguous."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import draftlab
from draftlab import UserError
from draftlab.export import write_export
from draftlab.export.importing import import_head
from draftlab.heads.folder import load_config
from tests.helpers.export_toys import LLAMA3, PEAGLE, change_config, change_tensors, read_tensors
from tests.helpers.foreign_toys import (
    BOUNDARIES,
    HIDDEN,
    LAYERS,
    POSITIONS,
    VOCAB,
    make_head,
)
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.toys import toy_target_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target_folder(tmp_path_factory.mktemp("import") / "target", tied=False)


@pytest.fixture
def exported(target: Path, tmp_path: Path) -> Callable[..., Path]:
    """Exports such a head, by default in vLLM's layout."""

    def make(program: str = "vllm", **changed: object) -> Path:
        head = make_head(tmp_path / "head", target, **changed)
        out = tmp_path / program
        return write_export(head, target, out, program, target_name=str(target))

    return make


SHAPES = {
    "plain": {},
    "whole vocabulary": {"draft_vocab_size": VOCAB},
    "own embeddings": {"embeddings": "own"},
    "residual after the norm": {"norm_before_residual": True},
    "one norm before fc": {"norm_before_fc": True},
    "a norm for each boundary": {"fc_norm": True},
    "normed output": {"norm_output": True},
    "four boundaries, float32": {"boundaries": (0, 1, 3, 6), "dtype": torch.float32},
    "llama3": {"rope_parameters": LLAMA3},
    "norms of q and k": {"qk_norm": True},
    "first generation": {"family": "eagle", "boundaries": (LAYERS,), "draft_vocab_size": VOCAB},
    "parallel": PEAGLE,
    "parallel, norms of q and k": PEAGLE | {"qk_norm": True, "draft_vocab_size": VOCAB},
}


FIRST = "first generation"
FOUR, NORMS = "four boundaries, float32", "norms of q and k"
PARALLEL = {shape for shape in SHAPES if shape.startswith("parallel")}
CANNOT = {
    "speculators": {FIRST},
    "vllm": set(),
    "sglang": {"own embeddings", "residual after the norm", FOUR, NORMS} | PARALLEL,
    "llamacpp": {"a norm for each boundary", "normed output", FOUR, NORMS, FIRST} | PARALLEL,
}
"""Shapes that a program refuses (tests/export/test_native_exports.py)."""


@pytest.mark.parametrize(
    ("program", "shape"), [(p, shape) for p in CANNOT for shape in SHAPES if shape not in CANNOT[p]]
)
def test_import_of_an_export_gives_equal_bits(
    target: Path, tmp_path: Path, program: str, shape: str
) -> None:
    head = make_head(tmp_path / "head", target, **SHAPES[shape])
    export = write_export(head, target, tmp_path / "x", program, target_name=str(target))
    back = import_head(export, tmp_path / "back", target=str(target))
    old, new = (read_tensors(f) for f in (head, back))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert tensor.dtype == new[name].dtype
        assert torch.equal(tensor, new[name]), name
    expected, actual = (load_config(f).model_dump(exclude={"provenance"}) for f in (head, back))
    assert actual == expected
    assert load_config(back).provenance["imported"]["sha256"].keys() == {
        "config.json",
        "model.safetensors",
    }
    assert (head / "config.json").read_bytes() == (back / "config.json").read_bytes()


def test_a_split_checkpoint_is_read_whole(target: Path, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", target)
    write_export(
        head, target, tmp_path / "x", "speculators", target_name=str(target), max_shard="20KB"
    )
    back = draftlab.import_head(tmp_path / "x", tmp_path / "back")  # the export names its target
    assert (back / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin"]
)
def test_an_index_cannot_lead_out_of_the_folder(
    exported: Callable, target: Path, tmp_path: Path, name: str
) -> None:
    export = exported()
    (export / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"fc.weight": name}}
    (export / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="beside the index, found"):
        import_head(export, tmp_path / "back", target=str(target))


def test_pickled_weights_are_refused_with_the_way_to_convert_them(
    exported: Callable, target: Path, tmp_path: Path
) -> None:
    export = exported()
    tensors = read_tensors(export)
    (export / "model.safetensors").unlink()
    torch.save(tensors, export / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin.*run code") as caught:
        import_head(export, tmp_path / "back", target=str(target))
    command = caught.value.do
    assert "weights_only=True" in command
    assert "pytorch_model.bin" in command
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("top", "nested", "read"),
    [
        ([1, 3, 5], [0, 2, 4], (1, 3, 5)),
        ([1, 3, 5], None, (1, 3, 5)),
        (None, None, (2, 3, 3)),  # every program's default, which repeats on six layers
        (None, [1, 3, 5], None),  # vLLM's older runner and SGLang disagree
        ([1, 3, 5], [1, 3, 5], None),
        (None, [2, 4, 6], (2, 4, 6)),  # six layers have no output 6
        ([5, 3, 1], None, (5, 3, 1)),
        ([1, 3, 7], None, (1, 3, 7)),
    ],
)
def test_ambiguous_boundaries_are_refused(
    exported: Callable, target: Path, tmp_path: Path, top: list, nested: list, read: tuple
) -> None:
    inner = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": nested}
    export = change_config(
        exported(), eagle_aux_hidden_state_layer_ids=top, eagle_config=inner if nested else None
    )
    sound = read is not None and list(read) == sorted(set(read)) and read[-1] <= LAYERS
    if sound:
        back = import_head(export, tmp_path / "back", target=str(target))
        assert load_config(back).boundaries == read
        return
    with pytest.raises(UserError) as caught:
        import_head(export, tmp_path / "back", target=str(target))
    if read is None:
        assert "differently" in str(caught.value)
        assert "--boundaries 1,3,5" in str(caught.value)
        assert "--boundaries 2,4,6" in str(caught.value)
        assert "doctor" in str(caught.value)
    else:
        assert str(list(read)) in str(caught.value)
    back = import_head(export, tmp_path / "back", target=str(target), boundaries=(2, 4, 6))
    assert load_config(back).boundaries == (2, 4, 6)


def prefix_model(tensors: dict) -> None:
    for name in [n for n in tensors if n not in ("d2t", "t2d", "lm_head.weight")]:
        tensors[f"model.{name}"] = tensors.pop(name)


SPELLINGS: dict[str, Callable] = {
    "absolute ids": lambda t: t["d2t"].add_(torch.arange(len(t["d2t"]))),
    "int32 without t2d": lambda t: (t.pop("t2d"), t.update(d2t=t["d2t"].int())),
    "t2d as bytes": lambda t: t.update(t2d=t["t2d"].to(torch.uint8)),
    "prefix model": prefix_model,
    "derived tensors": lambda t: t.update(
        {
            "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8),
            "midlayer.self_attn.o_proj.bias": torch.zeros(HIDDEN),
        }
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_of_the_same_head_give_the_same_file(
    exported: Callable, target: Path, tmp_path: Path, spelling: str
) -> None:
    monitor = RecordingMonitor()
    export = change_tensors(exported(), SPELLINGS[spelling])
    back = import_head(export, tmp_path / "back", target=str(target), monitor=monitor)
    saved = (tmp_path / "head" / "model.safetensors").read_bytes()
    assert (back / "model.safetensors").read_bytes() == saved
    if spelling == "absolute ids":
        assert "import: d2t holds ids, which become offsets" in monitor.lines


def test_sglangs_names_of_later_norms_must_agree_with_vllms(
    exported: Callable, target: Path, tmp_path: Path
) -> None:
    def rename(tensors: dict) -> None:
        usual = "layers.1.input_layernorm.weight"
        tensors["layers.1.hidden_norm.weight"] = tensors[usual].clone()

    export = change_tensors(exported(**PEAGLE), rename)
    back = import_head(export, tmp_path / "back", target=str(target))
    saved = (tmp_path / "head" / "model.safetensors").read_bytes()
    assert (back / "model.safetensors").read_bytes() == saved

    def differ(tensors: dict) -> None:
        tensors["layers.1.hidden_norm.weight"] += 1

    change_tensors(export, differ)
    with pytest.raises(UserError, match=r"layers\.1\.hidden_norm\.weight.*differ"):
        import_head(export, tmp_path / "other", target=str(target))


def test_copies_of_the_targets_tensors_are_recognised(
    exported: Callable, target: Path, tmp_path: Path
) -> None:
    parts = read_tensors(target)
    monitor = RecordingMonitor()

    def copy(tensors: dict) -> None:
        tensors["embed_tokens.weight"] = parts["model.embed_tokens.weight"].to(torch.bfloat16)
        del tensors["lm_head.weight"]

    export = change_tensors(exported(draft_vocab_size=VOCAB), copy)
    back = import_head(export, tmp_path / "back", target=str(target), monitor=monitor)
    tensors = read_tensors(back)
    assert "embed_tokens.weight" not in tensors
    assert torch.equal(tensors["lm_head.weight"], parts["lm_head.weight"].to(torch.bfloat16))
    assert any("lm_head is the target's" in line for line in monitor.lines)
    assert load_config(back).embeddings == "target"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_bias": True}, "attention_bias: expected False"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
        ({"hidden_size": "64"}, "hidden_size: expected a valid integer"),
        ({"rms_norm_eps": ...}, "rms_norm_eps: missing"),
        ({"residual_scale": 0.5}, "residual_scale: unknown, 0.5(?s:.*)--ignore residual_scale"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"logit_scale": 0.25}, "logit_scale"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
        ({"vocab_size": 300}, "vocab_size 300, this one has 289"),
        ({"target_hidden_size": 32}, "target_hidden_size 32, this one has 64"),
        ({"num_hidden_layers": 2}, "at most 1 layer, found num_layers 2"),
        ({"rope_theta": 10000.0}, "rope_theta 20000.0 in rope_parameters against 10000.0"),
        ({"intermediate_size": 95}, r"mlp\.down_proj\.weight: expected shape \[64, 95\]"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 2e4, "factor": 2.0}},
            "rope_type 'yarn' is not supported",
        ),
        ({"pard_token": 3, "mask_token_id": 4}, "name different tokens"),
        ({"rope_parameters": {"rope_theta": "1e4"}, "rope_theta": ...}, "'1e4' is no base"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": [2]}},
            "cannot compute this head",
        ),
    ],
)
def test_a_config_that_might_mean_another_head_is_refused_by_key(
    exported: Callable, target: Path, tmp_path: Path, keys: dict, message: str
) -> None:
    export = change_config(exported(), **keys)
    with pytest.raises(UserError, match=message):
        import_head(export, tmp_path / "back", target=str(target))
    assert not (tmp_path / "back").exists()


def test_keys_that_change_nothing_can_be_ignored(
    exported: Callable, target: Path, tmp_path: Path
) -> None:
    export = change_config(exported(), residual_scale=0.5, some_flag=False, other=None)
    ignore = frozenset({"residual_scale"})
    back = import_head(export, tmp_path / "back", target=str(target), ignore=ignore)
    assert load_config(back).boundaries == BOUNDARIES


def test_missing_keys_are_defaults_or_refused(
    exported: Callable, target: Path, tmp_path: Path
) -> None:
    monitor = RecordingMonitor()
    rope = {"rope_theta": ..., "rope_parameters": ..., "rope_scaling": ...}
    export = change_config(exported(), max_position_embeddings=64, **rope)
    back = import_head(export, tmp_path / "back", target=str(target), monitor=monitor)
    config = load_config(back)
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config.max_position_embeddings == POSITIONS
    for choice in (
        "no RoPE base in the config, so 10000",
        "max_position_embeddings 64 becomes",
        "trained for 7 drafts",
        "[1, 3, 5], inputs of layers",
    ):
        assert choice in monitor.text
    with pytest.raises(UserError, match=r"its config names none(?s:.*)--target"):
        import_head(export, tmp_path / "other")
    spec = change_config(exported("speculators"), norm_before_residual=...)
    with pytest.raises(UserError, match="the library's default is false, vLLM's is true"):
        import_head(spec, tmp_path / "other", target=str(target))
    named = import_head(spec, tmp_path / "named", target=str(target), norm_before_residual=True)
    assert load_config(named).norm_before_residual is True


def test_mixed_dtypes_need_a_choice_and_faulty_tensors_are_named(
    exported: Callable, target: Path, tmp_path: Path
) -> None:
    def mix(tensors: dict) -> None:
        tensors["norm.weight"] = tensors["norm.weight"].float()

    export = change_tensors(exported(), mix)
    with pytest.raises(UserError, match=r"bfloat16.*float32(?s:.*)--dtype"):
        import_head(export, tmp_path / "back", target=str(target))
    back = import_head(export, tmp_path / "back", target=str(target), dtype=torch.float32)
    assert read_tensors(back)["fc.weight"].dtype == torch.float32

    def spoil(tensors: dict) -> None:
        tensors["fc.weight"][0, 0] = float("nan")
        tensors["stranger"] = torch.ones(1)
        del tensors["midlayer.hidden_norm.weight"]

    change_tensors(export, spoil)
    with pytest.raises(UserError) as caught:
        import_head(export, tmp_path / "other", target=str(target), dtype=torch.float32)
    for fault in ("fc.weight: not finite", "unknown stranger", "missing layers.0.hidden_norm"):
        assert fault in str(caught.value)


def test_quantised_weights_are_refused(exported: Callable, target: Path, tmp_path: Path) -> None:
    def pack(tensors: dict) -> None:
        tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)

    export = change_tensors(exported(), pack)
    with pytest.raises(UserError, match=r"fc\.weight: expected float32.*found torch\.int8"):
        import_head(export, tmp_path / "back", target=str(target))


def test_unusable_sources_and_destinations_are_refused(
    exported: Callable, target: Path, tmp_path: Path
) -> None:
    export = exported()
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "thesis.tex").write_text("user")
    for place in (tmp_path / "user", tmp_path / "user" / "thesis.tex"):
        with pytest.raises(UserError, match="a new or an empty folder"):
            import_head(export, place, target=str(target))
    with pytest.raises(UserError, match="one of draftlab's own"):
        import_head(tmp_path / "head", tmp_path / "back", target=str(target))
    with pytest.raises(UserError, match=r"config\.json"):
        import_head(tmp_path / "nowhere", tmp_path / "back", target=str(target))
    with pytest.raises(UserError, match="draft head of an architecture out of"):
        import_head(
            change_config(export, architectures=["GPT2"]), tmp_path / "back", target=str(target)
        )


def test_a_plain_model_is_no_head(target: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a draft head, found no fc\.weight"):
        import_head(target, tmp_path / "back", target=str(target))


def test_safeailabs_architecture_is_recognised_by_its_tensors(
    exported: Callable, target: Path, tmp_path: Path
) -> None:
    export = change_config(exported(), architectures=["LlamaForCausalLM"])
    back = import_head(export, tmp_path / "back", target=str(target))
    assert load_config(back).family == "eagle3"
