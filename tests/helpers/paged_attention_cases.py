"""Cases of paged attention: rows of a cache whose unseen keys are NaN, and dense attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftlab.kernels.paged_attention import attend_paged
from tests.helpers.gpu import relative_error


class Case:
    """Rows of a paged cache. Keys that no query sees and blocks without an owner are NaN.

    Args:
        lengths: keys of each row before its new tokens.
        counts: real new tokens of each row, out of m.
        scale: of the scores; default: 1.3 / √head_dim.
        same_keys: all tokens of a row see the keys up to its last token's.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        counts: Sequence[int],
        m: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        spare: int = 2,
        dtype: torch.dtype = torch.float32,
        scale: float | None = None,
        seed: int = 0,
        same_keys: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        num_rows = len(lengths)
        width = max(-(-(n + m) // block_size) for n in lengths) + spare
        num_blocks = num_rows * width + 1
        self.key_pool = torch.full((num_blocks, block_size, kv_heads, head_dim), math.nan).to(dtype)
        self.value_pool = self.key_pool.clone()
        order = torch.randperm(num_blocks, generator=generator)[: num_rows * width]
        self.table = order.view(num_rows, width).int()
        self.counts, self.m, self.same_keys = counts, m, same_keys
        self.positions = torch.full((num_rows, m), -1)
        self.keys, self.values = [], []
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.positions[b, :count] = torch.arange(length, length + count)
            self.keys.append(random(length + count, kv_heads, head_dim))
            self.values.append(random(length + count, kv_heads, head_dim))
            at = self._at(b, torch.arange(length + count))
            self.key_pool[at], self.value_pool[at] = self.keys[b], self.values[b]
        # As transformers passes it: heads before tokens in memory. Padding is NaN.
        self.query = random(num_rows, heads, m, head_dim).transpose(1, 2)
        self.query[self.positions < 0] = math.nan
        self.scale = scale or 1.3 * head_dim**-0.5

    def _at(self, row: int, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return block and offset of positions of a row."""
        block_size = self.key_pool.shape[1]
        return self.table[row, position // block_size].long(), position % block_size

    def run(
        self, attend: Callable[..., Tensor] = attend_paged, device: str = "cpu", **options
    ) -> Tensor:
        """Return the output of `attend` [B, M, heads, head_dim], computed on `device`."""
        if self.same_keys:
            last = self.positions.amax(1, keepdim=True)
            options["last_seen"] = last.where(self.positions >= 0, -1)
        tensors = self.query, self.key_pool, self.value_pool, self.table, self.positions
        options = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
        return attend(*(t.to(device) for t in tensors), scale=self.scale, **options).cpu()

    def hide(self, window: int | None, chunk: int | None) -> None:
        """Set keys to NaN that lie before what a row's first query sees."""
        for b, first in enumerate(self.positions[:, 0].tolist()):
            position = torch.arange(max(first, 0))
            hidden = torch.zeros_like(position, dtype=torch.bool)
            if window:
                hidden |= position <= first - window
            if chunk:
                hidden |= position < first // chunk * chunk
            at = self._at(b, position[hidden])
            self.key_pool[at] = self.value_pool[at] = math.nan

    def expected(self, *, window=None, chunk=None, softcap=None, sinks=None) -> Tensor:
        """Return attention query by query and head by head, in float64 and by the definition."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        group = self.query.shape[2] // self.key_pool.shape[2]
        for b, count in enumerate(self.counts):
            for i in range(count):
                q = self.positions[b, i].item()
                end = self.positions[b].max().item() + 1 if self.same_keys else q + 1
                low = max(0, q - window + 1 if window else 0, q // chunk * chunk if chunk else 0)
                for h in range(self.query.shape[2]):
                    keys = self.keys[b][low:end, h // group].double()
                    scores = keys @ self.query[b, i, h].double() * self.scale
                    if softcap is not None:
                        scores = softcap * (scores / softcap).tanh()
                    weights = scores.exp()
                    total = weights.sum() + (sinks[h].double().exp() if sinks is not None else 0)
                    output[b, i, h] = weights @ self.values[b][low:end, h // group].double()
                    output[b, i, h] /= total
        return output

    def check(
        self,
        attend: Callable[..., Tensor] = attend_paged,
        tolerance: float = 1e-5,
        **options,
    ) -> None:
        """Assert that `attend` equals the definition, entry by entry, and that padding is 0."""
        self.hide(options.get("window"), options.get("chunk"))
        output = self.run(attend, **options)
        assert output.dtype == self.query.dtype
        assert output.is_contiguous()
        expected = self.expected(**options)
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
        assert not output[self.positions < 0].any()

    def check_norm(self, device: str, bound: float, **options) -> None:
        """Assert that `attend_paged` on `device` repeats and has a relative error below `bound`."""
        self.hide(options.get("window"), options.get("chunk"))
        output = self.run(device=device, **options)
        assert torch.equal(output, self.run(device=device, **options)), "two runs differ"
        assert not output[self.positions < 0].any()
        error = relative_error(output, self.expected(**options))
        assert error < bound, error
