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
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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


def leave_out_needless_work() -> None:
    """Halve the interpreter's time: patch Triton's language once a launch, and check no overflow.

    Triton patches its language again for every call of a device function. Its check for overflow of
    integers repeats each operation in int64, and adds nothing: where an overflow changes a result,
    the result differs from the reference's.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patching_once_a_launch(interpreter._patch_lang)


def patching_once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return Triton's `_patch_lang` so that it patches each module once in a launch.

    The scope that the outermost call returns is restored where the launch ends. Versions of Triton
    whose `_patch_lang` returns None never restore anything.
    """
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return SimpleNamespace(restore=lambda: None)
        outermost = not patched
        scope = patch(function)
        patched.add(module)
        if outermost and scope is not None:
            restore = scope.restore

            def end() -> None:
                patched.clear()
                restore()

            scope.restore = end
        return scope

    return patch_once


if INTERPRETED:
    leave_out_needless_work()
