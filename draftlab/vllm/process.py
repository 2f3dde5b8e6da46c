"""An installed vLLM as a program of its own: found, started, asked in JSON lines, ended."""

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
from draftlab.target_model.settings import VllmSettings
from draftlab.vllm.vllm_client.request import NO_VLLM

PYTHON_VARIABLE = "DRAFTLAB_VLLM_PYTHON"
CLIENT = Path(__file__).with_name("vllm_client")
_START = """\
import sys
sys.path = [sys.argv[1], *filter(None, sys.path)]  # the working directory may hold a vllm.py
from vllm_client.serve import main
sys.exit(main())
"""
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells this process of its peers; vLLM is none of them."""
_INSTALL = (
    f"name the Python that has vLLM: vllm.python of eval, record or regenerate, or "
    f"{PYTHON_VARIABLE}; eval/parity/setup_vllm.sh makes one for a CPU"
)


def find_python(settings: VllmSettings) -> Path:
    """The interpreter that runs vLLM.

    Raises:
        UserError: none is named and this one has no vLLM, or what is named is no program.
    """
    if settings.python is None and importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    named = settings.python or os.environ.get(PYTHON_VARIABLE)
    if not named:
        raise UserError("expected an installed vLLM, found none in this Python", do=_INSTALL)
    path = Path(named).expanduser().absolute()  # not resolved: a link tells its environment
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UserError(
            "expected a Python that has vLLM, found no program", where=path, do=_INSTALL
        )
    return path


class VllmProcess:
    """A vLLM with its engine loaded.

    Args:
        setup: what the client is told (`vllm_client/__init__.py`); `engine_extra` goes before what
            is decided here of memory and GPUs.
        settings: where vLLM is, and its share of memory.
        device, gpus: the GPUs it gets, from `device` on; a CPU build takes none.

    Attributes:
        python: the interpreter that runs it.
        info: what it says of itself (version, runner, device, corrections).

    Raises:
        UserError: no vLLM, or one that does not start; with the end of what it printed.
    """

    def __init__(
        self,
        setup: dict[str, Any],
        settings: VllmSettings,
        device: torch.device | None = None,
        gpus: int = 1,
    ) -> None:
        self.python = find_python(settings)
        extra = setup.get("engine_extra", {})
        environment = {k: v for k, v in os.environ.items() if k not in _LAUNCHED}
        if device is not None and device.type == "cuda":
            # What lies on the GPU already stays there: vLLM may only take what is left.
            free, total = torch.cuda.mem_get_info(device)
            extra = {
                "gpu_memory_utilization": settings.memory_share or 0.9 * free / total,
                "tensor_parallel_size": gpus,
                **extra,
            }
            environment["CUDA_VISIBLE_DEVICES"] = _visible(device.index or 0, gpus)
        # A folder of its own: it comes first where Python looks for modules, and beside the client
        # are a vllm.py and others that would be found in place of the real ones.
        self._folder = tempfile.TemporaryDirectory()
        copy = Path(self._folder.name) / CLIENT.name
        shutil.copytree(CLIENT, copy, ignore=shutil.ignore_patterns("__pycache__"))
        self._said = open(Path(self._folder.name) / "said", "w+b")  # noqa: SIM115  # see close
        self._process = subprocess.Popen(
            [str(self.python), "-c", _START, self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        started = time.monotonic()
        try:
            self.info = self.ask({**setup, "engine_extra": extra})
        except BaseException:
            self.close()
            raise

        self._took = time.monotonic() - started

    @property
    def name(self) -> str:
        """Version, runner and device: "vllm 0.32.0 (V1, cpu)"."""
        return f"vllm {self.info['version']} ({self.info['runner']}, {self.info['device']})"

    def line(self) -> str:
        """Its name, where it is, how long it took to start, and what was mended in it."""
        corrected = (f"corrected: {text}" for text in self.info["corrections"])
        place = f"{self.name} at {self.python}, started in {self._took:.0f} s"
        return "; ".join([place, *corrected])

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One line there, one line back.

        Raises:
            UserError: it has ended; with the end of what it printed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._said.seek(0)
        said = self._said.read().decode("utf-8", "replace").strip()
        missing = status == NO_VLLM
        raise UserError(
            "expected a Python that has vLLM, found one without"
            if missing
            else f"vLLM ended with status {status}:\n{_end_of(said)}",
            where=self.python,
            do=_INSTALL if missing else "",
        )

    def close(self) -> None:
        """Ends the program; closing twice is fine."""
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
        self._said.close()
        self._folder.cleanup()


def _end_of(said: str) -> str:
    """The end of what a program printed, after the errors further up that it may come from."""
    end = said[-3000:]
    errors = re.findall(r"\b\w+Error: .+", said[:-3000])
    return "\n".join([*dict.fromkeys(errors), end or "it said nothing"])


def _visible(first: int, count: int) -> str:
    """CUDA_VISIBLE_DEVICES of a program that gets `count` of the GPUs this one sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
    return ",".join(names[first : first + count])
