"""A model arrives on a GPU as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftlab.kernels.devices import _STAGED, to_device


def model() -> nn.Module:
    """Return a model with tied, large, transposed and small parameters and a buffer."""
    rows = 5 * _STAGED // (4 * 4096)  # of 4,096 bytes: they fill a buffer and a part of another
    embeddings, small = nn.Embedding(rows, 1024), nn.Linear(3, 2)
    with_buffers = nn.BatchNorm1d(2)
    module = nn.Sequential(embeddings, small, with_buffers)
    module.tied = embeddings.weight
    module.transposed = nn.Parameter(torch.rand(rows, 1024).T, requires_grad=False)
    return module


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_arrives_as_it_is(device: str) -> None:
    original = model()
    expected = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    moved = to_device(original, device)
    assert moved.tied is moved[0].weight
    assert moved.transposed.stride() == (1, 1024)
    assert [p.requires_grad for p in (moved.tied, moved.transposed)] == [True, False]
    for name, tensor in moved.state_dict().items():
        assert tensor.device.type == device
        assert torch.equal(tensor.cpu(), expected[name]), name
