"""DFlash2: DFlash's block with convolutions over its slots, and a selector that chooses each draft
among the most probable tokens (methods §7.5, servers §12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftlab.families.dflash import Dflash

if TYPE_CHECKING:
    from draftlab.export.foreign_config import ForeignConfig
    from draftlab.train.objectives.objective import Objective


class Dflash2(Dflash):
    """Block-parallel heads whose drafts are a path through the candidates of each slot."""

    name = "dflash2"
    config_type = "draftlab.heads.dflash2:Dflash2Config"
    head_type = "draftlab.heads.dflash2:Dflash2Head"
    drafter_type = "draftlab.engine.block_drafter:SelectorDrafter"
    native_type = "draftlab.heads.vllm_config:dflash2_native_config"
    title = "DFlash2"
    description = "DFlash2 draft head (a block of draft tokens in one pass, with a selector)"
    options = Dflash.options | {"selector_rank"}
    whole_vocabulary = True
    architectures = ("DFlash2DraftModel",)
    speculators_type = "dflash2"

    def objective(self) -> Objective:
        from dataclasses import replace

        from draftlab.train.flops import selector_flops
        from draftlab.train.objectives.loss import LossTerms

        terms = LossTerms(selector=1.0)
        return replace(super().objective(), own_terms=terms, flops=selector_flops)

    def foreign_fields(self, config: ForeignConfig, layout: str) -> dict[str, Any]:
        from draftlab.heads.vllm_config import FACTOR_KEYS, SELECTOR_KEYS

        where = config if layout == "speculators" else config.dflash_config
        keys = {**{name: name for name in SELECTOR_KEYS}, **FACTOR_KEYS}
        found = {field: getattr(where, key, None) for key, field in keys.items()}
        if missing := [name for name in SELECTOR_KEYS if found[name] is None]:
            place = "at the top of config.json" if where is config else "in dflash_config"
            raise ValueError(f"{', '.join(missing)}: missing {place}")
        given = {field: value for field, value in found.items() if value is not None}
        return super().foreign_fields(config, layout) | given

    def config_fields(self, settings: Any, target: Any) -> dict[str, Any]:
        return super().config_fields(settings, target) | {"selector_rank": settings.selector_rank}
