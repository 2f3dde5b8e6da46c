"""Written tensors have their library's bytes, a known hash, and errors that say what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftlab import files, tensor_files
from draftlab.errors import UserError
from draftlab.files import atomic_path, known_sha256, sha256_file
from draftlab.tensor_files import save_tensors


def test_tensors_that_cannot_be_written_are_a_user_error(tmp_path: Path) -> None:
    """safetensors raises its own type for a full disk as for a missing folder."""
    with pytest.raises(UserError, match="could not be written") as caught:
        save_tensors({"a": torch.zeros(3)}, tmp_path / "gone" / "a.safetensors")
    assert "gone" in str(caught.value.where)
    assert caught.value.do


def test_tensors_are_written_for_all_who_may_read_the_folder(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_tensors({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o644


TENSORS = {
    "large": torch.arange(3 << 20).float().view(3, -1),  # of several blocks
    "transposed": torch.arange(6, dtype=torch.int16).view(2, 3).T,
    "expanded": torch.tensor([7]).expand(1, 1),
    "number": torch.tensor(2.5, dtype=torch.bfloat16),
    "nothing": torch.zeros(0, 4, dtype=torch.bool),
    "größe": torch.ones(3, requires_grad=True),
    "codes": torch.ones(5).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("tensors", [TENSORS, {}], ids=["some", "none"])
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_tensors_are_written_as_by_their_library(
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_files, "_BLOCK_BYTES", 1 << 20)
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, tmp_path / "expected", metadata)
    digest = save_tensors(tensors, tmp_path / "written", metadata)
    assert (tmp_path / "written").read_bytes() == (tmp_path / "expected").read_bytes()
    assert digest == sha256_file(tmp_path / "written")


def test_a_written_file_is_not_read_for_its_hash_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reads = tmp_path / "x.safetensors", list[Path]()

    def counted(path: Path) -> str:
        reads.append(path)
        return sha256_file(path)

    monkeypatch.setattr(files, "sha256_file", counted)
    with atomic_path(path) as temporary:
        digest = save_tensors({"x": torch.zeros(2)}, temporary)
    assert (known_sha256(path), reads) == (digest, [])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)  # at once, and of the same size
    assert known_sha256(path) != digest
    assert reads == [path]
