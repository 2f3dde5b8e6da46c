"""The tensors of an MTP layer in its target's checkpoint (`heads/mtp.py`): names, reading, writing.

The rows of Qwen3.5's q_proj, which hold queries and gates of each head in turn, are split into
`q_proj` and `gate_proj`. A checkpoint has the experts in two tensors (Qwen3.6), or in three of each
expert (Qwen3.5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.heads.mtp import CORRECTION, MtpConfig, MtpHead
from draftlab.heads.validate import D2T, T2D

Q_PROJ, GATE = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.gate_proj.weight"
GATE_UP, DOWN = "layers.0.mlp.gate_up", "layers.0.mlp.down"


def checkpoint_tensors(
    config: MtpConfig, tensors: Mapping[str, Tensor], stored: Collection[str]
) -> dict[str, Tensor]:
    """Return the tensors of a head folder as the checkpoint, with tensors of `stored` names, has
    them before it is quantised.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if name != CORRECTION}
    if GATE in tensors:
        shape = (config.num_attention_heads, config.head_dim, config.hidden_size)
        halves = [tensors[Q_PROJ].view(shape), tensors.pop(GATE).view(shape)]
        tensors[Q_PROJ] = torch.cat(halves, 1).flatten(0, 1)
    renamed = {}
    for name, tensor in tensors.items():
        if parts := _names_of_experts(config, name, stored):
            values = tensor.unflatten(1, (len(parts[0]), -1)).unbind(1)
            for part, value in enumerate(values):
                renamed |= {names[part]: one for names, one in zip(parts, value, strict=True)}
        else:
            renamed[_checkpoint_name(config, name)] = tensor
    return {name: tensor.contiguous() for name, tensor in renamed.items()}


def load_checkpoint(head: MtpHead, read: Callable[[str], Tensor], stored: Collection[str]) -> None:
    """Load the layer of a checkpoint; the tensors that are the target's stay as they are.

    `read` returns the checkpoint's tensor of a name, out of `stored`, dequantised. Raises a
    `UserError` if a tensor has another shape, or quantised values.
    """
    config = head.config
    shared = head.shared_tensors()
    own = {name: one.data for name, one in head.named_parameters() if name not in shared}
    gate = own.pop(GATE, None)
    if CORRECTION in dict(head.named_buffers()):
        stored_bias = _checkpoint_name(config, CORRECTION)
        head.layer.mlp.set_correction(_floating(read, stored_bias, [config.experts.num_experts]))
    for name, tensor in own.items():
        parts = _names_of_experts(config, name, stored)
        if name == Q_PROJ and gate is not None:
            shape = (config.num_attention_heads, 2, config.head_dim, config.hidden_size)
            both = _floating(read, _checkpoint_name(config, name), [2 * len(tensor), shape[-1]])
            for half, values in zip((tensor, gate), both.view(shape).unbind(1), strict=True):
                half.copy_(values.flatten(0, 1))
        elif parts:
            shape = [tensor.shape[1] // len(parts[0]), tensor.shape[2]]
            for one, names in zip(tensor, parts, strict=True):
                one.copy_(torch.cat([_floating(read, part, shape) for part in names]))
        else:
            tensor.copy_(_floating(read, _checkpoint_name(config, name), [*tensor.shape]))


def _floating(read: Callable[[str], Tensor], name: str, shape: list[int]) -> Tensor:
    """Return a tensor as `read` does; raise a `UserError` unless it has 16-bit or wider numbers in
    this shape."""
    tensor = read(name)
    wide = tensor.is_floating_point() and tensor.element_size() >= 2
    if [*tensor.shape] != shape or not wide:
        raise UserError(
            f"{name}: expected {shape} floating numbers of 16 bits or more, found "
            f"{[*tensor.shape]} of {tensor.dtype}",
            where="target",
            do="name a checkpoint whose MTP layer is in FP8 or 16 bits",
        )
    return tensor


def checkpoint_names(config: MtpConfig, stored: Collection[str]) -> list[str]:
    """Return the names of the layer's tensors in a checkpoint with tensors of `stored` names."""
    with torch.device("meta"):
        head = MtpHead(config)
    own = head.state_dict().keys() - head.shared_tensors() - {GATE, D2T, T2D}
    names: set[str] = set()
    for name in own:
        parts = _names_of_experts(config, name, stored)
        names |= {part for names in parts for part in names} or {_checkpoint_name(config, name)}
    return sorted(names)


def _names_of_experts(
    config: MtpConfig, name: str, stored: Collection[str]
) -> list[tuple[str, ...]]:
    """Return the names of the matrices in each expert's part of a head's tensor, in order; none if
    the checkpoint has the tensor as a whole, or if it is not of experts."""
    whole = _checkpoint_name(config, name)
    if name not in (GATE_UP, DOWN) or whole in stored:
        return []
    kinds = ("gate", "up") if name == GATE_UP else ("down",)
    start = whole.rpartition(".")[0]
    experts = config.experts
    assert experts is not None  # the tensors of such names are theirs
    return [
        tuple(f"{start}.{number}.{kind}_proj.weight" for kind in kinds)
        for number in range(experts.num_experts)
    ]


def _checkpoint_name(config: MtpConfig, name: str) -> str:
    """Return the checkpoint's name of a tensor in a head folder."""
    names = config.mtp_type.names
    start = next(start for start in names if name.startswith(start))
    return names[start].format(layer=config.target_num_layers) + name.removeprefix(start)
