"""What the environment of draftlab's processes does to numbers."""

from __future__ import annotations

import os
import subprocess
import sys

GRADIENTS = """
import draftlab.cli
import torch

def gradients():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, 300, 32, generator=generator, requires_grad=True) for _ in "qkv")
    mask = torch.ones(300, 300, dtype=torch.bool).tril()
    torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    return torch.stack([q.grad, k.grad, v.grad])

before = gradients()
torch.set_num_threads(torch.get_num_threads())  # what decoding does before a training
assert torch.equal(before, gradients())
"""


def test_gradients_have_the_same_bits_before_and_after_decoding() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_DYNAMIC"}
    environment |= {"OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", GRADIENTS], env=environment, check=True)
