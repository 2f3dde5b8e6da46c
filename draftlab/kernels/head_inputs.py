"""What a head's attention reads: the token's embedding and the hidden state, normed side by side.

`head_inputs_reference` defines it (`Eagle3Layer.inputs` behind the embedding); on a GPU it is one
kernel in place of a lookup, two norms and a concatenation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.dependent_launch import launch_options


@dataclass(frozen=True)
class Masks:
    """Masked slots of a pass.

    Attributes:
        where: bool [B, M], contiguous.
        state: [H], the hidden state of all of them.
    """

    where: Tensor
    state: Tensor

    def fill(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, M, H] from those of the first columns, [B, ≤ M, H].

        What is neither given nor masked is padding.
        """
        missing = self.where.shape[1] - hidden.shape[1]
        return torch.where(self.where[..., None], self.state, F.pad(hidden, (0, 0, 0, missing)))


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
    ahead: int = 1,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    """cat[norm(embedding), norm(hidden)], and the residual.

    Args:
        tokens: int64 [B, M].
        hidden: [B, M, H], of the embeddings' dtype.
        embeddings: [V, H].
        embedding_norm, hidden_norm: [H], weights of the RMS norms, of the same dtype.
        eps: of both.
        norm_before_residual: the residual is the normed hidden state, else the hidden state.
        counts: int64 [B]; residuals are those of each row's `ahead` entries from counts − 1 on.
            None: of all M.
        ahead: with `counts`.
        masks: entries that have no hidden state of their own; `hidden` may then be narrower than
            `tokens`.

    Returns:
        [B, M, 2H], and [B, ahead, H] or [B, M, H]; the kernel computes norms in float32 and rounds
        once.
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
        ahead=ahead,
        masks=masks,
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
    ahead: int = 1,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    """`head_inputs`, operation by operation."""
    size = (hidden.shape[-1],)
    hidden = hidden if masks is None else masks.fill(hidden)
    normed = F.rms_norm(hidden, size, hidden_norm, eps)
    embedding = F.rms_norm(F.embedding(tokens, embeddings), size, embedding_norm, eps)
    residual = normed if norm_before_residual else hidden
    if counts is not None:
        residual = last_rows.reference(residual, counts, ahead)
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
    ahead: int = 1,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel, on CUDA or in Triton's interpreter."""
    from draftlab.kernels.head_inputs_triton import head_inputs_kernel

    hidden, embeddings = hidden.contiguous(), embeddings.contiguous()
    (rows, width), (given, size) = tokens.shape, hidden.shape[1:]
    x = hidden.new_empty(rows, width, 2 * size)
    # Of all pairs, the hidden states themselves can be the residual.
    copied = norm_before_residual or counts is not None or masks is not None
    asked = width if counts is None else ahead
    residual = hidden.new_empty(rows, asked, size) if copied else hidden
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
            None if masks is None else masks.where.contiguous(),
            None if masks is None else masks.state,
            width,
            given,
            asked,
            eps,
            NORMED=norm_before_residual,
            SIZE=size,
            PADDED=padded,
            num_warps=max(1, min(16, padded // 512)),
            **launch_options(hidden.device),
        )
    return x, residual
