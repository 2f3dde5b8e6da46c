"""What a head's attention reads: the token's embedding and the hidden state, normed side by side.

`head_inputs_reference` defines it (`Eagle3Layer.inputs` behind the embedding); on a GPU it is one
kernel in place of a lookup, two norms and a concatenation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.chain_layout import last_rows_reference
from draftlab.kernels.dependent_launch import launch_options


def head_inputs(
    tokens: Tensor,
    hidden: Tensor,
    embeddings: Tensor,
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    eps: float,
    *,
    norm_before_residual: bool,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """cat[norm(embedding), norm(hidden)], and the residual.

    Args:
        tokens: int64 [B, M].
        hidden: [B, M, H], of the embeddings' dtype.
        embeddings: [V, H].
        embedding_norm, hidden_norm: [H], weights of the RMS norms, of the same dtype.
        eps: of both.
        norm_before_residual: the residual is the normed hidden state, else the hidden state.
        counts: int64 [B]; the residual is that of each row's entry counts − 1. None where M = 1.

    Returns:
        [B, M, 2H] and [B, 1, H]; the kernel computes norms in float32 and rounds once.
    """
    operation = launch if hidden.is_cuda else head_inputs_reference
    return operation(
        tokens,
        hidden,
        embeddings,
        embedding_norm,
        hidden_norm,
        eps,
        norm_before_residual=norm_before_residual,
        counts=counts,
    )


def head_inputs_reference(
    tokens: Tensor,
    hidden: Tensor,
    embeddings: Tensor,
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    eps: float,
    *,
    norm_before_residual: bool,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`head_inputs`, operation by operation."""
    size = (hidden.shape[-1],)
    normed = F.rms_norm(hidden, size, hidden_norm, eps)
    embedding = F.rms_norm(F.embedding(tokens, embeddings), size, embedding_norm, eps)
    residual = normed if norm_before_residual else hidden
    if counts is not None:
        residual = last_rows_reference(residual, counts)
    return torch.cat([embedding, normed], -1), residual


def launch(
    tokens: Tensor,
    hidden: Tensor,
    embeddings: Tensor,
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    eps: float,
    *,
    norm_before_residual: bool,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel, on CUDA or in Triton's interpreter."""
    from draftlab.kernels.head_inputs_triton import head_inputs_kernel

    hidden, embeddings = hidden.contiguous(), embeddings.contiguous()
    rows, width, size = hidden.shape
    x = hidden.new_empty(rows, width, 2 * size)
    # Of one pair a row, the hidden state itself can be the residual.
    copied = norm_before_residual or counts is not None
    residual = hidden.new_empty(rows, 1, size) if copied else hidden
    padded = 1 << (size - 1).bit_length()
    with torch.cuda.device_of(hidden):
        head_inputs_kernel[(rows * width, 2)](
            tokens,
            *tokens.stride(),
            hidden,
            embeddings,
            embedding_norm,
            hidden_norm,
            x,
            residual if copied else None,
            counts,
            width,
            eps,
            NORMED=norm_before_residual,
            SIZE=size,
            PADDED=padded,
            num_warps=max(1, min(16, padded // 512)),
            **launch_options(hidden.device),
        )
    return x, residual
