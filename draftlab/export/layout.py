"""Layouts: how each program expects the files of a family's heads, and which heads it cannot serve.

A family names its table (`Family.layouts_type`): program → layout, or the reason why there is none.

- **speculators** (servers §9), which vLLM serves as it stands. Tensor names are those of the head
  folder; the target's embeddings are added, and config.json is complete: vLLM applies no defaults
  of a model, so that a missing key means a different head without an error (servers §1.6).
- **native** (servers §1, §5 to §7, §12): vLLM, SGLang and llama.cpp. Heads of EAGLE3's kind are
  `LlamaForCausalLMEagle3` in all programs. A head of one layer is written as `midlayer.*`, which
  every version of every program reads; `layers.0.*` is newer. Embeddings are left out if they are
  the target's, since programs share those then. With heads of EAGLE's first generation vLLM and
  SGLang use the target's embeddings and lm_head, and no norm. One folder of a block head serves all
  programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.launch_text import block_sglang_text, llamacpp_text, sglang_text, vllm_text
from draftlab.export.serving_tables import CALIBRATION, SPS, STS, ServingTables
from draftlab.export.settings import check_program
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import Family, get_family
from draftlab.heads.vllm_config import layer_fields, native_config

VLLM = "0.33.0"
"""The version of vLLM whose targets `WITHOUT_EAGLE3` lists."""
WITHOUT_EAGLE3 = {"gemma3": "Gemma 3", "gemma3_text": "Gemma 3"}
"""Targets (model_type → name) whose class in vLLM has no `SupportsEagle3`, so that vLLM cannot give
their hidden states to a head that reads them at boundaries (servers §1.3)."""
CONFIG, LAUNCH, README = "config.json", "launch.md", "README.md"
SPECULATORS = "0.9.0"
"""Version of the speculators library whose files its layout follows."""
LIBRARY_CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash": "DFlashDraftModel",
}
"""The library's classes of heads, by `speculators_model_type`."""
MASK_HIDDEN = "mask_hidden"
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
USE_VLLM = "use --to vllm"
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
_SCALED_EMBEDDINGS = "gemma"
"""Targets with this in their model_type multiply embeddings by √H without a key that says so."""
# fmt: off
_OWN_BLOCK_KEYS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "mask_token_id", "block_size", "sample_from_anchor",
)
"""Keys of a native block config that stand at the top of one in the speculators layout."""
_NATIVE_BLOCK_KEYS = (
    "architectures", "dflash_config", "target_layer_ids", "num_target_layers", "torch_dtype",
    "dtype", "draft_vocab_size", "rope_scaling",
)
"""Keys of a native block config that the speculators layout does not have."""
# fmt: on


@dataclass(frozen=True)
class Export:
    """A head that is being exported.

    Attributes:
        head: the head's draftlab.json.
        target: config.json of the head's target.
        target_name: its Hub id, or its folder.
        k: tokens that a server drafts by default.
        dtype: of floating tensors.
        serving: calibration and step times for servers; None: none were given.
    """

    head: HeadConfig
    target: dict[str, Any]
    target_name: str
    k: int
    dtype: torch.dtype
    serving: ServingTables | None = None

    @property
    def positions(self) -> int:
        """The target's `max_position_embeddings`: servers use the smaller of head and target."""
        text = self.target.get("text_config", self.target)
        return text.get("max_position_embeddings", self.head.max_position_embeddings)

    @property
    def placed_head(self) -> HeadConfig:
        """The head with the target's number of positions (servers §1.0)."""
        return self.head.model_copy(update={"max_position_embeddings": self.positions})

    @property
    def is_gpt_oss(self) -> bool:
        """Whether the target is gpt-oss, for which alone SGLang extracts the last boundary."""
        return self.target.get("model_type") == "gpt_oss"

    @property
    def dtype_name(self) -> str:
        """The dtype's name in config.json."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Refusal:
    """What a program cannot serve.

    Attributes:
        find: returns what is found of it in a head and its export; false: nothing.
        what: the message, in which {found}, {head}, {boundaries} and {export} are replaced.
        do: the layout to use instead, or another advice.
    """

    find: Callable[[Any, Export], object]
    what: str
    do: str = USE_VLLM
    where: str = ""


def _plain_config(export: Export) -> dict[str, Any]:
    """Return config.json of the head folder, with the target's number of positions."""
    return native_config(export.placed_head, export.dtype_name)


