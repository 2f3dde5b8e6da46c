"""A target as its files tell it, for states and answers that another program computes."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from draftlab.errors import UserError
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.model import resolve_device, resolve_target
from draftlab.target_model.parts import TargetParts, load_parts
from draftlab.target_model.settings import TargetSettings


class TargetMetadata:
    """What there is to know of a `Target` without its layers, under the same names.

    Embeddings, final norm and lm_head are read when they are first asked for.

    Args:
        settings: of the target; as `load_target` reads them.

    Attributes:
        device: of norm and lm_head.

    Raises:
        UserError: a checkpoint that is missing or whose config does not load.
    """

    def __init__(self, settings: TargetSettings) -> None:
        self.folder: Path = resolve_target(settings)
        self.name, self.settings = settings.path, settings
        self.device = resolve_device(settings.device)
        try:
            whole = AutoConfig.from_pretrained(
                self.folder, trust_remote_code=settings.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"the target's config does not load: {error}", where=self.folder
            ) from None
        self.config: Any = whole.get_text_config()
        self._stated = getattr(whole, "dtype", None) or getattr(self.config, "dtype", None)
        self.num_layers = int(self.config.num_hidden_layers)
        self.hidden_size = int(self.config.hidden_size)

    @cached_property
    def fingerprint(self) -> str:
        """See `target.fingerprint.fingerprint`."""
        return fingerprint(self.folder)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Compute dtype; "auto" is what `load_target` makes of it."""
        if self.settings.dtype != "auto":
            return getattr(torch, self.settings.dtype)
        if self.device.type == "cpu":
            return torch.float32
        return self._stated or self._read.embeddings.dtype

    @cached_property
    def _read(self) -> TargetParts:
        return load_parts(self.folder, trust_remote_code=self.settings.trust_remote_code)

    @cached_property
    def parts(self) -> TargetParts:
        """Norm and lm_head on `device`, in `dtype`; embeddings, which nothing here needs, stay."""
        norm = copy.deepcopy(self._read.norm).to(self.device, self.dtype)
        lm_head = self._read.lm_head.to(self.device, self.dtype)
        return replace(self._read, norm=norm, lm_head=lm_head)

    @property
    def vocab_size(self) -> int:
        """Rows of lm_head."""
        return self._read.lm_head.shape[0]

    @property
    def max_length(self) -> int:
        """Positions the target was built for."""
        return int(self.config.max_position_embeddings)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """float32 logits [..., V] of last states [..., Ht] before the final norm."""
        return self.parts.logits(last)
