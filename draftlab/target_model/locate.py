"""Find the checkpoint folder and the device that a target's settings name."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch

from draftlab.errors import UserError
from draftlab.target_model.settings import EMBEDDED, TargetSettings

_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]


def local_target(settings: TargetSettings) -> Path | None:
    """Return the folder of the embedded or a local target; None if the path is a Hub id.

    Raises:
        UserError: the path is neither a checkpoint folder nor a Hub id.
    """
    if settings.path == EMBEDDED:
        return Path(str(resources.files("draftlab") / "embedded" / "target"))
    path = Path(settings.path).expanduser()
    if (path / "config.json").is_file():
        return path
    if path.exists() or settings.path.startswith((".", "/", "~")) or settings.path.count("/") != 1:
        raise UserError(
            "expected a checkpoint folder with config.json, found none",
            where=path,
            do='give a folder, a Hub id such as "org/name", or "embedded"',
        )
    return None


def resolve_target(settings: TargetSettings) -> Path:
    """Return a local folder with the target; a target on the Hub is downloaded first."""
    if (path := local_target(settings)) is not None:
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(settings.path, revision=settings.revision, allow_patterns=_DOWNLOADED)
        )
    except Exception as error:  # the Hub client has many: offline, gated, unknown, interrupted
        raise UserError(
            f"{settings.path} could not be downloaded from the Hub: {error}",
            where=settings.path,
            do="check the id, your network and your login, or give a local folder",
        ) from None


def resolve_device(name: str) -> torch.device:
    """Return the device that a setting names; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"expected a device such as cpu or cuda:0, found {name!r}: {error}"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"expected a device such as cpu or cuda:0, found {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"expected device {name!r}, found {torch.cuda.device_count()} GPUs",
            do="use device: auto",
        )
    return device
