"""Mixture-of-experts products that never synchronise with the host, so a graph can capture them.

transformers' own loop over the selected experts reads their ids on the host. Its two other
implementations do not: *grouped* products (sorted tokens, one kernel), used where the GPU has the
kernel, and *batched* products (each token with a copy of its experts' weights).
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
    """Return whether grouped products are one kernel (CUDA) or simply the fastest way (CPU).

    torch has the CUDA kernel for bfloat16 from compute capability 9.0; its fallback reads the
    groups' sizes on the host. A CPU has nothing to wait for.
    """
    if device.type != "cuda":
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)


def bounded_batched(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return batched products [T, H], computed for a few tokens at a time.

    Every (token, expert) pair needs its own copy of the expert, so a whole prompt would take
    hundreds of gigabytes; a chunk copies no more than the layer's weights once. The number of
    chunks follows from shapes alone.

    Args:
        experts: a transformers experts module.
        hidden_states: [T, H]. top_k_index, top_k_weights: [T, top_k].
    """
    num_experts: Any = experts.num_experts
    size = max(1, num_experts // top_k_index.shape[-1])
    splits = (x.split(size) for x in (hidden_states, top_k_index, top_k_weights))
    return torch.cat(
        [batched_mm_experts_forward(experts, *chunk) for chunk in zip(*splits, strict=True)]
    )


def _experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute a layer's experts; see `bounded_batched` for the arguments."""
    weights = next(self.parameters())
    if grouped_products(weights.dtype, weights.device):
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return bounded_batched(self, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def use_experts(model: PreTrainedModel) -> None:
    """Select draftlab's experts function if the model lets transformers choose one.

    Models without experts, quantised experts (which have their own kernels) and models that
    implement their experts themselves do not change. Of the latter, Llama 4 uses batched products
    already; dbrx, doge, jetmoe, longcat_flash and step3p7 loop, which is correct and cannot be
    captured (`check_capabilities.can_capture`).
    """
    switchable = any(
        isinstance(module, PreTrainedModel) and module._can_set_experts_implementation()
        for module in model.modules()
    )
    if switchable and getattr(model.config, "quantization_config", None) is None:
        model.set_experts_implementation(EXPERTS)
