"""Heads that start from the target or from other heads."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import empty_head, new_head
from draftlab.heads.head import DraftHead
from draftlab.target_model.parts import TargetParts, load_parts
from draftlab.text.draft_vocabulary import DraftVocabulary
from draftlab.train import initial_weights
from draftlab.train.batch.packing import pack
from draftlab.train.initial_weights import fingerprint, start_from, untrained_head
from draftlab.train.settings import TrainSettings
from tests.helpers import synthetic
from tests.helpers.head_toys import (
    EAGLE,
    LLAMA4_ATTENTION,
    LLAMA4_HEAD,
    PEAGLE,
    make_config,
    make_head,
)
from tests.helpers.zoo import SHAPE, zoo_folder

CHAIN_OF_LAST = {"boundaries": (4,), "draft_vocab_size": synthetic.VOCAB}
FAMILIES: dict[str, dict[str, object]] = {
    "eagle3": {"norm_before_fc": True, "qk_norm": True, "num_layers": 1},
    "eagle3, fc_norm": {"fc_norm": True, "norm_output": True},
    "peagle": {"family": "peagle", "num_layers": 2},
    "dspark": {"family": "dspark", "num_layers": 2},
    "dspark, whole vocabulary": {"family": "dspark", "draft_vocab_size": synthetic.VOCAB},
    "dflash": {"family": "dflash", "num_layers": 2},
    "dflash2": {"family": "dflash2", "num_layers": 2},
    "eagle": {"family": "eagle", "num_layers": 2, **CHAIN_OF_LAST},
    "eagle_llama4": {**LLAMA4_HEAD, "target_hidden_size": 32, **CHAIN_OF_LAST},
}


def new(seed: int, **fields: object) -> DraftHead:
    """Return a head with random weights, of which those require a gradient that are trained."""
    head = make_head(seed, **fields)
    for parameter, other in zip(head.parameters(), new_head(head.config).parameters(), strict=True):
        parameter.requires_grad_(other.requires_grad)
    return head


@pytest.mark.parametrize("name", FAMILIES)
def test_every_value_of_a_new_head_is_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the memory of the empty head holds; and torch's modules draw nothing."""
    target = synthetic.parts()
    config = synthetic.head(target, **FAMILIES[name]).config
    size = config.draft_vocab_size
    vocabulary = DraftVocabulary(torch.arange(synthetic.VOCAB)[-size:], None)
    drawn = [dict(new_head(config).named_parameters()) for _ in range(2)]
    random = [n for n, value in drawn[0].items() if not torch.equal(value, drawn[1][n])]
    assert random
    heads, state = [], torch.get_rng_state()
    for fill in (float("nan"), 7.0):

        def filled(config: HeadConfig, fill: float = fill) -> DraftHead:
            head = empty_head(config)
            for name in random:
                head.get_parameter(name).data.fill_(fill)
            return head

        monkeypatch.setattr(initial_weights, "empty_head", filled)
        heads.append(untrained_head(config, target, vocabulary, seed=3).state_dict())
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in heads[0].items():
        assert torch.equal(tensor, heads[1][name]), name


