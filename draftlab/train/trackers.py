"""Trackers that show the metrics of a training: Weights & Biases and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import sha256_text
from draftlab.formatting import pip_install
from draftlab.train.settings import TrainSettings

Log = Callable[[Mapping[str, float], int], None]
"""Sends numbers by name, and the step that they are of."""


def check_trackers(settings: TrainSettings) -> None:
    """Raise a `UserError` if a package of a tracker is not installed."""
    for name, chosen in (("wandb", settings.wandb), ("tensorboard", settings.tensorboard)):
        if chosen and find_spec(name) is None:
            raise UserError(
                f"train.{name} is set, and {name} is not installed",
                where=f"train.{name}",
                do=pip_install(name),
            )


@contextmanager
def open_trackers(
    settings: TrainSettings, folder: Path, key: str, config: Mapping[str, Any], step: int
) -> Iterator[list[Log]]:
    """Yield functions that send numbers to the trackers which the settings name.

    Trackers end with the block, with 0 or the exit code of what ended it. A resumed training
    continues its run of Weights & Biases, and hides what TensorBoard has behind its step.

    Args:
        folder: the run's train/ folder.
        key: of the training.
        config: all settings of the run.
        step: the step that training continues after.
    """
    check_trackers(settings)
    logs: list[Log] = []
    ends: list[Callable[[int], object]] = []
    if settings.wandb:
        import wandb

        name = folder.parent.name
        id_ = sha256_text(f"{key} {name}")[:16]
        run = wandb.init(
            project=settings.wandb,
            name=name,
            id=id_,
            resume="allow",
            config=dict(config),
            dir=str(folder),
        )
        logs.append(lambda numbers, step: run.log(dict(numbers), step=step))
        ends.append(run.finish)
    if settings.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        logs.append(lambda numbers, step: [writer.add_scalar(n, numbers[n], step) for n in numbers])
        ends.append(lambda _: writer.close())
    code = 1
    try:
        yield logs
        code = 0
    except KeyboardInterrupt:
        code = 130
        raise
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        raise
    finally:
        for end in ends:
            end(code)
