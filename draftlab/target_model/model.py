"""The frozen target model: hidden states at layer boundaries, KV caches and logits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.target_model.attention import attention_inputs
from draftlab.target_model.check_capabilities import (
    can_capture,
    check_pages,
    check_rows,
    check_states,
    padding_reason,
)
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.hidden_states import HiddenStates, recorded_inputs
from draftlab.target_model.locate import max_positions
from draftlab.target_model.packed_rows import PackedRow
from draftlab.target_model.paged_cache import PagedCache, RowCache, cache_name, row_bytes
from draftlab.target_model.parts import TargetParts, model_parts, text_decoder
from draftlab.target_model.recurrent_layer import recurrent_layers

if TYPE_CHECKING:
    from draftlab.target_model.images import ImageReader


class DecodePath(Protocol):
    """A way to run the target's decoder over a paged cache: `Target` itself or a faster path."""

    def states(
        self,
        token_ids: Tensor,
        boundaries: tuple[int, ...] = (),
        *,
        positions: Tensor,
        cache: PagedCache,
    ) -> HiddenStates:
        """Run the decoder as `Target.states`; the states of padding are undefined."""

    def logits(self, last: Tensor) -> Tensor:
        """Return logits [..., V] of last states [..., Ht]: float32, or in the states' dtype."""


