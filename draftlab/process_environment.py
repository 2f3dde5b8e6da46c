"""Environment variables of draftlab's processes, read at torch's import by OpenMP, oneDNN and MKL.

Threads that spin while they wait slow a busy machine. Each shape of a product that oneDNN keeps
takes megabytes, and the shapes of a training seldom come twice. MKL chooses how many threads share
a product until `torch.set_num_threads` is first called, as decoding does: a training that goes on
in a process of its own would have other bits than one that follows the answers.
"""

from __future__ import annotations

import os

from draftlab.errors import UserError

PROCESS_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "MKL_DYNAMIC": "FALSE",
}


def launched_number(name: str, default: int) -> int:
    """Return a number that a launcher of processes has set, such as WORLD_SIZE and RANK.

    Raises:
        UserError: the environment variable is no such number.
    """
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(
            f"expected a number of processes or of one of them, found {text!r}",
            where=f"the environment variable {name}",
            do="unset it, or let torchrun or `accelerate launch` start the processes",
        )
    return int(text)


def name_accelerator(*, has_gpu: bool) -> None:
    """Tell DeepSpeed that there is no GPU, if there is none, or it warns that it found none.

    Accelerate imports an installed DeepSpeed when transformers saves a model.
    """
    if not has_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
