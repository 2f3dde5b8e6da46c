"""Token trees: several continuations of one prefix in a row, each of which sees the prefix alone.

A target computes the states of many draft blocks over one conversation in a single forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """The positions of tokens, and which tokens each of them sees.

    Attributes:
        positions: int64 [B, M], of each token in its own sequence, for RoPE and windows.
        visible: bool [B, M, M], whether a token sees another (or itself) if the model's mask
            allows it.
    """

    positions: Tensor
    visible: Tensor

    def mask(self, rule: Callable[..., Any], device: torch.device) -> Tensor:
        """Return bool [B, 1, M, M], True where a query sees a key.

        Args:
            rule: the model's mask function of (row, head, query position, key position): causal,
                with a sliding window, or in chunks.
        """
        positions = self.positions.to(device)
        rows = torch.arange(len(positions), device=device)[:, None, None, None]
        heads = torch.zeros(1, dtype=torch.long, device=device)[:, None, None, None]
        seen = rule(rows, heads, positions[:, None, :, None], positions[:, None, None, :])
        return seen & self.visible.to(device)[:, None]


def branches(
    trunks: Sequence[int], anchors: Sequence[Sequence[int]], length: int, device: torch.device
) -> TokenTree:
    """Return the trees of rows that hold a trunk and branches of it, padded at the end.

    Args:
        trunks: tokens of each row's trunk, which come first.
        anchors: for each row, the last trunk position that each of its branches sees.
        length: tokens of a branch, which begin at the position after its anchor.
    """
    width = max(n + length * len(a) for n, a in zip(trunks, anchors, strict=True))
    shape = len(trunks), width
    positions = torch.zeros(shape, dtype=torch.long)
    limit = torch.full(shape, -1)  # last trunk slot that a token sees
    branch = torch.full(shape, -2)  # −1: trunk; −2: padding
    for row, (trunk, ends) in enumerate(zip(trunks, anchors, strict=True)):
        end = torch.tensor(ends, dtype=torch.long).repeat_interleave(length)
        depth = torch.arange(length).repeat(len(ends))
        stop = trunk + len(end)
        positions[row, :stop] = torch.cat([torch.arange(trunk), end + 1 + depth])
        limit[row, :stop] = torch.cat([torch.arange(trunk), end])
        number = torch.arange(len(ends)).repeat_interleave(length)
        branch[row, :stop] = torch.cat([torch.full((trunk,), -1), number])
    positions, limit, branch = (x.to(device) for x in (positions, limit, branch))
    slots = torch.arange(width, device=device)
    on_trunk = (branch == -1)[:, None, :] & (slots <= limit[..., None])
    same = (branch[..., None] == branch[:, None, :]) & (branch != -1)[:, None, :]
    # Padding sees itself and other padding: a row without any key would be NaN.
    return TokenTree(positions, on_trunk | same)
