"""Checks of what train.precision=fp8 needs: sizes of the layers, and a GPU with such products."""

from __future__ import annotations

import torch

from draftlab.errors import UserError
from draftlab.heads.head import DraftHead
from draftlab.kernels.fp8_linear import SIZE_MULTIPLE, linear, quantise_weight

_DO = "set train.precision=bfloat16"


def check_fp8_sizes(head: DraftHead) -> None:
    """Check the sizes of a head's layers; the head may be on the meta device.

    Raises:
        UserError: a size is no multiple of `SIZE_MULTIPLE`; the message names the weight.
    """
    for name, weight in head.layers.named_parameters(prefix="layers"):
        if weight.ndim == 2 and any(size % SIZE_MULTIPLE for size in weight.shape):
            raise UserError(
                f"train.precision=fp8 expects sizes that are multiples of {SIZE_MULTIPLE}, found "
                f"{list(weight.shape)}",
                where=name,
                do=_DO,
            )


def check_fp8_device(device: torch.device) -> None:
    """Check that a device multiplies in fp8, by a small product.

    Raises:
        UserError: it does not; the message has torch's reason.
    """
    x = torch.ones(SIZE_MULTIPLE, SIZE_MULTIPLE, dtype=torch.bfloat16, device=device)
    try:
        linear(x, quantise_weight(x))
    except RuntimeError as error:
        raise UserError(
            "train.precision=fp8 expects a GPU that multiplies e4m3 numbers with a scale for each "
            f"row, as Hopper GPUs and later ones do; torch says: {error}",
            where=str(device),
            do=_DO,
        ) from error
