"""A target's embeddings, final norm and lm_head, from a loaded model or from its shards."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.errors import UserError
from draftlab.files import read_fields
from draftlab.target_model.auto_model import meta_model
from draftlab.target_model.locate import explain_loading, load_config
from draftlab.tensor_files import reading_tensors

_WRAPPERS = ("model", "language_model", "text_model", "backbone", "transformer", "thinker", "llm")
"""Modules around a text model, which files and transformers name in another order or not at all."""
_INNER = ("language_model", "text_model", "model")
_NORMS = ("norm", "final_layernorm", "ln_f", "norm_f", "embedding_norm")


@dataclass(frozen=True)
class NormForm:
    """A norm as x / rms(x) · weight, or with x less its mean, and a bias.

    Attributes:
        weight: [Ht], the factor of normed states, whatever the parameters say: Gemma and Qwen3-Next
            store it less 1, and OLMo has none.
        is_rms: whether it is an RMS norm, without a bias.
    """

    weight: Tensor
    is_rms: bool


def find_norm_form(norm: nn.Module, like: Tensor) -> NormForm | None:
    """Return what a norm computes, found by feeding it vectors; None: no form fits.

    The weight of a norm without parameters has width, dtype and device of `like` [V, Ht].
    """
    generator = torch.Generator().manual_seed(0)
    x = 100 * torch.randn(4, like.shape[1], generator=generator)  # so that epsilons do not count
    parameters = dict(norm.named_parameters())
    bias = parameters.pop("bias", None)
    if len(parameters) > 1:
        return None
    stored = next(iter(parameters.values()), torch.zeros_like(like[0])).detach()
    probe = copy.deepcopy(norm).to("cpu", torch.float32)
    with torch.no_grad():
        found = probe(x)
    shift = 0.0 if bias is None else bias.detach().cpu().float()
    for is_rms, states in ((True, x), (False, x - x.mean(-1, keepdim=True))):
        normed = F.rms_norm(states, states.shape[-1:])
        for weight in (stored, 1 + stored.float()) if parameters else (torch.ones_like(stored),):
            if torch.allclose(found, normed * weight.cpu().float() + shift, rtol=1e-3, atol=1e-3):
                return NormForm(weight, is_rms and bias is None)
    return None


@dataclass(frozen=True)
class TargetParts:
    """The modules before the first layer and after the last one.

    Attributes:
        embeddings, lm_head: [V, Ht].
        scale: factor of the logits.
        softcap: if given, logits become softcap · tanh(logits / softcap).
    """

    embeddings: Tensor
    norm: nn.Module
    lm_head: Tensor
    scale: float
    softcap: float | None

    def logits(self, last: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return float32 logits [..., V or len(rows)] of last states [..., Ht]."""
        weight = self.lm_head if rows is None else self.lm_head[rows]
        logits = F.linear(self.norm(last.to(weight.dtype)), weight).float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    @property
    def shared_tensors(self) -> dict[str, Tensor]:
        """The tensors that a head may share with its target, by their names in the head."""
        tensors = {"embed_tokens.weight": self.embeddings, "lm_head.weight": self.lm_head}
        form = self.norm_form
        return tensors if form is None else tensors | {"target_norm.weight": form.weight}

    @cached_property
    def norm_form(self) -> NormForm | None:
        """What the norm computes; None: neither an RMS norm nor a layer norm."""
        return find_norm_form(self.norm, self.lm_head)


def text_decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """Return the text decoder of a causal LM, its layers and its final norm; raise a `UserError` if
    the model has no `layers` or no final norm.
    """
    decoder = model.get_decoder()
    while not hasattr(decoder, "layers"):  # get_decoder does not know all module names
        inner = next((one for name in _INNER if (one := getattr(decoder, name, None))), None)
        if inner is None:
            break
        decoder = inner
    layers = getattr(decoder, "layers", None)
    norm = next((getattr(decoder, n) for n in _NORMS if hasattr(decoder, n)), None)
    if not isinstance(layers, nn.ModuleList) or norm is None:
        raise UserError(
            f"expected a decoder with `layers` and a final norm, found {type(decoder).__name__} "
            f"with {[name for name, _ in decoder.named_children()]}",
            do="this architecture needs an entry in draftlab/target_model/parts.py",
        )
    return decoder, layers, norm


def model_parts(model: PreTrainedModel) -> TargetParts:
    """Return the parts of a loaded model; tensors are shared, not copied."""
    lm_head = model.get_output_embeddings()
    if getattr(lm_head, "bias", None) is not None:
        raise UserError(
            "expected an lm_head without bias, found one with a bias",
            do="draftlab supports targets whose lm_head has no bias",
        )
    embeddings = model.get_input_embeddings().weight.detach()
    return _parts(embeddings, text_decoder(model)[2], lm_head.weight.detach(), model.config)


def _parts(embeddings: Tensor, norm: nn.Module, lm_head: Tensor, config: Any) -> TargetParts:
    """Return the parts with the config's logit transformations."""
    text = config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    return TargetParts(embeddings, norm, lm_head, _logit_scale(text), softcap)