def as_trained(head: DraftHead, seed: int = 0) -> DraftHead:
    """Return the head after noise on every trained parameter, in place of a training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return head


def judged(head: DraftHead, target: TargetParts) -> list[Tensor]:
    """Return the logits of all steps, and the loss's sums, which have α, in the head's family."""
    reads = head.config.reads_last
    record = synthetic.record(synthetic.spans_of([(3, 9), (2, 6)]), target)
    batch = pack([[record]], 24, 3)
    tokens, terms = batch.tokens.flatten(), head.family.objective().loss_terms(TrainSettings())
    assert reads == (head.config.family in ("eagle", "eagle_llama4"))
    steps = list(head.family.objective().forward(head, batch))
    logits = [head.logits(step.output, tokens[step.teacher_index]) for step in steps]
    loss, sums = synthetic.family_loss(head, target, batch, gamma=0.8, terms=terms)
    return [*logits, loss, *sums]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_head_that_differs_in_nothing_judges_as_its_donor_before_any_step(kind: str) -> None:
    target, fields = synthetic.parts(), FAMILIES[kind]
    donor = as_trained(synthetic.head(target, **fields))
    head = synthetic.head(target, seed=1, **fields)
    expected = judged(donor, target)
    before = judged(head, target)
    assert not any(torch.equal(a, b) for a, b in zip(before[:4], expected[:4], strict=True))
    line = start_from(head, donor, "head")
    for actual, value in zip(judged(head, target), expected, strict=True):
        assert torch.equal(actual, value)
    assert fingerprint(head) == fingerprint(donor)
    size = donor.config.draft_vocab_size
    assert f"with {size} of {size} tokens of the draft vocabulary in common" in line
    assert "not copied" not in line
    assert "initial values" not in line


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle"])
def test_what_belongs_to_the_target_stays_and_is_listed(kind: str) -> None:
    fields = FAMILIES[kind]
    donor = as_trained(synthetic.head(synthetic.parts(seed=5), **fields))
    target = synthetic.parts()
    head, untouched = (synthetic.head(target, seed=1, **fields) for _ in range(2))
    line = start_from(head, donor, "head")
    assert torch.equal(head.embed_tokens.weight, untouched.embed_tokens.weight)
    assert torch.equal(head.lm_head.weight, untouched.lm_head.weight)
    # What a head's files lack is the target's in any case.
    assert ("not copied: lm_head.weight" in line) == (kind != "eagle")


def test_rows_of_the_markov_factors_are_matched_by_target_id() -> None:
    target = synthetic.parts()
    donor = as_trained(synthetic.head(target, family="dspark", draft_vocab_size=30))
    head = synthetic.head(target, seed=1, family="dspark", draft_vocab_size=35)  # ids 5 … 39
    initial = head.markov_head.markov_w2.weight.clone()
    assert "with 30 of 35 tokens" in start_from(head, donor, "head")
    weight = head.markov_head.markov_w2.weight
    assert torch.equal(weight[5:], donor.markov_head.markov_w2.weight)  # donor: ids 10 … 39
    assert torch.equal(weight[:5], initial[:5])
    assert torch.equal(head.markov_head.markov_w1.weight, donor.markov_head.markov_w1.weight)


def test_embeddings_of_the_donor_alone_are_listed() -> None:
    target = synthetic.parts()
    donor = as_trained(synthetic.head(target, embeddings="own"))
    head = synthetic.head(target, seed=1)
    assert "not copied" not in start_from(head, donor, "head")  # they equal the target's
    with torch.no_grad():
        donor.embed_tokens.weight[3] += 1
    assert "; not copied: embed_tokens.weight" in start_from(head, donor, "head")


def test_a_head_starts_from_one_with_other_drafts_and_fewer_layers() -> None:
    chain = make_head(seed=1)
    head = new(seed=2, **PEAGLE | {"num_layers": 3, "draft_vocab_size": 30})
    before = head.lm_head.weight.clone()
    masks = head.mask_hidden.clone(), head.mask_embedding.clone()
    line = start_from(head, chain, "head")
    assert torch.equal(head.fc.weight, chain.fc.weight)
    assert torch.equal(head.norm.weight, chain.norm.weight)
    for name, tensor in chain.layer.state_dict().items():
        assert torch.equal(head.layer.state_dict()[name], tensor), name
    chain_rows = {target: i for i, target in enumerate(chain.target_ids(torch.arange(21)).tolist())}
    shared = 0
    for draft, target in enumerate(head.target_ids(torch.arange(30)).tolist()):
        known = target in chain_rows
        expected = chain.lm_head.weight[chain_rows[target]] if known else before[draft]
        assert torch.equal(head.lm_head.weight[draft], expected)
        shared += known
    assert 0 < shared < 30
    assert f"{shared} of 30 tokens" in line
    assert "with initial values: mask_hidden, mask_embedding" in line
    assert "2 more begin as the identity" in line
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 24, generator=generator, dtype=torch.float64)
    attended = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    for layer in head.layers[1:]:
        assert torch.equal(layer.output(attended, hidden), hidden)
    assert torch.equal(head.mask_hidden, masks[0])
    assert torch.equal(head.mask_embedding, masks[1])


OTHER_TARGET = make_config().target.model_copy(update={"fingerprint": "other"})
OTHER_TOKENIZER = OTHER_TARGET.model_copy(update={"tokenizer_sha256": "different"})
CHUNKED = LLAMA4_HEAD | {"llama4": LLAMA4_ATTENTION | {"attention_chunk_size": 6}}


@pytest.mark.parametrize(
    ("fields", "source", "message"),
    [
        (
            PEAGLE,
            PEAGLE | {"boundaries": (0, 2, 3)},
            r"boundaries: the new head has \(0, 2, 3, 5\), this one",
        ),
        (
            PEAGLE,
            PEAGLE | {"intermediate_size": 40},
            "intermediate_size: the new head has 36, this one 40",
        ),
        (PEAGLE, PEAGLE | {"head_dim": 16}, "head_dim: the new head has"),
        (PEAGLE, PEAGLE | {"target_num_layers": 6}, "target_num_layers: the new head has"),
        (
            PEAGLE,
            PEAGLE | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
            "rope_parameters: the new head has",
        ),
        (PEAGLE, PEAGLE | {"num_layers": 3}, "num_layers: the new head has 2, this one 3"),
        (
            PEAGLE,
            PEAGLE | {"target": OTHER_TOKENIZER},
            "tokenizer: the new head's target, toy, has",
        ),
        (PEAGLE, PEAGLE | {"vocab_size": 51}, "vocab_size: the new head has 50, this one 51"),
        (EAGLE, EAGLE | {"family": "eagle3"}, "family: the new head is eagle, this one eagle3"),
        (LLAMA4_HEAD, CHUNKED, "llama4: the new head has"),
        (LLAMA4_HEAD, EAGLE | {"num_layers": 2}, "llama4: the new head has"),
    ],
)
def test_a_head_that_differs_is_refused(fields: dict, source: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        start_from(new(0, **fields), make_head(**source), "head")


def test_another_window_is_said() -> None:
    donor, head = new(0), new(1, sliding_window=8)
    text = start_from(head, donor, "head.init")
    assert text.endswith("; it read all positions and reads the last 8 positions now")
    assert torch.equal(head.fc.weight, donor.fc.weight)
    assert " it read " not in start_from(new(1, sliding_window=8), head, "head.init")


def test_a_head_of_another_target_with_the_same_tokenizer_is_said() -> None:
    line = start_from(new(0, **PEAGLE), make_head(**PEAGLE | {"target": OTHER_TARGET}), "head")
    assert "2 layers) of another target, toy (other): " in line
    assert "another target" not in start_from(new(0, **PEAGLE), make_head(**PEAGLE), "head")


@pytest.mark.parametrize("family", ["dflash", "peagle"])
def test_another_mask_token_is_said_where_it_is_another_input(family: str) -> None:
    """The embedding of a parallel head's mask token is its own, and copied."""
    target = synthetic.parts()
    source, head, same = (
        synthetic.head(target, **FAMILIES[family], mask_token_id=i) for i in (5, 6, 6)
    )
    line = start_from(head, source, "here")
    assert ("had token 5 and have 6 now" in line) == (family == "dflash")
    assert "masked slots had" not in start_from(same, head, "here")


