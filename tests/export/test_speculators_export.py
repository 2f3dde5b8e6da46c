"""The speculators layout: names, shapes, config.json (model types eagle3 and peagle), launch.md."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from draftlab.errors import UserError
from tests.helpers.export_toys import (
    BOUNDARIES,
    DRAFT,
    HIDDEN,
    LLAMA3,
    MASK,
    MAX_LENGTH,
    PEAGLE,
    VOCAB,
    ExportHead,
    export,
    read_config,
    read_tensors,
)
from tests.helpers.monitors import RecordingMonitor


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, "float32"),
        ({}, "bfloat16"),
        ({"draft_vocab_size": VOCAB}, "float32"),
        (PEAGLE | {"num_layers": 1}, "float32"),
        (PEAGLE | {"qk_norm": True}, "bfloat16"),
    ],
    ids=str,
)
def test_tensors_have_the_layouts_types(export_head: ExportHead, fields: dict, dtype: str) -> None:
    exported = export_head(dtype=torch.float32, export_dtype=dtype, **fields)
    tensors, stored = exported.tensors, read_tensors(exported.head)
    types = {"d2t": torch.int64, "t2d": torch.bool}
    for name, tensor in tensors.items():
        assert tensor.dtype == types.get(name, getattr(torch, dtype)), name
    with safe_open(exported.folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    if "d2t" in tensors:
        drafts = torch.arange(DRAFT) + tensors["d2t"]
        assert torch.equal(tensors["t2d"].nonzero().flatten(), drafts)
    embeddings = read_tensors(exported.target)["model.embed_tokens.weight"]
    embeddings = stored.get("embed_tokens.weight", embeddings).to(getattr(torch, dtype))
    assert torch.equal(tensors["embed_tokens.weight"], embeddings)
    assert {p.name for p in exported.folder.iterdir()} == {
        "config.json", "model.safetensors", "launch.md", "README.md",
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_before_residual": True},
        PEAGLE | {"num_layers": 3},
        PEAGLE | {"qk_norm": True},
    ],
    ids=str,
)
def test_the_config_has_the_librarys_fields(export_head: ExportHead, fields: dict) -> None:
    parallel, layers = "mask_token_id" in fields, fields.get("num_layers", 1)
    kind = "peagle" if parallel else "eagle3"
    config = export_head(k=3, **fields).config
    layer = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["PEagleDraftModel" if parallel else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT,
        "target_hidden_size": HIDDEN,
        "eagle_aux_hidden_state_layer_ids": list(BOUNDARIES),
        "norm_before_residual": fields.get("norm_before_residual", False),
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": parallel,
        **({"mask_token_id": MASK} if parallel else {}),
        "speculators_config": {
            "algorithm": kind,
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
    }
    assert layer["model_type"] == ("qwen3" if fields.get("qk_norm") else "llama")
    assert layer["num_hidden_layers"] == layers
    assert layer["max_position_embeddings"] == MAX_LENGTH  # the target's


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
@pytest.mark.parametrize(
    ("fields", "model_config"),
    [
        ({}, LlamaConfig),
        ({"rope_parameters": LLAMA3}, LlamaConfig),
        (PEAGLE | {"rope_parameters": LLAMA3}, LlamaConfig),
        (PEAGLE | {"rope_parameters": LLAMA3, "qk_norm": True}, Qwen3Config),
    ],
    ids=str,
)
def test_model_config_and_bare_config_read_the_same_layers(
    export_head: ExportHead, fields: dict, model_config: Callable
) -> None:
    """speculators builds a model's own config; vLLM sets attributes of a bare one, in file order.

    rope_scaling is an alias of rope_parameters there.
    """
    exported = export_head(**fields)
    layer, bare = exported.config["transformer_layer_config"], PretrainedConfig()
    for key, value in exported.config["transformer_layer_config"].items():
        if key != "model_type":
            setattr(bare, key, value)
    full = model_config(**exported.config["transformer_layer_config"])
    assert full.model_type == layer["model_type"]
    for key in layer.keys() - {"model_type", "rope_scaling", "rope_theta"}:
        assert getattr(full, key) == getattr(bare, key), key
    rope = fields.get("rope_parameters", {"rope_type": "default", "rope_theta": 20000.0})
    assert full.rope_parameters == rope
    assert layer["rope_theta"] == rope["rope_theta"]  # transformers 4 reads this and rope_scaling
    assert layer.get("rope_scaling") == (rope if rope["rope_type"] == "llama3" else None)


@pytest.mark.parametrize(("fields", "more"), [({}, {}), (PEAGLE, {"parallel_drafting": True})])
def test_launch_commands_for_hub_and_local_targets(
    export_head: ExportHead, tmp_path: Path, fields: dict, more: dict
) -> None:
    exported, out = export_head(**fields), tmp_path / "out of here"
    folder, target = str(out.resolve()), str(exported.target.resolve())

    def commands() -> list[list[str]]:
        lines = (out / "launch.md").read_text().splitlines()
        return [shlex.split(line) for line in lines if line.startswith("vllm")]

    options = {"model": folder, "method": "eagle3", "num_speculative_tokens": 4} | more
    export(exported.head, exported.target, out, k=4)
    alone, (*explicit, value) = commands()
    assert alone == ["vllm", "serve", folder]
    assert explicit == ["vllm", "serve", "org/target", "--speculative-config"]
    assert json.loads(value) == options

    export(exported.head, exported.target, out, k=4, target_name="embedded")
    ((*local, value),) = commands()  # a local verifier cannot be served alone
    assert local == ["vllm", "serve", target, "--speculative-config"]
    assert json.loads(value) == options
    assert read_config(out)["speculators_config"]["verifier"]["name_or_path"] == target


def test_the_number_of_tokens_is_the_trained_one_or_smaller_than_the_positions(
    export_head: ExportHead,
) -> None:
    exported, monitor = export_head(), RecordingMonitor()
    paths = (exported.head, exported.target, exported.folder)

    def tokens() -> int:
        (proposal,) = exported.config["speculators_config"]["proposal_methods"]
        return proposal["speculative_tokens"]

    assert tokens() == 7
    export(*paths, k=MAX_LENGTH - 1, monitor=monitor)
    assert "warning: export: 511 speculative tokens, but the head was trained for 7" in monitor.text
    assert "for 7; vLLM's runner V1 verifies at most 128" in monitor.text
    for options, message in (
        ({"k": MAX_LENGTH}, f"the target's {MAX_LENGTH} positions, found {MAX_LENGTH}"),
        ({"k": 0}, "greater than or equal to 1"),
        ({"dtype": "int8"}, "int8"),
    ):
        with pytest.raises((UserError, ValueError), match=message):
            export(*paths, **options)
    assert tokens() == MAX_LENGTH - 1  # the earlier export stays
