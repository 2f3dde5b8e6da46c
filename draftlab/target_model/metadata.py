"""A target's metadata, read from its files while another program runs the model."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.locate import load_config, max_positions, resolve_device, resolve_target
from draftlab.target_model.parts import TargetParts, load_parts
from draftlab.target_model.settings import TargetSettings


class TargetMetadata:
    """The attributes of a `Target`, under the same names, without its layers.

    Embeddings, final norm and lm_head are read on first use, the last two on `device`. The process
    that runs the layers says the `padding_reason`; vLLM needs no padding. Raises a `UserError` if
    the checkpoint is missing or its config does not load.
    """

    def __init__(self, settings: TargetSettings, padding_reason: str | None = None) -> None:
        self.folder: Path = resolve_target(settings)
        self.name, self.settings, self.padding_reason = settings.path, settings, padding_reason
        self.device = resolve_device(settings.device)
        config = load_config(self.folder, trust_remote_code=settings.trust_remote_code)
        self.config: Any = config.get_text_config()
        self._config_dtype = getattr(config, "dtype", None) or getattr(self.config, "dtype", None)
        self.num_layers = int(self.config.num_hidden_layers)
        self.hidden_size = int(self.config.hidden_size)

    @cached_property
    def fingerprint(self) -> str:
        """The checkpoint's fingerprint."""
        return fingerprint(self.folder)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Compute dtype; "auto" is resolved as `load_target` does."""
        if self.settings.dtype != "auto":
            return getattr(torch, self.settings.dtype)
        if self.device.type == "cpu":
            return torch.float32
        return self._config_dtype or self._checkpoint_parts.embeddings.dtype

    @cached_property
    def _checkpoint_parts(self) -> TargetParts:
        """The parts in the checkpoint's dtype, on the CPU."""
        return load_parts(self.folder, trust_remote_code=self.settings.trust_remote_code)

    @cached_property
    def parts(self) -> TargetParts:
        """Norm and lm_head on `device`, in `dtype`; embeddings, which are not used, stay."""
        parts = self._checkpoint_parts
        norm = copy.deepcopy(parts.norm).to(self.device, self.dtype)
        return replace(parts, norm=norm, lm_head=parts.lm_head.to(self.device, self.dtype))

    @property
    def vocab_size(self) -> int:
        """Rows of lm_head."""
        return self._checkpoint_parts.lm_head.shape[0]

    @property
    def max_length(self) -> int:
        """Largest number of positions that the config allows."""
        return max_positions(self.config)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Return float32 logits [..., V] of last states [..., Ht] before the final norm."""
        return self.parts.logits(last)
