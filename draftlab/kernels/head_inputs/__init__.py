"""The input of an EAGLE-3 head's attention: normed embedding and normed hidden state, concatenated.

    x = cat[rms_norm(embedding(token)), rms_norm(hidden)]

It is `Eagle3Layer.inputs` behind the embedding (Li et al., arXiv:2503.01840), in one kernel in
place of a lookup, two norms and a concatenation. Tests: tests/kernels/test_pass_layouts.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.step_layout.types import MaskedColumns


@triton_operator("head_inputs.triton")
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
    num_columns: int = 1,
    masks: MaskedColumns | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cat[norm(embedding), norm(hidden)], and the residual.

    Args:
        tokens: int64 [B, M].
        hidden: [B, M, H], of the embeddings' dtype.
        embeddings: [V, H].
        embedding_norm, hidden_norm: [H], weights of the RMS norms, of the same dtype.
        eps: of both norms.
        norm_before_residual: the residual is the normed hidden state, else the hidden state.
        counts: int64 [B]; residuals are those of each row's `num_columns` columns from counts − 1
            on. None: of all M.
        num_columns: with `counts`.
        masks: the columns without a hidden state of their own; `hidden` may then be narrower than
            `tokens`.

    Returns:
        [B, M, 2H], and [B, num_columns, H] or [B, M, H]; the kernel computes norms in float32 and
        rounds once.
    """
    size = (hidden.shape[-1],)
    hidden = hidden if masks is None else masks.fill(hidden)
    normed = F.rms_norm(hidden, size, hidden_norm, eps)
    embedding = F.rms_norm(F.embedding(tokens, embeddings), size, embedding_norm, eps)
    residual = normed if norm_before_residual else hidden
    if counts is not None:
        residual = last_rows.reference(residual, counts, num_columns)
    return torch.cat([embedding, normed], -1), residual
