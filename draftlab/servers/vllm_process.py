"""The process of an installed vLLM: its interpreter, its start, its requests and its end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from draftlab.errors import UserError
from draftlab.servers.vllm_client.loading import NO_VLLM
from draftlab.target_model.settings import VllmSettings

PYTHON_VARIABLE = "DRAFTLAB_VLLM_PYTHON"
CLIENT = Path(__file__).with_name("vllm_client")
_START = """\
import sys
sys.path = [sys.argv[1], *filter(None, sys.path)]  # the working directory may have a vllm.py
from vllm_client.serve import main
sys.exit(main())
"""
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for this process; vLLM is none of its ranks."""


def find_python(program: str = "vllm") -> Path:
    """Return the interpreter that runs vLLM or SGLang.

    It is that of `PYTHON_VARIABLE` (SGLang: DRAFTLAB_SGLANG_PYTHON), else this one.

    Args:
        program: name of the module, vllm or sglang.

    Raises:
        UserError: none is named and this one has no such module, or the named file is no program.
    """
    name = {"vllm": "vLLM", "sglang": "SGLang"}[program]
    variable = PYTHON_VARIABLE.replace("VLLM", program.upper())
    install = f"name the Python that has {name} in the environment: {variable}"
    install += "; eval/parity/setup_vllm.sh makes one for a CPU" * (program == "vllm")
    python = os.environ.get(variable)
    if not python:
        if importlib.util.find_spec(program) is not None:
            return Path(sys.executable)
        raise UserError(f"expected an installed {name}, found none in this Python", do=install)
    # Links are not resolved, because Python finds its environment by the link.
    path = Path(python).expanduser().absolute()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UserError(
            f"expected a Python that has {name}, found no program", where=path, do=install
        )
    return path


class VllmProcess:
    """A process with a loaded vLLM engine, which answers requests.

    Args:
        setup: the client's setup (`vllm_client/loading.py`); its `engine_extra` replaces the
            options for memory and GPUs chosen here.
        settings: its share of memory.
        device, gpus: the first of its GPUs, and their number; a CPU build uses none.

    Attributes:
        python: the interpreter that runs it.
        info: its version, runner, device and corrections.

    Raises:
        UserError: there is no vLLM, or it does not start; with the end of its output.
    """

    def __init__(
        self,
        setup: dict[str, Any],
        settings: VllmSettings,
        device: torch.device | None = None,
        gpus: int = 1,
    ) -> None:
        self.python = find_python()
        extra = setup.get("engine_extra", {})
        environment = {k: v for k, v in os.environ.items() if k not in _TORCHRUN}
        if device is not None and device.type == "cuda":
            # vLLM may only use the memory that is free now.
            free, total = torch.cuda.mem_get_info(device)
            extra = {
                "gpu_memory_utilization": settings.memory_share or 0.9 * free / total,
                "tensor_parallel_size": gpus,
                **extra,
            }
            environment["CUDA_VISIBLE_DEVICES"] = _visible_gpus(device.index or 0, gpus)
        # A copy in a folder of its own, which is the first on sys.path: the client's own folder has
        # neighbours such as engine.py that would hide other modules.
        self._folder = tempfile.TemporaryDirectory()
        copy = Path(self._folder.name) / CLIENT.name
        shutil.copytree(CLIENT, copy, ignore=shutil.ignore_patterns("__pycache__"))
        self._log = open(Path(self._folder.name) / "log", "w+b")  # noqa: SIM115  # see close
        self._process = subprocess.Popen(
            [str(self.python), "-c", _START, self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        started = time.monotonic()
        try:
            self.info = self.request({**setup, "engine_extra": extra})
        except BaseException:
            self.close()
            raise
        self._startup_s = time.monotonic() - started

    @property
    def name(self) -> str:
        """Version, runner and device: "vllm 0.32.0 (V1, cpu)"."""
        return f"vllm {self.info['version']} ({self.info['runner']}, {self.info['device']})"

    def describe(self) -> str:
        """Return a line with its name, interpreter, start-up time and corrections."""
        corrections = (f"corrected: {text}" for text in self.info["corrections"])
        start = f"{self.name} at {self.python}, started in {self._startup_s:.0f} s"
        return "; ".join([start, *corrections])

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one line of JSON and return the answer.

        Raises:
            UserError: the process has ended; with the end of its output.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        status = self._process.wait()
        if status == NO_VLLM:
            raise UserError(
                "expected a Python that has vLLM, found one without",
                where=self.python,
                do=f"name one that has it in the environment: {PYTHON_VARIABLE}",
            )
        self._log.seek(0)
        log = self._log.read().decode("utf-8", "replace").strip()
        raise UserError(
            f"vLLM ended with status {status}:\n{log_tail(log)}",
            where=self.python,
            do="the log above says why; less memory: lower memory_share or the batch",
        )

    def close(self) -> None:
        """End the process. A second call does nothing."""
        if self._process.stdin and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()  # the end of its input ends it
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()


def log_tail(log: str) -> str:
    """Return the end of a program's output, after earlier errors that may have caused it."""
    tail = log[-3000:]
    errors = re.findall(r"\b\w+Error: .+", log[:-3000])
    return "\n".join([*dict.fromkeys(errors), tail or "it printed nothing"])


def _visible_gpus(first: int, count: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for `count` of this process's GPUs from `first` on."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = variable.split(",") if variable else map(str, range(torch.cuda.device_count()))
    return ",".join(list(names)[first : first + count])
