"""The native layouts of vLLM, SGLang and llama.cpp: names, keys, refusals (servers §7)."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from draftlab.errors import UserError
from draftlab.heads.family import families
from draftlab.target_model.parts import load_parts
from tests.helpers.export_toys import (
    HIDDEN,
    LAYERS,
    LLAMA3,
    MASK,
    MAX_LENGTH,
    PEAGLE,
    VOCAB,
    MakeHead,
    change_tensors,
    export,
    read_config,
    read_tensors,
    verify,
)
from tests.helpers.plain_reader import read_and_run

NATIVE = ("vllm", "sglang", "llamacpp")
INNER = (1, 2, 4)
"""Boundaries that every program can extract."""


@pytest.mark.parametrize("program", NATIVE)
@pytest.mark.parametrize("draft", [40, VOCAB])
def test_tensors_are_a_midlayers_without_the_targets_embeddings(
    make_head: MakeHead, target: Path, tmp_path: Path, program: str, draft: int
) -> None:
    head = make_head(boundaries=INNER, draft_vocab_size=draft)
    exported = read_tensors(export(head, target, tmp_path / "out", program))
    layer = [
        *(f"self_attn.{n}_proj" for n in "qkvo"),
        *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
        *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
    ]
    names = {f"midlayer.{n}.weight" for n in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert exported.keys() == names | ({"d2t", "t2d"} if draft < VOCAB else set())
    saved = read_tensors(head)
    for name, tensor in exported.items():
        assert torch.equal(tensor, saved[name.replace("midlayer", "layers.0")]), name


@pytest.mark.parametrize("program", NATIVE)
def test_config_has_the_keys_of_every_program(
    make_head: MakeHead, target: Path, tmp_path: Path, program: str
) -> None:
    head = make_head(boundaries=INNER, rope_parameters=dict(LLAMA3))
    config = read_config(export(head, target, tmp_path / "out", program, dtype="float32"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["dtype"] == "float32"
    assert config["max_position_embeddings"] == MAX_LENGTH  # the head itself says 64
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]  # inputs of layers
    nested = config["eagle_config"]
    assert nested == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],  # outputs of layers
    }
    assert config["num_aux_hidden_states"] == 3
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[flag] for flag in flags] == [False] * 4
    assert config["draft_vocab_size"] == 40
    assert config["tie_word_embeddings"] is config["attention_bias"] is config["bias"] is False
    assert config["rope_parameters"] == LLAMA3  # transformers 5
    assert config["rope_theta"] == LLAMA3["rope_theta"]  # transformers 4, with rope_scaling
    assert config["rope_scaling"] == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    read = LlamaConfig(**json.loads(json.dumps(config)))
    assert read.rope_parameters == LLAMA3
    assert read.head_dim == 8


def test_a_parallel_head_has_the_mask_token_under_all_names(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    head = make_head(**PEAGLE)
    out = export(head, target, tmp_path / "out", "vllm", k=5)
    config, tensors = read_config(out), read_tensors(out)
    assert {config[n] for n in ("mask_token_id", "ptd_token_id", "pard_token")} == {MASK}
    saved = read_tensors(head)
    assert tensors.keys() == saved.keys()  # two layers: numbered
    assert torch.equal(tensors["embed_tokens.weight"], saved["embed_tokens.weight"])
    assert list(tensors["mask_hidden"].shape) == [1, 4 * HIDDEN]
    (line,) = [x for x in (out / "launch.md").read_text().splitlines() if x.startswith("vllm")]
    options = json.loads(shlex.split(line)[-1])
    assert options["parallel_drafting"] is True
    assert options["num_speculative_tokens"] == 5


@pytest.mark.parametrize(
    ("program", "before"),
    [("vllm", False), ("vllm", True), ("sglang", False), ("llamacpp", False), ("llamacpp", True)],
)
def test_a_plain_reader_gets_the_heads_logits(
    make_head: MakeHead, target: Path, tmp_path: Path, program: str, before: bool
) -> None:
    folder = make_head(
        dtype=torch.float32,
        boundaries=INNER,
        norm_before_residual=before,
        rope_parameters=dict(LLAMA3),
    )
    out = export(folder, target, tmp_path / "out", program)
    spec = export(
        folder, target, tmp_path / "spec"
    )  # test_speculators_export.py compares it with the head
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (12,), generator=generator)
    features = torch.randn(12, 3 * HIDDEN, generator=generator)
    logits, ids = read_and_run(out, tokens, features, load_parts(target).embeddings.float())
    expected, expected_ids = read_and_run(spec, tokens, features)
    assert torch.equal(logits, expected)
    assert torch.equal(ids, expected_ids)
    assert read_config(out)["norm_before_residual"] is before


@pytest.mark.parametrize(
    ("program", "fields", "reason"),
    [
        ("sglang", PEAGLE, "no masked slots.*--to vllm"),
        ("llamacpp", PEAGLE, "no masked slots.*--to vllm"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual(?s:.*)--to vllm"),
        ("sglang", {"qk_norm": True}, "norms of queries and keys"),
        ("sglang", {"embeddings": "own"}, "embeddings of its own"),
        ("sglang", {"boundaries": (0, 2, 4)}, "boundary 0"),
        ("sglang", {"boundaries": (1, 2, 5)}, "boundary 5"),
        ("sglang", {"boundaries": (3,)}, "leaves out fc"),
        ("llamacpp", {"qk_norm": True}, "norms of queries and keys"),
        ("llamacpp", {"boundaries": (1, 2, 3, 4)}, r"exactly 3 boundaries.* has 4: \[1, 2, 3, 4\]"),
        ("llamacpp", {"norm_output": True}, "norm_output"),
        ("llamacpp", {"fc_norm": True}, "fc_norm"),
        ("vllm", {"num_attention_heads": 6}, "num_attention_heads to divide"),
    ],
)
def test_heads_that_a_program_cannot_serve_are_refused(
    make_head: MakeHead, target: Path, tmp_path: Path, program: str, fields: dict, reason: str
) -> None:
    head = make_head(**({"boundaries": INNER} | fields))
    with pytest.raises(UserError, match=reason):
        export(head, target, tmp_path / "out", program)
    assert not (tmp_path / "out").exists()


def test_sglang_reads_the_last_boundary_of_gpt_oss_targets_as_an_input(
    make_head: MakeHead, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(boundaries=(1, 3, LAYERS))
    monkeypatch.setattr("draftlab.export.vllm_sglang._is_gpt_oss", lambda export: True)
    config = read_config(export(head, target, tmp_path / "out", "sglang"))
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, LAYERS]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, LAYERS]
    inner = make_head(boundaries=INNER)
    config = read_config(export(inner, target, tmp_path / "inner", "sglang"))
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]


@pytest.mark.parametrize("program", [*NATIVE, "speculators"])
def test_large_exports_are_split_and_read_back(
    make_head: MakeHead, target: Path, tmp_path: Path, program: str
) -> None:
    head = make_head(boundaries=INNER)
    single = export(head, target, tmp_path / "single", program)
    out = export(head, target, tmp_path / "out", program, max_shard="8KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(out.glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    assert {f.name for f in files} == set(index.values())
    shards = {n: t for f in files for n, t in load_file(f).items()}
    expected = read_tensors(single)
    assert shards.keys() == expected.keys() == index.keys()
    assert all(torch.equal(shards[name], expected[name]) for name in expected)
    verify(out, head, target, program)
    save_file(load_file(files[0]), files[0])  # without the metadata
    with pytest.raises(UserError, match="metadata"):
        verify(out, head, target, program)
    export(head, target, out, program)  # replaces all shards
    assert not list(out.glob("model-*"))
    with pytest.raises(UserError, match="such as 5GB or 500MB, found 'much'"):
        export(head, target, out, program, max_shard="much")
    verify(out, head, target, program)


def test_float16_that_overflows_is_refused_by_name(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    head = make_head(boundaries=INNER)
    out = export(head, target, tmp_path / "out", "llamacpp", dtype="float16")
    assert read_tensors(out)["fc.weight"].dtype == torch.float16
    change_tensors(head, lambda tensors: tensors["fc.weight"][0, 0].fill_(1e6))
    with pytest.raises(UserError, match=r"fc\.weight does not fit torch\.float16.*9.99e\+05"):
        export(head, target, tmp_path / "out", "llamacpp", dtype="float16")


def test_launch_lines_of_the_other_servers(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    head, out = make_head(boundaries=INNER), tmp_path / "out of here"

    def words(program: str) -> list[list[str]]:
        export(head, target, out, program, k=4)
        blocks = (out / "launch.md").read_text().split("```")[1::2]
        return [
            shlex.split(line) for b in blocks for line in b.replace("\\\n", " ").strip().split("\n")
        ]

    (sglang,) = words("sglang")
    options = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert options == {
        "--model-path": "org/target",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(out.resolve()),
        "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "5",
    }
    fetch, both, convert, server = words("llamacpp")
    assert fetch == ["hf", "download", "org/target", "--local-dir", "target"]
    assert both[1:5] == ["convert_hf_to_gguf.py", "target", "--outtype", "bf16"]
    head_options = ["convert_hf_to_gguf.py", str(out.resolve()), "--target-model-dir", "target"]
    assert convert[1:5] == head_options
    assert server[server.index("--spec-draft-n-max") + 1] == "4"


def test_refusals_name_the_layout_to_use_instead() -> None:
    reasons = [x for f in families() for x in f.layouts().values() if isinstance(x, str)]
    assert reasons
    assert all("--to" in reason for reason in reasons)
