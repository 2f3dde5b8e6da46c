"""MTP: the layer for multi-token prediction in the target's own checkpoint (contract:
`heads/mtp.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftlab.errors import UserError
from draftlab.heads.family import Family
from draftlab.heads.rope import attention_factor

if TYPE_CHECKING:
    from draftlab.heads.config import HeadConfig
    from draftlab.heads.head import DraftHead
    from draftlab.progress import Monitor
    from draftlab.train.objectives.objective import Objective
    from draftlab.train.settings import HeadSettings

SHAPE = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_ROPE_SCALES = ("attention_factor", "mscale", "mscale_all_dim")
EAGLE3 = "train an EAGLE3 head: head.family=eagle3"


class Mtp(Family):
    """MTP layers, which start from the checkpoint and are written back in its layout."""

    name = "mtp"
    config_type = "draftlab.heads.mtp:MtpConfig"
    head_type = "draftlab.heads.mtp:MtpHead"
    drafter_type = "draftlab.engine.drafter:ChainDrafter"
    layouts_type = "draftlab.export.layout_table:mtp_layouts"
    title = "MTP"
    description = "MTP layer of the target's checkpoint, as a draft head"
    intermediate_size_names = ("intermediate_size", "moe_intermediate_size")
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
        found: str | None = "layers of another kind"
        if kind is not None:
            # Qwen3-Next's config does not say that its checkpoints have one.
            count = getattr(target, kind.count_key, target.model_type == "qwen3_next") or 0
            found = f"{kind.count_key} {int(count)}" if count != 1 else _unlike(target)
            if count > 1:  # vLLM's runner V1, its V2, SGLang
                found += ": servers draft with the first alone, one for each draft, or not at all"
        if found:
            raise UserError(
                f"expected a target with one MTP layer ({', '.join(sorted(TYPES))}), found "
                f"{target.model_type} with {found}",
                where="head.family",
                do=EAGLE3,
            )
        if kind.is_latent:
            shape = _latent_shape(target)
        else:
            size = getattr(target, "head_dim", None)
            size = size or target.hidden_size // target.num_attention_heads
            rope = target.rope_parameters or {}
            share = rope.get("partial_rotary_factor", getattr(target, "partial_rotary_factor", 1.0))
            shape = {"rotary_dim": int(size * share)}
        return shape | {
            "target_type": target.model_type,
            # MiMo's layers are Qwen2's, which have biases whatever the config says.
            "qkv_bias": target.model_type == "mimo" or bool(target.attention_bias),
            "qk_norm": kind.is_gated or bool(getattr(target, "use_qk_norm", False)),
            "experts": expert_fields(target) if kind.has_experts else None,
        }

    def head_of_target(
        self, config: HeadConfig, folder: Path, monitor: Monitor, *, meta: bool = False
    ) -> DraftHead | None:
        import torch

        from draftlab.heads.mtp import MtpHead
        from draftlab.heads.mtp_checkpoint import checkpoint_names, load_checkpoint
        from draftlab.target_model.quantisation import StoredWeights

        stored = StoredWeights(folder, meta=meta)
        names = checkpoint_names(config, stored.files)
        if not stored.files.keys() & {*names}:
            monitor.say(
                f"warning: the checkpoint has none of the tensors of an MTP layer ({names[0]}, …), "
                "as checkpoints that transformers wrote: training starts from random values"
            )
            return None
        with torch.device("meta" if meta else "cpu"):
            head = MtpHead(config)
            load_checkpoint(head, stored.read, stored.files)
        if not meta:
            for name in head.shared_tensors():  # so that a resumed training starts from equal ones
                head.get_parameter(name).data.zero_()
            head.set_draft_vocabulary(torch.arange(config.vocab_size))
            coded = sum(stored.factors_of(name) is not None for name in names)
            text = f", {coded} of them in float8, to which the trained ones are rounded"
            line = f"MTP layer: {len(names)} tensors of the target's checkpoint"
            monitor.say(line + text * bool(coded))
        return head

    def as_exported(self, head: DraftHead, folder: Path) -> DraftHead:
        from draftlab.heads.mtp_checkpoint import (
            checkpoint_names,
            checkpoint_tensors,
            load_checkpoint,
        )
        from draftlab.heads.validate import D2T, T2D
        from draftlab.target_model.quantisation import StoredWeights

        stored = StoredWeights(folder)
        if not any(map(stored.factors_of, checkpoint_names(head.config, stored.files))):
            return head
        not_own = head.shared_tensors() | {D2T, T2D}
        own = {name: one for name, one in head.tensors().items() if name not in not_own}
        written = stored.quantised(checkpoint_tensors(head.config, own, stored.files))
        load_checkpoint(head, stored.replaced(written).read, stored.files)
        return head


def expert_fields(target: Any) -> dict[str, Any]:
    """Return the fields of `ExpertsConfig` of a target's layers."""
    width, sigmoid = target.moe_intermediate_size, hasattr(target, "n_routed_experts")
    shared = target.n_shared_experts * width if sigmoid else target.shared_expert_intermediate_size
    fields = {
        "num_experts": target.n_routed_experts if sigmoid else target.num_experts,
        "per_token": target.num_experts_per_tok,
        "intermediate_size": width,
        "shared_size": shared,
        "normalised": getattr(target, "norm_topk_prob", True),
        "sigmoid": sigmoid,
        "gated": not sigmoid,
    }
    if sigmoid:
        names = {"scaling": "routed_scaling_factor", "groups": "n_group"}
        names |= {"chosen_groups": "topk_group"}
        fields |= {field: getattr(target, name) for field, name in names.items()}
    return fields


def _latent_shape(target: Any) -> dict[str, Any]:
    """Return the fields of a config with latent attention."""
    from draftlab.heads.latent_attention import LatentConfig

    rope = target.rope_parameters
    latent = LatentConfig(
        query_rank=target.q_lora_rank,
        rank=target.kv_lora_rank,
        plain_size=target.qk_nope_head_dim,
        rope_size=target.qk_rope_head_dim,
        value_size=target.v_head_dim,
        score_factor=attention_factor(rope) ** 2 if rope.get("mscale_all_dim") else 1.0,
    )
    return {
        "latent": latent,
        "rotary_dim": latent.rope_size,
        "head_dim": latent.head_dim,
        "num_key_value_heads": target.num_attention_heads,
    }


def _unlike(target: Any) -> str | None:
    """Return the setting in which a target of a known type differs from what is computed."""
    expected = {
        "hidden_act": "silu",
        "attn_output_gate": True,
        "use_sliding_window": False,
        "mtp_use_dedicated_embeddings": False,
    }
    if target.model_type == "mimo":
        expected |= {"qkv_bias": True, "qk_norm": False}
    if getattr(target, "kv_lora_rank", None):
        expected |= {"attention_bias": False, "rope_interleave": True, "index_topk": None}
        expected |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    rope = target.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        scales = {name: rope[name] for name in _ROPE_SCALES if rope.get(name)}
        computed: list[dict[str, float]] = [{}, {"mscale": 1}]
        if getattr(target, "kv_lora_rank", None):  # its scores are scaled by mscale_all_dim
            computed.append({"mscale": 1, "mscale_all_dim": 1})
        if scales not in computed:
            return f"rope_parameters {scales}"
    for name, value in expected.items():
        if (found := getattr(target, name, value)) != value:
            return f"{name} {found}"
    return None
