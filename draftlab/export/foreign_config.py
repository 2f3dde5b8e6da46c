"""Strict reading of other programs' config.json of a draft head (servers §1.3, §6, §9).

There are two layouts: that of the speculators library, and the native one of vLLM, SGLang,
SpecForge and SafeAILab. Keys that change a forward pass are checked one by one; keys that every
transformers config has are ignored; any other key is refused by name, since it might mean a
different head.

vLLM, llama.cpp and the speculators library count inputs of layers, as draftlab does; SGLang and
SpecForge count outputs, in `eagle_config`. If the readings of a config disagree, the config does
not show which program the head was trained with, and with the wrong one it drafts badly without
an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError
from transformers import PretrainedConfig

from draftlab.errors import UserError
from draftlab.export.launch import LAUNCH, stated_k
from draftlab.files import read_fields
from draftlab.heads.config import Size
from draftlab.heads.family import Family, families
from draftlab.heads.rope import attention_factor
from draftlab.heads.vllm_config import MASK_TOKEN_KEYS
from draftlab.settings import describe_error, merged_errors
from draftlab.target_model.hidden_states import check_boundaries

LLAMA4 = ("Llama4ForCausalLM", "EagleLlama4ForCausalLM")
"""Architectures of dense Llama 4 drafters, which cannot be imported."""
EXPORT_AGAIN = "export the head again with the program that wrote it"
DEFAULT_ROPE_THETA = 10000.0
"""Every program's RoPE base for a config without one."""
# fmt: off
_TRAINING_KEYS = {
    "attention_dropout", "auto_map", "bos_token_id", "embed_requires_grad", "eos_token_id",
    "initializer_range", "max_window_layers", "num_anchors", "pad_token_id", "pretraining_tp",
    "speculators_version", "tie_word_embeddings", "torch_dtype", "use_cache",
}
# fmt: on
_IGNORED_KEYS = (frozenset(PretrainedConfig().to_dict()) | _TRAINING_KEYS) - {"model_type"}


class EagleConfig(BaseModel, extra="forbid", strict=True):
    """The nested object `eagle_config`."""

    use_aux_hidden_state: Literal[True] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_fc: bool | None = None


class SelectorKeys(BaseModel):
    """Keys of DFlash2 heads: in `dflash_config`, in the speculators layout at the top."""

    conv_kernel_size: Size | None = None
    conv_group_size: Size | None = None
    selector_rank: Size | None = None
    selector_top_k: Size | None = None
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    final_logit_softcapping: float | None = None


class DflashConfig(SelectorKeys, extra="forbid", strict=True):
    """The nested object `dflash_config`, which wins over the top level. Published heads of z-lab
    have block_size at the top level alone."""

    mask_token_id: int
    target_layer_ids: list[int]
    block_size: Size | None = None
    causal: bool | None = None


class ForeignConfig(SelectorKeys, extra="forbid", strict=True, frozen=True):
    """The keys that change a forward pass; a literal is the only value that draftlab computes.

    `eagle_aux_hidden_state_layer_ids` counts inputs of layers like vLLM and the speculators
    library, as does `aux_hidden_state_layer_ids`; `target_layer_ids` and the list in `eagle_config`
    count outputs like SGLang.
    """

    model_type: Literal["llama", "qwen3"] = "llama"
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    vocab_size: Size
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    max_position_embeddings: Size | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    num_aux_hidden_states: Size | None = None
    eagle_config: EagleConfig | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    mask_token_id: int | None = None
    pard_token: int | None = None
    ptd_token_id: int | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: Size | None = None
    dflash_config: DflashConfig | None = None
    block_size: Size | None = None
    sample_from_anchor: bool | None = None
    is_causal: bool | None = None
    sliding_window_non_causal: bool | None = None
    markov_rank: Annotated[int, Field(ge=0)] | None = None
    markov_head_type: Literal["vanilla"] | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] | None = None
    mlp_bias: Literal[False] | None = None
    bias: Literal[False] | None = None
    qkv_bias: Literal[False] | None = None
    use_sliding_window: bool | None = None
    sliding_window: Size | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    logit_scale: Literal[1.0] | None = None
    quantization_config: None = None

    @property
    def names_mask_token(self) -> bool:
        """True if it names a mask token, as configs of parallel heads do."""
        return any(getattr(self, name) is not None for name in MASK_TOKEN_KEYS)

    @property
    def slides(self) -> bool:
        """Whether a layer has a sliding window. Without `layer_types` programs differ."""
        return "sliding_attention" in (self.layer_types or ())

    @property
    def outputs_of_layers(self) -> list[int] | None:
        """The layers whose outputs a block head reads; None: not in the native layout."""
        return self.dflash_config.target_layer_ids if self.dflash_config else self.target_layer_ids


