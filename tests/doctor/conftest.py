"""Fixtures: the embedded target, and copies of the reference head with faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draftlab.doctor.diagnose import diagnose
from draftlab.doctor.diagnosis import Diagnosis
from draftlab.doctor.settings import DoctorSettings
from draftlab.doctor.target_session import TargetSession
from draftlab.heads.config import make_head_config
from draftlab.heads.folder import CONFIG, NATIVE, WEIGHTS
from draftlab.heads.vllm_config import native_config
from draftlab.progress import Monitor
from draftlab.run.resolve import reference_head
from draftlab.target_model.settings import TargetSettings
from tests.helpers.diagnosis import CopyHead, Tensors, initial_tensors, reference_config


@pytest.fixture(scope="session")
def session() -> TargetSession:
    settings = DoctorSettings(max_prompts=16, max_new_tokens=28, k=2)
    return TargetSession(TargetSettings(device="cpu"), settings, Monitor())


@pytest.fixture
def copy_head(tmp_path: Path) -> CopyHead:
    """Copies the reference head with changed tensors, and with config keys changed everywhere."""

    def copy(change: Callable[[Tensors], Any] | None = None, **fields: Any) -> Path:
        folder = tmp_path / "head"
        shutil.copytree(reference_head(), folder)
        config = json.loads((folder / CONFIG).read_text()) | fields
        (folder / CONFIG).write_text(json.dumps(config))
        native = native_config(make_head_config(**config), "bfloat16")
        (folder / NATIVE).write_text(json.dumps(native))
        if change is not None:
            tensors = load_file(folder / WEIGHTS)
            change(tensors)
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return folder

    return copy


@pytest.fixture
def diagnose_copy(session: TargetSession, copy_head: CopyHead) -> Callable[..., Diagnosis]:
    """Diagnoses such a copy."""
    return lambda *change, **fields: diagnose(copy_head(*change, **fields), session)


@pytest.fixture
def untrained_eagle(session: TargetSession, copy_head: CopyHead) -> Path:
    """An initialised EAGLE head of the first generation."""
    chain_only = {"norm_before_residual": False}  # the reference head, a chain, has it
    config = reference_config(family="eagle", boundaries=[12], draft_vocab_size=6144, **chain_only)
    initial = initial_tensors(config, session.target.parts)
    tensors = {name: tensor.bfloat16() for name, tensor in initial.items()}
    return copy_head(
        lambda stored: (stored.clear(), stored.update(tensors)),
        **chain_only | config.model_dump(mode="json", by_alias=True),
    )
