"""Tensors of other programs' heads under draftlab's names, in its shapes (servers §1.3, §6)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.validate import draft_vocabulary_readings

Say = Callable[[str], None]
_FC_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_DERIVED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_LATER_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.weight")
_BIAS = re.compile(r"(^fc|_proj)\.bias$")


def rename(found: dict[str, Tensor], where: Path, say: Say) -> dict[str, Tensor]:
    """Names as a head folder's file has them; what no head needs is left out, and said.

    `model.` and `midlayer.` are other programs' words for nothing and for `layers.0.`. A bias of
    zeros is what SGLang asks for and draftlab's layers lack. SGLang norms later layers' inputs by
    `hidden_norm`, vLLM by `input_layernorm`: either name is taken, and both where they are equal.

    Raises:
        UserError: two tensors of one name, two norms that differ.
    """
    tensors: dict[str, Tensor] = {}
    for original, tensor in found.items():
        name = original.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        stem = name.split(".")[0]
        name = _FC_NORMS.get(stem, stem) + name.removeprefix(stem)
        if _DERIVED.search(name):
            say(f"import: {original} is left out, it follows from the config")
        elif _BIAS.search(name) and not bool(tensor.any()):
            say(f"import: {original} is left out, it is zero")
        elif name in tensors:
            raise UserError(
                f"the head holds {name} under two names, {original} among them", where=where
            )
        else:
            tensors[name] = tensor
    for name in [n for n in tensors if _LATER_NORM.fullmatch(n)]:
        theirs, usual = tensors.pop(name), name.replace("hidden_norm", "input_layernorm")
        if not torch.equal(tensors.setdefault(usual, theirs), theirs):
            raise UserError(
                f"{name} and {usual} differ: SGLang reads the one, vLLM the other",
                where=where,
                do="remove the tensor of the program it was not trained with",
            )
    return tensors


def read_maps(
    tensors: dict[str, Tensor], config: HeadConfig, where: Path, say: Say
) -> dict[str, Tensor]:
    """The tensors with d2t as int64 offsets and t2d as bool, both there iff D < V.

    Offsets are told from absolute ids by t2d, or by giving ascending ids of the vocabulary in one
    reading alone.

    Raises:
        UserError: maps that are missing, of another size, or that can be read in no way or in two.
    """
    rest = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    size, whole = config.draft_vocab_size, config.vocab_size
    if size == whole:
        if d2t is not None and bool(d2t.any()) and not torch.equal(d2t.long(), torch.arange(whole)):
            raise UserError(
                "d2t reorders a whole vocabulary, which draftlab's heads do not", where=where
            )
        return rest
    if d2t is None:
        raise UserError(f"missing d2t, which {size:,} of {whole:,} tokens need", where=where)
    for name, tensor, length in (("d2t", d2t, size), ("t2d", t2d, whole)):
        if tensor is not None and (tensor.shape != (length,) or tensor.is_floating_point()):
            raise UserError(
                f"{name}: expected integers of shape [{length}], found {tensor.dtype} "
                f"{list(tensor.shape)}",
                where=where,
            )
    readings = draft_vocabulary_readings(d2t, t2d, whole)
    if len(readings) != 1:
        ways = "both as offsets and as ids" if readings else "neither as offsets nor as ids"
        raise UserError(
            f"d2t can be read {ways} of a vocabulary of {whole:,}"
            + ("" if t2d is None else " whose members t2d marks"),
            where=where,
            do="add t2d (bool, [V]), which marks the draft vocabulary" if readings else "",
        )
    ((kind, ids),) = readings.items()
    if kind == "ids":
        say("import: d2t held ids, it becomes offsets")
    if t2d is None:
        say("import: t2d is made from d2t")
    members = torch.zeros(whole, dtype=torch.bool)
    members[ids] = True
    return rest | {"d2t": ids - torch.arange(size), "t2d": members}


def fill(
    tensors: dict[str, Tensor], config: HeadConfig, embeddings: Tensor, lm_head: Tensor, say: Say
) -> tuple[dict[str, Tensor], HeadConfig]:
    """Gives a head the target's own embeddings and lm_head where it means them.

    Args:
        tensors: renamed.
        config: with `embeddings` yet to be known, except of a parallel head.
        embeddings, lm_head: the target's, [V, Ht].

    Returns:
        The tensors as a head folder keeps them, and the config that says whose embeddings.

    Raises:
        UserError: no embeddings in a head that is not as wide as its target.
    """
    tensors, name, family = dict(tensors), "embed_tokens.weight", get_family(config.family)
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    floating = [t.dtype for t in tensors.values() if t.is_floating_point()]
    own = tensors.get(name)
    if own is None and config.hidden_size != config.target_hidden_size:
        raise UserError(
            f"missing {name}: the target's are {config.target_hidden_size} wide, the head "
            f"{config.hidden_size}"
        )
    if own is None:
        if family.has_mask_token:
            raise UserError(f"missing {name}, whose mask token's row a parallel head has trained")
        say("import: the embeddings are the target's, the head has none of its own")
    elif not family.has_mask_token:
        if own.shape == embeddings.shape and torch.equal(own, embeddings.to(own.dtype)):
            del tensors[name]
            say("import: the embeddings equal the target's, which are used")
        else:
            config = config.model_copy(update={"embeddings": "own"})
            say("import: the embeddings differ from the target's and are the head's own")
    whole = config.draft_vocab_size == config.vocab_size and not family.uses_target_lm_head
    if "lm_head.weight" not in tensors and whole and floating:
        tensors["lm_head.weight"] = lm_head.to(floating[0])
        say("import: lm_head is the target's, the head has none of its own")
    return tensors, config