class Target:
    """A loaded target model (`target_model/loading.py` loads it).

    Attributes:
        notes: lines on how the checkpoint was loaded, for the user.
        decode_paths: checked fast paths by name; None: the path does not support this target.
        asked_kernels: those that its engines have compiled ahead (`GraphedStep.compile_ahead`).
        recurrent, latent: whether layers keep a recurrent state, or cache compressed keys (MLA).
        images: what reads the images of prompts, once there are any (`images.py`).
    """

    def __init__(self, model: Any, folder: Path, name: str, notes: Sequence[str] = ()) -> None:
        self.model, self.folder, self.name, self.notes = model, folder, name, tuple(notes)
        self.config = model.config.get_text_config()
        self.decoder, self.layers, self.norm = text_decoder(model)
        self.parts: TargetParts = model_parts(model)
        self.num_layers = len(self.layers)
        self.recurrent = bool(recurrent_layers(self.decoder))
        self.latent = bool(getattr(self.config, "kv_lora_rank", None))
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size = self.parts.lm_head.shape[0]
        self.decode_paths: dict[str, Any] = {}
        self.asked_kernels = set[Hashable]()
        self.images: ImageReader | None = None
        self._checked: set[Callable[[Target], None]] = set()

    @cached_property
    def fingerprint(self) -> str:
        """The checkpoint's fingerprint; its files are read once."""
        return fingerprint(self.folder)

    @property
    def device(self) -> torch.device:
        """The device of the embeddings, which takes token ids."""
        return self.parts.embeddings.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.parts.embeddings.dtype

    @cached_property
    def can_capture(self) -> bool:
        """True if a CUDA graph can hold its passes; `check_capabilities.can_capture` tests it."""
        return can_capture(self)

    @property
    def pipeline_parallel(self) -> bool:
        """True if layers are on several devices."""
        return any(p.device != self.device for p in self.layers.parameters())

    @property
    def max_length(self) -> int:
        """Largest number of positions that the config allows."""
        return max_positions(self.config)

    def new_cache(self, num_rows: int, max_length: int) -> RowCache:
        """Return an empty cache for `num_rows` sequences of at most `max_length` positions; raise a
        `UserError` if the model cannot decode with such a cache (`check_capabilities.py`).
        """
        if self.recurrent:
            raise UserError(
                "the reference engine keeps no recurrent states, which this target has",
                where=self.folder,
                do="decode with `Engine`",
            )
        self._check_once(check_rows)
        return RowCache(self.num_layers, num_rows, max_length)

    def new_paged_cache(self, num_blocks: int, block_size: int, num_rows: int = 1) -> PagedCache:
        """Return an empty pool of `num_blocks` blocks and, for recurrent layers, of `num_rows` rows
        of states; raises as `new_cache` does.
        """
        for check in (check_states,) if self.recurrent else (check_rows, check_pages):
            self._check_once(check)
        rows = self.recurrent * num_rows
        return PagedCache(self.num_layers, num_blocks, block_size, rows, gathers=self.latent)

    @property
    def kv_bytes(self) -> dict[torch.device, int]:
        """Bytes of one position's keys and values on each device."""
        return self._bytes_of_one_token[0]

    @property
    def state_bytes(self) -> dict[torch.device, int]:
        """Bytes of one request's recurrent states on each device."""
        return self._bytes_of_one_token[1]

    @cached_property
    def _bytes_of_one_token(self) -> tuple[dict[torch.device, int], dict[torch.device, int]]:
        """`kv_bytes` and `state_bytes`, from a pass over one token."""
        cache = self.new_paged_cache(2, 1)
        cache.gathers = True  # without a kernel, which such blocks would be compiled for
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        cache.at(zero.int() + 1, zero, zero + 1, zero[0], [1])
        self.states(zero, positions=zero, cache=cache)
        states = row_bytes(cache.states.pools) if cache.states else {}
        return dict.fromkeys(states, 0) | row_bytes(cache.pools), states

    @cached_property
    def padding_reason(self) -> str | None:
        """Why conversations must be padded instead of packed into a row; None: they can be
        packed."""
        return padding_reason(self)

    def _check_once(self, check: Callable[[Target], None]) -> None:
        """Run a check before the first decoding: recording hidden states needs none of them."""
        if check not in self._checked:
            check(self)
            self._checked.add(check)

    @torch.inference_mode()
    def states(
        self,
        token_ids: Tensor,
        boundaries: tuple[int, ...] = (),
        *,
        positions: Tensor | None = None,
        cache: PagedCache | None = None,
        packed_row: PackedRow | None = None,
    ) -> HiddenStates:
        """Run one forward pass of the decoder.

        Args:
            token_ids: int64 [B, M]. Without a cache the rows are right-padded sequences from
                position 0 (padding has no effect under a causal mask), or B is 1 and the row is
                `packed_row`.
            boundaries: layers whose input states become the features, ascending.
            positions: int64 [B, M] of each token (−1: padding), with a cache that `cache.at`
                has prepared for them, and that is read and written.
            packed_row: boundaries of the conversations in the row, for targets without a
                `padding_reason`.

        Returns:
            Features in boundary order, and the last state before the final norm.
        """
        modules = {b: self.layers[b] for b in boundaries if b < self.num_layers}
        with ExitStack() as stack:
            recorded = stack.enter_context(recorded_inputs(modules | {self.num_layers: self.norm}))
            if packed_row is not None:
                stack.enter_context(attention_inputs(packed_row=packed_row))
                # Without a mask transformers searches for packed sequences and waits for the GPU.
                self.decoder(
                    input_ids=token_ids,
                    position_ids=packed_row.positions,
                    attention_mask=torch.ones_like(token_ids),
                    use_cache=False,
                )
            elif cache is None:
                self.decoder(input_ids=token_ids, use_cache=False)
            else:
                # Padding (slot −1) may have any valid position; its output is never read.
                valid = positions.clamp(min=0)
                stack.enter_context(attention_inputs(positions=valid, paged_cache=cache))
                self.decoder(
                    input_ids=token_ids,
                    position_ids=valid,
                    use_cache=True,
                    **{cache_name(self.decoder.forward): cache},
                )
        return self._at_boundaries(recorded, boundaries)

    def _at_boundaries(self, states: dict[int, Tensor], boundaries: Sequence[int]) -> HiddenStates:
        last, decoder, fault = states[self.num_layers], type(self.decoder).__name__, ""
        for boundary, state in states.items():
            if not fault and state.numel() != last.numel():
                fault = (
                    f"states of width {last.shape[-1]} at boundary {boundary}, found "
                    f"{list(state.shape)}: layers of {decoder} pass on several streams"
                )
        if skipped := sorted({*boundaries} - states.keys()):
            fault = (
                f"states at every boundary, found none at {skipped}: these layers of {decoder} do "
                "not run for text alone"
            )
        if fault:
            raise UserError(
                f"expected {fault}",
                where=self.folder,
                do="use another target, such as the text model that this one was made of",
            )
        # Pipeline-parallel layers leave their states on their own devices.
        return HiddenStates.of([states[b].to(last.device) for b in boundaries], last)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Return float32 logits [..., V] of last states [..., Ht]."""
        return self.parts.logits(last)

    @torch.inference_mode()
    def check_parts(self) -> None:
        """Compare logits from `parts` with the model's own on a few tokens; raise a `UserError` if
        they differ, or layers pass on more than a state for each token.
        """
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        if bool(expected.isnan().any()):
            raise UserError(
                f"expected logits of the first tokens, found NaN in {self.dtype}",
                where=self.folder,
                do="fetch its weights again, or try target.dtype=float32",
            )
        actual = self.logits(self.states(ids, tuple(range(self.num_layers))).last)
        error = (expected - actual).abs().max() / expected.abs().max().clamp(min=1e-6)
        tolerance = 1e-4 if self.dtype == torch.float32 else 3e-2
        if not bool(error <= tolerance):
            raise UserError(
                f"expected {type(self.model).__name__}'s own logits from its final norm and "
                f"lm_head, found a relative difference of {float(error):.3g}: it transforms logits "
                "in a way that draftlab does not know",
                where=self.folder,
                do="add the transformation to draftlab/target_model/parts.py",
            )