@dataclass(frozen=True)
class ForeignHead:
    """A foreign head's config, without its target.

    Attributes:
        layout: "speculators" or "native".
        family: draftlab's family of its heads.
        config: its keys.
        k: tokens that a server drafts, if the config or the launch command names a number.
        verifier: the target, if the config names one.
    """

    layout: Literal["speculators", "native"]
    family: Family
    config: ForeignConfig
    k: int | None = None
    verifier: str | None = None

    def mask_token(self) -> int | None:
        """Return the mask token, for which programs have three names.

        Raises:
            ValueError: the names have different values.
        """
        if self.config.dflash_config is not None:
            return self.config.dflash_config.mask_token_id
        tokens = {getattr(self.config, key) for key in MASK_TOKEN_KEYS} - {None}
        if len(tokens) > 1:
            raise ValueError(
                f"{', '.join(MASK_TOKEN_KEYS)} name different tokens: {sorted(tokens)}"
            )
        return tokens.pop() if tokens else None


def layout_name(folder: Path) -> Literal["draftlab", "speculators", "native", "unknown"]:
    """Return the layout of a head's folder by its configs; "unknown": there is no readable one."""
    if (folder / "draftlab.json").is_file():
        return "draftlab"
    try:
        config = read_fields(folder / "config.json", {}, kind="head's config.json")
    except UserError:
        return "unknown"
    return "speculators" if "speculators_model_type" in config else "native"


def read_foreign_config(
    folder: Path, tensors: Collection[str], ignore: frozenset[str] = frozenset()
) -> ForeignHead:
    """Read a foreign head's config.json.

    Args:
        tensors: names of the head's tensors, which distinguish families of one architecture.
        ignore: unknown keys that the user knows to change nothing.

    Raises:
        UserError: no such file, another kind of model, a key of the wrong type, a key that might
            change the forward pass.
    """
    where = folder / "config.json"
    if (folder / "draftlab.json").is_file():
        raise UserError(
            "expected another program's head, found one of draftlab's own",
            where=folder,
            do="use it without an import: draftlab eval --head FOLDER",
        )
    config = read_fields(where, {}, kind="head's config.json", do=EXPORT_AGAIN)
    if not any(name.endswith("fc.weight") for name in tensors):
        raise UserError(
            "expected a draft head, found no fc.weight among its tensors",
            where=folder,
            do="a draft head's folder is not its target's",
        )
    if "speculators_model_type" in config:
        return _read_speculators(config, where, ignore)
    return _read_native(config, tensors, where, ignore)


