"""Freed memory is reused: the process takes fewer page faults for the same tensors."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest
import torch

from draftlab.kernels.devices import reuse_freed_memory

PROGRAM = """
import re, resource, sys, torch
from contextlib import nullcontext
from pathlib import Path
from draftlab.kernels.devices import reuse_freed_memory

def megabytes():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

torch.set_num_threads(1)
x = torch.ones(16 * 2**20)
start = megabytes()
with reuse_freed_memory() if sys.argv[1] == "reuse" else nullcontext():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):  # the heap grows by some tensors first
        x + 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    tensors = [torch.ones(2**21) for _ in range(40)]  # 8 MiB each
    del tensors[:-1]
    inside = megabytes()
print(faults, inside - start, megabytes() - start)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_reused_and_given_back() -> None:
    if torch.cuda.is_available():
        pytest.skip("the setting is for machines without a GPU")

    def run(mode: str) -> list[int]:
        command = [sys.executable, "-c", PROGRAM, mode]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        return [int(word) for word in run.stdout.split()]

    faults, inside, after = run("reuse")
    assert faults < run("leave")[0] / 4
    assert inside > 300
    assert after < 50  # 39 tensors lay below one that is in use


def test_a_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # has no functions
    with reuse_freed_memory():
        pass
