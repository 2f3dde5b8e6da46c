"""Heads that start from others."""

from __future__ import annotations

import pytest
import torch

from draftlab.errors import UserError
from draftlab.heads.initial import fingerprint, start_from
from tests.helpers.head_toys import (
    EAGLE,
    LLAMA4_ATTENTION,
    LLAMA4_HEAD,
    PEAGLE,
    make_config,
    make_head,
)


def test_a_head_starts_from_one_with_other_drafts_and_fewer_layers() -> None:
    chain = make_head(seed=1)
    head = make_head(seed=2, **PEAGLE | {"num_layers": 3, "draft_vocab_size": 30})
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
    assert f"{shared} of 30 rows" in line
    assert "2 more begin as the identity" in line
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 24, generator=generator, dtype=torch.float64)
    attended = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    for layer in head.layers[1:]:
        assert torch.equal(layer.output(attended, hidden), hidden)
    assert torch.equal(head.mask_hidden, masks[0])
    assert torch.equal(head.mask_embedding, masks[1])


def test_a_deeper_head_takes_over_the_masked_slots_too() -> None:
    shallow, deep = make_head(1, **PEAGLE | {"num_layers": 1}), make_head(2, **PEAGLE)
    start_from(deep, shallow, "head")
    assert torch.equal(deep.mask_hidden, shallow.mask_hidden)
    assert torch.equal(deep.mask_embedding, shallow.mask_embedding)
    assert fingerprint(deep) != fingerprint(shallow)


def test_a_llama4_head_starts_from_one_of_its_kind() -> None:
    source, head = make_head(**LLAMA4_HEAD), make_head(seed=1, **LLAMA4_HEAD)
    assert "starts from a trained head (eagle_llama4, 2 layers)" in start_from(head, source, "s")
    for name, tensor in source.tensors().items():
        if name.startswith(("fc.", "layers.", "norm.")):
            assert torch.equal(head.tensors()[name], tensor), name


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
        (PEAGLE, PEAGLE | {"num_layers": 3}, "num_layers: the new head has 2, this one 3"),
        (
            PEAGLE,
            PEAGLE | {"target": OTHER_TOKENIZER},
            "tokenizer: the new head's target, toy, has",
        ),
        (EAGLE, EAGLE | {"family": "eagle3"}, "family: the new head is eagle, this one eagle3"),
        (LLAMA4_HEAD, CHUNKED, "llama4: the new head has"),
        (LLAMA4_HEAD, EAGLE | {"num_layers": 2}, "llama4: the new head has"),
    ],
)
def test_a_head_that_differs_is_refused(fields: dict, source: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        start_from(make_head(**fields), make_head(**source), "head")


def test_a_head_of_another_target_with_the_same_tokenizer_is_said() -> None:
    line = start_from(make_head(**PEAGLE), make_head(**PEAGLE | {"target": OTHER_TARGET}), "head")
    assert "2 layers) of another target, toy (other), with" in line
    assert "another target" not in start_from(make_head(**PEAGLE), make_head(**PEAGLE), "head")