def _read_speculators(config: dict[str, Any], where: Path, ignore: frozenset[str]) -> ForeignHead:
    config = dict(config)
    model_type = config.pop("speculators_model_type")
    options = config.pop("speculators_config", None)
    layers = config.pop("transformer_layer_config", None)
    by_type = {f.speculators_type: f for f in families() if f.speculators_type is not None}
    if model_type not in by_type:
        raise UserError(
            f"expected a speculators_model_type out of {', '.join(by_type)}, found {model_type!r}",
            where=where,
            do="draftlab imports heads of these types only",
        )
    try:
        k = int(options["proposal_methods"][0]["speculative_tokens"])
        verifier = options["verifier"]["name_or_path"]
        if k < 1 or not (verifier is None or isinstance(verifier, str)):
            raise ValueError
    except (KeyError, IndexError, TypeError, ValueError):
        raise UserError(
            "expected speculators_config with proposal_methods and a verifier",
            where=where,
            do=EXPORT_AGAIN,
        ) from None
    if not isinstance(layers, dict):
        raise UserError(
            "expected a transformer_layer_config, found none", where=where, do=EXPORT_AGAIN
        )
    # Only the dtype, tying and versions may be in both.
    if duplicates := sorted((config.keys() & layers.keys()) - _IGNORED_KEYS):
        raise UserError(
            f"{duplicates[0]} is both at the top and in transformer_layer_config",
            where=where,
            do="remove one of the two from config.json",
        )
    parsed = _parse(config | layers, where, ignore)
    return ForeignHead("speculators", by_type[model_type], parsed, k, verifier)


def _read_native(
    config: dict[str, Any], tensors: Collection[str], where: Path, ignore: frozenset[str]
) -> ForeignHead:
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    known = dict.fromkeys(a for family in families() for a in family.architectures)
    if name not in known:
        raise UserError(
            f"expected a draft head of an architecture out of {', '.join(known)}, found {name}",
            where=where,
            do="dense Llama 4 drafters cannot be imported: use the head folder of the export"
            if name in LLAMA4
            else "",
        )
    parsed = _parse(config, where, ignore)
    family = next(f for f in families() if f.reads(name, parsed, tensors))
    launch = where.with_name(LAUNCH)  # which draftlab writes: config.json has no key for K
    k = stated_k(launch.read_text("utf-8", "replace")) if launch.is_file() else None
    return ForeignHead("native", family, parsed, k)


def _parse(config: dict[str, Any], where: Path, ignore: frozenset[str]) -> ForeignConfig:
    """Check the keys that change a forward pass, and refuse unknown ones by name."""
    checked = {
        key: value
        for key, value in config.items()
        if key in ForeignConfig.model_fields
        # An unknown key that is off changes nothing.
        or not (key in _IGNORED_KEYS or key in ignore or value in (None, False, "", [], {}))
    }
    try:
        return ForeignConfig.model_validate(checked)
    except ValidationError as error:
        lines, unknown = [], []
        for fault in merged_errors(error):
            key = ".".join(map(str, fault["loc"]))
            if fault["type"] == "extra_forbidden":
                unknown.append(key)
                lines.append(
                    f"{key}: unknown, {fault['input']!r}; it might change what is computed"
                )
            else:
                lines.append(f"{key}: {describe_error(fault)}")
        do = " ".join(f"--ignore {key}" for key in unknown)
        raise UserError(
            "the config is not one of a head that draftlab can compute:\n  " + "\n  ".join(lines),
            where=where,
            do=f"if you know that it changes nothing: {do}" if do else "correct config.json",
        ) from None


def read_boundaries(
    foreign: ForeignHead,
    num_layers: int,
    requested: tuple[int, ...] | None,
    where: Path,
    log: Callable[[str], None],
) -> tuple[int, ...]:
    """Return the boundaries of a foreign head.

    Args:
        num_layers: N of the target.
        requested: boundaries that the user names, which replace the config's.
        where: the config, for errors.
        log: prints what was read.

    Raises:
        UserError: readings that disagree, boundaries outside 0..N, unsorted or repeated ones.
    """
    readings = boundary_readings(foreign, num_layers)
    if requested is not None:
        others = "; ".join(f"{program}: {list(ids)}" for program, ids in readings.items())
        log(f"import: boundaries {list(requested)}, as named; in the config, {others}")
        return _checked(requested, num_layers, "--boundaries")
    if len(set(readings.values())) > 1:
        lines = [f"{p}: --boundaries {','.join(map(str, ids))}" for p, ids in readings.items()]
        raise UserError(
            "programs read the boundaries in this config differently:\n  " + "\n  ".join(lines),
            where=where,
            do="name those that the head was trained with; draftlab doctor scores them",
        )
    program, ids = next(iter(readings.items()))
    log(f"import: boundaries {list(ids)}, inputs of layers ({program})")
    return _checked(ids, num_layers, where)


