"""SwiGLU, the activation of Llama's feed-forward, and its gradient (Shazeer, arXiv:2002.05202).

    y = silu(gate) · up,  silu(x) = x · sigmoid(x)
    d_gate = dy · up · silu'(gate),  d_up = dy · silu(gate)

The backward pass computes y again and writes it over dy, so that nothing has to keep y.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.distill import at_least_float32


@triton_operator("swiglu.triton")
def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up [n, I] of gate and up side by side [n, 2 I], rounded once."""
    gate, up = at_least_float32(gate_up).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@triton_operator("swiglu.triton")
def swiglu_backward_(gate_up: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient [n, 2 I] of gate_up from that of `swiglu(gate_up)`.

    Args:
        gate_up: [n, 2 I].
        gradient: [n, I], contiguous; it is overwritten by `swiglu(gate_up)`, equal bit for bit.
    """
    gate, up = at_least_float32(gate_up).chunk(2, -1)
    d_y, silu = at_least_float32(gradient), F.silu(gate)
    d_gate_up = torch.empty_like(gate_up)
    d_gate, d_up = d_gate_up.chunk(2, -1)
    d_gate.copy_(torch.ops.aten.silu_backward(d_y * up, gate))
    d_up.copy_(d_y * silu)
    gradient.copy_(silu * up)
    return d_gate_up
