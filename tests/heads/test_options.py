"""EAGLE heads and every option of EAGLE3's against `PlainChain`; what excludes what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftlab.errors import UserError
from draftlab.heads.folder import load_config, load_head, new_head, save_head
from draftlab.heads.initial import start_from
from tests.helpers.dense_attention import causal_attention
from tests.helpers.head_toys import make_config, make_head
from tests.helpers.plain_chain import PlainChain

EAGLE = {"family": "eagle", "boundaries": (5,), "target_hidden_size": 24, "draft_vocab_size": 50}
KINDS: dict[str, dict] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "qk_norm": {"qk_norm": True},
    "one boundary": {"boundaries": (2,)},
    "all": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "qk_norm": True},
    "eagle": EAGLE,
    "eagle of 2 layers": EAGLE | {"num_layers": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_fed_back_steps_equal_a_plain_chain(kind: str) -> None:
    head, size, drafts = make_head(**KINDS[kind]), 6, 3
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (size + drafts,), generator=generator)
    features = torch.randn(size, head.config.feature_size, generator=generator, dtype=torch.float64)
    plain = PlainChain({n: t.double() for n, t in head.state_dict().items()}, head.config)
    caches, wanted, logits = plain.empty, [], []
    for t in range(size + drafts):
        hidden = plain.project_features(features[t]) if t < size else wanted[-1]
        out, row, caches = plain.step(int(tokens[t]), hidden, t, caches)
        wanted.append(out)
        logits.append(row)
    hidden = head.project_features(features)
    for t in range(size, size + drafts + 1):
        out = head.run(tokens[:t], hidden, torch.arange(t), causal_attention)
        # float32 angles are the only rounding: everything else runs in float64 here.
        torch.testing.assert_close(out, torch.stack(wanted[:t]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.logits(out), torch.stack(logits[:t]), rtol=1e-4, atol=2e-4)
        hidden = torch.cat([hidden, out[-1:]])
    assert torch.stack(logits).std() > 1


@pytest.mark.parametrize("kind", [k for k, changed in KINDS.items() if len(changed) == 1])
def test_an_option_is_not_without_effect(kind: str) -> None:
    """A flag that nothing reads would pass every comparison of equals."""
    head, plain = make_head(**KINDS[kind]), make_head()
    assert head.config != plain.config
    if kind == "one boundary":
        return
    tensors = plain.state_dict()
    head.load_state_dict({n: tensors.get(n, t) for n, t in head.state_dict().items()})
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (4,), generator=generator)
    features = torch.randn(4, head.config.feature_size, generator=generator, dtype=torch.float64)
    outputs = [
        h.run(tokens, h.project_features(features), torch.arange(4), causal_attention)
        for h in (head, plain)
    ]
    assert not torch.allclose(*outputs, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_same_head(kind: str, tmp_path: Path) -> None:
    head = make_head(**KINDS[kind]).float()
    save_head(tmp_path, head, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    state = head.state_dict()
    lent = {n: state[n] for n in head.shared_tensors()}
    assert not lent.keys() & stored.keys()
    found = load_head(tmp_path, target_tensors=lent, dtype=torch.float32, device="cpu")
    assert found.config == head.config == load_config(tmp_path)
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    for name in lent:  # shared, not copied
        assert found.get_parameter(name).data_ptr() == lent[name].data_ptr()


def test_what_the_target_lends_an_eagle_head_is_in_no_file(tmp_path: Path) -> None:
    head = make_head(**EAGLE).float()
    save_head(tmp_path, head, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    wanted = {"fc.weight", "layers.0.post_attention_layernorm.weight"}
    wanted |= {f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"}
    wanted |= {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert stored.keys() == wanted  # servers §1.1, which vLLM loads as it stands
    assert stored["fc.weight"].shape == (24, 48)
    state = head.state_dict()
    lent = {n: state[n] for n in head.shared_tensors()}
    for name, words in (("lm_head.weight", "lm_head"), ("target_norm.weight", "final norm")):
        fewer = {n: t for n, t in lent.items() if n != name}
        with pytest.raises(UserError, match=f"target's {words}, and none were given"):
            load_head(tmp_path, target_tensors=fewer, dtype=torch.float32, device="cpu")
    save_file(stored | {"lm_head.weight": state["lm_head.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight is shared"):
        load_head(tmp_path, target_tensors=lent, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        (
            {"family": "peagle", "mask_token_id": 7, "embeddings": "own", "norm_output": True},
            "feeds",
        ),
        (EAGLE | {"boundaries": (4,)}, r"last state, boundaries \[5\], found \[4\]"),
        (EAGLE | {"target_hidden_size": 20}, r"as wide as its target \(20\).* found .* 24"),
        (EAGLE | {"draft_vocab_size": 21}, "all 50 tokens, found draft_vocab_size 21"),
        (EAGLE | {"norm_output": True, "qk_norm": True}, "EAGLE heads have no norm_output"),
        (EAGLE | {"mask_token_id": 7}, "EAGLE heads have no mask_token_id, found 7"),
    ],
)
def test_contradictions_are_refused(changed: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config(**changed)


def test_a_head_does_not_start_from_one_of_another_generation() -> None:
    eagle = new_head(make_config(**EAGLE))
    chain = new_head(make_config(boundaries=(5,), target_hidden_size=24, draft_vocab_size=50))
    with pytest.raises(UserError, match="family: the new head is eagle, this one eagle3"):
        start_from(eagle, chain, "here")
