"""A head against the target it is given: shapes, content, RoPE, positions, tokenizer, template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.doctor.findings import Finding
from draftlab.doctor.head_files import membership
from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.head import EMBEDDINGS, LM_HEAD
from draftlab.text.chat_template import template_sha256, tokenizer_sha256

ALIKE = 0.1  # cosine of weights that have something to do with each other; strangers have 0


def shape_findings(head: HeadConfig, text: Any) -> list[Finding]:
    """What no target of other shapes can be served with.

    Args:
        text: the target's text config, as transformers reads it.
    """
    pairs = {
        "{:,} layers": (head.target_num_layers, text.num_hidden_layers),
        "hidden size {:,}": (head.target_hidden_size, text.hidden_size),
        "{:,} tokens": (head.vocab_size, text.vocab_size),
    }
    return [
        Finding(
            kind="target",
            what=f"the head was trained for a target of {size.format(mine)} ({head.target.name}); "
            f"this one has {theirs:,}",
            do="give the target it was trained for with --target",
        )
        for size, (mine, theirs) in pairs.items()
        if mine != theirs
    ]


def config_findings(head: HeadConfig, text: Any) -> list[Finding]:
    """RoPE and positions against the target's config."""
    findings = []
    rope = dict(getattr(text, "rope_parameters", None) or {})
    mine = {"rope_type": "default", **head.rope_parameters}
    if "rope_theta" in rope:
        theirs = {"rope_type": "default", **rope}
        if float(mine["rope_theta"]) != float(theirs["rope_theta"]):
            findings.append(
                Finding(
                    kind="rope",
                    what=f"RoPE base {mine['rope_theta']:,.0f}, where the target has "
                    f"{theirs['rope_theta']:,.0f}",
                    do="heads usually take their target's; a base of 10,000 is what readers fill "
                    "in where none is written. The scores below say which one fits",
                    severity="note",
                )
            )
        elif mine != theirs:
            findings.append(
                Finding(
                    kind="rope",
                    what=f"RoPE parameters {mine}, where the target has {theirs}",
                    do="of a scaled RoPE a head may take the base alone; the scores say which fits",
                    severity="note",
                )
            )
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and positions != head.max_position_embeddings:
        less = head.max_position_embeddings < positions
        findings.append(
            Finding(
                kind="max_position_embeddings",
                what=f"max_position_embeddings {head.max_position_embeddings:,}, where the target "
                f"has {positions:,}: "
                + (
                    "servers stop drafting there, or shorten the target to it"
                    if less
                    else "the target has no such positions"
                ),
                do=f"write {positions}, the target's",
            )
        )
    return findings


def identity_findings(head: HeadConfig, fingerprint: str, tokenizer: Any) -> list[Finding]:
    """Content of target, tokenizer and template against what the head says it was trained with."""
    try:
        template = template_sha256(tokenizer)
    except UserError:
        template = "none"
    pairs = {
        "target": (head.target.fingerprint, fingerprint, "its weights or its config differ"),
        "tokenizer": (
            head.target.tokenizer_sha256,
            tokenizer_sha256(tokenizer),
            "the same text becomes other tokens",
        ),
        "template": (
            head.target.template_sha256,
            template,
            "chats are rendered otherwise than in training",
        ),
    }
    return [
        Finding(
            kind=kind,
            what=f"the {kind} is not the one the head was trained with ({head.target.name}): "
            f"{trained[:12]} there, {found[:12]} here; {meaning}",
            do="give the very checkpoint it was trained for, or train a head for this one",
        )
        for kind, (trained, found, meaning) in pairs.items()
        if trained and trained != found  # heads of other programs do not say
    ]


def kinship_findings(
    head: HeadConfig, tensors: Mapping[str, Tensor], target_tensors: Mapping[str, Tensor]
) -> list[Finding]:
    """Whether weights that began as copies of the target's still resemble them.

    A head's embeddings are the target's, frozen, and its lm_head begins as rows of the target's;
    neither looks like those of another target.
    """
    findings = []
    table, theirs = tensors[EMBEDDINGS], target_tensors[EMBEDDINGS]
    if head.embeddings == "own" and table.shape == theirs.shape:
        likeness = cosine(table, theirs)
        if likeness < ALIKE:
            findings.append(
                Finding(
                    kind="embeddings",
                    what=f"the head's embeddings have nothing of this target's (mean cosine "
                    f"{likeness:.2f})",
                    do="another target's head, or embeddings that were never loaded",
                )
            )
    if (
        not get_family(head.family).uses_target_lm_head
        and head.hidden_size == head.target_hidden_size
    ):
        known = membership(tensors["d2t"], head.vocab_size)
        ids = (torch.arange(len(tensors["d2t"])) + tensors["d2t"].long()).clamp(
            0, head.vocab_size - 1
        )
        likeness = cosine(tensors[LM_HEAD], target_tensors[LM_HEAD][ids])
        if bool(known.any()) and likeness < ALIKE:
            findings.append(
                Finding(
                    kind="lm_head",
                    what="lm_head's rows do not resemble the target's rows of the tokens that d2t "
                    f"gives them (mean cosine {likeness:.2f})",
                    do="another target's head, a wrong d2t, or an lm_head trained from nothing",
                    severity="note",
                )
            )
    return findings


def cosine(mine: Tensor, theirs: Tensor) -> float:
    """Mean cosine of rows, of every n-th row of a large table."""
    step = max(1, len(mine) // 4096)
    return float(F.cosine_similarity(mine[::step].float(), theirs[::step].float()).mean())
