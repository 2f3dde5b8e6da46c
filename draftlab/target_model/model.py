"""Loading a target, tapping its boundary states, its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftlab.errors import UserError
from draftlab.target_model.attention import side_by_side
from draftlab.target_model.cache import RowCache
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.loading import load_model
from draftlab.target_model.packed_rows import Documents
from draftlab.target_model.paged_cache import PagedCache
from draftlab.target_model.parts import TargetParts, parts_of, text_decoder
from draftlab.target_model.probe import check_pages, check_rows, why_padded
from draftlab.target_model.replacements import replace_layers
from draftlab.target_model.settings import EMBEDDED, TargetSettings


@dataclass(frozen=True)
class States:
    """What a forward pass leaves behind: features [B, M, F] and last states [B, M, Ht]."""

    features: Tensor
    last: Tensor


def local_target(settings: TargetSettings) -> Path | None:
    """The embedded target's folder, or the one that is named; None: a Hub id is.

    Raises:
        UserError: what is named is neither.
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
    """A local folder for the target: the embedded one, a folder, or a download from the Hub."""
    if (path := local_target(settings)) is not None:
        return path
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
        return Path(
            snapshot_download(settings.path, revision=settings.revision, allow_patterns=patterns)
        )
    except Exception as error:  # the Hub client has many: offline, gated, unknown, interrupted
        raise UserError(
            f"the Hub did not give {settings.path}: {error}",
            where=settings.path,
            do="check the id, your network and your login, or give a local folder",
        ) from None


def resolve_device(name: str) -> torch.device:
    """The device a setting names."""
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
            f"device {name!r} was asked for, and there are {torch.cuda.device_count()} GPUs",
            do="use device: auto",
        )
    return device


def load_tokenizer(settings: TargetSettings) -> PreTrainedTokenizerBase:
    """The target's tokenizer, chat template included."""
    folder = resolve_target(settings)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(f"the target's tokenizer does not load: {error}", where=folder) from None
    template = tokenizer.chat_template
    if isinstance(template, str):
        tokenizer.chat_template = settings.template(template)
    elif template:  # several, by name
        named = {name: settings.template(source) for name, source in template.items()}
        tokenizer.chat_template = named
    return tokenizer


