"""Triton's interpreter, which runs kernels on a CPU.

Triton reads TRITON_INTERPRET when kernels are defined. A file of kernel tests therefore has one
test, made by `interpreter_test`, that runs the whole file again in a process where it is set.

- `inside` marks tests that need the interpreter, `outside` those that call no kernel,
- `on_kernels` and `kernel_cases` run a test with device="cpu" in the interpreter and, marked `gpu`,
  on a GPU,
- `compiles` marks tests that compile kernels and launch none.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
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
compiles = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="needs the compiler, and no GPU"
)


def kernel_cases(
    names: str, interpreted: Sequence[tuple], on_gpu: Sequence[tuple]
) -> pytest.MarkDecorator:
    """Return a mark like `on_kernels` whose sizes differ: small ones for the interpreter.

    Args:
        names: arguments of the test, separated by commas; `device` is added.
        interpreted, on_gpu: values of the arguments of each case.
    """
    cases = [
        *(pytest.param(*case, "cpu", marks=inside, id=str(case)) for case in interpreted),
        *(pytest.param(*case, "cuda", marks=pytest.mark.gpu, id=f"{case}-gpu") for case in on_gpu),
    ]
    return pytest.mark.parametrize(f"{names}, device", cases)


# What tests of kernels import is imported once: that takes as long as most of these tests. The
# server imports no test itself, so that pytest rewrites the assertions in each child.
SERVER = """
import os, sys
import hypothesis, pytest, torch, transformers.modeling_utils, triton
import draftlab.engine.engine, draftlab.train.loop
torch.set_num_threads(1)
for line in sys.stdin:
    file, log = line.rstrip().split(chr(9))
    child = os.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = pytest.main([file, "-x", "-p", "no:cacheprovider"])
        sys.stdout.flush()
        os._exit(int(status))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def interpreter_server() -> subprocess.Popen[str]:
    """Start a process whose children run files of tests with interpreted kernels.

    It ends when its standard input is closed, at the latest where this process ends.
    """
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # waits, so that its time counts as time of the tests
    return server


def interpreter_test(file: str) -> Callable[[], None]:
    """Return a test: the other tests of a file (its `__file__`) pass with interpreted kernels."""

    @pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="runs the file's tests")
    def test_in_the_interpreter() -> None:
        pytest.importorskip("triton")
        server = interpreter_server()
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "output"
            print(file, log, sep="\t", file=server.stdin, flush=True)
            status = server.stdout.readline().strip()
            output = log.read_text() if log.exists() else "no output"
        assert status == "0", output
        assert " passed" in output
        assert "skipped" in output  # this test, in there

    return test_in_the_interpreter


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
