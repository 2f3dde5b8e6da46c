"""The reference head, copies of it to be broken, and the embedded target as witness."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftlab.doctor.diagnose import examine
from draftlab.doctor.findings import Diagnosis
from draftlab.doctor.settings import DoctorSettings
from draftlab.doctor.target_session import TargetSession
from draftlab.heads.config import make_head_config
from draftlab.heads.eagle import EagleHead
from draftlab.heads.folder import CONFIG, NATIVE, WEIGHTS, load_config
from draftlab.heads.head import initialise_head
from draftlab.heads.native_config import native_config
from draftlab.pipeline.resolve import reference_head
from draftlab.progress import Monitor
from draftlab.target_model.settings import TargetSettings


@pytest.fixture(scope="session")
def witness() -> TargetSession:
    settings = DoctorSettings(max_prompts=6, max_new_tokens=36, k=2)
    return TargetSession(TargetSettings(device="cpu"), settings, Monitor())


Tensors = dict[str, Tensor]
Broken = Callable[..., Path]


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    """A copy of the reference head, its tensors and its config changed as a writer would."""

    def make(change: Callable[[Tensors], Any] | None = None, **fields: Any) -> Path:
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

    return make


@pytest.fixture
def examined(witness: TargetSession, broken: Broken) -> Callable[..., Diagnosis]:
    """The diagnosis of such a copy."""
    return lambda *change, **fields: examine(broken(*change, **fields), witness)


@pytest.fixture
def untrained_eagle(witness: TargetSession, broken: Broken) -> Path:
    """A head of EAGLE's first generation, as it is before training."""
    own = load_config(reference_head()).model_dump(mode="json", by_alias=True)
    more = {"family": "eagle", "boundaries": [12], "draft_vocab_size": 6144, "provenance": {}}
    config = make_head_config(**(own | more))
    head, parts = EagleHead(config), witness.target.parts
    initialise_head(
        head,
        embeddings=parts.embeddings,
        final_norm=next(parts.norm.parameters()),
        lm_head=parts.lm_head,
        target_ids=torch.arange(6144),
        seed=0,
    )
    left_out = {*head.shared_tensors(), "d2t", "t2d"}

    def change(stored: Tensors) -> None:
        stored.clear()
        stored.update(
            {n: t.detach().bfloat16() for n, t in head.tensors().items() if n not in left_out}
        )

    return broken(change, **config.model_dump(mode="json", by_alias=True))


def kinds(diagnosis: Diagnosis, severity: str = "fault") -> list[str]:
    """Kinds of its findings."""
    return [f.kind for f in diagnosis.findings if f.severity == severity]
