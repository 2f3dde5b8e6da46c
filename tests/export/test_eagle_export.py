"""First-generation EAGLE heads for vLLM and SGLang: names, shapes, keys of servers §1.1, §6."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftlab.errors import UserError
from draftlab.heads.folder import load_head
from draftlab.target_model.parts import load_parts
from tests.helpers.dense_attention import dense_logits
from tests.helpers.export_toys import (
    HIDDEN,
    LAYERS,
    MAX_LENGTH,
    VOCAB,
    MakeHead,
    change_tensors,
    export,
    read_config,
    read_tensors,
    verify,
)
from tests.helpers.plain_chain import PlainChain

EAGLE = {"family": "eagle", "boundaries": (LAYERS,), "draft_vocab_size": VOCAB, "num_layers": 2}
LAYER = {
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (32, HIDDEN),
    "self_attn.k_proj.weight": (16, HIDDEN),
    "self_attn.v_proj.weight": (16, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, 32),
    "mlp.gate_proj.weight": (40, HIDDEN),
    "mlp.up_proj.weight": (40, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, 40),
}
TENSORS = {f"layers.{n}.{name}": shape for n in (0, 1) for name, shape in LAYER.items()} | {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    "layers.1.input_layernorm.weight": (HIDDEN,),  # the first layer has none
}


@pytest.mark.parametrize("program", ["vllm", "sglang"])
def test_tensors_and_config(
    make_head: MakeHead, target: Path, tmp_path: Path, program: str
) -> None:
    out = export(make_head(**EAGLE), target, tmp_path / "out", program)
    tensors = read_tensors(out)
    bias = {"fc.bias": (HIDDEN,)} if program == "sglang" else {}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == TENSORS | bias
    assert not any(bool(tensors[name].any()) for name in bias)
    config = read_config(out)
    name = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}[program]
    assert config["architectures"] == [name]
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCAB)
    assert config["draft_vocab_size"] == VOCAB
    assert config["max_position_embeddings"] == MAX_LENGTH  # the head itself says 64
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 10000.0
    # vLLM would index layer_types behind the target's layers (§1.1).
    assert not {"layer_types", "eagle_aux_hidden_state_layer_ids", "eagle_config"} & config.keys()
    launch = (out / "launch.md").read_text()
    words = {"vllm": '"method": "eagle"', "sglang": "--speculative-algorithm EAGLE "}[program]
    assert words in launch
    assert "EAGLE head for org/target" in (out / "README.md").read_text()


@pytest.mark.parametrize("program", ["vllm", "sglang"])
def test_the_exports_forward_is_the_heads(
    make_head: MakeHead, target: Path, tmp_path: Path, program: str
) -> None:
    folder, parts = make_head(**EAGLE, dtype=torch.float32), load_parts(target)
    shared = {name: tensor.float() for name, tensor in parts.shared_tensors.items()}
    out = export(folder, target, tmp_path / "out", program, dtype="float32")
    c = read_config(out)
    flags = dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "qk_norm"), False)
    config = SimpleNamespace(
        **c | {"family": "eagle", "num_layers": c["num_hidden_layers"], **flags}
    )
    plain = PlainChain({n: t.double() for n, t in (shared | read_tensors(out)).items()}, config)
    head = load_head(folder, target_tensors=shared, dtype=torch.float32, device="cpu").double()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (9,), generator=generator)
    states = torch.randn(9, HIDDEN, generator=generator, dtype=torch.float64)
    caches, logits = plain.empty, []
    for t in range(9):
        _, row, caches = plain.step(int(tokens[t]), plain.project_features(states[t]), t, caches)
        logits.append(row)
    expected = torch.stack(logits)
    torch.testing.assert_close(
        dense_logits(head, tokens, head.project_features(states)), expected, rtol=1e-4, atol=1e-4
    )
    assert expected.std() > 1


@pytest.mark.parametrize(
    ("program", "words"),
    [("speculators", "not its eagle: use --to vllm"), ("llamacpp", "no first-generation EAGLE")],
)
def test_programs_without_such_heads_refuse_them(
    make_head: MakeHead, target: Path, tmp_path: Path, program: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        export(make_head(**EAGLE), target, tmp_path / "out", program)
    assert not (tmp_path / "out").exists()


def test_a_changed_export_does_not_verify(
    make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    folder = make_head(**EAGLE)
    out = export(folder, target, tmp_path / "out", "sglang")
    verify(out, folder, target, "sglang")
    change_tensors(out, lambda tensors: tensors["fc.bias"][3].fill_(1e-3))
    with pytest.raises(UserError, match=r"fc\.bias: expected 0\.0 at flat index 3"):
        verify(out, folder, target, "sglang")
