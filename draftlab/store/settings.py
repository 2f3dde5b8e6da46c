"""Settings of the recording. This module imports neither torch nor transformers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from draftlab.settings import ServerUrls, Settings, SingleOrList, Size
from draftlab.store.urls import check_url
from draftlab.target_model.settings import VllmSettings

StoreDtype = Literal["bfloat16", "float32", "fp8"]
RecordBackend = Literal["transformers", "vllm", "server"]


class StateServerSettings(Settings):
    """Running vLLM servers that write hidden states; `--plan` prints the command that starts one.

    OPENAI_API_KEY goes to them as `regenerate.server.url` says.
    """

    urls: ServerUrls
    """Addresses of servers of the same target, such as http://localhost:8000."""
    folder: str
    """Folder that this machine sees and to which the servers write, by whatever path."""
    model: str | None = None
    """The servers' name of the target; None: the only model that they serve."""


class RecordSettings(Settings):
    """Which hidden states are recorded, and how they are stored."""

    boundaries: Annotated[tuple[int, ...] | None, SingleOrList] = None
    """Boundaries whose states become the features, in ascending order: the inputs of the layers
    with these numbers (vLLM's `eagle_aux_hidden_state_layer_ids`); None: the target's defaults."""
    dtype: StoreDtype = "bfloat16"
    """Dtype of the stored states. fp8 stores the features in 8 bits with a scale for each token and
    boundary, and the last state in bfloat16; it takes three fifths of the disk space."""
    shard_tokens: Annotated[int, Field(gt=0)] = 32_768
    """Tokens of a shard. Three shards are held in memory, and a killed recording loses them."""
    batch_tokens: Annotated[int, Field(gt=0)] = 8_192
    """Maximum number of tokens of a forward pass, including padding where a target needs it; a
    longer sample has a pass of its own."""
    max_length: Annotated[int, Field(gt=2)] | None = None
    """Maximum number of tokens of a sample; None: as many as the target has positions, which is the
    limit for larger values too."""
    window: Size | None = None
    """Most disk space of the shards that training reads, such as 200GB; None: all are recorded
    before the training. With a window they are recorded while the training reads others, a shard
    that it has read is deleted, and every further epoch computes its states again. Records are
    shuffled within half of the window. Validation records have shards of their own, which stay."""
    keep: Literal["window", "all"] = "window"
    """With a window: which shards stay. all: every shard is recorded before the training, which
    reads them in the window's order, so that the head has the same bits."""
    url: str | None = None
    """Folder of the shards at a URL that fsspec knows: s3://bucket/folder, gs://, hf://.
    Copies of the manifest make it a store by itself. Training reads through a cache on each machine
    (environment variables DRAFTLAB_CACHE, its folder, and DRAFTLAB_CACHE_SIZE, 20GB). Credentials
    are in the environment. None: the shards are in the run folder."""
    backend: RecordBackend = "transformers"
    """What computes the states: transformers, or an installed vLLM in a process of its own through
    its hidden-state extraction, for the architectures that it supports. Both give the same store up
    to rounding; vLLM runs a target on `target.gpus` GPUs at once (tensor parallel). server: vLLM
    servers that run elsewhere, see `server`."""
    server: StateServerSettings | None = None
    """The servers of the backend "server"."""
    vllm: VllmSettings = VllmSettings()
    """Settings of the vLLM backend."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value)

    @model_validator(mode="after")
    def _window_fits(self) -> RecordSettings:
        if self.window is not None and self.window < 10_000:  # a unit was forgotten
            raise ValueError(f"window: expected a size such as 200GB, found {self.window} bytes")
        if self.rolls and self.url is not None:
            raise ValueError(
                "expected url, or a window whose shards are deleted, found both: keep=all keeps "
                "the shards of a window at the URL"
            )
        if self.keep == "all" and self.window is None:
            raise ValueError("keep=all keeps the shards of a window: expected a window, found none")
        if self.backend == "server" and self.server is None:
            raise ValueError("expected server.urls and server.folder for backend server")
        if self.backend == "server" and self.rolls:
            raise ValueError(
                "expected keep=all with backend server, found a window whose shards are recorded "
                "again: servers run other requests beside them, which changes the last bits"
            )
        return self

    def length_limit(self, positions: int) -> int:
        """Return the most tokens of a sample of a target with this many positions."""
        return min(self.max_length or positions, positions)

    @property
    def rolls(self) -> bool:
        """True if shards are recorded and deleted while the training runs."""
        return self.window is not None and self.keep == "window"
