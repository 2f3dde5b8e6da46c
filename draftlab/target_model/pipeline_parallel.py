"""Pipeline parallelism: a target's layers on several GPUs, in order.

Embeddings, rotary embeddings, the final norm and lm_head stay on the first device, so the rest of
draftlab sees a target on that device. A layer's inputs are moved to its device when it is called.
GPUs do not overlap: the purpose is memory, not speed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import send_to_device
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftlab.errors import UserError
from draftlab.target_model.auto_model import meta_model
from draftlab.target_model.parts import text_decoder

DeviceMap = dict[str, torch.device]
"""The device of each module by its name, as transformers takes it; layers come last, in order."""


def describe_placement(device_map: DeviceMap) -> str:
    """Return a line that says which layers are on which device."""
    layers: dict[torch.device, list[str]] = {}
    for name, device in device_map.items():
        if (number := name.rpartition(".")[2]).isdigit():
            layers.setdefault(device, []).append(number)
    ranges = (f"{numbers[0]}-{numbers[-1]} on {device}" for device, numbers in layers.items())
    return f"target: layers {', '.join(ranges)}"


def plan_placement(
    config: PreTrainedConfig, gpus: int, device: torch.device, *, trust_remote_code: bool = False
) -> DeviceMap | None:
    """Divide layers by bytes among `gpus` devices from `device` on; None: one device holds all, as
    on a CPU. Raises a `UserError` if there are fewer GPUs.
    """
    if gpus == 1 or device.type == "cpu":
        return None
    first = device.index or 0
    available = torch.cuda.device_count() - first
    if gpus > available:
        raise UserError(
            f"expected {gpus} GPUs from {device} on (target.gpus), found {available}",
            do="lower target.gpus, or use a machine with more",
        )
    model = meta_model(config, trust_remote_code=trust_remote_code)
    return divide_layers(model, [torch.device("cuda", first + n) for n in range(gpus)])


def divide_layers(model: PreTrainedModel, devices: list[torch.device]) -> DeviceMap:
    """Assign contiguous layers to each device, so that all hold about the same number of bytes. The
    first one holds everything that is not a layer. The model may be on "meta".
    """
    decoder, layers, _ = text_decoder(model)
    names = {id(module): name for name, module in model.named_modules()}
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    total = sum(p.numel() for p in model.parameters())
    others = [m for m in (*model.children(), *decoder.children()) if m not in (decoder, layers)]
    device_map = {names[id(module)]: devices[0] for module in others}
    before = total - sum(sizes)
    for layer, size in zip(layers, sizes, strict=True):
        share = (before + size / 2) / total
        device_map[names[id(layer)]] = devices[min(int(share * len(devices)), len(devices) - 1)]
        before += size
    return device_map


def dispatch_layers(model: PreTrainedModel, device_map: DeviceMap) -> PreTrainedModel:
    """Move inputs to each layer's device by forward pre-hooks, in a model loaded by a device map.

    accelerate's own hooks replace `forward` in each instance and would hide replaced layers
    (`target_model/replacements.py`), so they are removed.
    """
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    remove_hook_from_submodules(model)
    for module in hooked:
        vars(module).pop("forward", None)  # accelerate restored it on the instance
    names = {id(module): name for name, module in model.named_modules()}
    _, layers, norm = text_decoder(model)
    for module in (*layers, norm):
        move = partial(_move_inputs, device_map[names[id(module)]])
        module.register_forward_pre_hook(move, with_kwargs=True)
    return model


def _move_inputs(device: torch.device, _: nn.Module, args: tuple, kwargs: dict) -> Any:
    return send_to_device((args, kwargs), device, non_blocking=True)