def _as_they_are(tensors: dict[str, Tensor], _: Export) -> dict[str, Tensor]:
    return tensors


@dataclass(frozen=True)
class Layout:
    """A program's layout of one family's heads. It renames and fills; it never computes.

    Attributes:
        title: the layout's name in README.md.
        launch: returns launch.md, the commands that serve the export at a path.
        config: returns config.json.
        tensors: returns the head's tensors, with `EMBEDDINGS` if `ships_embeddings`, under the
            layout's names.
        refusals: the heads that the program cannot serve.
        ships_embeddings: whether the target's embeddings are written where the head has none.
        reads_norm_before_residual: whether the program reads the flag; else it cannot serve a head
            that has it.
        reads_confidence: whether the program reads files about a head's confidence.
    """

    title: str
    launch: Callable[[Export, Path], str] = vllm_text
    config: Callable[[Export], dict[str, Any]] = _plain_config
    tensors: Callable[[dict[str, Tensor], Export], dict[str, Tensor]] = _as_they_are
    refusals: tuple[Refusal, ...] = ()
    ships_embeddings: bool = False
    reads_norm_before_residual: bool = True
    reads_confidence: bool = False

    def check(self, export: Export) -> None:
        """Check that the program can serve the head.

        Raises:
            UserError: the reason why not, and the layout to use instead.
        """
        for one in self.refusals:
            if found := one.find(export.head, export):
                known = {"head": export.head, "boundaries": list(export.head.boundaries)}
                what, do = (
                    text.format(found=found, export=export, **known) for text in (one.what, one.do)
                )
                raise UserError(what, where=one.where, do=do)

    def json_files(self, export: Export) -> dict[str, dict[str, Any]]:
        """Return the JSON files beside config.json that servers read, by name."""
        if (serving := export.serving) is None:
            return {}
        files = {CALIBRATION: serving.as_json()}
        if self.reads_confidence and serving.temperatures is not None:
            files[STS] = serving.sts_json()
            if serving.step_rates:
                files[SPS] = serving.sps_json()
        return files


def layout_for(program: str, family: str) -> Layout:
    """Return a program's layout of a family's heads.

    Raises:
        UserError: the program is unknown or cannot load such heads.
    """
    check_program(program)
    layout = get_family(family).layouts().get(program, "no layout has been written for them")
    if isinstance(layout, Layout):
        return layout
    raise UserError(
        f"{program} cannot hold {get_family(family).title} heads: {layout}",
        do="name another layout; docs/servers.md (section 7) says which program loads which head",
    )


def serving_warnings(program: str, export: Export) -> list[str]:
    """Return warnings about a target that a program cannot serve with such a head."""
    text = export.target.get("text_config") or export.target
    kinds = [WITHOUT_EAGLE3.get(part.get("model_type", "")) for part in (export.target, text)]
    name = next(filter(None, kinds), None)
    if program not in ("vllm", "speculators") or name is None:
        return []
    if get_family(export.head.family).reads_last_state:
        return []
    return [
        f"warning: export: vLLM {VLLM} cannot serve this head: its class of {name} targets has no "
        "SupportsEagle3, and cannot give the head their hidden states"
    ]


# What programs refuse.


def _width(owner: str) -> Refusal:
    """Refuse a head that a Llama config cannot describe."""
    return Refusal(
        lambda h, e: not _flag(h, "qk_norm") and h.hidden_size % h.num_attention_heads,
        f"{owner} Llama layers need num_attention_heads to divide hidden_size; this head "
        "has {head.num_attention_heads} and {head.hidden_size}",
        "train with a head.num_attention_heads that divides it, or use another layout",
    )


def _flags(program: str, **reasons: str) -> tuple[Refusal, ...]:
    """Refuse flags of draftlab.json that a program cannot serve."""
    return tuple(
        Refusal(
            lambda h, e, name=name: _flag(h, name),  # type: ignore[misc]
            f"{program} cannot serve a head with {name}: {reason}",
        )
        for name, reason in reasons.items()
    )