SIZES = {name: SHAPE[name] for name in ("vocab_size", "hidden_size")}
STATES = 10 * torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
FULL_VOCABULARY = ("eagle3", "peagle", "dspark", "dflash")


def head_of(parts: TargetParts, family: str = "eagle3") -> DraftHead:
    config = synthetic.config(family=family, draft_vocab_size=40, **SIZES)
    return untrained_head(config, parts, DraftVocabulary(torch.arange(40), 1.0), seed=0)


@pytest.mark.parametrize(
    ("kind", "family"),
    zip(
        ["llama", "gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3", "olmo2", "olmo3"],
        FULL_VOCABULARY * 2,
        strict=True,
    ),
)
def test_the_norm_is_the_targets(kind: str, family: str, tmp_path: Path) -> None:
    parts = load_parts(zoo_folder(tmp_path, kind))
    torch.testing.assert_close(head_of(parts, family).norm(STATES), parts.norm(STATES))
    assert parts.norm_form is not None
    assert parts.norm_form.is_rms


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_next", "olmo"])
def test_the_norm_is_found_in_16_bit(kind: str, tmp_path: Path) -> None:
    exact = load_parts(zoo_folder(tmp_path, kind))
    norm, lm_head = copy.deepcopy(exact.norm).bfloat16(), exact.lm_head.bfloat16()
    parts = replace(exact, norm=norm, lm_head=lm_head)
    assert exact.norm_form is not None
    assert parts.norm_form is not None
    expected = exact.norm_form.weight.float()
    assert torch.allclose(parts.norm_form.weight.float(), expected, atol=0.01)
    assert parts.norm_form.is_rms == exact.norm_form.is_rms


@pytest.mark.parametrize(("kind", "has_bias"), [("olmo", False), ("cohere2", False), ("phi", True)])
def test_of_a_layer_norm_it_has_the_weight(kind: str, has_bias: bool, tmp_path: Path) -> None:
    parts = load_parts(zoo_folder(tmp_path, kind))
    assert parts.norm_form is not None
    assert not parts.norm_form.is_rms
    bias = parts.norm.bias if has_bias else torch.zeros(())
    without_mean = STATES - STATES.mean(-1, keepdim=True)
    expected = parts.norm(STATES) - bias
    torch.testing.assert_close(head_of(parts).norm(without_mean), expected, rtol=1e-4, atol=1e-4)
    assert bool(bias.any()) == has_bias


class Tanh(nn.Module):
    """A norm's stand-in that saturates (DyT)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((32,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


class Double(Tanh):
    """A norm whose factor is neither its weight nor 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.rms_norm(x, x.shape[-1:], self.weight)


@pytest.mark.parametrize("norm", [Tanh, Double])
def test_another_norm_is_refused(norm: type[nn.Module]) -> None:
    table = torch.randn(61, 32, generator=torch.Generator().manual_seed(0))
    parts = TargetParts(table, norm().requires_grad_(False), table, 1.0, None)
    assert "target_norm.weight" not in parts.shared_tensors
    with pytest.raises(UserError, match=f"expected a final norm .*, found {norm.__name__}"):
        head_of(parts)


@pytest.mark.parametrize("family", FULL_VOCABULARY)
@pytest.mark.parametrize("kind", ["cohere2", "granite"])
def test_the_targets_state_gives_the_targets_logits(kind: str, family: str, tmp_path: Path) -> None:
    """Also where the target multiplies them: a head's logits have no factor."""
    parts = load_parts(zoo_folder(tmp_path, kind))
    assert parts.scale != 1
    states = STATES - STATES.mean(-1, keepdim=True)  # a head's norm takes no mean off
    head = head_of(parts, family)
    product = F.linear(head.norm(states), head.lm_head.weight)
    torch.testing.assert_close(product, parts.logits(states)[:, :40], rtol=1e-3, atol=1e-3)
