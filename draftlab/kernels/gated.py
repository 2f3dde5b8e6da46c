"""silu(gate) · up between the products of a feed-forward, and its gradient.

The backward pass has gate and up at hand anyway, so it makes their gated product again, in the
memory of the gradient that came for it, and nobody has to keep it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.dependent_launch import FP_FUSION

_COLUMNS = 2048
"""Of one program, at most."""


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) · up [n, I] of gate and up side by side [n, 2 I]; rounded once."""
    return (launch if _on_kernel(gate_up) else gated_reference)(gate_up)


def gated_backward_(gate_up: Tensor, given: Tensor) -> Tensor:
    """The gradient [n, 2 I] of gate_up from that of `gated` of it.

    Args:
        gate_up: [n, 2 I]. given: [n, I], that gradient; becomes `gated(gate_up)`, bit for bit.
    """
    operation = launch_backward_ if _on_kernel(gate_up) else gated_backward_reference_
    return operation(gate_up, given)


def gated_reference(gate_up: Tensor) -> Tensor:
    """`gated`, operation by operation."""
    gate, up = _wide(gate_up).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gated_backward_reference_(gate_up: Tensor, given: Tensor) -> Tensor:
    """`gated_backward_`, operation by operation."""
    gate, up = _wide(gate_up).chunk(2, -1)
    owed, silu = _wide(given), F.silu(gate)
    both = torch.empty_like(gate_up)
    of_gate, of_up = both.chunk(2, -1)
    of_gate.copy_(torch.ops.aten.silu_backward(owed * up, gate))
    of_up.copy_(owed * silu)
    given.copy_(silu * up)
    return both


def launch(gate_up: Tensor) -> Tensor:
    """The kernel of `gated`, on CUDA or in Triton's interpreter."""
    from draftlab.kernels.gated_triton import gated_kernel

    gate_up = gate_up.contiguous()
    columns = gate_up.shape[1] // 2
    made = gate_up.new_empty(len(gate_up), columns)
    if made.numel():
        grid, options = _grid(made)
        with torch.cuda.device_of(gate_up):
            gated_kernel[grid](gate_up, made, columns, **options)
    return made


def launch_backward_(gate_up: Tensor, given: Tensor) -> Tensor:
    """The kernel of `gated_backward_`.

    Raises:
        ValueError: if shapes do not fit together, or `given` does not lie row behind row.
    """
    from draftlab.kernels.gated_triton import gated_backward_kernel

    gate_up = gate_up.contiguous()
    n, columns = len(gate_up), gate_up.shape[1] // 2
    if given.shape != (n, columns) or not given.is_contiguous():
        raise ValueError(
            f"expected a contiguous gradient [{n}, {columns}], found {list(given.shape)} with "
            f"strides {given.stride()}"
        )
    both = torch.empty_like(gate_up)
    if given.numel():
        grid, options = _grid(given)
        with torch.cuda.device_of(gate_up):
            gated_backward_kernel[grid](gate_up, given, both, columns, **options)
    return both


def _on_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64  # the kernels compute in float32


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _grid(rows: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Programs for each row of rows [n, I], and how they are compiled."""
    n, columns = rows.shape
    block = min(_COLUMNS, 1 << (columns - 1).bit_length())
    options = {"BLOCK": block, "num_warps": 8 if block > 1024 else 4} | FP_FUSION
    return (n, -(-columns // block)), options
