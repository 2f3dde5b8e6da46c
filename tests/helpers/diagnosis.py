"""Shared parts of the doctor's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.doctor.diagnosis import Diagnosis
from draftlab.heads.config import HeadConfig, make_head_config
from draftlab.heads.folder import load_config, new_head
from draftlab.heads.head import initialise_head
from draftlab.run.resolve import reference_head
from draftlab.target_model.parts import TargetParts

Tensors = dict[str, Tensor]
CopyHead = Callable[..., Path]
DiagnoseCopy = Callable[..., Diagnosis]


def fault_kinds(diagnosis: Diagnosis) -> list[str]:
    """Return the kinds of its faults."""
    return [f.kind for f in diagnosis.findings if f.severity == "fault"]


def reference_config(**changes: Any) -> HeadConfig:
    """Return the reference head's config with changes."""
    fields = load_config(reference_head()).model_dump(by_alias=True) | {"provenance": {}}
    return make_head_config(**(fields | changes))


def initial_tensors(config: HeadConfig, parts: TargetParts) -> Tensors:
    """Return the tensors that the file of an untrained head would hold."""
    head = new_head(config)
    initialise_head(
        head,
        embeddings=parts.embeddings,
        final_norm=next(parts.norm.parameters()),
        lm_head=parts.lm_head,
        target_ids=torch.arange(config.draft_vocab_size),
        seed=0,
    )
    maps = {"d2t", "t2d"} if config.draft_vocab_size == config.vocab_size else set()
    omitted = {*head.shared_tensors(), *maps}
    return {name: t.detach().clone() for name, t in head.tensors().items() if name not in omitted}
