"""Settings of the recipe's section run:."""

from __future__ import annotations

from pydantic import field_validator

from draftlab.settings import Settings
from draftlab.store.urls import check_url


class RunSettings(Settings):
    """The copy of a run folder at a URL."""

    url: str | None = None
    """Folder at a URL that fsspec knows (s3://bucket/folder, gs://, hf://, file://), to which the
    run's files are copied: recipe, answers, checkpoints, head, report and exports. On another
    machine the same command with the same recipe goes on from them. The shards are at
    `record.url`. Credentials are in the environment. None: nothing is copied."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value)
