"""A target's layers spread over several GPUs, in order; everything else stays on the first.

Embeddings, rotary embeddings, the final norm and lm_head lie where token ids go in, so to the rest
of draftlab a spread target is one on that device: only its layers are elsewhere. A layer's inputs
are moved to it as it is called. There is no overlap between GPUs: it is a way to fit, not to go
faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from draftlab.errors import UserError
from draftlab.target_model.parts import text_decoder


@dataclass(frozen=True)
class Places:
    """Where the modules of a model go.

    Attributes:
        by_module: transformers' device map: the model's own modules by name.
        devices: of each layer.
        first: of all the rest.
    """

    by_module: dict[str, torch.device]
    devices: tuple[torch.device, ...]
    first: torch.device

    def line(self) -> str:
        """What lies where, in words."""
        ranges = []
        for device in dict.fromkeys(self.devices):
            mine = [i for i, at in enumerate(self.devices) if at == device]
            ranges.append(f"{mine[0]}-{mine[-1]} on {device}")
        return f"target: layers {', '.join(ranges)}"


def layer_places(
    config: PreTrainedConfig, gpus: int, device: torch.device, *, trust_remote_code: bool = False
) -> Places | None:
    """Divides layers among `gpus` devices from `device` on by their bytes; None: all on one.

    Without any GPU (`device` is a CPU) nothing is spread.

    Raises:
        UserError: more GPUs than there are.
    """
    if gpus == 1 or device.type == "cpu":
        return None
    first = device.index or 0
    there = torch.cuda.device_count() - first
    if gpus > there:
        raise UserError(
            f"target.gpus is {gpus}, and there are {there} GPUs from {device} on",
            do="lower target.gpus, or use a machine with more",
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return spread(model, [torch.device("cuda", first + n) for n in range(gpus)])


def spread(model: PreTrainedModel, devices: list[torch.device]) -> Places:
    """Contiguous layers for each device, so that all hold about as many bytes.

    Args:
        model: its modules and the shapes of their weights count; they may be on "meta".
        devices: the first one takes all that is no layer.
    """
    decoder, layers, _ = text_decoder(model)
    names = {id(module): name for name, module in model.named_modules()}
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    total = sum(p.numel() for p in model.parameters())
    before, chosen = total - sum(sizes), []
    for size in sizes:
        share = (before + size / 2) / total
        chosen.append(devices[min(int(share * len(devices)), len(devices) - 1)])
        before += size
    others = [m for m in (*model.children(), *decoder.children()) if m not in (decoder, layers)]
    by_module = {names[id(module)]: devices[0] for module in others}
    by_module |= {names[id(layer)]: at for layer, at in zip(layers, chosen, strict=True)}
    return Places(by_module, tuple(chosen), devices[0])


def place_layers(model: PreTrainedModel, places: Places) -> PreTrainedModel:
    """Makes a model that was loaded by a device map run by it.

    accelerate's hooks take the place of `forward` in each instance, where replaced layers
    (`target_model/replacements.py`) would not be seen; ours come before a module is called.
    """
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    remove_hook_from_submodules(model)
    for module in hooked:
        vars(module).pop("forward", None)  # where accelerate put the method back
    _, layers, norm = text_decoder(model)
    at = (*zip(layers, places.devices, strict=True), (norm, places.first))
    for module, device in at:
        module.register_forward_pre_hook(_mover(device), with_kwargs=True)
    return model


def _mover(device: torch.device) -> Any:
    def move(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return _moved(args, device), _moved(kwargs, device)

    return move


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors, and tuples and dictionaries of them, on another device; all else as it is."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if type(value) is tuple:
        return tuple(_moved(v, device) for v in value)
    if type(value) is dict:
        return {k: _moved(v, device) for k, v in value.items()}
    return value
