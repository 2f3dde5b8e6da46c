"""How a mixture of experts multiplies: without the host looking, so that a step can be captured.

transformers' own loop over the experts that were hit reads their ids on the host. Its two other
ways do not: *grouped* products (sorted tokens, one kernel) and *batched* ones (each token with a
copy of its experts' weights). Grouped is the better one where the GPU has the kernel; elsewhere
torch stands in for it with a loop that synchronises, and batched products of bounded size serve.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

EXPERTS = "draftlab"


def grouped_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether grouped products are one kernel (CUDA) or simply the fastest way (CPU).

    torch has the CUDA kernel for bfloat16 from compute capability 9.0; its stand-in reads the
    groups' sizes on the host. On a CPU there is nothing to wait for.
    """
    if device.type != "cuda":
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)


def bounded_batched(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Batched products, a few tokens at a time.

    Every (token, expert) pair needs its own copy of the expert, so a prompt at once would take
    hundreds of gigabytes; a piece copies no more than the layer's weights once. The number of
    pieces follows from shapes alone.

    Args:
        experts: a transformers experts module.
        hidden_states: [T, H].
        top_k_index: int64 [T, top_k].
        top_k_weights: [T, top_k].

    Returns:
        [T, H].
    """
    num_experts: Any = experts.num_experts
    piece = max(1, num_experts // top_k_index.shape[-1])
    pieces = zip(
        hidden_states.split(piece),
        top_k_index.split(piece),
        top_k_weights.split(piece),
        strict=True,
    )
    return torch.cat([batched_mm_experts_forward(experts, *tensors) for tensors in pieces])


def _experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts function we register; arguments as in `bounded_batched`."""
    weights = next(self.parameters())
    if grouped_products(weights.dtype, weights.device):
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return bounded_batched(self, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def use_experts(model: PreTrainedModel) -> None:
    """Makes a model's experts multiply in our way where transformers lets one choose.

    Left alone: models without experts, quantised experts (their own kernels), and experts that are
    written out in the model: Llama 4's are batched products already; those of dbrx, doge, jetmoe,
    longcat_flash and step3p7 loop, which is right and cannot be captured (`probe.can_capture`).
    """
    if getattr(model.config, "quantization_config", None) is None:
        switchable = any(
            isinstance(part, PreTrainedModel) and part._can_set_experts_implementation()
            for part in model.modules()
        )
        if switchable:
            model.set_experts_implementation(EXPERTS)
