"""The comparison of a head with its target: sizes, hashes, RoPE, positions, similar weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.doctor.diagnosis import Finding, fault, note
from draftlab.errors import UserError
from draftlab.files import same_fingerprint
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.head import EMBEDDINGS, LM_HEAD
from draftlab.heads.rope import used_rope
from draftlab.text.chat_template import template_sha256, tokenizer_sha256

MIN_COSINE = 0.1  # of weights of related models; those of unrelated ones have 0


def shape_findings(head: HeadConfig, text: Any) -> list[Finding]:
    """Return a finding for each size of the target that is not the one in the head's config.

    Args:
        text: the target's text config, as transformers reads it.
    """
    sizes = {
        "{:,} layers": (head.target_num_layers, text.num_hidden_layers),
        "hidden size {:,}": (head.target_hidden_size, text.hidden_size),
        "{:,} tokens": (head.vocab_size, text.vocab_size),
    }
    return [
        fault(
            "target",
            f"the head was trained for a target of {size.format(expected)} ({head.target.name}); "
            f"this one has {actual:,}",
            "give the target it was trained for with --target",
        )
        for size, (expected, actual) in sizes.items()
        if expected != actual
    ]


def config_findings(head: HeadConfig, text: Any) -> Iterator[Finding]:
    """Yield findings on RoPE and positions that differ from the target's."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        head_rope, target_rope = (
            {"rope_type": "default", **fields} for fields in (head.rope_parameters, used_rope(rope))
        )
        if head_rope != target_rope:
            yield note(
                "rope",
                f"RoPE parameters {head_rope}, where the target has {target_rope}",
                "heads usually have their target's, or its base alone; programs take base 10,000 "
                "if a config has none. The scores below show which fits",
            )
    yield from position_findings(head.max_position_embeddings, text)


def position_findings(number: int | None, text: Any) -> Iterator[Finding]:
    """Yield a finding if a head's number of positions is not the target's, if that states one."""
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and number != positions:
        effect = (
            "servers stop drafting there, or shorten the target to it"
            if number is None or number < positions
            else "the target has no such positions"
        )
        shown = "none" if number is None else f"{number:,}"
        yield fault(
            "max_position_embeddings",
            f"max_position_embeddings {shown}, where the target has {positions:,}: {effect}",
            f"write {positions}, the target's",
        )


def identity_findings(head: HeadConfig, fingerprint: str, tokenizer: Any) -> list[Finding]:
    """Return a finding for each of target, tokenizer and template whose hash differs."""
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
            "chats are rendered differently than in training",
        ),
    }
    return [
        fault(
            kind,
            f"the {kind} is not the one the head was trained with ({head.target.name}): "
            f"{trained[:12]} there, {actual[:12]} here; {effect}",
            "give the checkpoint it was trained for, or train a head for this one",
        )
        for kind, (trained, actual, effect) in pairs.items()
        if trained and not same_fingerprint(trained, actual)  # empty in heads of other programs
    ]


def resemblance_findings(
    head: HeadConfig, tensors: Mapping[str, Tensor], target_tensors: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Yield findings on weights that do not resemble the target's.

    A head's embeddings are the target's, frozen, and its lm_head is initialised with rows of the
    target's; weights of another target do not resemble either.
    """
    table, target_table = tensors[EMBEDDINGS], target_tensors[EMBEDDINGS]
    comparable = head.embeddings == "own" and table.shape == target_table.shape
    if comparable and (similarity := mean_cosine(table, target_table)) < MIN_COSINE:
        yield fault(
            "embeddings",
            f"the head's embeddings do not resemble this target's (mean cosine {similarity:.2f})",
            "another target's head, or embeddings that were never loaded",
        )
    own_lm_head = not get_family(head.family).uses_target_lm_head
    if own_lm_head and head.hidden_size == head.target_hidden_size:
        d2t, last = tensors["d2t"].long(), head.vocab_size - 1
        rows = target_tensors[LM_HEAD][(torch.arange(len(d2t)) + d2t).clamp(0, last)]
        similarity = mean_cosine(tensors[LM_HEAD], rows)
        if bool(vocabulary_mask(d2t, head.vocab_size).any()) and similarity < MIN_COSINE:
            yield note(
                "lm_head",
                "lm_head's rows do not resemble the target's rows of the tokens that d2t "
                f"gives them (mean cosine {similarity:.2f})",
                "another target's head, a wrong d2t, or an lm_head that was initialised at random",
            )


def mean_cosine(a: Tensor, b: Tensor) -> float:
    """Return the mean cosine of rows, in large tables of every n-th row."""
    step = max(1, len(a) // 4096)
    return float(F.cosine_similarity(a[::step].float(), b[::step].float()).mean())


def vocabulary_mask(d2t: Tensor, size: int) -> Tensor:
    """Return t2d [V] for offsets; ids outside the vocabulary are left out."""
    ids = torch.arange(len(d2t)) + d2t.long()
    members = torch.zeros(size, dtype=torch.bool)
    members[ids[(ids >= 0) & (ids < size)]] = True
    return members
