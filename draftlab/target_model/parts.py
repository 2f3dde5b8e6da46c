"""The parts of a target that training needs, read from its shards: embeddings, norm, lm_head."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftlab.errors import UserError
from draftlab.files import read_json

_NORMS = ("norm", "final_layernorm", "ln_f")


@dataclass(frozen=True)
class TargetParts:
    """From token to embedding, and from the last state to logits.

    Attributes:
        embeddings: [V, Ht].
        norm: the target's own final norm module, so that no variant of it is re-invented here.
        lm_head: [V, Ht].
        scale: factor on the logits.
        softcap: logits become softcap · tanh(logits / softcap) when given.
    """

    embeddings: Tensor
    norm: nn.Module
    lm_head: Tensor
    scale: float
    softcap: float | None

    def logits(self, last: Tensor, rows: Tensor | None = None) -> Tensor:
        """float32 logits [..., V or len(rows)] of last states [..., Ht] before the final norm."""
        weight = self.lm_head if rows is None else self.lm_head[rows]
        logits = F.linear(self.norm(last.to(weight.dtype)), weight).float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    @property
    def lent(self) -> dict[str, Tensor]:
        """What a head may use of its target, by its name in the head; nothing is copied."""
        weight = next(self.norm.parameters()).detach()
        return {
            "embed_tokens.weight": self.embeddings,
            "lm_head.weight": self.lm_head,
            "target_norm.weight": weight,
        }

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TargetParts:
        """Copies on another device, in another dtype."""
        return TargetParts(
            self.embeddings.to(device, dtype),
            # A module moves in place, and this one may be the final norm of a model in use.
            copy.deepcopy(self.norm).to(device, dtype),
            self.lm_head.to(device, dtype),
            self.scale,
            self.softcap,
        )


def text_decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """The text tower of a causal LM: decoder, its layers, its final norm.

    Raises:
        UserError: when the model is not built from `layers` and a final norm.
    """
    decoder = model.get_decoder()
    while not hasattr(decoder, "layers") and hasattr(decoder, "model"):
        decoder = decoder.model  # Llama 4's names for its towers are not those that it looks for
    layers = getattr(decoder, "layers", None)
    norm = next((getattr(decoder, n) for n in _NORMS if hasattr(decoder, n)), None)
    if not isinstance(layers, nn.ModuleList) or norm is None:
        raise UserError(
            f"expected a decoder with `layers` and a final norm, found {type(decoder).__name__} "
            f"with {[name for name, _ in decoder.named_children()]}",
            do="this architecture needs an entry in draftlab/target_model/parts.py",
        )
    return decoder, layers, norm


def parts_of(model: PreTrainedModel) -> TargetParts:
    """The parts of a loaded model (shared tensors, nothing copied)."""
    lm_head = model.get_output_embeddings()
    if getattr(lm_head, "bias", None) is not None:
        raise UserError("targets whose lm_head has a bias are not supported")
    config = model.config.get_text_config()
    return TargetParts(
        model.get_input_embeddings().weight.detach(),
        text_decoder(model)[2],
        lm_head.weight.detach(),
        _logit_scale(config),
        getattr(config, "final_logit_softcapping", None),
    )


def _logit_scale(config: Any) -> float:
    """Cohere multiplies by logit_scale, Granite divides by logits_scaling."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )


def check_llama_style(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Refuses a target whose final norm and logits a head cannot make itself, as EAGLE's must.

    Nothing of its weights is read.

    Raises:
        UserError: logits that are scaled or capped, or a final norm that is no RMS norm times its
            weight.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    norm = copy.deepcopy(text_decoder(model)[2]).to_empty(device="cpu").float()
    x = torch.linspace(-1, 2, text.hidden_size)[None]
    faults = []
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
        plain = F.rms_norm(
            x, x.shape[-1:], next(norm.parameters()), getattr(text, "rms_norm_eps", 0.0)
        )
        if not torch.allclose(norm(x), plain, atol=1e-4):
            faults.append(f"its final norm ({type(norm).__name__}) is not Llama's")
    if _logit_scale(text) != 1:
        faults.append("its logits are scaled")
    if getattr(text, "final_logit_softcapping", None):
        faults.append("its logits are capped")
    if faults:
        raise UserError(
            f"EAGLE heads are for Llama-style targets; of {type(model).__name__} "
            + ", ".join(faults),
            where=folder,
            do="train an EAGLE3 head: head.family=eagle3",
        )


def load_parts(folder: Path, *, trust_remote_code: bool = False) -> TargetParts:
    """Reads only the parts' tensors from a checkpoint folder; layers are never touched.

    Args:
        folder: local checkpoint with safetensors files, single or sharded.

    Returns:
        The parts in the checkpoint's dtype, on the CPU.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    norm = text_decoder(skeleton)[2]
    names = {id(parameter): name for name, parameter in skeleton.named_parameters()}
    embed_name = names[id(skeleton.get_input_embeddings().weight)]
    embeddings = read_tensor(folder, embed_name)
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    head_name = names[id(skeleton.get_output_embeddings().weight)]
    lm_head = embeddings if tied or head_name == embed_name else read_tensor(folder, head_name)
    weights = {
        name: read_tensor(folder, names[id(parameter)])
        for name, parameter in norm.named_parameters()
    }
    norm = norm.to_empty(device="cpu")
    norm.load_state_dict(weights, assign=True)
    text = config.get_text_config()
    return TargetParts(
        embeddings,
        norm.requires_grad_(False),
        lm_head,
        _logit_scale(text),
        getattr(text, "final_logit_softcapping", None),
    )


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            "expected safetensors weights, found none",
            where=folder,
            do="convert the checkpoint with transformers' save_pretrained",
        )
    return files


def read_tensor(folder: Path, name: str) -> Tensor:
    """One tensor by name; a checkpoint may prefix or shorten it (text towers do).

    Raises:
        UserError: when it is missing or ambiguous, or its file is missing or broken.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        where: dict[str, str] = read_json(index, kind="safetensors index")["weight_map"]
    else:
        where = {}
        for file in shard_files(folder):
            with _open(file) as opened:
                where |= dict.fromkeys(opened.keys(), file.name)
    found = [key for key in where if key == name]
    found = found or [k for k in where if k.endswith("." + name) or name.endswith("." + k)]
    if len(found) != 1:
        raise UserError(f"expected one tensor named {name}, found {found or 'none'}", where=folder)
    file = str(where[found[0]])
    if file != Path(file).name:  # whatever an index says, nothing outside the folder is opened
        raise UserError(
            f"expected names of files beside the index, found {file!r}",
            where=index,
            do="fetch the checkpoint again from where you trust it",
        )
    with _open(folder / file) as opened:
        return opened.get_tensor(found[0])


def _open(file: Path) -> Any:
    """A safetensors file, opened."""
    try:
        return safe_open(file, "pt")
    except FileNotFoundError:
        raise UserError(
            "expected a shard of the checkpoint, found nothing",
            where=file,
            do="fetch the checkpoint again: a file of it is missing",
        ) from None
    except SafetensorError as error:
        raise UserError(
            f"a safetensors file is truncated or corrupt: {error}",
            where=file,
            do="fetch the file again (git clones need git-lfs)",
        ) from None
