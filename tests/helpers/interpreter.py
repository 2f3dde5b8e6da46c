"""Triton's interpreter, which runs kernels on a CPU.

Triton reads TRITON_INTERPRET when kernels are defined. A file of kernel tests therefore has one
test that runs the whole file again in a process where the variable is set:

- `runs_the_others` marks that test,
- `inside` marks tests that need the interpreter, `outside` those that call no kernel,
- `on_kernels` runs a test with device="cpu" in the interpreter and, marked `gpu`, on a GPU,
- `compiles` marks tests that compile kernels and launch none.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
on_kernels = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=inside), pytest.param("cuda", marks=pytest.mark.gpu)],
)
outside = pytest.mark.skipif(INTERPRETED, reason="calls no kernel")
runs_the_others = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="runs the other tests of the file"
)
compiles = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="needs the compiler, and no GPU"
)


def run_in_the_interpreter(file: str) -> None:
    """Assert that the tests of a file (its `__file__`) pass with interpreted kernels."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", file, "-x", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" in done.stdout  # the test that called this function
