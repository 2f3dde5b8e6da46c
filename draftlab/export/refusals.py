"""Which heads and targets each program cannot serve, and why."""

from __future__ import annotations

from typing import Any

from draftlab.export.layout import USE_VLLM, Export, Refusal
from draftlab.heads.vllm_config import FACTOR_KEYS

VLLM = "0.33.0"
"""The version of vLLM whose targets `WITHOUT_EAGLE3` lists."""
WITHOUT_EAGLE3 = {
    "aria", "cohere", "cohere2", "ernie4_5_moe", "exaone4", "falcon_h1", "gemma", "gemma2",
    "gemma3", "gemma3_text", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "granitemoehybrid",
    "idefics3", "internvl", "jamba", "lfm2", "lfm2_vl", "llava_onevision", "mixtral",
    "olmo_hybrid", "olmoe", "qwen2_moe", "qwen2_vl", "smolvlm", "stablelm",
}  # fmt: skip
"""Types of targets whose class in vLLM has no `SupportsEagle3`, so that vLLM cannot give their
hidden states to a head that reads them at boundaries (servers §1.3)."""
_NO_QK_NORM = "its EAGLE3 layer has no norms of queries and keys"
_WRONG_TOKENS = "would draft wrong tokens without a warning"
_NEUTRAL = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "scale_emb": 1.0,
    "final_logit_softcapping": None,
}
"""Keys of a target's config that scale embeddings or logits, with the value that changes nothing.
Servers apply none of them to a block head, except `logit_scale` in vLLM."""


def serving_warnings(program: str, export: Export) -> list[str]:
    """Return warnings about a target that a program cannot serve with such a head."""
    # vLLM's class is that of the whole model: Exaone 4.5's has the interface, Exaone 4's has not.
    kind = export.target.get("model_type") or export.text_config.get("model_type")
    reads_boundaries = not export.family.reads_last_state
    if program not in ("vllm", "speculators") or kind not in WITHOUT_EAGLE3 or not reads_boundaries:
        return []
    return [
        f"warning: export: vLLM {VLLM} cannot serve this head: its class of this target has no "
        "SupportsEagle3, and cannot give the head their hidden states"
    ]


def refuse_width(owner: str) -> Refusal:
    """Refuse a head that a Llama config cannot describe."""
    return Refusal(
        lambda h, e: not e.has("qk_norm") and h.hidden_size % h.num_attention_heads,
        f"{owner} Llama layers need num_attention_heads to divide hidden_size; this head "
        "has {head.num_attention_heads} and {head.hidden_size}",
        "train with a head.num_attention_heads that divides it, or use another layout",
    )


def _flags(program: str, **reasons: str) -> tuple[Refusal, ...]:
    """Refuse flags of draftlab.json that a program cannot serve."""
    return tuple(
        Refusal(
            lambda h, e, name=name: e.has(name),  # type: ignore[misc]
            f"{program} cannot serve a head with {name}: {reason}",
        )
        for name, reason in reasons.items()
    )


def refuse_block(program: str) -> tuple[Refusal, ...]:
    """Return what a program refuses of a block head and its target."""
    return (
        Refusal(
            lambda h, e: _scaled(e),
            program + " runs {found}",
            "use the head in draftlab alone, or export an EAGLE3 head for this target",
        ),
        Refusal(
            lambda h, e: (
                (h.boundaries[0] == 0 or e.reads_last_boundary) and f"{h.target_num_layers - 1}"
            ),
            program + " reads outputs of the layers below the last one, boundaries 1 to {found}; "
            "this head has {boundaries}",
            "record and train with other boundaries",
        ),
        Refusal(
            lambda h, e: e.k > h.k_trained,
            "expected at most {head.k_trained} draft tokens, all slots of the block, found "
            "{export.k}",
            "lower it to {head.k_trained}",
            "export.k",
        ),
    )


def _one_layer(program: str) -> Refusal:
    """Refuse a chain of several layers."""
    return Refusal(
        lambda h, e: h.num_layers > 1 and str(h.num_layers),
        f"{program} loads EAGLE3 heads of one layer, this one has {{found}}",
        f"{USE_VLLM}, or train with head.num_layers=1",
    )


VLLM_WINDOW = Refusal(
    lambda h, e: e.has("sliding_window") and e.has("qk_norm") and str(h.sliding_window),
    "vLLM cannot serve a head with qk_norm and a sliding_window of {found}: its Qwen3 class of "
    "0.32 ignores the window",
    "train without head.qk_norm, whose window vLLM reads",
)


def _factors(head: Any) -> str:
    """Return the factors of a head's embeddings and logits that change something."""
    found = {name: getattr(head, name, None) for name in FACTOR_KEYS.values()}
    return ", ".join(f"{name} {x:g}" for name, x in found.items() if x not in (None, 1.0))


