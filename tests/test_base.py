"""What every room stands on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftlab.base import UserError, save_tensors


def test_tensors_that_cannot_be_written_are_the_disks_fault(tmp_path: Path) -> None:
    """safetensors raises its own type for a full disk as for a folder that is not there."""
    with pytest.raises(UserError, match="could not be written") as caught:
        save_tensors({"a": torch.zeros(3)}, tmp_path / "gone" / "a.safetensors")
    assert "gone" in str(caught.value.where)
    assert caught.value.do
