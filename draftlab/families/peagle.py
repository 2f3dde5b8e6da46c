"""P-EAGLE: all draft tokens in one pass, from masked slots (methods §4, servers §1.5)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

from draftlab.families.eagle3 import Eagle3

if TYPE_CHECKING:
    from draftlab.export.foreign_config import ForeignConfig
    from draftlab.train.objectives.objective import Objective


class Peagle(Eagle3):
    """Parallel heads: EAGLE3's layers, one to four, with a learned feature for masked slots."""

    name = "peagle"
    config_type = "draftlab.heads.peagle:PeagleConfig"
    head_type = "draftlab.heads.peagle:PeagleHead"
    drafter_type = "draftlab.engine.drafter:ParallelDrafter"
    layouts_type = "draftlab.export.layout_table:peagle_layouts"
    title = "parallel (P-EAGLE)"
    description = "parallel draft head (P-EAGLE: all draft tokens in one pass)"
    drafting = "parallel"
    options = frozenset(
        {"norm_before_residual", "norm_before_fc", "fc_norm", "qk_norm", "mask_token"}
    )
    norms_residual = False  # it does not raise its acceptance (docs/benchmarks.md)
    has_mask_token = True
    trains_mask = True
    starts_from = frozenset({"eagle3"})
    architectures = ("PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM", "PEagleDraftModel")
    speculators_type = "peagle"
    norm_flag_must_be_named = False
    # vLLM reads it from config.json only if the export is served alone.
    vllm_options: ClassVar[dict[str, Any]] = {"parallel_drafting": True}

    def objective(self) -> Objective:
        from draftlab.train.batch.loss_rows import DEPTH_SAMPLING
        from draftlab.train.fast.parallel import FastParallel
        from draftlab.train.flops import parallel_flops
        from draftlab.train.objectives.objective import Objective
        from draftlab.train.objectives.parallel import parallel_outputs, parallel_weights

        return Objective(
            parallel_outputs,
            parallel_weights,
            fast_forward=FastParallel,
            sampling=DEPTH_SAMPLING,
            flops=parallel_flops,
        )

    def reads(self, architecture: str, config: ForeignConfig, tensors: Collection[str]) -> bool:
        if architecture in self.architectures:
            return True
        return config.names_mask_token and architecture in Eagle3.architectures
