"""Packed rows: several conversations in one row, as a pass without padding reads them.

A token depends on its position within its conversation (RoPE, temperatures) and on the earlier keys
of that conversation only (`attention.py`), so it gets the states that it has in a row of its own.
The host knows the lengths; what the device needs of them is copied without a synchronisation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftlab.kernels.devices import copy_to_device

try:  # from torch 2.10 on; with causal windows from 2.11 on
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

_OPTIONS = inspect.signature(varlen_attn).parameters if varlen_attn else {}
_MAX_HEAD_DIM = 256  # of the flash kernel


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The conversations of one row, of so many tokens each, in order.

    Attributes:
        positions: int64 [1, sum of lengths], each token's position in its conversation, on the
            device that takes token ids.
        require_varlen: whether attention without the variable-length kernel is an error.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    require_varlen: bool = False
    _cache: dict[object, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedRow:
        """Return a row of conversations that all begin at position 0."""
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        return cls(tuple(lengths), copy_to_device(positions, device))

    @cached_property
    def slices(self) -> list[slice]:
        """The columns of each conversation."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - n, end) for end, n in zip(ends, self.lengths, strict=True)]

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Return cumulative lengths, int32 [conversations + 1]; copied once to each device."""
        if device not in self._cache:
            ends = [0, *(columns.stop for columns in self.slices)]
            self._cache[device] = copy_to_device(torch.tensor(ends, dtype=torch.int32), device)
        return self._cache[device]

    def split_chunks(self, size: int) -> PackedRow:
        """Split each conversation into chunks of `size` tokens, which do not see each other."""
        if size not in self._cache:
            lengths = [min(size, n - first) for n in self.lengths for first in range(0, n, size)]
            self._cache[size] = PackedRow(tuple(lengths), self.positions, self.require_varlen)
        return self._cache[size]

    def window_mask(self, length: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return bool [length, length], True where a query sees a key; None: plainly causal."""
        if window is None or length <= window:
            return None
        key = length, window, device
        if key not in self._cache:
            mask = torch.ones(length, length, dtype=torch.bool, device=device)
            self._cache[key] = mask.tril().triu(1 - window)
        return self._cache[key]

    def by_conversation(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return [1, T, …] of a causal function of tensors [1, T, …] that runs on right-padded
        conversations [B, M, …], in place of the packed row.
        """
        result: Tensor | None = None
        for padded, real, columns in self._rows(tensors[0].device):
            rows = function(*(tensor[0, padded] for tensor in tensors)).flatten(0, 1)
            if result is None:
                result = rows.new_empty(tensors[0].shape[1], *rows.shape[1:])
            result[columns] = rows[real]
        return result[None]

    def _rows(self, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return rows of conversations, those within a factor of two in length together.

        Returns:
            For each group: columns of the packed row, int64 [B, M], the last one repeated as
            padding; which of these B · M are real; and the columns of the real ones.
        """
        key = "rows", device
        if key not in self._cache:
            groups: dict[int, list[slice]] = {}
            for columns in self.slices:
                length = columns.stop - columns.start
                groups.setdefault(length.bit_length(), []).append(columns)
            self._cache[key] = [
                tuple(copy_to_device(index, device) for index in _group_index(group))
                for group in groups.values()
            ]
        return self._cache[key]


def _group_index(group: list[slice]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the index tensors of a group of `PackedRow._rows`."""
    starts = torch.tensor([columns.start for columns in group])
    stops = torch.tensor([columns.stop for columns in group])
    columns = starts[:, None] + torch.arange(int((stops - starts).max()))
    is_real = (columns < stops[:, None]).flatten()
    padded = columns.minimum(stops[:, None] - 1)
    return padded, is_real.nonzero()[:, 0], padded.flatten()[is_real]


def supports_varlen(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether torch's variable-length kernel (16-bit flash attention) takes these."""
    return (
        query.is_cuda
        and "window_size" in _OPTIONS
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _MAX_HEAD_DIM
        and query.shape[-1] % 8 == 0
    )


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_row: PackedRow,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Return causal attention within each conversation [1, T, heads, head_dim], in one kernel.

    Args:
        query: [1, heads, T, head_dim]; key and value may have fewer heads, one for each group.
        window: number of keys that a query sees, itself included; None: all before it.
    """
    bounds, longest = packed_row.cu_seqlens(query.device), max(packed_row.lengths)
    # Before 2.12 the kernel has no such option and takes grouped heads as they are.
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
