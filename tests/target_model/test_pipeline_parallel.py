"""Pipeline parallelism on two CPU devices, "cpu" and "cpu:0".

tests/engine/test_on_gpu.py has the proof for GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request
from draftlab.target_model.loading import load_model
from draftlab.target_model.model import Target
from draftlab.target_model.pipeline_parallel import (
    DeviceMap,
    describe_placement,
    dispatch_layers,
    divide_layers,
)
from draftlab.target_model.replacements import replace_layers
from draftlab.target_model.settings import TargetSettings
from tests.helpers.greedy_answers import run
from tests.helpers.zoo import load_on_cpu, zoo_config, zoo_folder

DEVICES = [torch.device("cpu"), torch.device("cpu", 0)]


def skeleton(kind: str, **changes: object) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(zoo_config(kind, **changes))


def layer_devices(placement: DeviceMap) -> list[torch.device]:
    return [device for name, device in placement.items() if name[-1].isdigit()]


@pytest.mark.parametrize("kind", ["llama", "llama4", "gemma3_text", "gpt_oss"])
def test_every_weight_has_one_device(kind: str) -> None:
    model = skeleton(kind)
    placement = divide_layers(model, DEVICES)
    for name, _ in model.named_parameters():
        assert sum(name.startswith(module + ".") for module in placement) == 1, name
    assert layer_devices(placement) == [DEVICES[0]] * 2 + [DEVICES[1]] * 2
    assert describe_placement(placement) == "target: layers 0-1 on cpu, 2-3 on cpu:0"


def test_a_large_vocabulary_counts() -> None:
    """The first device holds embeddings and lm_head too, so it has fewer layers."""
    devices = [torch.device("cuda", n) for n in range(3)]
    model = skeleton("llama", vocab_size=300, num_hidden_layers=9)
    numbers = [device.index for device in layer_devices(divide_layers(model, devices))]
    assert numbers == sorted(numbers)
    assert numbers.count(0) < min(numbers.count(1), numbers.count(2))


def load_pipeline_parallel(folder: Path) -> Target:
    """Load a target over `DEVICES`, from a model with accelerate's hooks of a device map."""
    model, _ = load_model(folder, TargetSettings(device="cpu"), torch.device("cpu"))
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    model = dispatch_layers(model, divide_layers(model, DEVICES))
    replace_layers(model)
    return Target(model.eval(), folder, "pipeline parallel")


@pytest.mark.parametrize("kind", ["llama4", "gpt_oss"])
def test_a_pipeline_parallel_target_decodes_the_same(kind: str, tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, kind)
    single = load_on_cpu(folder)
    target = load_pipeline_parallel(folder)
    assert [len(m._forward_pre_hooks) for m in (*target.layers, target.norm)] == [1] * 5
    ids = torch.arange(3, 40)[None]
    one, other = single.states(ids, (1, 3)), target.states(ids, (1, 3))
    assert torch.equal(one.features, other.features)
    assert torch.equal(one.last, other.last)
    requests = [Request(str(n), tuple(range(3, 3 + n)), 20) for n in (4, 15)]
    answers = [
        [g.token_ids for g in run(Engine(t, None, batch=2, max_length=64, block_size=16), requests)]
        for t in (single, target)
    ]
    assert answers[0] == answers[1]
