"""Starting a new head from one that is trained."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from draftlab.errors import UserError
from draftlab.formatting import counted
from draftlab.heads.config import HeadConfig
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
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "qk_norm",
    "llama4",
    "vocab_size",
)
"""What both heads must agree on for one's weights to mean the same in the other."""

_COPIED = ("fc.", "fc_norm.", "input_norm.", "layers.", "norm.", "mask_")


def check_start(mine: HeadConfig, theirs: HeadConfig, where: Path | str) -> None:
    """Refuses a new head that cannot start from a trained one.

    Args:
        mine: of the new head; one that is only planned may have a target without a fingerprint.
        where: the trained one's place, for errors.

    Raises:
        UserError: the two differ in shape, conventions or target, each difference named.
    """
    faults = [
        f"{name}: the new head has {getattr(mine, name)}, this one {getattr(theirs, name)}"
        for name in _SHARED
        if getattr(mine, name) != getattr(theirs, name)
    ]
    if (mine.family == "eagle") != (theirs.family == "eagle"):
        faults.append(f"family: the new head is {mine.family}, this one {theirs.family}")
    if theirs.num_layers > mine.num_layers:
        faults.append(
            f"num_layers: the new head has {mine.num_layers}, this one {theirs.num_layers}"
        )
    if mine.target.fingerprint not in ("", theirs.target.fingerprint):
        # The reason for most of the others.
        faults.insert(
            0,
            f"target: the new head is for {mine.target.name} "
            f"({mine.target.fingerprint[:12]}), this one for {theirs.target.name} "
            f"({theirs.target.fingerprint[:12]})",
        )
    if faults:
        raise UserError(
            "a head cannot start from one that differs:\n  " + "\n  ".join(faults),
            where=where,
            do="change the settings of head: and record:, or start from another head (head.init)",
        )


def start_from(head: DraftHead, source: DraftHead, where: Path | str) -> str:
    """Copies fc, layers, norms and lm_head of `source` into a head that has its initial values.

    Layers that `source` lacks begin as the identity: what they write into the residual stream is
    zero. Rows of lm_head are matched by target id; those that `source` has not keep their values.
    Masked slots take over the source's, where it has them.

    Args:
        where: the source's place, for errors.

    Returns:
        What was done, in a line.

    Raises:
        UserError: as `check_start`.
    """
    mine, theirs = head.config, source.config
    check_start(mine, theirs, where)
    state, found = head.state_dict(), source.state_dict()
    copied = [name for name in found if name in state and name.startswith(_COPIED)]
    with torch.no_grad():
        for name in copied:
            state[name].copy_(found[name])
        for layer in head.layers[theirs.num_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        ids = head.target_ids(torch.arange(len(head.d2t)))
        known = source.t2d[ids]
        place = source.t2d.cumsum(0)[ids[known]] - 1
        head.lm_head.weight[known] = source.lm_head.weight[place]
    added = mine.num_layers - theirs.num_layers
    begin = "begins" if added == 1 else "begin"
    return (
        f"starts from a trained head ({theirs.family}, {counted(theirs.num_layers, 'layer')}), "
        f"with {int(known.sum()):,} of {len(ids):,} rows of lm_head in common"
        + (f"; {added} more {begin} as the identity" if added else "")
    )


def fingerprint(head: DraftHead) -> str:
    """Hex SHA-256 of a head's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
