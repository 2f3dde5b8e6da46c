"""Triton's interpreter, in which kernels run on a CPU.

Triton reads TRITON_INTERPRET when kernels are defined. So a file of tests that call kernels has one
that runs the file once more, in a process where it is set: that one is marked `runs_the_others`,
those that need it `inside` (`on_kernels`: there or on a
GPU, `DEVICE`), those that no kernel takes part in `outside`. Those that compile
kernels and launch none are marked `compiles`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
on_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="run by test_in_the_interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
outside = pytest.mark.skipif(INTERPRETED, reason="no kernel takes part")
runs_the_others = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="runs the others"
)
compiles = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="needs the compiler, and no GPU"
)


def run_in_the_interpreter(file: str) -> None:
    """Runs a file's tests (its `__file__`) with interpreted kernels; they must pass."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", file, "-x", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" in done.stdout  # the test that called this, in there
