"""Images in prompts: files that the checkpoint's own processor and vision tower read.

Token ids are real ones wherever they are stored, with the config's image token at each position of
an image, and a draft head reads its embedding there, as vLLM's EAGLE3 does. The target reads what
its own forward pass gives to its decoder at those positions. In its inputs alone they are named by
ids from `FIRST` on, which hold a hash of the images and the number of the position: prompts with
equal ids have equal images, and no engine has to know of images.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from draftlab.errors import UserError
from draftlab.files import check_size, read_fields
from draftlab.target_model.image_files import Images
from draftlab.target_model.loading import quiet_transformers
from draftlab.target_model.locate import explain_loading, load_config
from draftlab.target_model.parts import text_decoder
from draftlab.target_model.quantisation import quantisation_fields

if TYPE_CHECKING:
    from draftlab.target_model.model import Target

FIRST = 1 << 62
_POSITIONS = 1 << 16  # of the images of a prompt, which the lowest bits number
MAX_KEPT = 64
"""Prompts whose image embeddings stay in memory."""
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_TOKENS = ("image_token_id", "image_token_index")
_TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids", "cross_attention_mask")
"""Arguments that say to a model which tokens are an image's: its decoder is given more of them than
embeddings, such as positions in two dimensions (Qwen) or a mask of both directions (Gemma)."""
_HARMLESS = ("inputs_embeds", "past_key_values", "cache_position", "logits_to_keep")
"""Arguments of a decoder that no image changes; a flag or nothing does no harm either."""


def no_images(folder: Path) -> str:
    """Return why a checkpoint's images are not read, from its config and processor; "": they are.

    What shows in a forward pass alone is an error of `image_ids`.
    """
    fields = read_fields(folder / "config.json", {}, kind="target's config.json")
    if not any(type(fields.get(name)) is int for name in _TOKENS):
        return "the target's config has no image token"
    try:
        config = load_config(folder, trust_remote_code=False)
        model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
        if model is None or quantisation_fields(config):
            return f"{config.model_type!r} is no model of images in 16 or 32 bits"
        kinds = set(_TOKEN_KINDS).intersection(inspect.signature(model.forward).parameters)
        if kinds or "mrope_section" in str(fields):
            return f"the decoder of a {model.__name__} is given more of images than embeddings"
        _processor(folder)
    except UserError as error:
        return error.what
    return ""


@lru_cache(maxsize=2)
def _processor(folder: Path) -> Any:
    from transformers import AutoProcessor  # which text alone does not need

    files = [folder / name for name in _PROCESSORS if (folder / name).is_file()]
    for file in files:
        check_size(file)
    with quiet_transformers(), explain_loading("the target's processor of images", folder):
        processor = AutoProcessor.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    if not files or not isinstance(getattr(processor, "image_token", None), str):
        raise UserError(
            f"expected a processor with a placeholder of images, found {type(processor).__name__}",
            where=folder,
            do="leave prompts with images out",
        )
    return processor


def process(folder: Path, images: Images, text: str | None = None) -> Any:
    """Return what a checkpoint's processor makes of images and a rendered text (None: placeholders
    alone); raise a `UserError` if an image is refused, or the processor does not take these.
    """
    processor, opened = _processor(folder), [image.open() for image in images]
    text = processor.image_token * len(images) if text is None else text
    if (number := text.count(processor.image_token)) != len(images):
        raise UserError(
            f"expected {processor.image_token!r} once for each image in a rendered prompt, found "
            f"{len(images)} images and {number} of them",
            do="write no placeholder in a text, and use the chat template of the checkpoint",
        )
    try:
        return processor(text=[text], images=opened, add_special_tokens=False, return_tensors="pt")
    except Exception as error:  # each processor has its own
        raise UserError(
            f"the target's processor does not take the images of a prompt: {error}",
            where=images[0].path,
            do="leave the prompt out",
        ) from error


def image_ids(target: Target, ids: Sequence[int], images: Images, *, prompt: bool = True) -> Any:
    """Return token ids by which the target reads images; without images `ids`. They are a whole
    `prompt` if they have no answer, which may have further image tokens.
    """
    if not images:
        return ids
    if target.images is None:
        target.images = ImageReader(target)
    return target.images.name_positions(ids, images, prompt=prompt)


def token_ids(target: Target, ids: Tensor) -> Tensor:
    """Return ids of the vocabulary for ids of `image_ids`, int64 of any shape."""
    return ids if target.images is None else target.images.without_names(ids)


def has_images(target: Target, ids: Sequence[int]) -> bool:
    """Return whether ids are those of `image_ids`, for images."""
    return target.images is not None and max(ids) >= FIRST


class _Stop(Exception):
    """Ends a forward pass where its decoder begins."""


class ImageReader:
    """Gives a target the images of its prompts, in place of the image token's embedding."""

    def __init__(self, target: Target) -> None:
        self.target = target
        fields = read_fields(target.folder / "config.json", {}, kind="target's config.json")
        self.token: int = next(fields[name] for name in _TOKENS if name in fields)
        self.rows = lru_cache(MAX_KEPT)(self._rows_of)
        self._images: dict[int, Images] = {}
        self._found: tuple[Tensor, list[int]] | None = None
        self._refusal: UserError | None = None
        embeddings = target.model.get_input_embeddings()
        embeddings.register_forward_pre_hook(self._take_names)
        embeddings.register_forward_hook(self._put_rows)

    def name_positions(
        self, ids: Sequence[int], images: Images, *, prompt: bool
    ) -> tuple[int, ...]:
        """Return ids with the names of image positions; raise a `UserError` if their number is not
        that of the images' embeddings.
        """
        digest = hashlib.sha256("".join(image.sha256 for image in images).encode()).digest()
        key = int.from_bytes(digest[:6], "big") >> 2  # 46 bits
        same = self._images.setdefault(key, images)
        if [one.sha256 for one in same] != [one.sha256 for one in images]:
            raise UserError(
                f"expected images with another hash than those of {same[0].name}",
                where=images[0].path,
                do="leave one of the prompts out",
            )
        number, named = len(self.rows(key)), list(map(int, ids))
        at = [position for position, one in enumerate(named) if one == self.token]
        if prompt and len(at) != number:
            raise UserError(
                f"expected {number:,} positions of images in a prompt, found {len(at):,}",
                where=images[0].path,
                do="write no image token in the text of a prompt with images",
            )
        for row, position in enumerate(at[:number]):
            named[position] = FIRST + key * _POSITIONS + row
        return tuple(named)

    def without_names(self, ids: Tensor) -> Tensor:
        """Return the image token for every name."""
        return ids.where(ids < FIRST, self.token)

    @torch.inference_mode()
    def _rows_of(self, key: int) -> Tensor:
        """Return what the checkpoint's model gives to its decoder at image positions, [N, H]; raise
        a `UserError` if it gives more than embeddings, such as positions in two dimensions.
        """
        images = self._images[key]
        if self._refusal is not None:
            raise self._refusal
        inputs = process(self.target.folder, images).to(self.target.device, self.target.dtype)
        given: dict[str, Any] = {}

        def stop(_module: Any, _args: tuple, kwargs: dict) -> None:
            given.update(kwargs)
            raise _Stop

        handle = text_decoder(self._model)[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._model(**inputs, use_cache=False)
        except _Stop:
            pass
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # each model has its own
            raise UserError(
                f"the target's model does not take the images of a prompt: {error}",
                where=images[0].path,
                do="leave the prompt out, or fetch the target's files again",
            ) from error
        finally:
            handle.remove()
        ids = inputs["input_ids"]
        others = [name for name, value in given.items() if not _is_plain(name, value, ids)]
        if others or "inputs_embeds" not in given:
            self._refusal = UserError(
                f"expected images that are embeddings alone, found a {type(self._model).__name__}, "
                f"whose decoder is given {', '.join(others) or 'none'}",
                where=self.target.folder,
                do="leave prompts with images out: this target's are not supported",
            )
            raise self._refusal
        rows = given["inputs_embeds"][ids == self.token]
        if not 0 < len(rows) <= _POSITIONS:
            raise UserError(
                f"expected 1 to {_POSITIONS:,} positions of images, found {len(rows):,}",
                where=images[0].path,
                do="leave this prompt out, or use smaller images",
            )
        return rows.cpu()

    @cached_property
    def _model(self) -> Any:
        """The whole model without the decoder's layers, which the target has."""
        folder, target = self.target.folder, self.target
        with explain_loading("the target's model of images", folder):
            config = copy.deepcopy(load_config(folder, trust_remote_code=False))
            text = config.get_text_config()
            text.num_hidden_layers, own = 1, text.num_hidden_layers
            if len(kinds := getattr(text, "layer_types", None) or ()) == own:
                text.layer_types = kinds[:1]
            with quiet_transformers():
                model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].from_pretrained(
                    folder, config=config, dtype=target.dtype, local_files_only=True
                )
        del text_decoder(model)[1][:]
        return model.to(target.device).eval().requires_grad_(False)

    def _take_names(self, _module: Any, args: tuple) -> tuple | None:
        """Replace the names in ids that are to be embedded by the image token."""
        self._found, ids = None, args[0]
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # a step of decoding, whose tokens the target wrote
        named = ids >= FIRST
        if not bool(named.any()):
            return None
        self._found = named, (ids[named] - FIRST).tolist()
        return self.without_names(ids), *args[1:]

    def _put_rows(self, _module: Any, _args: tuple, output: Tensor) -> Tensor:
        """Put the embeddings of images at the positions that had names."""
        if self._found is None:
            return output
        named, numbers = self._found
        rows = {key: self.rows(key) for key in {number // _POSITIONS for number in numbers}}
        chosen = torch.stack([rows[n // _POSITIONS][n % _POSITIONS] for n in numbers])
        output = output.clone()
        output[named] = chosen.to(output)
        return output


def _is_plain(name: str, value: Any, ids: Tensor) -> bool:
    """Return whether an argument of a decoder says nothing but what the target's own pass has."""
    if name in _HARMLESS or value is None or isinstance(value, bool):
        return True
    if name == "attention_mask" and isinstance(value, Tensor):
        return value.ndim == 2 and bool((value != 0).all())
    if name == "position_ids" and isinstance(value, Tensor):
        own = torch.arange(ids.shape[1], device=value.device)
        return value.ndim == 2 and bool((value == own).all())
    return False