def _block(program: str) -> tuple[Refusal, ...]:
    """Return what a program refuses of a block head and its target."""
    return (
        Refusal(
            lambda h, e: _scaled(e),
            program + " runs {found}",
            "use the head in draftlab alone, or export an EAGLE3 head for this target",
        ),
        Refusal(
            lambda h, e: (h.boundaries[0] == 0 or _reads_last(h)) and f"{h.target_num_layers - 1}",
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


_SERVED_EMBEDDINGS = Refusal(
    lambda h, e: h.embeddings == "own" and h.hidden_size == h.target_hidden_size,
    f"SGLang cannot serve a head with embeddings of its own: it replaces them by the target's, and "
    f"{_WRONG_TOKENS}",
)
_SGLANG = (
    _width("SGLang's"),
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
    _SERVED_EMBEDDINGS,
    Refusal(
        lambda h, e: h.boundaries[0] == 0,
        "SGLang cannot extract boundary 0, the embeddings: it counts outputs of layers",
    ),
    Refusal(
        lambda h, e: _reads_last(h) and not e.is_gpt_oss,
        "SGLang extracts boundary {head.target_num_layers}, the state after the last layer, only "
        "from gpt-oss targets",
    ),
    Refusal(
        lambda h, e: h.feature_size == h.hidden_size,
        "SGLang leaves out fc if its input is as wide as its output, as with this one boundary",
    ),
)
_LLAMACPP = (
    _width("llama.cpp's"),
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
_SPECULATORS = (
    Refusal(  # the library builds its layers from the config and sets the target's width in it
        lambda h, e: h.hidden_size != h.target_hidden_size,
        "the speculators layout holds heads as wide as their target ({head.target_hidden_size}); "
        "this one has hidden_size {head.hidden_size}",
    ),
    Refusal(
        lambda h, e: _trains_mask(h) and _flag(h, "fc_norm"),
        "vLLM does not read fc_norm of a parallel head in the speculators layout",
    ),
    _width("the speculators layout's"),
)
_SPECULATORS_BLOCK = (
    *_block("the speculators layout"),
    Refusal(
        lambda h, e: _flag(h, "is_causal"),
        "the speculators layout has no key for causal blocks of full attention",
        "use --to vllm, sglang or llamacpp",
    ),
)
_SGLANG_BLOCK = (
    *_block("SGLang"),
    Refusal(
        lambda h, e: h.draft_vocab_size != h.vocab_size,
        "SGLang drafts with its target's lm_head, over the whole vocabulary; this head has "
        "{head.draft_vocab_size:,} of {head.vocab_size:,} tokens",
        f"{USE_VLLM}, or train a head with the whole vocabulary",
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
    text = export.target.get("text_config", export.target)
    scaled = [k for k, v in _NEUTRAL.items() if text.get(k, v) not in (v, None)]
    if _SCALED_EMBEDDINGS in str(text.get("model_type", "")):
        scaled.append("embeddings times √H")
    heads = f"{get_family(export.head.family).title} heads on plain embeddings and logits"
    return f"{heads}, and this target scales them: {', '.join(scaled)}" if scaled else ""


def _flag(head: HeadConfig, name: str) -> bool:
    return bool(getattr(head, name, False))


def _reads_last(head: HeadConfig) -> bool:
    return head.boundaries[-1] == head.target_num_layers


def _trains_mask(head: HeadConfig) -> bool:
    return get_family(head.family).trains_mask


# How tensors are named and filled.


def _midlayer(tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
    """Name the only layer as every version of every program does."""
    if export.head.num_layers > 1:
        return tensors
    return {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: x
        for name, x in tensors.items()
    }


def _fc_bias(tensors: dict[str, Tensor], _: Export) -> dict[str, Tensor]:
    """Add a bias of zeros: SGLang initialises a missing one at random, and vLLM refuses one."""
    weight = tensors["fc.weight"]
    return tensors | {"fc.bias": weight.new_zeros(len(weight))}


def _library_mask(tensors: dict[str, Tensor], _: Export) -> dict[str, Tensor]:
    """Give `mask_hidden`, if there is one, the library's shape [1, 1, F]."""
    if MASK_HIDDEN not in tensors:
        return tensors
    return tensors | {MASK_HIDDEN: tensors[MASK_HIDDEN][None]}


def _baked(tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
    """Divide the confidence head by the temperature to bake, if any.

    σ((w · x + b) / T) = σ(w/T · x + b/T), so that the only error is the rounding to the dtype.
    """
    temperature = export.serving and export.serving.baked_temperature
    if not temperature:
        return tensors
    baked = {name: (tensors[name].float() / temperature).to(export.dtype) for name in CONFIDENCE}
    return tensors | baked


# config.json where it is another than the head folder's.


def _sglang_config(export: Export) -> dict[str, Any]:
    config = _plain_config(export)
    if export.is_gpt_oss and _reads_last(export.head):
        # Only for these targets SGLang reads ids that name the last boundary as boundaries.
        ids = {"eagle_aux_hidden_state_layer_ids": list(export.head.boundaries)}
        config["eagle_config"] = {**config["eagle_config"], **ids}
    return config


def _sglang_eagle_config(export: Export) -> dict[str, Any]:
    return _plain_config(export) | {"architectures": ["LlamaForCausalLMEagle"]}


def _speculators_config(
    export: Export, own_fields: dict[str, Any], layers: dict[str, Any]
) -> dict[str, Any]:
    """Return config.json of a model type of the library, from its keys and its layers' config."""
    model_type = get_family(export.head.family).speculators_type or ""
    targets = export.target.get("architectures") or [export.head.target.architecture]
    return {
        "architectures": [LIBRARY_CLASSES[model_type]],
        "speculators_model_type": model_type,
        "speculators_version": SPECULATORS,
        "dtype": export.dtype_name,
        "tie_word_embeddings": False,
        "draft_vocab_size": export.head.draft_vocab_size,
        **own_fields,
        "speculators_config": {
            "algorithm": model_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": export.k,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": export.target_name, "architectures": targets},
        },
        "transformer_layer_config": layers,
    }


def _eagle3_speculators_config(export: Export) -> dict[str, Any]:
    """Return config.json of an EAGLE3 or parallel head in the speculators layout.

    There is no `model_type` at the top (it would select the wrong parser), `num_aux_hidden_states`
    is inside the layer config (vLLM reads the size of fc there), and every norm flag is written
    (the defaults of vLLM, the library and the families differ).
    """
    head: Any = export.head
    own_fields = {
        "target_hidden_size": head.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(head.boundaries),
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "embed_requires_grad": _trains_mask(head),
        **({"mask_token_id": head.mask_token_id} if _trains_mask(head) else {}),
    }
    fields = layer_fields(export.placed_head, "")
    rope = fields["rope_parameters"]
    for key in ("dtype", "bias", "draft_vocab_size", "target_hidden_size", "rope_scaling"):
        del fields[key]
    # transformers 5 treats rope_scaling as another name of rope_parameters, and vLLM assigns keys
    # in file order: a null, or a copy without theta, would overwrite the RoPE. So rope_scaling is
    # an equal copy or, without scaling, absent.
    scaling = {} if rope["rope_type"] == "default" else {"rope_scaling": dict(rope)}
    layers = {
        "model_type": "qwen3" if head.qk_norm else "llama",
        **fields,
        **scaling,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "pretraining_tp": 1,
        "layer_types": ["full_attention"] * head.num_layers,
        "num_aux_hidden_states": len(head.boundaries),
    }
    return _speculators_config(export, own_fields, layers)


def _block_speculators_config(export: Export) -> dict[str, Any]:
    """Return config.json of a block head in the speculators layout.

    In the layer config `is_causal` stays: vLLM runs DSpark's sliding layers causally without it.
    `rope_scaling` does not: transformers 5 reads it as another name of `rope_parameters`.
    """
    native = _plain_config(export)
    own_fields = {
        "aux_hidden_state_layer_ids": list(export.head.boundaries),
        "sliding_window_non_causal": not _flag(export.head, "is_causal"),
        **{name: native[name] for name in _OWN_BLOCK_KEYS if name in native},
    }
    left_out = {*_OWN_BLOCK_KEYS, *_NATIVE_BLOCK_KEYS}
    layers = {name: value for name, value in native.items() if name not in left_out}
    return _speculators_config(export, own_fields, layers)


# The tables of the families.


def _library(family: Family, config: Callable[..., dict[str, Any]], **options: Any) -> Layout:
    """Return the speculators layout of one of the library's model types."""
    title = (
        f"speculators layout {SPECULATORS} (`speculators_model_type: {family.speculators_type}`)"
    )
    return Layout(title, partial(vllm_text, alone=True), config, **options)


def eagle3_layouts(family: Family) -> dict[str, Layout | str]:
    """Return the layouts of EAGLE3 heads.

    llama.cpp's `convert_hf_to_gguf.py` recognises a head by `draft_vocab_size` and a single layer,
    reads the boundaries from the top of config.json, permutes q and k itself and converts offsets
    in d2t to ids.
    """
    return {
        "speculators": _library(
            family,
            _eagle3_speculators_config,
            tensors=_library_mask,
            refusals=_SPECULATORS,
            ships_embeddings=True,  # the library leaves missing ones uninitialised
        ),
        "vllm": Layout("vLLM layout", tensors=_midlayer, refusals=(_width("vLLM's"),)),
        "sglang": Layout(
            "SGLang layout",
            sglang_text,
            _sglang_config,
            _midlayer,
            _SGLANG,
            reads_norm_before_residual=False,
        ),
        "llamacpp": Layout(
            "llama.cpp layout", llamacpp_text, tensors=_midlayer, refusals=_LLAMACPP
        ),
    }


def peagle_layouts(family: Family) -> dict[str, Layout | str]:
    """Return the layouts of parallel heads."""
    elsewhere = "vLLM serves this head (--to vllm or --to speculators)"
    return eagle3_layouts(family) | {
        "sglang": f"SGLang has no masked slots, it drafts one token a pass: {elsewhere}",
        "llamacpp": f"llama.cpp's EAGLE3 drafts one token a pass, has no masked slots: {elsewhere}",
    }


def eagle_layouts(_: Family) -> dict[str, Layout | str]:
    """Return the layouts of first-generation EAGLE heads."""
    return {
        "speculators": f"vLLM reads speculators' eagle3 and peagle, not its eagle: {USE_VLLM}",
        "vllm": Layout(
            "vLLM layout (`LlamaForCausalLM`, served with method eagle)",
            refusals=(_width("vLLM's"),),
        ),
        "sglang": Layout(
            "SGLang layout (`LlamaForCausalLMEagle`)",
            partial(sglang_text, algorithm="EAGLE"),
            _sglang_eagle_config,
            _fc_bias,
            (_width("SGLang's"), _SERVED_EMBEDDINGS),
        ),
        "llamacpp": "llama.cpp has no first-generation EAGLE: vLLM serves this head (--to vllm)",
    }


def eagle_llama4_layouts(_: Family) -> dict[str, Layout | str]:
    """Return the layouts of dense Llama 4 heads.

    The head folder is in vLLM's layout already: Llama 4's names, RoPE on neighbouring pairs, a
    config.json with the keys that have no default there. The export adds the target's embeddings,
    since older versions require a checkpoint to hold every tensor.
    """
    title = "vLLM layout (`Llama4ForCausalLM`, served as `EagleLlama4ForCausalLM`)"
    return {
        "speculators": f"the format has Llama's layers and Qwen3's, not Llama 4's: {USE_VLLM}",
        "vllm": Layout(title, ships_embeddings=True),
        "sglang": "SGLang has no EAGLE drafter of Llama 4's layers: vLLM serves this head "
        "(--to vllm)",
        "llamacpp": "llama.cpp has no such EAGLE: vLLM serves this head (--to vllm)",
    }


def block_layouts(family: Family) -> dict[str, Layout | str]:
    """Return the layouts of block-parallel heads; the native one is the head folder's.

    Embeddings are never written, since all programs use the target's; lm_head only over a reduced
    draft vocabulary. `is_causal` and `sample_from_anchor` are always written, because programs
    disagree about their defaults.
    """
    native = "{} layout, which vLLM, SGLang and llama.cpp read alike".format
    config, sglang = _block_speculators_config, (native("SGLang"), block_sglang_text)
    return {
        "speculators": _library(family, config, tensors=_baked, refusals=_SPECULATORS_BLOCK),
        "vllm": Layout(native("vLLM"), tensors=_baked, refusals=_block("vLLM")),
        "sglang": Layout(*sglang, tensors=_baked, refusals=_SGLANG_BLOCK, reads_confidence=True),
        "llamacpp": Layout(
            native("llama.cpp"), llamacpp_text, tensors=_baked, refusals=_block("llama.cpp")
        ),
    }
