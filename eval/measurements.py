"""What the programs of eval/ share: results saved part by part, and a check of what they need.

A program's measurement has parts: a head, a batch, a number of requests. Each is saved in a JSON
file (`--results`) as soon as it is there. The same command then measures only the parts that the
file lacks, and with `--minutes` it begins none after a time. Several programs, one after the other,
can share a file; its parts belong to a program, a device and its options.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftlab.errors import UserError
from draftlab.evaluate.metrics import device_name
from draftlab.files import read_json, write_json
from draftlab.progress import Monitor

ROOT = Path(__file__).resolve().parents[1]


class PrintMonitor(Monitor):
    """A monitor that prints lines and shows no progress.

    Args:
        errors: whether to print on stderr.
    """

    def __init__(self, *, errors: bool = False) -> None:
        self.errors = errors

    def say(self, line: str) -> None:
        print(line, file=sys.stderr if self.errors else sys.stdout, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `Measurements`."""
    parser.add_argument(
        "--results", type=Path, help="a JSON file of finished parts, which are not measured again"
    )
    parser.add_argument("--minutes", type=float, help="begin no part after so many minutes")


def option_values(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the values of some options by name."""
    return {name: getattr(options, name) for name in names}


class Measurements:
    """The parts of a measurement, each saved as soon as it is there.

    Args:
        options: of a parser that `add_options` has seen.
        conditions: what all parts have in common beside program, device and version of torch.
        device: None: the first GPU, or the CPU.

    Attributes:
        parts: results by name.
        left_out: names of parts for which no time was left.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        conditions: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.file: Path | None = options.results
        self._end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        facts = {"program": Path(sys.argv[0]).name, "device": device_name(device)}
        facts |= {"torch": torch.__version__} | dict(conditions or {})
        self.conditions = {name: str(value) for name, value in facts.items()}
        self.parts: dict[str, Any] = {}
        self.left_out: list[str] = []
        print(", ".join(f"{name} {value}" for name, value in self.conditions.items()), flush=True)
        self._others: list[dict[str, Any]] = []
        if self.file is not None and self.file.exists():
            for one in read_json(self.file, kind="file of results"):
                if one["conditions"] == self.conditions:
                    self.parts = one["parts"]
                else:
                    self._others.append(one)
            print(f"{self.file} has {', '.join(self.parts) or 'none of these parts'}", flush=True)

    @property
    def time_is_up(self) -> bool:
        """Whether no further part may begin."""
        return self._end is not None and time.monotonic() > self._end

    def measure(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the results of a part: those in the file, or else those of `measure`.

        Args:
            measure: returns what JSON can hold.

        Returns:
            The results as JSON has them; None if the part is not there and no time is left.
        """
        if name not in self.parts:
            if self.time_is_up:
                self.left_out.append(name)
                print(f"no time is left for {name}", flush=True)
                return None
            self.save(name, measure())
        return self.parts[name]

    def save(self, name: str, results: Any) -> None:
        """Save the results of a part."""
        self.parts[name] = json.loads(json.dumps(results))
        if self.file is not None:
            own = {"conditions": self.conditions, "parts": self.parts}
            write_json(self.file, [*self._others, own])


def require(
    *, gpus: int = 0, modules: Iterable[str] = (), disk: tuple[Path, float] | None = None
) -> None:
    """Check at once what a program will need.

    Args:
        gpus: CUDA devices.
        modules: modules of other packages.
        disk: a folder, and the bytes that it will need.

    Raises:
        UserError: something is lacking; the message names everything that is.
    """
    lacking = [text for name in modules if (text := import_error(name))]
    if gpus > torch.cuda.device_count():
        lacking.append(f"{gpus} GPUs, found {torch.cuda.device_count()}")
    if disk is not None:
        folder, size = disk
        free = shutil.disk_usage(folder).free
        print(f"needs {size / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f}", flush=True)
        if free < size:
            lacking.append(f"{size / 1e9:.1f} GB in {folder}, found {free / 1e9:.1f}")
    if lacking:
        raise UserError("\n".join(f"expected {text}" for text in lacking))


def import_error(*modules: str) -> str | None:
    """Return why modules cannot be imported; None if they can."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"the module {name}, found: {error}"
    return None


def child_environment(**variables: str) -> dict[str, str]:
    """Return an environment in which a child process imports what this process can.

    A child that runs in another folder would not find packages by a relative PYTHONPATH.
    """
    own = ROOT / "eval"
    paths = [path for path in sys.path if path and not Path(path).is_relative_to(own)]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *paths])} | variables


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column is aligned to the left."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    align: list[Callable[..., str]] = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    for row in (header, *rows):
        cells = (one(text, width) for one, text, width in zip(align, row, widths, strict=True))
        print("  ".join(cells), flush=True)


def print_usage(what: str, started: tuple[float, float]) -> None:
    """Print the seconds since `started` (`now()`) and the memory peak of this process."""
    status = Path("/proc/self/status").read_text()  # getrusage would count the parent's memory
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 2**20
    cpu = time.process_time() - started[1]
    seconds = time.perf_counter() - started[0]
    print(f"{what}: {seconds:.1f} s, {cpu:.1f} s of CPU, peak {peak:.2f} GiB", flush=True)


def now() -> tuple[float, float]:
    """Return the time, and the CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()
