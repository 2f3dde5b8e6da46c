"""Conversations side by side in one row: what a pass without padding is made of.

All that a token sees is its position within its conversation (RoPE, temperatures) and the keys
before it there (`attention.py`), so it gets the states that it has in a row of its own. The lengths
are known on the host, and what the device needs of them is copied without waiting for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

try:  # from torch 2.10 on; windows, and causality by them, since 2.11
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

_OPTIONS = inspect.signature(varlen_attn).parameters if varlen_attn else {}
_MOST_HEAD_DIM = 256  # of the flash kernel


@dataclass(frozen=True, eq=False)
class Documents:
    """The conversations of one row.

    Attributes:
        lengths: of each, in order.
        positions: int64 [1, sum of lengths], of each token in its conversation, where the target
            takes its token ids.
        at_once: whether attention that takes them one by one is an error.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    at_once: bool = False
    _kept: dict[object, Tensor | Documents] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Documents:
        """Conversations that all begin at position 0."""
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        return cls(tuple(lengths), sent(positions, device))

    @cached_property
    def slices(self) -> list[slice]:
        """Where each lies in the row."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - n, end) for end, n in zip(ends, self.lengths, strict=True)]

    def bounds(self, device: torch.device) -> Tensor:
        """int32 [documents + 1]: where each begins, and the end; copied once to each device."""
        if device not in self._kept:
            ends = [0, *(part.stop for part in self.slices)]
            self._kept[device] = sent(torch.tensor(ends, dtype=torch.int32), device)
        return self._kept[device]

    def cut(self, size: int) -> Documents:
        """Each in pieces of `size` tokens: a chunk sees nothing of those before it."""
        if size not in self._kept:
            lengths = [min(size, n - first) for n in self.lengths for first in range(0, n, size)]
            self._kept[size] = Documents(tuple(lengths), self.positions, self.at_once)
        return self._kept[size]

    def window_mask(self, length: int, window: int | None, device: torch.device) -> Tensor | None:
        """bool [length, length], True where a query sees a key; None: all keys up to its own."""
        if window is None or length <= window:
            return None
        key = length, window, device
        if key not in self._kept:
            seen = torch.ones(length, length, dtype=torch.bool, device=device)
            self._kept[key] = seen.tril().triu(1 - window)
        return self._kept[key]


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The host's values on a device, without waiting for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def one_kernel_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's kernel for rows of documents takes these: flash attention, in 16 bit."""
    return (
        query.is_cuda
        and "window_size" in _OPTIONS
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _MOST_HEAD_DIM
        and query.shape[-1] % 8 == 0
    )


def attend_in_one_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Causal attention within each document.

    Args:
        query: [1, heads, T, head_dim]; key and value may have fewer heads, each for a group.
        window: how many keys a query sees, itself included; None: all before it.

    Returns:
        [1, T, heads, head_dim].
    """
    bounds, longest = documents.bounds(query.device), max(documents.lengths)
    # Before 2.12 there is no such option and groups are taken as they come.
    grouped = {"enable_gqa": True} if "enable_gqa" in _OPTIONS else {}
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    attended = varlen_attn(
        *rows,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return attended[None]
