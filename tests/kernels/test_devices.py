"""A model arrives on a GPU as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftlab.kernels.devices import _STAGED, to_device


def model() -> nn.Module:
    """Return a model with tied, large, transposed and small parameters and a buffer."""
    torch.manual_seed(0)
    numbers = 5 * _STAGED // 16  # of 4 bytes: a whole buffer and a part
    made = nn.Sequential(nn.Embedding(numbers // 1024, 1024), nn.Linear(3, 2), nn.BatchNorm1d(2))
    made.tied = made[0].weight
    made.transposed = nn.Parameter(torch.randn(numbers // 1024, 1024).T, requires_grad=False)
    return made


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_arrives_as_it_is(device: str) -> None:
    expected, moved = model().state_dict(), to_device(model(), device)
    assert moved.tied is moved[0].weight
    assert moved.transposed.stride() == (1, 1024)
    assert [p.requires_grad for p in (moved.tied, moved.transposed)] == [True, False]
    for name, tensor in moved.state_dict().items():
        assert tensor.device.type == device
        assert torch.equal(tensor.cpu(), expected[name]), name
