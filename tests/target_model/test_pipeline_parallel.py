"""A target whose layers lie on several devices.

A CPU stands in for GPUs: "cpu" and "cpu:0" are two devices by name. What moves between real ones is
proven by tests/target_model/test_on_gpu.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request
from draftlab.target_model import llama4
from draftlab.target_model.loading import load_model
from draftlab.target_model.model import Target, TargetSettings, load_target
from draftlab.target_model.pipeline_parallel import place_layers, spread
from draftlab.target_model.replacements import replace_layers
from tests.helpers.greedy_answers import run
from tests.helpers.zoo import zoo_config, zoo_folder

DEVICES = [torch.device("cpu"), torch.device("cpu", 0)]


def skeleton(kind: str, **changes: object) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(zoo_config(kind, **changes))


@pytest.mark.parametrize("kind", ["llama", "llama4", "gemma3_text", "gpt_oss"])
def test_every_weight_has_one_place(kind: str) -> None:
    model = skeleton(kind)
    places = spread(model, DEVICES)
    for name, _ in model.named_parameters():
        assert sum(name.startswith(module + ".") for module in places.by_module) == 1, name
    assert places.devices == (DEVICES[0],) * 2 + (DEVICES[1],) * 2
    assert places.line() == "target: layers 0-1 on cpu, 2-3 on cpu:0"


def test_a_large_vocabulary_counts() -> None:
    """The first device holds embeddings and lm_head too, so it gets fewer layers."""
    devices = [torch.device("cuda", n) for n in range(3)]
    places = spread(skeleton("llama", vocab_size=300, num_hidden_layers=9), devices)
    numbers = [device.index for device in places.devices]
    assert numbers == sorted(numbers)
    assert numbers.count(0) < min(numbers.count(1), numbers.count(2))


def load_spread(folder: Path) -> Target:
    """As `load_target` does, from a model with accelerate's hooks, as a device map leaves it."""
    model, _ = load_model(folder, TargetSettings(device="cpu"), torch.device("cpu"))
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    model = place_layers(model, spread(model, DEVICES))
    replace_layers(model)
    return Target(model.eval(), folder, "spread")


@pytest.mark.parametrize("kind", ["llama4", "gpt_oss"])
def test_a_spread_target_decodes_the_same(kind: str, tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, kind)
    whole = load_target(TargetSettings(path=str(folder), device="cpu"))
    target = load_spread(folder)
    moved = [len(layer._forward_pre_hooks) for layer in (*target.layers, target.norm)]
    assert moved == [1] * 5
    ids = torch.arange(3, 40)[None]
    one, other = whole.states(ids, (1, 3)), target.states(ids, (1, 3))
    assert torch.equal(one.features, other.features)
    assert torch.equal(one.last, other.last)
    asked = [Request(str(n), tuple(range(3, 3 + n)), 20) for n in (4, 15)]
    answers = [
        [g.token_ids for g in run(Engine(t, None, batch=2, max_length=64, block_size=16), asked)]
        for t in (whole, target)
    ]
    assert answers[0] == answers[1]


def test_replaced_layers_stay_replaced(tmp_path: Path) -> None:
    """accelerate's hooks would keep the methods that a layer had before."""
    target = load_spread(zoo_folder(tmp_path, "llama4"))
    layer = target.layers[1]
    assert layer.forward.__func__ is llama4.PositionedLayer.forward
    assert layer.self_attn.forward.__func__ is llama4.PositionedAttention.forward
