"""The mathematics, shapes, RoPE and initial values of heads."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.folder import load_head, save_head
from draftlab.heads.head import initialise_head
from draftlab.heads.layers import Rope
from draftlab.heads.peagle import PeagleHead
from draftlab.heads.rope import attention_factor, rope_frequencies
from tests.helpers.dense_attention import dense_pass
from tests.helpers.head_toys import EAGLE, LLAMA3, PEAGLE, YARN, make_config, make_head
from tests.helpers.plain_chain import PlainChain


def transformers_frequencies(head_dim: int, parameters: dict) -> Tensor:
    config = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    if parameters.get("rope_type", "default") == "default":
        return LlamaRotaryEmbedding(config).inv_freq
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")[0]


@settings(max_examples=30)
@given(
    head_dim=st.sampled_from([8, 32, 64, 96, 128]),
    theta=st.sampled_from([1e4, 5e5, 1e6, 150000.0]),
    kind=st.sampled_from(["default", "linear", "llama3", "yarn", None]),
    factor=st.floats(1.0, 64.0),
    low=st.floats(0.5, 2.0),
    width=st.floats(0.5, 6.0),
    old=st.sampled_from([512, 4096, 8192]),
    truncate=st.booleans(),
)
def test_rope_frequencies_are_those_of_transformers(
    head_dim: int,
    theta: float,
    kind: str | None,
    factor: float,
    low: float,
    width: float,
    old: int,
    truncate: bool,
) -> None:
    parameters: dict = {"rope_theta": theta} | ({"rope_type": kind} if kind else {})
    if kind in ("linear", "llama3", "yarn"):
        parameters["factor"] = factor
    if kind == "llama3":
        parameters |= {
            "low_freq_factor": low,
            "high_freq_factor": low + width,
            "original_max_position_embeddings": old,
        }
    if kind == "yarn":
        parameters |= {"original_max_position_embeddings": old, "truncate": truncate}
        parameters |= {"beta_fast": 16.0 + width, "beta_slow": low}
        config = LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=131072,
            rope_parameters=dict(parameters),
        )
        expected = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1]
        assert attention_factor(parameters) == pytest.approx(expected)
    frequencies = rope_frequencies(head_dim, parameters)
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(
        frequencies, transformers_frequencies(head_dim, parameters), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    "rope", [LLAMA3, YARN, {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}]
)
def test_angles_beyond_the_original_length_are_those_of_transformers(rope: dict) -> None:
    """A small error of a frequency is a large one of an angle there."""
    positions = torch.tensor([[0, 511, 512, 8191, 8192, 32_767, 131_071]])
    config = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=dict(rope))
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    for own, theirs in zip(Rope(64, rope).angles(positions), expected, strict=True):
        torch.testing.assert_close(own[:, :, 0], theirs[..., :32], atol=1e-6, rtol=0)


def test_llama3_frequencies_have_all_three_bands() -> None:
    """Guards the comparison above: kept, mixed and divided frequencies all occur."""
    plain = rope_frequencies(128, {"rope_theta": 5e5})
    ratio = plain / rope_frequencies(128, LLAMA3)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(8)
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "nonsense"])
def test_other_ropes_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        rope_frequencies(8, {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_frequencies_stay_float32_in_every_cast(dtype: torch.dtype) -> None:
    head = Eagle3Head(make_config(rope_parameters=LLAMA3, head_dim=64))
    exact = rope_frequencies(64, LLAMA3)
    for moved in (head.to(dtype), copy.deepcopy(head).to(dtype), head.to(dtype=dtype).float()):
        assert moved.rope.frequencies.dtype == torch.float32
        assert torch.equal(moved.rope.frequencies, exact)
    head.to(dtype)
    assert head.fc.weight.dtype == dtype
    cos, sin = head.rope.angles(torch.tensor([100_000]))
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[0, 0], torch.cos(100_000 * exact))
    assert (head.d2t.dtype, head.t2d.dtype) == (torch.int64, torch.bool)


def test_draft_ids_become_target_ids() -> None:
    head = Eagle3Head(make_config(draft_vocab_size=4))
    chosen = torch.tensor([0, 7, 8, 49])
    head.set_draft_vocabulary(torch.tensor([1, 2, 3, 4]))
    head.set_draft_vocabulary(chosen)  # nothing of the first is left
    assert head.d2t.tolist() == [0, 6, 6, 46]
    assert head.t2d.nonzero().flatten().tolist() == chosen.tolist()
    assert head.target_ids(torch.tensor([[3, 0], [1, 2]])).tolist() == [[49, 0], [7, 8]]
    for wrong in ([0, 7, 8], [0, 8, 7, 49], [0, 7, 7, 49]):
        with pytest.raises(ValueError, match="4 ascending unique"):
            head.set_draft_vocabulary(torch.tensor(wrong))


def test_initial_values_come_from_the_target_and_the_seed_alone() -> None:
    chosen = torch.arange(1, 42, 2)
    generator = torch.Generator().manual_seed(5)
    embeddings, lm_head = (torch.randn(50, 24, generator=generator) for _ in range(2))
    norm = torch.randn(24, generator=generator)

    def initialised(seed: int) -> Eagle3Head:
        head = Eagle3Head(make_config())
        initialise_head(
            head,
            embeddings=embeddings,
            final_norm=norm,
            lm_head=lm_head,
            target_ids=chosen,
            seed=seed,
        )
        return head

    state = torch.get_rng_state()
    first = initialised(0)
    torch.manual_seed(123)
    again, other = initialised(0).state_dict(), initialised(1).state_dict()
    torch.set_rng_state(state)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again[name]), name
    assert not torch.equal(first.fc.weight, other["fc.weight"])
    assert torch.equal(first.embed_tokens.weight, embeddings)
    assert not first.embed_tokens.weight.requires_grad
    assert first.lm_head.weight.requires_grad
    assert torch.equal(first.norm.weight, norm)
    assert torch.equal(first.lm_head.weight, lm_head[chosen])
    assert torch.equal(first.target_ids(torch.arange(21)), chosen)
    # A head whose output is the target's last state has the target's logits.
    output = torch.randn(3, 24, generator=generator)
    scaled = output * (output.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * norm
    torch.testing.assert_close(first.logits(output), (scaled @ lm_head.T)[:, chosen])


def test_each_projection_has_random_values_of_its_own_and_the_documented_deviation() -> None:
    head = Eagle3Head(make_config(num_layers=2))
    table = torch.zeros(50, 24)
    initialise_head(
        head,
        embeddings=table,
        final_norm=torch.ones(24),
        lm_head=table,
        target_ids=torch.arange(21),
        seed=0,
    )
    drawn = {
        n: p for n, p in head.named_parameters() if (p.ndim == 2 and "_proj" in n) or n[:2] == "fc"
    }
    for name, weight in drawn.items():
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = (0.5 if residual else 1.0) ** 0.5 * weight.shape[1] ** -0.5
        assert (
            abs(float(weight.detach().std()) / expected - 1) < 5 * (2 * weight.numel()) ** -0.5
        ), name
    firsts = {
        tuple((p.detach() * p.shape[1] ** 0.5).flatten()[:3].tolist()) for p in drawn.values()
    }
    assert len(drawn) > 10
    for one, other in itertools.combinations(firsts, 2):
        ratios = [a / b for a, b in zip(one, other, strict=True)]
        assert max(ratios) - min(ratios) > 1e-3  # not the same numbers, scaled
    assert len(firsts) == len(drawn)


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
    caches, expected, logits = plain.empty, [], []
    for t in range(size + drafts):
        hidden = plain.project_features(features[t]) if t < size else expected[-1]
        out, row, caches = plain.step(int(tokens[t]), hidden, t, caches)
        expected.append(out)
        logits.append(row)
    hidden = head.project_features(features)
    for t in range(size, size + drafts + 1):
        out = dense_pass(head, tokens[:t], hidden)
        # float32 angles are the only rounding: everything else runs in float64 here.
        torch.testing.assert_close(out, torch.stack(expected[:t]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.logits(out), torch.stack(logits[:t]), rtol=1e-4, atol=2e-4)
        hidden = torch.cat([hidden, out[-1:]])
    assert torch.stack(logits).std() > 1


MASK, FEATURES = 7, 80


def test_the_mask_tokens_embedding_is_a_row_of_the_stored_table(tmp_path: Path) -> None:
    head = make_head(**PEAGLE, qk_norm=True).float()
    assert isinstance(head, PeagleHead)
    save_head(tmp_path, head, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, FEATURES)
    assert "mask_embedding" not in tensors
    table = tensors["embed_tokens.weight"]
    assert torch.equal(table[MASK], head.mask_embedding)
    rest = torch.arange(50) != MASK
    assert torch.equal(table[rest], head.embed_tokens.weight[rest])
    # The first layer reads two vectors, the second one; only the first norms a hidden state apart.
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (48, 48)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (48, 24)
    assert tensors["layers.1.self_attn.k_norm.weight"].shape == (8,)
    assert "layers.0.hidden_norm.weight" in tensors
    assert "layers.1.hidden_norm.weight" not in tensors

    loaded = load_head(tmp_path, dtype=torch.float32, device="cpu")
    tokens = torch.arange(50).view(5, 10)
    assert torch.equal(loaded.embed(tokens), head.embed(tokens))
    assert not torch.equal(head.embed(tokens)[0, MASK], head.embed_tokens.weight[MASK])
    assert torch.equal(loaded.mask_state(), head.mask_state())