LLAMACPP_BLOCK = (
    *refuse_block("llama.cpp"),
    Refusal(
        lambda h, e: h.draft_vocab_size < h.vocab_size and not h.markov_rank and e.family.title,
        "llama.cpp's converter reads {found} heads of the target's whole vocabulary alone, this "
        "one drafts {head.draft_vocab_size} of {head.vocab_size} tokens",
        f"{USE_VLLM}, or train without draft_vocab.size",
    ),
    Refusal(
        lambda h, e: (k := getattr(h, "selector_top_k", 0)) * (k + 1) > h.hidden_size and k,
        "llama.cpp keeps the scores of a slot in a state: {found} candidates do not fit into "
        "hidden_size {head.hidden_size}",
    ),
)
SGLANG_EMBEDDINGS = Refusal(
    lambda h, e: h.embeddings == "own" and h.hidden_size == h.target_hidden_size,
    f"SGLang cannot serve a head with embeddings of its own: it replaces them by the target's, and "
    f"{_WRONG_TOKENS}",
)
SGLANG_EAGLE3 = (
    refuse_width("SGLang's"),
    _one_layer("SGLang"),
    *_flags(
        "SGLang",
        qk_norm=_NO_QK_NORM,
        norm_before_residual=f"it does not read the flag, and {_WRONG_TOKENS}",
    ),
    Refusal(
        lambda h, e: not h.rope_parameters.get("truncate", True),
        "SGLang rounds the bounds of YaRN, and this head's are not (truncate)",
        where="rope_parameters",
    ),
    SGLANG_EMBEDDINGS,
    Refusal(
        lambda h, e: h.boundaries[0] == 0,
        "SGLang cannot extract boundary 0, the embeddings: it counts outputs of layers",
    ),
    Refusal(
        lambda h, e: e.reads_last_boundary and not e.is_gpt_oss,
        "SGLang extracts boundary {head.target_num_layers}, the state after the last layer, only "
        "from gpt-oss targets",
    ),
    Refusal(
        lambda h, e: h.feature_size == h.hidden_size,
        "SGLang leaves out fc if its input is as wide as its output, as with this one boundary",
    ),
)
LLAMACPP_EAGLE3 = (
    refuse_width("llama.cpp's"),
    _one_layer("llama.cpp"),
    Refusal(
        lambda h, e: e.has("sliding_window") and str(h.sliding_window),
        "llama.cpp cannot serve a head with a sliding_window of {found}: its EAGLE3 graph attends "
        "to all keys",
    ),
    *_flags(
        "llama.cpp",
        qk_norm=_NO_QK_NORM,
        fc_norm=f"its converter drops the norms, and it {_WRONG_TOKENS}",
        norm_output=f"it feeds back the state before the norm, and {_WRONG_TOKENS}",
    ),
    Refusal(
        lambda h, e: h.rope_parameters.get("rope_type") == "yarn",
        "a head with YaRN has not been tried in llama.cpp",
        where="rope_parameters",
    ),
    Refusal(
        lambda h, e: len(h.boundaries) != 3 and len(h.boundaries),
        "llama.cpp reads exactly 3 boundaries, this head has {found}: {boundaries}",
        f"{USE_VLLM}, or train a head with three",
    ),
    Refusal(  # `--spec-draft-p-min` is compared with a probability at temperature 1 (servers §13)
        lambda h, e: (
            (e.serving and (t := e.serving.calibration.confidence_temperature) not in (None, 1.0))
            and f"{t:g}"
        ),
        "llama.cpp reads a draft's confidence at temperature 1, this calibration states it at "
        "{found}, that of its sampled drafts",
        "`draftlab eval --calibrate --draft-probs off` makes one of argmax drafts",
        "export.calibration",
    ),
)
SPECULATORS_EAGLE3 = (
    Refusal(  # the library builds its layers from the config and sets the target's width in it
        lambda h, e: h.hidden_size != h.target_hidden_size,
        "the speculators layout holds heads as wide as their target ({head.target_hidden_size}); "
        "this one has hidden_size {head.hidden_size}",
    ),
    Refusal(
        lambda h, e: e.family.trains_mask and e.has("fc_norm"),
        "vLLM does not read fc_norm of a parallel head in the speculators layout",
    ),
    VLLM_WINDOW,
    refuse_width("the speculators layout's"),
)
SPECULATORS_BLOCK = (
    *refuse_block("the speculators layout"),
    Refusal(
        lambda h, e: e.has("is_causal"),
        "the speculators layout has no key for causal blocks of full attention",
        "use --to vllm, sglang or llamacpp",
    ),
    Refusal(
        lambda h, e: _factors(h),
        "the speculators layout has no key for factors of embeddings and logits: {found}",
    ),
)
SGLANG_BLOCK = (
    *refuse_block("SGLang"),
    Refusal(
        lambda h, e: h.draft_vocab_size != h.vocab_size,
        "SGLang drafts with its target's lm_head, over the whole vocabulary; this head has "
        "{head.draft_vocab_size:,} of {head.vocab_size:,} tokens",
        f"{USE_VLLM}, or train a head with the whole vocabulary",
    ),
    Refusal(
        lambda h, e: (x := getattr(h, "embedding_scale", 1.0)) != 1 and f"{x:g}",
        "SGLang feeds block heads the target's embeddings as they are; this head's are multiplied "
        "by {found}",
    ),
    Refusal(
        lambda h, e: e.serving and e.k != h.k_trained,
        "SGLang drafts all {head.k_trained} slots of the block and wants a temperature "
        "for each; the calibration has {export.k}",
        "`draftlab eval --calibrate --k {head.k_trained}`, and export with that K",
        "export.k",
    ),
)


def _scaled(export: Export) -> str:
    """Return what a target scales that servers do not scale for a block head; "": nothing."""
    if export.has("embedding_scale"):  # the head says by what its own are multiplied
        return ""
    text = export.text_config
    scaled = [k for k, v in _NEUTRAL.items() if text.get(k, v) not in (v, None)]
    if "gemma" in str(text.get("model_type", "")):  # no key says so
        scaled.append("embeddings times √H")
    heads = f"{export.family.title} heads on plain embeddings and logits"
    return f"{heads}, and this target scales them: {', '.join(scaled)}" if scaled else ""
