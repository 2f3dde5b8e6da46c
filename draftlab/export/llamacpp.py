"""llama.cpp's layout: a folder that its `convert_hf_to_gguf.py` reads (servers §5)."""

from __future__ import annotations

from pathlib import Path

from draftlab.errors import UserError
from draftlab.export.launch_text import llamacpp_text
from draftlab.export.layout import Export
from draftlab.export.vllm_sglang import Native, refuse_flags

NUM_BOUNDARIES = 3
CONFIDENCE_TEMPERATURE = 1.0
"""Temperature of the draft probability that `--spec-draft-p-min` is compared with (servers §13)."""


class LlamaCpp(Native):
    """The native layout, for heads that llama.cpp can compute.

    The converter recognises it by `draft_vocab_size` and a single layer, reads the boundaries from
    the top of config.json, permutes q and k itself and converts offsets in d2t to ids.
    """

    program = "llama.cpp"

    def check(self, export: Export) -> None:
        super().check(export)
        head = export.head
        refuse_flags(
            head,
            {
                "qk_norm": "its EAGLE3 layer has no norms of queries and keys",
                "fc_norm": "its converter drops the norms, and it would draft wrong tokens "
                "without a warning",
                "norm_output": "it feeds back the state before the norm, and would draft wrong "
                "tokens without a warning",
            },
            "llama.cpp",
        )
        if len(head.boundaries) != NUM_BOUNDARIES:
            raise UserError(
                f"llama.cpp reads exactly {NUM_BOUNDARIES} boundaries, this head has "
                f"{len(head.boundaries)}: {list(head.boundaries)}",
                do="use --to vllm, or train a head with three",
            )

        one = export.serving and export.serving.calibration
        if one and one.confidence_temperature not in (None, CONFIDENCE_TEMPERATURE):
            raise UserError(
                "llama.cpp reads a draft's confidence at temperature "
                f"{CONFIDENCE_TEMPERATURE:g}, this calibration states it at "
                f"{one.confidence_temperature:g}, that of its sampled drafts",
                where="export.calibration",
                do="`draftlab eval --calibrate --draft-probs off` makes one of argmax drafts",
            )

    def launch(self, export: Export, path: Path) -> str:
        return llamacpp_text(export, path)
