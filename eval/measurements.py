"""What the programs of eval/ share: results saved part by part, and a check of what they need.

A program's measurement has parts: a head, a batch, a number of requests. Each is saved in a JSON
file (`--results`) as soon as it is there. The same command then measures only the parts that the
file lacks. Several programs, one after the other, can share a file; its parts belong to a program,
a device and its options.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftlab.errors import UserError
from draftlab.evaluate.metrics import device_name
from draftlab.files import read_json, write_json
from draftlab.intervals import expanded_interval, resampled_prompts
from draftlab.progress import Monitor


class PrintMonitor(Monitor):
    """A monitor that prints lines and shows no progress."""

    def say(self, line: str) -> None:
        print(line, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option of `Measurements`."""
    parser.add_argument(
        "--results", type=Path, help="a JSON file of finished parts, which are not measured again"
    )


def option_values(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the values of some options by name."""
    return {name: getattr(options, name) for name in names}


def bootstrap_interval(
    statistic: Callable[[np.ndarray], float],
    count: int,
    *,
    samples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the bootstrap interval of a statistic over prompts (see `expanded_interval`).

    Args:
        statistic: maps an index array [count] of resampled prompts to a number.
        count: number of prompts.
        samples: number of resamples.
        level: confidence level.
        seed: seed of a local numpy generator.
    """
    values = [statistic(index) for index in resampled_prompts(count, samples, seed)]
    return expanded_interval(np.array(values), count, level)


class Measurements:
    """The parts of a measurement, each saved as soon as it is there.

    Args:
        options: of a parser that `add_options` has seen.
        conditions: what all parts have in common beside program, device and version of torch.
        device: None: the first GPU, or the CPU.

    Attributes:
        parts: results by name.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        conditions: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.file: Path | None = options.results
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        facts = {"program": Path(sys.argv[0]).name, "device": device_name(device)}
        facts |= {"torch": torch.__version__} | dict(conditions or {})
        self.conditions = {name: str(value) for name, value in facts.items()}
        self.parts: dict[str, Any] = {}
        print(", ".join(f"{name} {value}" for name, value in self.conditions.items()), flush=True)
        self._others: list[dict[str, Any]] = []
        if self.file is not None and self.file.exists():
            for one in read_json(self.file, kind="file of results"):
                if one["conditions"] == self.conditions:
                    self.parts = one["parts"]
                else:
                    self._others.append(one)
            print(f"{self.file} has {', '.join(self.parts) or 'none of these parts'}", flush=True)

    def measure(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the results of a part: those in the file, or else those of `measure`.

        Args:
            measure: returns what JSON can hold.
        """
        if name not in self.parts:
            self.parts[name] = json.loads(json.dumps(measure()))
            if self.file is not None:
                own = {"conditions": self.conditions, "parts": self.parts}
                write_json(self.file, [*self._others, own])
        return self.parts[name]


def require(*, gpus: int = 0, disk: tuple[Path, float] | None = None) -> None:
    """Check at once what a program will need.

    Args:
        gpus: CUDA devices.
        disk: a folder, and the bytes that it will need.

    Raises:
        UserError: something is lacking; the message names everything that is.
    """
    lacking = []
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