class Target:
    """A loaded target: states at boundaries, logits of last states; `load_target` builds it.

    Attributes:
        notes: lines on how it was loaded, to be said where it is.
    """

    def __init__(self, model: Any, folder: Path, name: str, notes: Sequence[str] = ()) -> None:
        self.model, self.folder, self.name, self.notes = model, folder, name, tuple(notes)
        self.config = model.config.get_text_config()
        self.decoder, self.layers, self.norm = text_decoder(model)
        self.parts: TargetParts = parts_of(model)
        self.num_layers = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size = self.parts.lm_head.shape[0]
        self._checked: set[Callable[[Target], None]] = set()

    @cached_property
    def fingerprint(self) -> str:
        """See `fingerprint`; reads the checkpoint's files once."""
        return fingerprint(self.folder)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.parts.embeddings.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.parts.embeddings.dtype

    @property
    def spread(self) -> bool:
        """Whether layers lie on several devices."""
        return any(p.device != self.device for p in self.layers.parameters())

    @property
    def max_length(self) -> int:
        """Positions the target was built for."""
        return int(self.config.max_position_embeddings)

    def new_cache(self, num_rows: int, max_length: int) -> RowCache:
        """An empty cache for `num_rows` sequences of at most `max_length` positions.

        Raises:
            UserError: for a model that cannot decode from one (`target_model/probe.py`).
        """
        self._check_once(check_rows)
        return RowCache(self.num_layers, num_rows, max_length)

    def new_paged_cache(self, num_blocks: int, block_size: int) -> PagedCache:
        """An empty pool of `num_blocks` blocks of `block_size` positions; raises as `new_cache`."""
        self._check_once(check_rows)
        self._check_once(check_pages)
        return PagedCache(self.num_layers, num_blocks, block_size)

    @cached_property
    def why_padded(self) -> str | None:
        """What keeps conversations from lying side by side in a row; None: nothing."""
        return why_padded(self)

    def _check_once(self, check: Callable[[Target], None]) -> None:
        """Models are asked when they are about to decode: recording states needs none of it."""
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
        cache: RowCache | PagedCache | None = None,
        documents: Documents | None = None,
    ) -> States:
        """One forward pass of the decoder.

        Args:
            token_ids: int64 [B, M]. Without a cache rows are right-padded sequences from position 0
                (causality keeps padding from mattering), or B is 1 and the row holds `documents`.
            boundaries: whose states become the features, ascending.
            positions: int64 [B, M] of each token (−1: padding), with a cache aimed by `cache.at`.
            cache: where earlier keys are and new ones go.
            documents: conversations side by side, where nothing keeps them from it (`why_padded`).

        Returns:
            Features [B, M, len(boundaries) · Ht] in boundary order, and the last state [B, M, Ht]
            before the final norm.
        """
        taken: dict[int, Tensor] = {}

        def tap(boundary: int) -> Any:
            def hook(_module: Any, args: tuple, kwargs: dict) -> None:
                taken[boundary] = args[0] if args else kwargs["hidden_states"]

            return hook

        with ExitStack() as stack:
            for boundary in {*boundaries, self.num_layers}:
                module = self.norm if boundary == self.num_layers else self.layers[boundary]
                handle = module.register_forward_pre_hook(tap(boundary), with_kwargs=True)
                stack.callback(handle.remove)
            if documents is not None:
                stack.enter_context(side_by_side(documents))
                # Without a mask transformers looks for documents itself, and waits for the device.
                self.decoder(
                    input_ids=token_ids,
                    position_ids=documents.positions,
                    attention_mask=torch.ones_like(token_ids),
                    use_cache=False,
                )
            elif cache is None:
                self.decoder(input_ids=token_ids, use_cache=False)
            else:
                # Padding (slot −1) may take any valid position; its output is never read.
                at = positions.clamp(min=0)
                stack.enter_context(cache.step(at))
                self.decoder(
                    input_ids=token_ids, position_ids=at, past_key_values=cache, use_cache=True
                )
        last = taken[self.num_layers]
        # A spread target (`target_model/pipeline_parallel.py`) leaves states where its layers are.
        features = [taken[b].to(last.device) for b in boundaries]
        return States(torch.cat(features, -1) if features else last[..., :0], last)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """float32 logits [..., V] of last states [..., Ht]."""
        return self.parts.logits(last)

    @torch.inference_mode()
    def check_parts(self) -> None:
        """Compares our reading of norm and lm_head with the model's own logits on a few tokens.

        Raises:
            UserError: when a logit transformation of this architecture is unknown to us.
        """
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        if bool(expected.isnan().any()):
            raise UserError(
                f"expected logits of the first tokens, found NaN in {self.dtype}",
                where=self.folder,
                do="fetch its weights again, or try target.dtype=float32",
            )
        found = self.logits(self.states(ids).last)
        error = (expected - found).abs().max() / expected.abs().max().clamp(min=1e-6)
        tolerance = 1e-4 if self.dtype == torch.float32 else 3e-2
        if not bool(error <= tolerance):
            raise UserError(
                f"logits made from the target's norm and lm_head differ from its own by "
                f"{float(error):.3g} (relative): {type(self.model).__name__} transforms them in a "
                "way draftlab does not know",
                where=self.folder,
                do="add the transformation to draftlab/target_model/parts.py",
            )


def load_target(settings: TargetSettings) -> Target:
    """Loads a target for inference and checks our reading of it.

    Raises:
        UserError: missing, corrupt or unsupported checkpoints.
    """
    folder, device = resolve_target(settings), resolve_device(settings.device)
    model, notes = load_model(folder, settings, device)
    replace_layers(model)
    target = Target(model.eval().requires_grad_(False), folder, settings.path, notes)
    target.check_parts()
    if settings.compile:
        from draftlab.target_model.compiled import compile_small  # it knows what a target is

        compile_small(target)
    return target
