"""Initial weights of a head: the target's and random ones, or a trained head's (`head.init`)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.formatting import count_text
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.folder import empty_head
from draftlab.heads.head import DraftHead, initialise_head
from draftlab.target_model.parts import TargetParts
from draftlab.text.draft_vocabulary import DraftVocabulary

_SHARED = (
    "boundaries",
    "target_num_layers",
    "target_hidden_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "vocab_size",
)
"""Config fields that must be equal in both heads, beside their families' options."""

DRAFT_IDS = {"d2t", "t2d"}
"""Buffers of the draft vocabulary, which each head chooses for itself."""


def untrained_head(
    config: HeadConfig, parts: TargetParts, vocabulary: DraftVocabulary, seed: int
) -> DraftHead:
    """Return a float32 head on the CPU, with the values that `initialise_head` sets; raise a
    `UserError` if the target's final norm is of no known form.
    """
    if (form := parts.norm_form) is None:
        raise UserError(
            f"expected a final norm that divides states by their root mean square or standard "
            f"deviation and multiplies them by a weight, found {type(parts.norm).__name__}, which "
            "computes something else",
            where="target",
            do="choose another target: a draft head cannot start from this norm",
        )
    head = empty_head(config)
    # A head's logits have no factor: its lm_head takes the target's, or, if that is frozen, its
    # norm does. EAGLE heads imitate the last state, and have the target's logits as they are.
    family = head.family
    of_norm = parts.scale if family.freezes_lm_head else 1.0
    of_lm_head = 1.0 if family.freezes_lm_head or family.uses_target_lm_head else parts.scale
    initialise_head(
        head,
        embeddings=parts.embeddings,
        final_norm=of_norm * form.weight.float(),
        lm_head=parts.lm_head if of_lm_head == 1 else of_lm_head * parts.lm_head.float(),
        target_ids=vocabulary.target_ids,
        seed=seed,
    )
    return head


def check_start(new: HeadConfig, trained: HeadConfig, where: Path | str) -> None:
    """Raise a `UserError` with all differences in shape, options and tokenizer that keep a new head
    from starting from a trained one, at the path `where`. Its window may be another.

    The trained one may have another target, such as the model that this target was tuned from. The
    target of a head that is only planned may have no hashes.
    """
    free = {"mask_token_id", "sliding_window"}
    options = sorted((new.options().keys() | trained.options().keys()) - free)
    faults = [
        f"{name}: the new head has {getattr(new, name, None)}, this one "
        f"{getattr(trained, name, None)}"
        for name in (*_SHARED, *options)
        if (getattr(new, name, None) or None) != (getattr(trained, name, None) or None)
    ]
    if trained.family not in {new.family, *get_family(new.family).starts_from}:
        faults.append(f"family: the new head is {new.family}, this one {trained.family}")
    if trained.num_layers > new.num_layers:
        faults.append(
            f"num_layers: the new head has {new.num_layers}, this one {trained.num_layers}"
        )
    planned = new.target.tokenizer_sha256
    if planned and planned != trained.target.tokenizer_sha256:
        # First, since other differences mostly follow from it.
        faults.insert(
            0,
            f"tokenizer: the new head's target, {new.target.name}, has {planned[:12]}, this one's, "
            f"{trained.target.name}, {trained.target.tokenizer_sha256[:12]}",
        )
    if faults:
        raise UserError(
            "a head cannot start from one of another shape, family or tokenizer:\n  "
            + "\n  ".join(faults),
            where=where,
            do="change the settings of head: and record:, or start from another head (head.init)",
        )


def start_from(head: DraftHead, source: DraftHead, where: Path | str) -> str:
    """Copy every trained tensor of `source` into a head that has its initial values.

    Frozen weights, the target's, are left as they are. Rows of `DraftHead.draft_tables` are matched
    by target id; rows that `source` lacks keep their values. Layers that it lacks start as the
    identity: they write zeros into the residual stream. Raises as `check_start`.

    Returns:
        A line that says what was copied, and which tensors were not.
    """
    new, trained = head.config, source.config
    check_start(new, trained, where)
    ids = head.target_ids(torch.arange(len(head.d2t)))
    in_source = source.t2d[ids]
    rows = source.t2d.cumsum(0)[ids[in_source]] - 1
    tables = {f"{name}.weight" for name, m in head.named_modules() if m in head.draft_tables()}

    def common(tensors: dict[str, Tensor], name: str, chosen: Tensor) -> Tensor:
        """Return a tensor; of a draft table the rows of tokens that both heads can draft."""
        return tensors[name][chosen] if name in tables else tensors[name]

    frozen = {name for name, p in head.named_parameters() if not p.requires_grad} | DRAFT_IDS
    state, source_state = head.state_dict(), source.state_dict()
    own = [name for name in state if name not in frozen]
    copied = [
        name
        for name in own
        if name in source_state
        and common(state, name, in_source).shape == common(source_state, name, rows).shape
    ]
    with torch.no_grad():
        for name in copied:
            values = common(source_state, name, rows).to(state[name].dtype)
            state[name][in_source if name in tables else ...] = values
        for layer in head.layers[trained.num_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    tensors, source_tensors = head.tensors(), source.tensors()
    left = [
        name
        for name in source_tensors.keys() - source.shared_tensors() - DRAFT_IDS - {*copied}
        if name not in tensors
        or not torch.equal(
            common(tensors, name, in_source),
            common(source_tensors, name, rows).to(tensors[name].dtype),
        )
    ]
    added = tuple(f"layers.{n}." for n in range(trained.num_layers, new.num_layers))
    initial = [n for n in own if n not in copied and not n.startswith(added)]
    source_target, other = trained.target, ""
    if new.target.fingerprint != source_target.fingerprint:
        other = f" of another target, {source_target.name} ({source_target.fingerprint[:12]})"
    windows = [getattr(config, "sliding_window", None) for config in (new, trained)]
    reads = [f"the last {w:,} positions" if w else "all positions" for w in windows]
    begin = "begins" if len(added) == 1 else "begin"
    masks = [getattr(config, "mask_token_id", None) for config in (new, trained)]
    new_mask = None not in masks and masks[0] != masks[1] and not head.family.trains_mask
    return (
        f"starts from a trained head ({trained.family}, "
        f"{count_text(trained.num_layers, 'layer')}){other}: "
        f"{count_text(len(copied), 'tensor')} copied, with {int(in_source.sum()):,} of "
        f"{len(ids):,} tokens of the draft vocabulary in common"
        + (f"; {len(added)} more {begin} as the identity" if added else "")
        + (f"; not copied: {', '.join(sorted(left))}" if left else "")
        + (f"; with initial values: {', '.join(initial)}" if initial else "")
        + (f"; it read {reads[1]} and reads {reads[0]} now" if reads[0] != reads[1] else "")
        + (
            f"; its masked slots had token {masks[1]} and have {masks[0]} now, another input "
            "(head.mask_token)"
            if new_mask
            else ""
        )
    )


def fingerprint(head: DraftHead) -> str:
    """Return the hex SHA-256 of a head's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
