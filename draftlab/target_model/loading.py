"""Load a target and its tokenizer from a folder or the Hub.

Only the text model of a checkpoint is loaded, on one GPU or pipeline parallel over several.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from draftlab.errors import UserError
from draftlab.files import FileState, check_size, file_state, read_fields
from draftlab.kernels.compile_ahead import hash_triton
from draftlab.kernels.devices import to_device
from draftlab.process_environment import name_accelerator
from draftlab.target_model.attention import text_attention
from draftlab.target_model.auto_model import auto_class, drop_other_modules, model_class
from draftlab.target_model.locate import (
    TOKENIZER_FILES,
    explain_loading,
    load_config,
    resolve_device,
    resolve_target,
)
from draftlab.target_model.model import Target
from draftlab.target_model.parts import shard_files, text_decoder
from draftlab.target_model.pipeline_parallel import (
    describe_placement,
    dispatch_layers,
    plan_placement,
)
from draftlab.target_model.quantisation import (
    check_files,
    format_name,
    is_dequantised_here,
    quantisation_fields,
    read_weights,
)
from draftlab.target_model.replacements import replace_layers
from draftlab.target_model.settings import FOLDER, ROWS, TargetSettings

CHAT_TEMPLATE = "chat_template.json"
_PARSED_FILES = (
    CHAT_TEMPLATE,
    "config.json",
    "tokenizer*",
    "vocab*",
    "merges*",
    "*tokens*.json",
    "*.jinja",
    "*.model",
)
"""Files that transformers parses for a tokenizer."""


def load_tokenizer(settings: TargetSettings) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer; raise a `UserError` if there is none, or it does not load.

    All who ask for it share one object, which a large vocabulary takes a second to make, until a
    file of the folder changes.
    """
    folder = resolve_target(settings, TOKENIZER_FILES)
    for pattern in _PARSED_FILES:
        for file in folder.glob(pattern):
            check_size(file)
    found, states = {file for name in TOKENIZER_FILES for file in folder.rglob(name)}, []
    for file in sorted(filter(Path.is_file, found)):
        with suppress(OSError):  # transformers says what is wrong with it
            states.append((file, file_state(file)))
    options = settings.path.endswith(".gguf"), settings.trust_remote_code
    return _load_tokenizer(folder, *options, tuple(states))


@lru_cache(maxsize=2)
def _load_tokenizer(
    folder: Path, is_gguf: bool, trust_remote_code: bool, _: tuple[tuple[Path, FileState], ...]
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder; its files' states are there for the cache alone."""
    advice = "copy the tokenizer files there, such as tokenizer.json"
    with quiet_transformers(), explain_loading("the target's tokenizer", folder, advice):
        # Classes of an architecture normalise and split in their own way, llama.cpp as a GGUF says.
        tokenizer = (PreTrainedTokenizerFast if is_gguf else AutoTokenizer).from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        # Of a folder without a tokenizer transformers makes one of the special tokens alone.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise UserError(
                "expected the target's tokenizer, found none with words", where=folder, do=advice
            )
        if tokenizer.chat_template is None and (folder / CHAT_TEMPLATE).is_file():
            # Of a processor, as Mistral Small 3.1 has one; transformers reads it for those alone.
            fields = read_fields(folder / CHAT_TEMPLATE, {"chat_template": str}, kind="template")
            tokenizer.chat_template = fields["chat_template"]
        config = load_config(folder, trust_remote_code=trust_remote_code)
    setattr(tokenizer, ROWS, config.get_text_config().vocab_size)
    setattr(tokenizer, FOLDER, folder)
    return tokenizer


def load_target(settings: TargetSettings, *, layers: int | None = None) -> Target:
    """Load a target for inference and check how its norm and lm_head are read; raise a `UserError`
    if the checkpoint is missing, corrupt or unsupported.

    Args:
        layers: how many layers the config has, if it has fewer than the weights.
    """
    folder, device = resolve_target(settings), resolve_device(settings.device)
    if device.type == "cuda":
        hash_triton()
    with explain_loading("the target", folder):
        model, notes = load_model(folder, settings, device, layers)
        replace_layers(model)
        target = Target(model.eval().requires_grad_(False), folder, settings.path, notes)
        target.check_parts()
    return target


