"""Trackers that show the metrics of a training: Weights & Biases and TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from draftlab.errors import UserError
from draftlab.files import sha256_text
from draftlab.train.settings import TrainSettings


class Tracker(Protocol):
    """A program that receives numbers by name and step."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class _Wandb:
    """A run of Weights & Biases, which a resumed training continues."""

    def __init__(self, project: str, folder: Path, key: str, config: Mapping[str, Any]) -> None:
        import wandb

        name = folder.parent.name
        self.run = wandb.init(
            project=project,
            name=name,
            id=sha256_text(f"{key} {name}")[:16],
            resume="allow",
            config=dict(config),
            dir=str(folder),
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.run.log(dict(numbers), step=step)

    def finish(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)


class _TensorBoard:
    """Event files in `folder`/tensorboard; those behind the resumed step are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, exit_code: int) -> None:
        self.writer.close()


def check_trackers(settings: TrainSettings) -> None:
    """Raise a `UserError` if a package of a tracker is not installed."""
    for name, chosen in (("wandb", settings.wandb), ("tensorboard", settings.tensorboard)):
        if chosen and find_spec(name) is None:
            raise UserError(
                f"train.{name} is set, and {name} is not installed",
                where=f"train.{name}",
                do=f"pip install 'draftlab[{name}]'",
            )


@contextmanager
def open_trackers(
    settings: TrainSettings, folder: Path, key: str, config: Mapping[str, Any], step: int
) -> Iterator[list[Tracker]]:
    """Yield the trackers that the settings name; they learn how the block ended.

    Args:
        folder: the run's train/ folder.
        key: of the training; a run of Weights & Biases is found again by it and the run's name.
        config: all settings of the run.
        step: the step that training continues after.
    """
    check_trackers(settings)
    trackers: list[Tracker] = []
    if settings.wandb:
        trackers.append(_Wandb(settings.wandb, folder, key, config))
    if settings.tensorboard:
        trackers.append(_TensorBoard(folder, step))
    code = 1
    try:
        yield trackers
        code = 0
    except KeyboardInterrupt:
        code = 130
        raise
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        raise
    finally:
        for tracker in trackers:
            tracker.finish(code)
