"""DFlash: a block of masked slots, over context keys from features (methods §7, servers §12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftlab.heads.family import Family

if TYPE_CHECKING:
    from draftlab.export.foreign_config import ForeignConfig
    from draftlab.train.objectives.objective import Objective

LAYER_OPTIONS = ("is_causal", "sliding_window")
"""Settings of `HeadSettings` that a block head's config has too."""


class Dflash(Family):
    """Block-parallel heads in the fill-in layout, whose drafts do not depend on each other."""

    name = "dflash"
    config_type = "draftlab.heads.block:BlockConfig"
    head_type = "draftlab.heads.block:BlockHead"
    drafter_type = "draftlab.engine.block_drafter:BlockDrafter"
    native_type = "draftlab.heads.vllm_config:dflash_native_config"
    layouts_type = "draftlab.export.layout_table:block_layouts"
    title = "DFlash"
    description = "DFlash draft head (a block of draft tokens in one pass)"
    drafting = "parallel"
    max_layers = 5
    options = frozenset({"mask_token", *LAYER_OPTIONS})
    has_mask_token = True
    freezes_lm_head = True
    default_rope = True
    has_own_loss = True
    architectures = ("DFlashDraftModel",)
    speculators_type = "dflash"
    vllm_method = "dflash"

    def objective(self) -> Objective:
        from draftlab.train.batch.loss_rows import BLOCK_SAMPLING
        from draftlab.train.fast.block import FastBlock
        from draftlab.train.flops import block_flops
        from draftlab.train.objectives.block import block_outputs, block_weights
        from draftlab.train.objectives.loss import LossTerms
        from draftlab.train.objectives.objective import Objective

        terms = LossTerms("ce_l1", cross_entropy=1.0)
        return Objective(
            block_outputs,
            block_weights,
            fast_forward=FastBlock,
            sampling=BLOCK_SAMPLING,
            flops=block_flops,
            own_terms=terms,
        )

    def foreign_fields(self, config: ForeignConfig, layout: str) -> dict[str, Any]:
        anchor = config.sample_from_anchor
        if anchor is None and self.anchor_by_default and layout == "speculators":
            raise ValueError(
                "sample_from_anchor is missing, and programs disagree about its default: write "
                "true if the first slot of a block predicts a token, else false"
            )
        if anchor is None:
            anchor = self.anchor_by_default
        sizes = {config.block_size, config.dflash_config and config.dflash_config.block_size}
        if len(sizes := sizes - {None}) != 1:
            raise ValueError(f"block_size: expected one value, found {sorted(sizes) or 'none'}")
        (slots,) = sizes
        if config.use_sliding_window and config.layer_types is None:
            raise ValueError("use_sliding_window is true: layer_types is missing")
        if config.slides and config.sliding_window is None:
            raise ValueError("layer_types has sliding layers: sliding_window is missing")
        types = tuple(config.layer_types or ())
        if types and len(types) != config.num_hidden_layers:
            raise ValueError(
                f"expected layer_types of {config.num_hidden_layers} layers, found {len(types)}"
            )
        is_causal = config.is_causal
        if is_causal is None and config.dflash_config:
            is_causal = config.dflash_config.causal
        if config.slides and layout == "speculators":
            # The library runs sliding layers causally without this flag, and full ones never.
            slides_causally = not config.sliding_window_non_causal
            if is_causal is None and slides_causally and "full_attention" in types:
                raise ValueError("sliding layers of the block are causal, and full ones are not")
            if is_causal is not None and is_causal != slides_causally:
                raise ValueError("is_causal and sliding_window_non_causal contradict each other")
            is_causal = slides_causally
        return {
            "sample_from_anchor": anchor,
            "is_causal": bool(is_causal),
            "sliding_window": config.sliding_window if config.slides else None,
            "layer_types": types if len(set(types)) > 1 else None,
            "k_trained": slots if anchor else slots - 1,
            "markov_rank": config.markov_rank or 0,
            "confidence": bool(config.enable_confidence_head),
            "qk_norm": False,  # no option: the layers of a block head always have these norms
        }

    def config_fields(self, settings: Any, target: Any) -> dict[str, Any]:
        own = {name: getattr(settings, name) for name in LAYER_OPTIONS}
        return {"sample_from_anchor": False} | own
