"""The native layouts of vLLM, SGLang and llama.cpp: names, keys, refusals (servers §7)."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from draftlab.errors import UserError
from draftlab.export.layout import Export
from tests.helpers.export_toys import (
    DFLASH,
    DRAFT,
    DSPARK,
    EAGLE,
    HIDDEN,
    LAYERS,
    LLAMA3,
    LLAMA4,
    MASK,
    MAX_LENGTH,
    PEAGLE,
    VOCAB,
    YARN,
    ExportHead,
    change_tensors,
    export,
    read_tensors,
)

NATIVE = ("vllm", "sglang", "llamacpp")


@pytest.mark.parametrize("program", NATIVE)
def test_config_has_the_keys_of_every_program(export_head: ExportHead, program: str) -> None:
    changes = {"rope_parameters": LLAMA3, "max_position_embeddings": 64}
    config = export_head(program, export_dtype="float32", **changes).config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["dtype"] == "float32"
    assert config["max_position_embeddings"] == MAX_LENGTH  # the target's
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]  # inputs of layers
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 4],  # outputs of layers
    }
    assert config["num_aux_hidden_states"] == 3
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[flag] for flag in flags] == [False] * 4
    assert config["draft_vocab_size"] == DRAFT
    assert config["tie_word_embeddings"] is config["attention_bias"] is config["bias"] is False
    assert config["rope_parameters"] == LLAMA3  # transformers 5
    assert config["rope_theta"] == LLAMA3["rope_theta"]  # transformers 4, with rope_scaling
    assert config["rope_scaling"] == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    read = LlamaConfig(**json.loads(json.dumps(config)))
    assert read.rope_parameters == LLAMA3
    assert read.head_dim == 8


@pytest.mark.parametrize(
    ("program", "architecture", "launch"),
    [
        ("vllm", "LlamaForCausalLM", '"method": "eagle"'),
        ("sglang", "LlamaForCausalLMEagle", "--speculative-algorithm EAGLE "),
    ],
)
def test_a_first_generation_head_has_two_numbered_layers(
    export_head: ExportHead, program: str, architecture: str, launch: str
) -> None:
    exported = export_head(program, max_position_embeddings=64, **EAGLE)
    tensors, config = exported.tensors, exported.config
    assert ("fc.bias" in tensors) == (program == "sglang")
    assert "fc.bias" not in tensors or not tensors["fc.bias"].any()
    assert "layers.0.input_layernorm.weight" not in tensors
    assert "layers.1.input_layernorm.weight" in tensors
    assert config["architectures"] == [architecture]
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCAB)
    assert config["draft_vocab_size"] == VOCAB
    assert config["max_position_embeddings"] == MAX_LENGTH  # the target's
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 20000.0
    # vLLM would index layer_types behind the target's layers (§1.1).
    assert not {"layer_types", "eagle_aux_hidden_state_layer_ids", "eagle_config"} & config.keys()
    assert launch in exported.launch_text


def test_a_parallel_head_has_the_mask_token_under_all_names(export_head: ExportHead) -> None:
    exported = export_head("vllm", **PEAGLE, k=5)
    config, tensors, saved = exported.config, exported.tensors, read_tensors(exported.head)
    assert {config[n] for n in ("mask_token_id", "ptd_token_id", "pard_token")} == {MASK}
    assert tensors.keys() == saved.keys()  # two layers: numbered
    assert torch.equal(tensors["embed_tokens.weight"], saved["embed_tokens.weight"])
    assert list(tensors["mask_hidden"].shape) == [1, 3 * HIDDEN]
    (line,) = [x for x in exported.launch_text.splitlines() if x.startswith("vllm")]
    options = json.loads(shlex.split(line)[-1])
    assert options["parallel_drafting"] is True
    assert options["num_speculative_tokens"] == 5


@pytest.mark.parametrize(
    ("program", "fields", "reason"),
    [
        ("speculators", EAGLE, "not its eagle: use --to vllm"),
        ("llamacpp", EAGLE, "no first-generation EAGLE"),
        *(
            (program, LLAMA4, "cannot hold dense Llama 4 heads: .*--to vllm")
            for program in ("speculators", "sglang", "llamacpp")
        ),
        ("sglang", PEAGLE, "no masked slots.*--to vllm"),
        ("llamacpp", PEAGLE, "no masked slots.*--to vllm"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual(?s:.*)--to vllm"),
        *((p, {"num_layers": 2}, "heads of one layer, .* has 2") for p in ("sglang", "llamacpp")),
        ("llamacpp", {"sliding_window": 12}, "a sliding_window of 12"),
        ("vllm", {"sliding_window": 12, "qk_norm": True}, "qk_norm and a sliding_window of 12"),
        ("sglang", {"qk_norm": True}, "norms of queries and keys"),
        ("sglang", {"rope_parameters": YARN | {"truncate": False}}, "rounds the bounds of YaRN"),
        ("llamacpp", {"rope_parameters": YARN}, "YaRN has not been tried"),
        ("sglang", {"embeddings": "own"}, "embeddings of its own"),
        ("sglang", {"boundaries": (0, 2, 4)}, "boundary 0"),
        ("sglang", {"boundaries": (1, 2, 6)}, "boundary 6"),
        ("sglang", {"boundaries": (3,)}, "leaves out fc"),
        ("llamacpp", {"qk_norm": True}, "norms of queries and keys"),
        ("llamacpp", {"boundaries": (1, 2, 3, 4)}, r"exactly 3 boundaries.* has 4: \[1, 2, 3, 4\]"),
        ("llamacpp", {"norm_output": True}, "norm_output"),
        ("llamacpp", {"fc_norm": True}, "fc_norm"),
        ("vllm", {"num_attention_heads": 6}, "num_attention_heads to divide"),
        ("speculators", {"num_attention_heads": 6}, "num_attention_heads"),
        ("speculators", {"hidden_size": 16, "embeddings": "own"}, "as wide as their target"),
        ("speculators", DSPARK | {"is_causal": True}, "no key for causal"),
        ("sglang", DFLASH | {"draft_vocab_size": DRAFT}, "SGLang drafts with"),
        ("vllm", DSPARK | {"boundaries": (0, 2, 4)}, "outputs of the layers"),
    ],
)
def test_heads_that_a_program_cannot_serve_are_refused(
    export_head: ExportHead, program: str, fields: dict, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        export_head(program, **fields)


def test_sglang_reads_the_last_boundary_of_gpt_oss_targets_as_an_input(
    export_head: ExportHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Export, "is_gpt_oss", True)
    for boundaries, outputs in (((1, 3, LAYERS), [1, 3, LAYERS]), ((1, 2, 4), [0, 1, 3])):
        config = export_head("sglang", boundaries=boundaries).config
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == outputs
        assert config["eagle_aux_hidden_state_layer_ids"] == list(boundaries)


@pytest.mark.parametrize("program", ["vllm", "speculators"])
def test_large_exports_are_split_and_read_back(export_head: ExportHead, program: str) -> None:
    exported = export_head(program)
    paths, expected = (exported.head, exported.target, exported.folder, program), exported.tensors
    export(*paths, max_shard="8KB")
    index = json.loads((exported.folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(exported.folder.glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    assert {f.name for f in files} == set(index.values())
    shards = {n: t for f in files for n, t in load_file(f).items()}
    assert shards.keys() == expected.keys() == index.keys()
    assert all(torch.equal(shards[name], expected[name]) for name in expected)
    exported.verify()
    save_file(load_file(files[0]), files[0])  # without the metadata
    with pytest.raises(UserError, match="metadata"):
        exported.verify()
    export(*paths)  # replaces all shards
    assert not list(exported.folder.glob("model-*"))
    exported.verify()


@pytest.mark.parametrize("value", [1e6, -1e6])
def test_float16_that_overflows_is_refused_by_name(export_head: ExportHead, value: float) -> None:
    exported = export_head("llamacpp", export_dtype="float16")
    assert exported.tensors["fc.weight"].dtype == torch.float16
    change_tensors(exported.head, lambda tensors: tensors["fc.weight"][0, 0].fill_(value))
    with pytest.raises(UserError, match=r"fc\.weight does not fit torch\.float16.*9.99e\+05"):
        export(exported.head, exported.target, exported.folder, exported.program, dtype="float16")


def test_launch_lines_of_the_other_servers(export_head: ExportHead) -> None:
    def commands(program: str) -> tuple[str, list[list[str]]]:
        exported = export_head(program, k=4)
        blocks = exported.launch_text.split("```")[1::2]
        lines = [line for b in blocks for line in b.replace("\\\n", " ").strip().split("\n")]
        return str(exported.folder.resolve()), [shlex.split(line) for line in lines]

    folder, (sglang,) = commands("sglang")
    options = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert options["--speculative-draft-model-path"] == folder
    assert options["--speculative-eagle-topk"] == "1"
    folder, (fetch, both, convert, server) = commands("llamacpp")
    assert fetch == ["hf", "download", "org/target", "--local-dir", "target"]
    assert both[1:5] == ["convert_hf_to_gguf.py", "target", "--outtype", "bf16"]
    assert convert[1:5] == ["convert_hf_to_gguf.py", folder, "--target-model-dir", "target"]
    assert server[server.index("--spec-draft-n-max") + 1] == "4"
