"""The keys that rows compute themselves in training-time test, and a check of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.kernels.paged_attention.plan import check_heads


@dataclass(frozen=True)
class StepKeyValues:
    """The keys and values that rows computed in steps 1..k; none is copied as k grows.

    Attributes:
        keys, values: of each step j, [B, R_j, kv heads, head_dim].
        rows: int64 [k, B, R], the row of step j that each of the R rows is: flat, b · R_j + r. No
            two rows that see anything share one.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    rows: Tensor

    @classmethod
    def extend(
        cls, previous: StepKeyValues | None, key: Tensor, value: Tensor, select: Tensor
    ) -> StepKeyValues:
        """Return `previous` for the rows that a step still runs, with that step's keys added.

        Args:
            previous: of the step before; None if this is step 1.
            key, value: the step's, [B, R, kv heads, head_dim].
            select: int64 [B, R], the indices of these rows among the previous step's rows.
        """
        newest = torch.arange(select.numel(), device=select.device).view(1, *select.shape)
        if previous is None:
            return cls((key,), (value,), newest)
        rows = previous.rows.gather(2, select.expand(len(previous.rows), -1, -1))
        keys, values = (*previous.keys, key), (*previous.values, value)
        return cls(keys, values, torch.cat([rows, newest]))


def check_inputs(query: Tensor, key: Tensor, *others: Tensor) -> None:
    """Raise ValueError if the heads are no multiple of the kv heads, or dtypes differ."""
    check_heads(query, key)
    dtypes = {t.dtype for t in (query, key, *others)}
    if len(dtypes) > 1:
        raise ValueError(f"expected queries, keys and values of one dtype, found {dtypes}")
