"""Freed memory is reused: the process takes fewer page faults for the same tensors."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from draftlab.kernels.cpu_memory import keep_freed_memory

PROGRAM = """
import resource, sys, torch
from draftlab.kernels.cpu_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
torch.set_num_threads(1)
x = torch.ones(16 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):  # the heap grows by some tensors first
    x + 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_tensors_take_fewer_page_faults() -> None:
    if torch.cuda.is_available():
        pytest.skip("the setting is for machines without a GPU")

    def faults(mode: str) -> int:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True
        )
        return int(run.stdout)

    assert faults("keep") < faults("leave") / 4


def test_a_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not keep_freed_memory()