def boundary_readings(foreign: ForeignHead, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Return the boundaries as each kind of program reads them from the config."""
    if (outputs := foreign.config.outputs_of_layers) is not None:
        return {"target_layer_ids counts outputs of layers": tuple(i + 1 for i in outputs)}
    if (inputs := foreign.config.aux_hidden_state_layer_ids) is not None:
        return {"aux_hidden_state_layer_ids counts inputs of layers": tuple(inputs)}
    top = foreign.config.eagle_aux_hidden_state_layer_ids
    nested = foreign.config.eagle_config
    inner = nested.eagle_aux_hidden_state_layer_ids if nested else None
    if top is None and inner is None:
        default = (2, num_layers // 2, num_layers - 3)
        return {"none in the config: every program's default": default}
    readings = {}
    if top is not None:
        readings["the list at the top counts inputs of layers (vLLM, llama.cpp)"] = tuple(top)
    elif inner is not None:
        program = "the list in eagle_config counts inputs of layers (vLLM's older runner)"
        readings[program] = tuple(inner)
    if inner is not None:
        # For gpt-oss, SGLang reads ids that name the last boundary as boundaries.
        shift = 0 if max(inner, default=0) == num_layers else 1
        readings["the list in eagle_config counts outputs of layers (SGLang, SpecForge)"] = tuple(
            i + shift for i in inner
        )
    return readings


def _checked(ids: tuple[int, ...], num_layers: int, where: str | Path) -> tuple[int, ...]:
    """Return boundaries that are ascending and inside the target."""
    try:
        check_boundaries(ids, num_layers)
    except UserError as error:
        raise UserError(
            error.what, where=where, do="name them with --boundaries, as inputs of layers"
        ) from None
    return ids


def read_rope(config: ForeignConfig) -> tuple[dict[str, Any], bool]:
    """Return the `rope_parameters`, and whether the config names a base.

    transformers 4 and 5 spell them differently.

    Raises:
        ValueError: two spellings that contradict each other, or a part of the channels rotates.
    """
    old, new = dict(config.rope_scaling or {}), dict(config.rope_parameters or {})
    if "type" in old:
        old.setdefault("rope_type", old.pop("type"))
    if config.rope_theta is not None:
        old.setdefault("rope_theta", config.rope_theta)
        if old["rope_theta"] != config.rope_theta:
            raise ValueError(f"rope_theta {config.rope_theta} against {old['rope_theta']}")
    if new and (old.keys() - {"rope_theta"}):
        new.setdefault("rope_type", "default")
    clashes = [key for key in old.keys() & new.keys() if old[key] != new[key]]
    if clashes:
        key = sorted(clashes)[0]
        raise ValueError(f"{key} {new[key]!r} in rope_parameters against {old[key]!r} outside")
    has_base = "rope_theta" in old or "rope_theta" in new
    merged = {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA} | old | new
    theta = merged["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e30:
        raise ValueError(f"rope_theta {theta!r} is no base")
    if (share := merged.get("partial_rotary_factor", 1)) != 1:
        raise ValueError(f"partial_rotary_factor {share!r}: heads of draftlab rotate all channels")
    if merged["rope_type"] == "yarn":
        _check_yarn(merged)
    return merged, has_base


def _check_yarn(rope: dict[str, Any]) -> None:
    """Check that every program computes the same YaRN of a config.

    Raises:
        ValueError: transformers or vLLM alone reads one of its keys.
    """
    own = {"extrapolation_factor": 1, "attn_factor": 1, "apply_yarn_scaling": True}
    with contextlib.suppress(KeyError, TypeError, ValueError):  # the head's config says which key
        own["attention_factor"] = attention_factor(rope)
    for name, value in (own | {"mscale": None, "mscale_all_dim": None}).items():
        if (found := rope.get(name)) is not None and found != value:
            raise ValueError(f"{name} {found!r} of its YaRN: programs differ in what they do")
