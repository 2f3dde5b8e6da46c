"""Shared parts of the doctor's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from draftlab.doctor.findings import Diagnosis

Tensors = dict[str, Tensor]
CopyHead = Callable[..., Path]
DiagnoseCopy = Callable[..., Diagnosis]


def fault_kinds(diagnosis: Diagnosis) -> list[str]:
    """Return the kinds of its faults."""
    return [f.kind for f in diagnosis.findings if f.severity == "fault"]
