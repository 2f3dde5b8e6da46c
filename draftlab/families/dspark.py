"""DSpark: DFlash's block with a Markov bias and a confidence head (arXiv 2607.05147; methods §7,
servers §12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftlab.families.dflash import Dflash

if TYPE_CHECKING:
    from draftlab.train.objectives.objective import Objective


class Dspark(Dflash):
    """Block-parallel heads whose drafts depend on the token before them."""

    name = "dspark"
    native_type = "draftlab.heads.vllm_config:dspark_native_config"
    title = "DSpark"
    description = "DSpark draft head (a block of draft tokens in one pass, with a Markov bias)"
    options = Dflash.options | {"markov_rank"}
    architectures = ("Qwen3DSparkModel", "DSparkDraftModel")
    speculators_type = "dspark"
    vllm_method = "dspark"
    anchor_by_default = True

    def objective(self) -> Objective:
        from dataclasses import replace

        from draftlab.train.objectives.loss import LossTerms

        terms = LossTerms("ce_l1", cross_entropy=0.1, l1=0.9, confidence=1.0)
        return replace(super().objective(), own_terms=terms)

    def config_fields(self, settings: Any, target: Any) -> dict[str, Any]:
        own = {"sample_from_anchor": True, "markov_rank": settings.markov_rank, "confidence": True}
        return super().config_fields(settings, target) | own
