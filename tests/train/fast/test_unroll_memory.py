"""The tensors that fast passes save for the backward pass, and when gradients are complete."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftlab.train.batch.packing import pack
from draftlab.train.fast import ttt as fast_unroll
from draftlab.train.fast.block import FastBlock
from draftlab.train.fast.parallel import FastParallel
from draftlab.train.fast.ttt import FastUnroll
from draftlab.train.flops import kept_bytes
from tests.helpers.synthetic import (
    head,
    parts,
    ragged_batch,
    random_norms_head,
    record,
    spans_of,
    train_step,
)


def test_the_backward_pass_keeps_as_much_as_estimated() -> None:
    """Beside the weights."""
    target, model = parts(), head(parts(), intermediate_size=512)
    batch = pack([[record(spans_of([(2, 100)]), target)]], 128, 6)
    rows = sum(len(step.valid_rows) for step in batch.steps)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    stored: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Of the layer's length are weights that were stacked; the others belong to rows.
        if storage.data_ptr() not in weights and len(tensor) not in (2 * 512, 32, 64, 128):
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = FastUnroll(torch.float32)(model, batch)
    assert outputs
    expected = rows * kept_bytes(model.config, torch.float32)
    assert 0.5 < sum(stored.values()) / expected < 1.5


def test_gradients_are_complete_before_the_backward_pass_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks reduce what is whole while the backward pass goes on: it must not come at the end.

    What follows attention is last read at step 0, before the backward pass of its attention.
    """
    model, batch, events = random_norms_head(), ragged_batch(), []
    attention = fast_unroll.ttt_attention

    def watched(query: Tensor, *rest: object) -> Tensor:
        if query.requires_grad:
            query.register_hook(lambda _: events.append("attention"))
        return attention(query, *rest)

    monkeypatch.setattr(fast_unroll, "ttt_attention", watched)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    train_step(model, FastUnroll(torch.float32)(model, batch), batch)
    last = max(number for number, name in enumerate(events) if name == "attention")
    layer = "layers.0.{}.weight".format
    early = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"}
    assert {"lm_head.weight", *map(layer, early)} <= set(events[:last])
    assert {"fc.weight", layer("self_attn.q_proj"), layer("self_attn.k_proj")} <= set(events[last:])


@pytest.mark.parametrize(("family", "fast"), [("peagle", FastParallel), ("dspark", FastBlock)])
def test_a_layers_gradients_are_complete_before_those_of_the_layer_below(
    family: str, fast: type[FastBlock | FastParallel]
) -> None:
    model, batch, layers = random_norms_head(family=family, num_layers=3), ragged_batch(2), []
    for number, layer in enumerate(model.layers):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, n=number: layers.append(n))
    train_step(model, fast(torch.float32)(model, batch), batch)
    assert layers == sorted(layers, reverse=True)
    assert {*layers} == {0, 1, 2}