def _logit_scale(config: Any) -> float:
    """Return the product of what Cohere and Falcon-H1 multiply logits by and Granite divides by."""
    factors = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier"))
    return math.prod(map(float, factors)) / float(getattr(config, "logits_scaling", None) or 1.0)


def check_llama_style(config: Any, where: Path | str, *, trust_remote_code: bool = False) -> None:
    """Raise a `UserError` if an EAGLE head cannot compute the logits of the target (`where`): they
    are scaled or capped, or its final norm is not an RMS norm times its weight. Reads no weights.
    """
    with explain_loading("the target", where):
        text = config.get_text_config()
        model = meta_model(config, trust_remote_code=trust_remote_code)
        norm = copy.deepcopy(text_decoder(model)[2]).to_empty(device="cpu").float()
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
        form, faults = find_norm_form(norm, torch.empty(1, text.hidden_size)), []
        if form is None or not form.is_rms or not torch.equal(form.weight, next(norm.parameters())):
            faults.append(f"its final norm ({type(norm).__name__}) is not Llama's")
        if _logit_scale(text) != 1:
            faults.append("its logits are scaled")
        if getattr(text, "final_logit_softcapping", None):
            faults.append("its logits are capped")
    if faults:
        raise UserError(
            f"expected a Llama-style target for an EAGLE head, found {type(model).__name__}: "
            + ", ".join(faults),
            where=where,
            do="train an EAGLE3 head: head.family=eagle3",
        )


def load_parts(folder: Path, *, trust_remote_code: bool = False) -> TargetParts:
    """Read the parts, and no layer, in the checkpoint's dtype, on the CPU."""
    with explain_loading("the target", folder):
        config = load_config(folder, trust_remote_code=trust_remote_code)
        skeleton = meta_model(config, trust_remote_code=trust_remote_code)
        norm = text_decoder(skeleton)[2]
        names = {id(parameter): name for name, parameter in skeleton.named_parameters()}
        embed_name = names[id(skeleton.get_input_embeddings().weight)]
        embeddings = read_tensor(folder, embed_name)
        head_name = names[id(skeleton.get_output_embeddings().weight)]
        lm_head = embeddings if head_name == embed_name else read_tensor(folder, head_name)
        weights = {
            name: read_tensor(folder, names[id(parameter)])
            for name, parameter in norm.named_parameters()
        }
        norm = norm.to_empty(device="cpu")
        norm.load_state_dict(weights, assign=True)
        return _parts(embeddings, norm.requires_grad_(False), lm_head, config)


def shard_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, sorted."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            "expected safetensors weights, found none",
            where=folder,
            do="convert the checkpoint with transformers' save_pretrained",
        )
    return files


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the names of a checkpoint's tensors, each with that of its file; raise a `UserError`
    if the index is damaged or names files elsewhere, or a file is missing or broken.
    """
    index, files = folder / "model.safetensors.index.json", dict[str, str]()
    if index.exists():
        files = read_fields(index, {"weight_map": dict}, kind="safetensors index")["weight_map"]
        for file in files.values():
            # Whatever an index says, nothing outside of the folder is opened.
            is_name = isinstance(file, str) and file == Path(file).name
            if not is_name or not file.endswith(".safetensors"):
                raise UserError(
                    f"expected names of safetensors files beside the index, found {file!r}",
                    where=index,
                    do="fetch the checkpoint again from a source that you trust",
                )
        return files
    for file in shard_files(folder):
        with _open(file) as tensors:
            files |= dict.fromkeys(tensors.keys(), file.name)
    return files


def read_tensor(folder: Path, name: str, *, files: dict[str, str] | None = None) -> Tensor:
    """Read a tensor by name, which the checkpoint may prefix or shorten, as text models do; raise a
    `UserError` if it is missing or ambiguous, or its file is missing or broken.
    """
    name, file = _place(folder, name, files or tensor_files(folder))
    with _open(file) as tensors:
        return tensors.get_tensor(name)


def meta_tensor(folder: Path, name: str, *, files: dict[str, str]) -> Tensor:
    """Return `read_tensor` on the meta device, from the header of its file."""
    name, file = _place(folder, name, files)
    with _open(file) as tensors:
        values = tensors.get_slice(name)
        shape = values.get_shape()
        of_no_row = values[:0] if shape else tensors.get_tensor(name)
        return torch.empty(shape, dtype=of_no_row.dtype, device="meta")


def _place(folder: Path, name: str, files: dict[str, str]) -> tuple[str, Path]:
    """Return a tensor's whole name and its file; see `read_tensor`."""
    matches = [name] if name in files else []
    matches = matches or [k for k in files if without_wrappers(k) == without_wrappers(name)]
    if len(matches) != 1:
        raise UserError(
            f"expected one tensor named {name}, found {matches or 'none'}",
            where=folder,
            do="check that the checkpoint is complete",
        )
    return matches[0], folder / files[matches[0]]


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the modules that hold a text model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """Open a safetensors file of a checkpoint; raise a `UserError` if it cannot be read."""
    with (
        reading_tensors(file, "target's weights", "fetch the checkpoint again"),
        safe_open(file, "pt") as tensors,
    ):
        yield tensors