def load_model(
    folder: Path, settings: TargetSettings, device: torch.device, layers: int | None = None
) -> tuple[PreTrainedModel, list[str]]:
    """Return the causal language model of a checkpoint, of a multimodal one the text model, and
    lines on tensors that were left out, quantisation and placement.

    Raises:
        UserError: weights are missing, corrupt or of another shape.
    """
    dtype: Any = settings.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "auto"
    shard_files(folder)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    with explain_loading("the target", folder):
        config = load_config(folder, trust_remote_code=settings.trust_remote_code)
        placement = plan_placement(config, settings.gpus, device, **options)
        quantisation, loader, source = quantisation_fields(config), auto_class(config), folder
        if placement is not None:
            options["device_map"] = placement
        elif quantisation:
            options["device_map"] = {"": device}  # some quantised weights cannot be moved later
        check_files(folder, quantisation)
        if read_here := is_dequantised_here(quantisation):
            if dtype == "auto":
                dtype = str(config.get_text_config().dtype or "bfloat16").removeprefix("torch.")
            loader, source = model_class(config), None
            options = {"device_map": options["device_map"], "config": _without_quantisation(config)}
            options["state_dict"] = read_weights(
                folder, quantisation, getattr(torch, dtype), layers
            )
        with quiet_transformers():
            model, info = loader.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation=text_attention(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **options,
            )
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise UserError(
            f"expected {name} in shape {list(expected)}, as config.json says, found {list(found)}"
            + (f", and {len(mismatched) - 1} more such tensors" if len(mismatched) > 1 else ""),
            where=folder,
            do="fetch config.json and the weights again, from one and the same checkpoint",
        )
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__}, such as "
            + ", ".join(missing[:3]),
            where=folder,
            do="fetch it again; without them the target would run on random weights",
        )
    wanted = model.dtype if dtype == "auto" else getattr(torch, dtype)
    dequantised = bool(quantisation) and not getattr(model, "is_quantized", False)
    if dequantised and not read_here:
        torch.nn.Module.to(model, wanted)  # transformers leaves what it dequantises in bfloat16
    unused = Counter(drop_other_modules(model, text_decoder(model)[0]))
    unused.update(name.split(".")[0] for name in info["unexpected_keys"])
    notes = [*_notes(model, settings, folder, unused, quantisation if dequantised else None)]
    if "device_map" not in options:
        return to_device(model, device), notes
    if placement is None:
        return model, notes
    return dispatch_layers(model, placement), [*notes, describe_placement(placement)]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bar, its table of tensors, which `load_model` reads, advice on
    its own settings, and DeepSpeed, which is imported when a model is saved.
    """
    name_accelerator(has_gpu=torch.cuda.is_available())
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _without_quantisation(config: Any) -> Any:
    """Return a copy of a config whose weights are not quantised."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return plain


def _notes(
    model: PreTrainedModel,
    settings: TargetSettings,
    folder: Path,
    unused: Mapping[str, int],
    dequantised: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Yield lines on the checkpoint's `unused` tensors, by their counts, on its quantisation, which
    the loaded model may not have (`dequantised`), and on what it was made of.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if unused:
        counts = ", ".join(f"{name} ({count:,})" for name, count in sorted(unused.items()))
        yield (
            f"target: draftlab uses {type(model).__name__}, the text model, only; these tensors of "
            f"the checkpoint are not used: {counts}"
        )
    if dequantised is not None:
        yield (
            f"target: its weights ({format_name(dequantised)}) were dequantised; products are in "
            f"{dtype}, and activations are not quantised"
        )
    elif getattr(model, "is_quantized", False):
        method = str(getattr(model, "quantization_method", None) or "").rpartition(".")[2].lower()
        yield (
            f"target: its weights are quantised ({method.replace('_', '-')}): answers, states and "
            f"tokens are those of the quantised model, computed in {dtype}"
        )
    if settings.path.endswith(".gguf"):
        place = folder if settings.adapter is None else folder.parents[1] / "gguf"
        yield f"target: the weights of {settings.path} are dequantised, in 16 bits, in {place}"
    if settings.adapter is not None:
        yield f"target: the LoRA adapter {settings.adapter} is merged, in {folder}"
