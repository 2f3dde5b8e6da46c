"""Initial values of a new head from a trained one (`head.init`)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from draftlab.errors import UserError
from draftlab.files import same_fingerprint
from draftlab.formatting import count_text
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.head import DraftHead

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

_COPIED = ("fc.", "fc_norm.", "input_norm.", "layers.", "norm.", "mask_")


def check_start(new: HeadConfig, trained: HeadConfig, where: Path | str) -> None:
    """Refuse a new head that cannot start from a trained one.

    The trained one may have another target of the same shape and tokenizer, such as the model that
    this target was tuned from.

    Args:
        new: the new head's config; if it is only planned, its target may have no hashes.
        trained: the trained head's.
        where: path of the trained head, for errors.

    Raises:
        UserError: the two differ in shape, options or tokenizer; each difference is named.
    """
    options = sorted((new.options().keys() | trained.options().keys()) - {"mask_token_id"})
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
    """Copy fc, layers, norms and lm_head of `source` into a head that has its initial values.

    Layers that `source` lacks start as the identity: they write zeros into the residual stream.
    Rows of lm_head are matched by target id; rows that `source` lacks keep their values. The mask
    parameters are copied if `source` has them.

    Args:
        where: path of the trained head, for errors.

    Returns:
        A line that describes what was copied.

    Raises:
        UserError: as in `check_start`.
    """
    new, trained = head.config, source.config
    check_start(new, trained, where)
    state, source_state = head.state_dict(), source.state_dict()
    copied = [name for name in source_state if name in state and name.startswith(_COPIED)]
    with torch.no_grad():
        for name in copied:
            state[name].copy_(source_state[name])
        for layer in head.layers[trained.num_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        ids = head.target_ids(torch.arange(len(head.d2t)))
        in_source = source.t2d[ids]
        rows = source.t2d.cumsum(0)[ids[in_source]] - 1
        head.lm_head.weight[in_source] = source.lm_head.weight[rows]
    added = new.num_layers - trained.num_layers
    source_target, other = trained.target, ""
    if not same_fingerprint(new.target.fingerprint, source_target.fingerprint):
        other = f" of another target, {source_target.name} ({source_target.fingerprint[:12]})"
    begin = "begins" if added == 1 else "begin"
    return (
        f"starts from a trained head ({trained.family}, "
        f"{count_text(trained.num_layers, 'layer')}){other}, with {int(in_source.sum()):,} of "
        f"{len(ids):,} rows of lm_head in common"
        + (f"; {added} more {begin} as the identity" if added else "")
    )


def fingerprint(head: DraftHead) -> str:
    """Return the hex SHA-256 of a head's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
