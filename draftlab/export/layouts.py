"""Which program holds which family of heads, and why not where it does not."""

from __future__ import annotations

from draftlab.errors import UserError
from draftlab.export.eagle import SglangEagle, VllmEagle
from draftlab.export.layout import Layout
from draftlab.export.llama4 import VllmLlama4
from draftlab.export.llamacpp import LlamaCpp
from draftlab.export.native import Sglang, Vllm
from draftlab.export.settings import check_program
from draftlab.export.speculators import Speculators

NAMES = {
    "eagle3": "EAGLE3",
    "ptd": "parallel (PTD)",
    "eagle": "first-generation EAGLE",
    "eagle_llama4": "dense Llama 4",
}
"""Families, as messages call them."""

LAYOUTS: dict[str, dict[str, Layout | str]] = {
    "speculators": {
        "eagle3": Speculators("eagle3"),
        "ptd": Speculators("peagle"),
        "eagle": "vLLM reads speculators' eagle3 and peagle, not its eagle: use --to vllm",
        "eagle_llama4": "the format has Llama's layers and Qwen3's, not Llama 4's: use --to vllm",
    },
    "vllm": {
        "eagle3": Vllm(),
        "ptd": Vllm(),
        "eagle": VllmEagle(),
        "eagle_llama4": VllmLlama4(),
    },
    "sglang": {
        "eagle3": Sglang(),
        "ptd": "SGLang has no masked slots, it drafts a token a pass: vLLM serves this head "
        "(--to vllm or --to speculators)",
        "eagle": SglangEagle(),
        "eagle_llama4": "SGLang has no EAGLE drafter of Llama 4's layers: vLLM serves this head "
        "(--to vllm)",
    },
    "llamacpp": {
        "eagle3": LlamaCpp(),
        "ptd": "llama.cpp's EAGLE3 drafts a token a pass and has no masked slots: vLLM serves this "
        "head (--to vllm or --to speculators)",
        "eagle": "llama.cpp has no first-generation EAGLE: vLLM serves this head (--to vllm)",
        "eagle_llama4": "llama.cpp has no such EAGLE: vLLM serves this head (--to vllm)",
    },
}
"""Program → family → its layout, or why it has none."""


def find_layout(program: str) -> dict[str, Layout | str]:
    """What a program holds of each family.

    Raises:
        UserError: for an unknown program, with the nearest known name.
    """
    check_program(program)
    return LAYOUTS[program]


def layout_for(program: str, family: str) -> Layout:
    """A program's layout of a family's heads.

    Raises:
        UserError: the program is unknown, or cannot hold such heads: why, and what to use instead.
    """
    found = find_layout(program).get(family, "it is not written for them")
    if isinstance(found, Layout):
        return found
    raise UserError(f"{program} cannot hold {NAMES.get(family, family)} heads: {found}")
