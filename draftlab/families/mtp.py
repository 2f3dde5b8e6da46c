"""MTP: the layer for multi-token prediction in the target's own checkpoint (contract:
`heads/mtp.py`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftlab.errors import UserError
from draftlab.heads.family import Family

if TYPE_CHECKING:
    from draftlab.heads.config import HeadConfig
    from draftlab.heads.head import DraftHead
    from draftlab.progress import Monitor
    from draftlab.train.objectives.objective import Objective
    from draftlab.train.settings import HeadSettings

SHAPE = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
EAGLE3 = "train an EAGLE3 head: head.family=eagle3"


class Mtp(Family):
    """Dense MTP layers, which start from the checkpoint and are written back in its layout."""

    name = "mtp"
    config_type = "draftlab.heads.mtp:MtpConfig"
    head_type = "draftlab.heads.mtp:MtpHead"
    drafter_type = "draftlab.engine.drafter:ChainDrafter"
    layouts_type = "draftlab.export.layout_table:mtp_layouts"
    title = "MTP"
    description = "MTP layer of the target's checkpoint, as a draft head"
    max_layers = 1
    reads_last_state = True
    whole_vocabulary = True
    freezes_lm_head = True
    has_target_rope = True
    vllm_method = "mtp"

    def objective(self) -> Objective:
        from draftlab.train.objectives.objective import Objective
        from draftlab.train.objectives.ttt import ttt_weights, unroll

        return Objective(unroll, ttt_weights)

    def check_settings(self, settings: HeadSettings) -> None:
        super().check_settings(settings)
        if chosen := [name for name in SHAPE if getattr(settings, name) is not None]:
            raise ValueError(
                f"MTP layers have their checkpoint's shape: leave {', '.join(chosen)} out"
            )

    def config_fields(self, settings: HeadSettings, target: Any) -> dict[str, Any]:
        """Return the type of layer, and the channels that RoPE turns.

        Raises:
            UserError: the checkpoint has no MTP layer, or none that draftlab computes.
        """
        from draftlab.heads.mtp import TYPES

        kind = TYPES.get(target.model_type)
        found = _unsupported(target) if kind is None else None
        if kind is not None:
            count = getattr(target, kind.count_key, None) or 0
            found = f"{kind.count_key} {count}" if count != 1 else _unlike(target, kind.has_bias)
        if found is not None:
            raise UserError(
                f"expected a target with one dense MTP layer ({', '.join(sorted(TYPES))}), found "
                f"{target.model_type} with {found}",
                where="head.family",
                do=EAGLE3,
            )
        size = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
        share = (target.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        return {"target_type": target.model_type, "rotary_dim": int(size * share)}

    def head_of_target(
        self, config: HeadConfig, folder: Path, monitor: Monitor
    ) -> DraftHead | None:
        from draftlab.heads.mtp import checkpoint_names, layer_of_checkpoint
        from draftlab.target_model.parts import read_tensor, tensor_files

        names = checkpoint_names(config)
        if not tensor_files(folder).keys() & {*names}:
            monitor.say(
                f"warning: the checkpoint has none of the tensors of an MTP layer ({names[0]}, …), "
                "as checkpoints that transformers wrote: training starts from random values"
            )
            return None
        monitor.say(f"MTP layer: {len(names)} tensors of the target's checkpoint")
        return layer_of_checkpoint(config, partial(read_tensor, folder))


def _unsupported(target: Any) -> str:
    """Return what a target's layers have that draftlab's MTP layers have not."""
    names = {
        "kv_lora_rank": "attention over latent keys (MLA)",
        "n_routed_experts": "experts (MoE)",
        "num_experts": "experts (MoE)",
        "num_local_experts": "experts (MoE)",
    }
    found = [text for name, text in names.items() if getattr(target, name, None)]
    return " and ".join(dict.fromkeys(found)) or "layers of another kind"


def _unlike(target: Any, has_bias: bool) -> str | None:
    """Return the setting in which a target of a known type differs from what is computed."""
    expected = {
        "hidden_act": "silu",
        "attn_output_gate": True,
        "use_sliding_window": False,
        "qkv_bias": has_bias,
        "qk_norm": False,
        "mtp_use_dedicated_embeddings": False,
    }
    if not has_bias:
        expected["attention_bias"] = False
    for name, value in expected.items():
        if (found := getattr(target, name, value)) != value:
            return f"{name} {found}"
    return None
