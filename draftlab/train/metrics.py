"""The metrics of training, in metrics.jsonl and in trackers."""

from __future__ import annotations

import json
import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import sha256_text, write_text
from draftlab.formatting import pip_install
from draftlab.train.objectives.loss import Sums
from draftlab.train.settings import TrainSettings

NOT_TRAINING = "outside"
"""The phase of validation and checkpoints."""


class PhaseTimer:
    """Measures the time since `start` in named phases.

    On a GPU a mark is an event behind the queued work, so a phase lasts as long as its work and the
    GPU's idle time before it. Elsewhere it measures the host's time.

    Attributes:
        totals: seconds of each phase since the timer was made, as far as they were read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.totals: dict[str, float] = {}

    def start(self) -> None:
        """Drop all marks and begin the first phase."""
        self._marks = [("", self._now())]

    def mark(self, phase: str) -> None:
        """End a phase; phases of the same name add up."""
        self._marks.append((phase, self._now()))

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase up to the last mark, where time starts anew."""
        if self.on_gpu:
            self._marks[-1][1].synchronize()
        phases: dict[str, float] = {}
        for (_, before), (phase, now) in zip(self._marks, self._marks[1:], strict=False):
            seconds = before.elapsed_time(now) / 1e3 if self.on_gpu else now - before
            phases[phase] = phases.get(phase, 0.0) + seconds
        self._marks = self._marks[-1:]
        for phase, seconds in phases.items():
            self.totals[phase] = self.totals.get(phase, 0.0) + seconds
        return phases

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


@dataclass
class Window:
    """The metrics of the steps since the last line of metrics.jsonl; sums stay on the device."""

    sums: Sums
    grad_norm: Tensor
    largest_norm: Tensor
    tokens: int = 0
    teachers: int = 0
    counts: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, num_steps: int, device: torch.device) -> Window:
        """Return a window without steps."""
        sums, zero = Sums.zeros(num_steps, device), torch.zeros((), device=device)
        return cls(sums, zero, zero, counts=[0] * num_steps)

    def add_step(self, counts: Sequence[int], tokens: int, teachers: int) -> None:
        """Add the counts of an optimizer step on all ranks."""
        self.tokens += tokens
        self.teachers += teachers
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]

    def add_gradient_norm(self, grad_norm: Tensor) -> None:
        """Record a step's gradient norm, and the largest one; a norm that is not finite stays."""
        self.grad_norm = grad_norm
        self.largest_norm = torch.maximum(self.largest_norm, grad_norm)

    def compute(
        self, timer: PhaseTimer, *, mfu_seconds: float | None, bytes_before: int = 0
    ) -> dict[str, Any]:
        """Return the numbers of a line; the host waits for the device once.

        Args:
            timer: has run since the window was opened; it restarts.
            mfu_seconds: seconds of the window at an MFU of 1; None: MFU is left out, as on a CPU.
                If the window was faster, other work slowed the measurement, and MFU is None.
            bytes_before: of the GPU's tensors that are not the training's.
        """
        loss, alpha, hits = ((x / self.sums.count.clamp(min=1)).tolist() for x in self.sums[:3])
        phases = timer.read()
        phases.pop(NOT_TRAINING, None)
        seconds = sum(phases.values())
        tokens_per_s = self.tokens / seconds
        mfu = (mfu_seconds or 0) / seconds
        return {
            "loss": loss,
            "alpha": alpha,
            "accuracy": hits,
            "grad_norm": float(self.grad_norm),
            "tokens_per_s": tokens_per_s,
            "loss_tokens_per_s": self.counts[0] / seconds,
            "predictions_per_s": sum(self.counts) / seconds,
            **({} if mfu_seconds is None else {"mfu": mfu if mfu <= 1 else None}),
            "phases": {name: part / seconds for name, part in phases.items()},
            "peak_memory_gib": (peak_memory(self.grad_norm.device) - bytes_before) / 2**30,
        }


def reset_peak_memory(device: torch.device) -> None:
    """Have `peak_memory` leave out what this process needed before, where the system can do so."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # a container may forbid it
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Return the peak since `reset_peak_memory` in bytes: of tensors on a GPU, else the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def speed_line(row: dict[str, Any]) -> str:
    """Return a line's speed, loss and share of time without data, for the console."""
    mfu = ""
    if "mfu" in row:
        share = row["mfu"]
        mfu = f"MFU {'not known (a shared GPU)' if share is None else f'{share:.0%}'} · "
    memory = f"{row['peak_memory_gib']:.1f} GiB" + ("" if mfu else " with libraries")
    return (
        f"{row['tokens_per_s']:,.0f} tokens/s ({row['loss_tokens_per_s']:,.0f} with loss) · "
        f"loss {row['loss'][0]:.3f} · α {row['alpha'][0]:.3f} · {mfu}"
        f"data {row['phases'].get('data', 0):.1%} of the time · {memory}"
    )


class MetricsLog:
    """Writer of `folder`/metrics.jsonl and of `trackers`; it writes nothing if `muted`."""

    def __init__(self, folder: Path, *, muted: bool = False) -> None:
        self.path, self.muted = folder / "metrics.jsonl", muted
        self.trackers: list[Callable[[Mapping[str, float], int], object]] = []
        if not muted:
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def tracked(
        self, settings: TrainSettings, key: str, config: Mapping[str, Any], step: int
    ) -> Iterator[None]:
        """Send rows to the trackers that the settings name, until the block ends.

        Trackers end with 0 or the exit code of what ended it. A training that resumes after `step`
        continues its run of Weights & Biases, and hides what TensorBoard has behind the step.
        """
        if self.muted:
            yield
            return
        check_trackers(settings)
        folder, code = self.path.parent, 1
        ends: list[Callable[[int], object]] = []
        if settings.wandb:
            import wandb

            name = folder.parent.name
            run = wandb.init(
                project=settings.wandb,
                name=name,
                id=sha256_text(f"{key} {name}")[:16],
                resume="allow",
                config=dict(config),
                dir=str(folder),
            )
            self.trackers.append(lambda numbers, step: run.log(dict(numbers), step=step))
            ends.append(run.finish)
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
            self.trackers.append(
                lambda numbers, step: [writer.add_scalar(n, numbers[n], step) for n in numbers]
            )
            ends.append(lambda _: writer.close())
        try:
            yield
            code = 0
        except KeyboardInterrupt:
            code = 130
            raise
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
            raise
        finally:
            self.trackers.clear()
            for end in ends:
                end(code)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row, which has a `step`."""
        if self.muted:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        for log in self.trackers:
            log(_flat(row), row["step"])

    def truncate(self, step: int, steps: int) -> bool:
        """Drop rows behind the checkpoint of `step`, and a torn last line; return whether the
        step's validation is there. A signal ends training before it. That of the last of `steps` is
        done again.
        """
        if self.muted or not self.path.exists():
            return False
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
        valid = [
            line
            for line, row in rows
            if row["step"] <= step - (step == steps and "validation" in row)
        ]
        write_text(self.path, "".join(valid), writer="trainer")
        return any(row["step"] == step and "validation" in row for _, row in rows)


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return nested numbers and lists under slash-separated names."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, list):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}/")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def check_trackers(settings: TrainSettings) -> None:
    """Raise a `UserError` if a package of a tracker is not installed."""
    for name, chosen in (("wandb", settings.wandb), ("tensorboard", settings.tensorboard)):
        if chosen and find_spec(name) is None:
            raise UserError(
                f"train.{name} is set, and {name} is not installed",
                where=f"train.{name}",
                do=pip_install(name),
            )
