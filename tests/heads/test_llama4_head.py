"""heads/llama4.py against a few lines written from servers §1.2, and against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextModel

from draftlab.errors import UserError
from draftlab.heads.config import make_head_config
from draftlab.heads.folder import load_config, load_head, save_head
from draftlab.heads.initial import start_from
from draftlab.heads.vllm_config import native_config
from tests.helpers.dense_attention import run_llama4_head
from tests.helpers.head_toys import LLAMA3, make_config, make_head
from tests.helpers.llama4_reader import Reader, half_split, pairs
from tests.helpers.llama4_toys import LLAMA4_ATTENTION, LLAMA4_HEAD

LENGTH = 13  # two borders of chunks, four of temperatures


def changed(**kind: object) -> dict[str, object]:
    return LLAMA4_HEAD | {"llama4": LLAMA4_ATTENTION | kind}


ALONE = {"no_rope_layers": (1,)}
CASES = {
    "both": LLAMA4_HEAD,
    "one layer": changed(**ALONE) | {"num_layers": 1},
    "no norm": changed(use_qk_norm=False),
    "no chunk": changed(attention_chunk_size=None),
    "no temperature": changed(attn_temperature_tuning=False),
}


def inputs(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens int64 [T] and last states [T, H]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (LENGTH,), generator=generator)
    return tokens, torch.randn(LENGTH, 24, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_the_head_is_what_its_files_say(case: str) -> None:
    """But for rotations, norms and temperatures, which it makes in float32."""
    head = make_head(**CASES[case])
    config = json.loads(json.dumps(native_config(head.config, "float32")))
    reader = Reader(config, head.tensors())
    tokens, states = inputs()
    found = run_llama4_head(head, tokens, states)
    for position, (token, state) in enumerate(zip(tokens.tolist(), states, strict=True)):
        normed = reader.norm(state, "target_norm")
        expected = reader.step(token, normed, position)
        torch.testing.assert_close(found[position], expected, rtol=0, atol=1e-5)
    # What is fed back is what lm_head reads.
    logits = torch.stack([reader.w["lm_head.weight"] @ state for state in found])
    torch.testing.assert_close(head.logits(found), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "wrong", ["half_split", "no chunk", "no norm", "no temperature", "ropes everywhere"]
)
def test_a_reader_that_differs_is_noticed(wrong: str) -> None:
    head = make_head(**LLAMA4_HEAD)
    config = native_config(head.config, "float32")
    tensors = dict(head.tensors())
    if wrong == "half_split":
        name = "layers.0.self_attn.q_proj.weight"
        tensors[name] = pairs(tensors[name], 6)
    else:
        config |= {
            "no chunk": {"attention_chunk_size": None},
            "no norm": {"use_qk_norm": False},
            "no temperature": {"attn_temperature_tuning": False},
            "ropes everywhere": {"no_rope_layers": [1, 1]},
        }[wrong]
    reader = Reader(config, tensors)
    tokens, states = inputs()
    found = run_llama4_head(head, tokens, states)
    for position, (token, state) in enumerate(zip(tokens.tolist(), states, strict=True)):
        expected = reader.step(token, reader.norm(state, "target_norm"), position)
    assert float((found[-1] - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_the_permutation_has_an_inverse(heads: int) -> None:
    weight = torch.arange(heads * 8 * 5).view(heads * 8, 5)
    assert torch.equal(pairs(half_split(weight, heads), heads), weight)
    assert torch.equal(half_split(pairs(weight, heads), heads), weight)
    assert half_split(weight, heads)[:8, 0].div(5).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_layers_are_transformers_own() -> None:
    """Weights go into transformers' layers under their own names, and states are the same."""
    head = make_head(**LLAMA4_HEAD, rope_parameters=LLAMA3)
    fields = native_config(head.config, "float64")
    config = Llama4TextConfig(**fields)
    config._attn_implementation = "eager"
    model = Llama4TextModel(config).double().eval()
    tensors = {n: t for n, t in head.tensors().items() if n.startswith(("layers", "norm"))}
    assert model.load_state_dict(tensors, strict=False).unexpected_keys == []
    tokens, states = inputs()
    fed = head.fc(torch.cat([head.embed(tokens), head.project_features(states)], -1))
    with torch.no_grad():
        expected = model(inputs_embeds=fed[None], use_cache=False).last_hidden_state[0]
    # transformers rotates in float32.
    torch.testing.assert_close(run_llama4_head(head, tokens, states), expected, rtol=0, atol=1e-5)


def test_a_folder_is_what_vllm_loads(tmp_path: Path) -> None:
    """Names, shapes and keys of servers §1.2; embeddings, norm and lm_head of the target stay."""
    head = make_head(**changed(**ALONE) | {"num_layers": 1}).float()
    save_head(tmp_path, head, torch.float32)
    lent = {n: head.tensors()[n] for n in head.shared_tensors()}
    assert sorted(lent) == ["embed_tokens.weight", "lm_head.weight", "target_norm.weight"]
    again = load_head(tmp_path, target_tensors=lent, dtype=torch.float32, device="cpu")
    for name, tensor in head.tensors().items():
        assert torch.equal(again.tensors()[name], tensor), name
    found = AutoConfig.from_pretrained(tmp_path)
    assert (found.model_type, found.moe_layers, found.no_rope_layers) == ("llama4_text", [], [1])
    assert found.draft_vocab_size == found.vocab_size == 50
    assert found.yoco_global_kv_layer is found.yoco_local_kv_layer is None
    before = json.dumps(load_config(tmp_path).model_dump(mode="json"))
    load_head(tmp_path, target_tensors=lent, dtype=torch.float32, device="cpu")
    assert json.dumps(load_config(tmp_path).model_dump(mode="json")) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama4": None}, "llama4"),
        ({"family": "eagle"}, "heads have no llama4"),
        ({"num_layers": 3}, "one number for each of the head's 3 layers"),
        ({"qk_norm": True}, r"heads have no qk_norm"),
        ({"llama4": LLAMA4_ATTENTION | {"no_rope_layers": (2, 1)}}, "no_rope_layers"),
        (
            {"llama4": {k: v for k, v in LLAMA4_ATTENTION.items() if k != "attn_scale"}},
            "attn_scale",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_config(**(LLAMA4_HEAD | changes))


def test_llama4_is_for_its_family_alone() -> None:
    with pytest.raises(ValueError, match="heads have no llama4"):
        make_config(llama4=LLAMA4_ATTENTION)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    head = make_head(**LLAMA4_HEAD).float()
    save_head(tmp_path, head, torch.float32)
    file = tmp_path / "draftlab.json"
    fields = json.loads(file.read_text())
    del fields["llama4"]["attention_chunk_size"]
    file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="attention_chunk_size"):
        load_config(tmp_path)
    assert make_head_config(**head.config.model_dump(by_alias=True)) == head.config


def test_a_head_starts_from_one_of_its_kind_alone() -> None:
    source, head = make_head(**LLAMA4_HEAD), make_head(seed=1, **LLAMA4_HEAD)
    assert "starts from a trained head (eagle_llama4, 2 layers)" in start_from(head, source, "s")
    for name, tensor in source.tensors().items():
        if name.startswith(("fc.", "layers.", "norm.")):
            assert torch.equal(head.tensors()[name], tensor), name
    for other in (
        changed(attention_chunk_size=6),
        LLAMA4_HEAD | {"family": "eagle", "llama4": None},
    ):
        with pytest.raises(UserError, match="llama4: the new head has"):
            start_from(head, make_head(**other), "s")
