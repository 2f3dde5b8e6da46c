"""The speculators layout: names, shapes, config.json, and equal logits."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from draftlab.errors import UserError
from draftlab.export import ExportSettings, layout_for
from draftlab.export.settings import PROGRAMS
from draftlab.heads.family import get_family
from draftlab.heads.folder import load_head
from draftlab.target_model.parts import load_parts
from tests.helpers.dense_attention import dense_logits
from tests.helpers.export_toys import (
    BOUNDARIES,
    HIDDEN,
    LLAMA3,
    MAX_LENGTH,
    VOCAB,
    MakeHead,
    export,
    read_config,
    read_tensors,
)
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.plain_reader import read_and_run

H, A, KV, D, INNER, DRAFT = HIDDEN, 4, 2, 8, 40, 40
# As in servers §9.2.
SHAPES = {
    "embed_tokens.weight": [VOCAB, H],
    "fc.weight": [H, len(BOUNDARIES) * H],
    "layers.0.self_attn.q_proj.weight": [A * D, 2 * H],
    "layers.0.self_attn.k_proj.weight": [KV * D, 2 * H],
    "layers.0.self_attn.v_proj.weight": [KV * D, 2 * H],
    "layers.0.self_attn.o_proj.weight": [H, A * D],
    "layers.0.input_layernorm.weight": [H],
    "layers.0.hidden_norm.weight": [H],
    "layers.0.post_attention_layernorm.weight": [H],
    "layers.0.mlp.gate_proj.weight": [INNER, H],
    "layers.0.mlp.up_proj.weight": [INNER, H],
    "layers.0.mlp.down_proj.weight": [H, INNER],
    "norm.weight": [H],
    "lm_head.weight": [DRAFT, H],
    "d2t": [DRAFT],
    "t2d": [VOCAB],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_have_the_layouts_names_shapes_and_types(
    make_head: MakeHead, target: Path, tmp_path: Path, dtype: str
) -> None:
    head = make_head(dtype=torch.float32)
    out = export(head, target, tmp_path / "out", dtype=dtype)
    tensors = read_tensors(out)
    assert {name: list(t.shape) for name, t in tensors.items()} == SHAPES
    types = {"d2t": torch.int64, "t2d": torch.bool}
    for name, tensor in tensors.items():
        assert tensor.dtype == types.get(name, getattr(torch, dtype)), name
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    drafts = torch.arange(DRAFT) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), drafts)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    embeddings = model.get_input_embeddings().weight.to(getattr(torch, dtype))
    assert torch.equal(tensors["embed_tokens.weight"], embeddings)
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "launch.md",
        "README.md",
    }


@pytest.mark.parametrize("before", [False, True])
def test_config_is_written_in_full(
    make_head: MakeHead, target: Path, tmp_path: Path, before: bool
) -> None:
    head = make_head(norm_before_residual=before, rope_parameters={"rope_theta": 20000.0})
    out = export(head, target, tmp_path / "out", k=3)
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    assert read_config(out) == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT,
        "target_hidden_size": H,
        "eagle_aux_hidden_state_layer_ids": list(BOUNDARIES),
        "norm_before_residual": before,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": H,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": A,
            "num_key_value_heads": KV,
            "head_dim": D,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "pretraining_tp": 1,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"],
            "max_position_embeddings": MAX_LENGTH,
            "rope_theta": 20000.0,
            "rope_parameters": rope,
            "num_aux_hidden_states": len(BOUNDARIES),
        },
    }


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
@pytest.mark.parametrize("rope", [LLAMA3, {"rope_type": "default", "rope_theta": 20000.0}])
def test_rope_survives_readers_that_assign_keys_in_file_order(
    make_head: MakeHead, target: Path, tmp_path: Path, rope: dict
) -> None:
    """vLLM sets attributes of a bare config, where rope_scaling is an alias of rope_parameters."""
    out = export(make_head(rope_parameters=rope), target, tmp_path / "out")
    layer = read_config(out)["transformer_layer_config"]
    bare = PretrainedConfig()
    for key, value in json.loads(json.dumps(layer)).items():  # a copy: transformers writes into it
        if key != "model_type":
            setattr(bare, key, value)
    assert bare.rope_parameters == rope
    llama = LlamaConfig(**json.loads(json.dumps(layer)))
    assert llama.rope_parameters == rope
    assert layer["rope_theta"] == rope["rope_theta"]  # transformers 4 reads this and rope_scaling
    assert layer.get("rope_scaling") == (rope if rope["rope_type"] == "llama3" else None)
    for key in ("head_dim", "hidden_size", "vocab_size", "max_position_embeddings"):
        assert getattr(llama, key) == layer[key]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("draft", [DRAFT, VOCAB])
def test_a_plain_reader_of_the_folder_gets_the_heads_logits(
    make_head: MakeHead, target: Path, tmp_path: Path, before: bool, draft: int
) -> None:
    folder = make_head(
        dtype=torch.float32,
        norm_before_residual=before,
        draft_vocab_size=draft,
        rope_parameters=dict(LLAMA3),
    )
    out = export(folder, target, tmp_path / "out")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (12,), generator=generator)
    features = torch.randn(12, len(BOUNDARIES) * H, generator=generator)

    head = load_head(
        folder, embeddings=load_parts(target).embeddings, dtype=torch.float32, device="cpu"
    )
    expected = dense_logits(head, tokens, head.project_features(features))
    logits, ids = read_and_run(out, tokens, features)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(ids, head.target_ids(torch.arange(draft)))
    assert expected.std() > 1  # constant logits would equal anything


def test_a_full_vocabulary_has_no_maps(make_head: MakeHead, target: Path, tmp_path: Path) -> None:
    out = export(make_head(draft_vocab_size=VOCAB), target, tmp_path / "out")
    tensors = read_tensors(out)
    assert tensors.keys() == SHAPES.keys() - {"d2t", "t2d"}
    assert list(tensors["lm_head.weight"].shape) == [VOCAB, H]


def test_own_embeddings_are_the_heads(make_head: MakeHead, target: Path, tmp_path: Path) -> None:
    folder = make_head(embeddings="own")
    out = export(folder, target, tmp_path / "out")
    own = read_tensors(folder)["embed_tokens.weight"]
    assert torch.equal(read_tensors(out)["embed_tokens.weight"], own)
    assert not torch.equal(own, load_parts(target).embeddings)


def test_launch_commands_for_hub_and_local_targets(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    head, out = make_head(), tmp_path / "out of here"
    export(head, target, out, k=4)

    def commands() -> list[list[str]]:
        lines = (out / "launch.md").read_text().splitlines()
        return [shlex.split(line) for line in lines if line.startswith("vllm")]

    options = {"model": str(out.resolve()), "method": "eagle3", "num_speculative_tokens": 4}
    alone, explicit = commands()
    assert alone == ["vllm", "serve", str(out.resolve())]
    assert explicit[:4] == ["vllm", "serve", "org/target", "--speculative-config"]
    assert json.loads(explicit[4]) == options

    export(head, target, out, k=4, target_name="embedded")
    ((*local, value),) = commands()  # a local verifier cannot be served alone
    assert local == ["vllm", "serve", str(target.resolve()), "--speculative-config"]
    assert json.loads(value) == options
    config = read_config(out)
    verifier = config["speculators_config"]["verifier"]["name_or_path"]
    assert verifier == str(target.resolve())
    assert "speculators layout 0.9.0" in (out / "README.md").read_text()


def test_chosen_defaults_are_printed(make_head: MakeHead, target: Path, tmp_path: Path) -> None:
    head, monitor = make_head(), RecordingMonitor()
    export(head, target, tmp_path / "out", monitor=monitor)
    assert "7 speculative tokens" in monitor.lines[0]
    config = read_config(tmp_path / "out")
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    export(head, target, tmp_path / "out", k=9, monitor=monitor)
    assert "9 speculative tokens, but the head was trained for 7" in monitor.lines[1]
    with pytest.raises(UserError, match="at least 1"):
        export(head, target, tmp_path / "out", k=0)
    with pytest.raises(UserError, match="int8"):
        export(head, target, tmp_path / "out", dtype="int8")


def test_layouts_and_settings() -> None:
    assert get_family("eagle3").layouts().keys() == set(PROGRAMS)
    with pytest.raises(UserError, match="did you mean 'speculators'"):
        layout_for("speculator", "eagle3")
    with pytest.raises(UserError, match="expected a layout out of llamacpp, sglang, speculators"):
        layout_for("onnx", "eagle3")
    with pytest.raises(UserError, match="did you mean 'llamacpp'"):
        layout_for("gguf", "eagle3")
    assert ExportSettings() == ExportSettings(formats=("speculators",), dtype=None, k=None)
    with pytest.raises(ValueError, match="did you mean 'speculators'"):
        ExportSettings(formats=("Speculators",))
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        ExportSettings(k=0)
