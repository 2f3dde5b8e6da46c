"""Names and shapes of other programs' tensors, converted to draftlab's (servers §1.3, §6)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.foreign_config import EXPORT_AGAIN
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.head import EMBEDDINGS, LM_HEAD
from draftlab.heads.validate import draft_vocabulary_readings

Log = Callable[[str], None]
_FC_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_ROPE_TABLES = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_LATER_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.weight")
_BIAS = re.compile(r"(^fc|_proj)\.bias$")


def rename_tensors(stored: dict[str, Tensor], where: Path, log: Log) -> dict[str, Tensor]:
    """Return tensors under the names of a head folder, without those that no head needs.

    The prefix `model.` is dropped, and `midlayer.` means `layers.0.`. SGLang requires a bias of
    zeros, which draftlab's layers do not have. SGLang calls the input norm of later layers
    `hidden_norm`, vLLM `input_layernorm`; both may be there if they are equal.

    Raises:
        UserError: two tensors of one name, two norms that differ.
    """
    tensors: dict[str, Tensor] = {}
    for original, tensor in stored.items():
        name = original.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        stem = name.split(".")[0]
        name = _FC_NORMS.get(stem, stem) + name.removeprefix(stem)
        if _ROPE_TABLES.search(name):
            log(f"import: {original} is left out: it follows from the config")
        elif _BIAS.search(name) and not bool(tensor.any()):
            log(f"import: {original} is left out: it is zero")
        elif name in tensors:
            raise UserError(
                f"the head holds {name} under two names, one of them {original}",
                where=where,
                do="remove one of the two tensors",
            )
        else:
            tensors[name] = tensor
    for name in [n for n in tensors if _LATER_NORM.fullmatch(n)]:
        norm, vllm_name = tensors.pop(name), name.replace("hidden_norm", "input_layernorm")
        if not torch.equal(tensors.setdefault(vllm_name, norm), norm):
            raise UserError(
                f"{name} and {vllm_name} differ: SGLang reads the first, vLLM the second",
                where=where,
                do="remove the tensor of the program it was not trained with",
            )
    return tensors


def normalise_vocabulary(
    tensors: dict[str, Tensor], config: HeadConfig, where: Path, log: Log
) -> dict[str, Tensor]:
    """Return the tensors with d2t as int64 offsets and t2d as bool, both present iff D < V.

    d2t may hold offsets or absolute ids: t2d decides, or only one of them gives ascending ids.

    Raises:
        UserError: maps that are missing, of another size, or ambiguous.
    """
    rest = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if size == vocab_size:
        identity = torch.arange(size)
        if d2t is not None and bool(d2t.any()) and not torch.equal(d2t.long(), identity):
            raise UserError(
                "d2t reorders the full vocabulary, which draftlab's heads cannot do",
                where=where,
                do="draftlab imports such a head only with d2t in ascending order",
            )
        return rest
    if d2t is None:
        raise UserError(
            f"missing d2t: a draft vocabulary of {size:,} of {vocab_size:,} tokens needs it",
            where=where,
            do="export the head again with its d2t; without it nobody knows which tokens it drafts",
        )
    for name, tensor, length in (("d2t", d2t, size), ("t2d", t2d, vocab_size)):
        if tensor is not None and (tensor.shape != (length,) or tensor.is_floating_point()):
            raise UserError(
                f"{name}: expected integers of shape [{length}], found {tensor.dtype} "
                f"{list(tensor.shape)}",
                where=where,
                do=EXPORT_AGAIN,
            )
    readings = draft_vocabulary_readings(d2t, t2d, vocab_size)
    if len(readings) != 1:
        ways = "both as offsets and as ids" if readings else "neither as offsets nor as ids"
        raise UserError(
            f"d2t can be read {ways} of a vocabulary of {vocab_size:,}"
            + ("" if t2d is None else " whose members t2d marks"),
            where=where,
            do="add t2d (bool, [V]), which marks the draft vocabulary"
            if readings
            else "correct d2t: entry i holds (target id of draft token i) − i, or the target id",
        )
    ((kind, ids),) = readings.items()
    if kind == "ids":
        log("import: d2t holds ids, which become offsets")
    if t2d is None:
        log("import: t2d is computed from d2t")
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[ids] = True
    return rest | {"d2t": ids - torch.arange(size), "t2d": members}


def add_target_tensors(
    tensors: dict[str, Tensor], config: HeadConfig, embeddings: Tensor, lm_head: Tensor, log: Log
) -> tuple[dict[str, Tensor], HeadConfig]:
    """Add the target's lm_head if the head shares it, and decide whose embeddings it has.

    Args:
        tensors: renamed.
        config: with "embeddings": "target", except of a head with a mask token.
        embeddings, lm_head: the target's, [V, Ht].

    Returns:
        The tensors of the head folder, and the config with the right `embeddings`.

    Raises:
        UserError: no embeddings in a head that is not as wide as its target.
    """
    tensors, name, family = dict(tensors), EMBEDDINGS, get_family(config.family)
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    floating = [t.dtype for t in tensors.values() if t.is_floating_point()]
    table = tensors.get(name)
    if table is None and config.hidden_size != config.target_hidden_size:
        raise UserError(
            f"missing {name}: the target's are {config.target_hidden_size} wide, the head "
            f"{config.hidden_size}",
            do=EXPORT_AGAIN,
        )
    if table is None:
        if family.trains_mask:
            raise UserError(
                f"missing {name}, in which a parallel head has a trained mask token",
                do=EXPORT_AGAIN,
            )
        log("import: the head has no embeddings and uses the target's")
    elif not family.trains_mask:
        if table.shape == embeddings.shape and torch.equal(table, embeddings.to(table.dtype)):
            del tensors[name]
            log("import: the head's embeddings equal the target's, and it uses those")
        else:
            config = config.model_copy(update={"embeddings": "own"})
            log("import: the head has embeddings of its own")
    full_vocabulary = config.draft_vocab_size == config.vocab_size
    shares_lm_head = family.freezes_lm_head and full_vocabulary
    if shares_lm_head and LM_HEAD in tensors:
        if not torch.equal(tensors[LM_HEAD], lm_head.to(tensors[LM_HEAD].dtype)):
            raise UserError(
                f"{LM_HEAD} differs from the target's, which servers use in its place",
                do="name the target that the head was trained for: --target",
            )
        del tensors[LM_HEAD]
        log("import: the head's lm_head equals the target's, and it uses that")
    needs_lm_head = LM_HEAD not in tensors and not (family.uses_target_lm_head or shares_lm_head)
    if needs_lm_head and full_vocabulary and floating:
        tensors[LM_HEAD] = lm_head.to(floating[0])
        log("import: the head has no lm_head and gets a copy: lm_head is the target's")
    return tensors, config
