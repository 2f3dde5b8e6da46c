"""Other programs' config.json of a draft head, read strictly (servers §1.3, §6, §9).

Two kinds: that of the speculators library, and the native one of vLLM, SGLang, SpecForge and
SafeAILab. Keys that shape a forward pass are checked one by one; keys that every config of
transformers carries are passed over; what is left is refused by name, since it might be a
different head.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from transformers import PretrainedConfig

from draftlab.errors import UserError
from draftlab.files import read_json
from draftlab.heads.family import Family, families

LLAMA4 = ("Llama4ForCausalLM", "EagleLlama4ForCausalLM")
"""Of dense Llama 4 drafters, which are not read."""
# fmt: off
_OF_TRAINING = {
    "attention_dropout", "auto_map", "bos_token_id", "embed_requires_grad", "eos_token_id",
    "initializer_range", "max_window_layers", "pad_token_id", "pretraining_tp",
    "sliding_window", "speculators_version", "tie_word_embeddings", "torch_dtype", "use_cache",
}
# fmt: on
_PASSED_OVER = (frozenset(PretrainedConfig().to_dict()) | _OF_TRAINING) - {"model_type"}
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
ROPE_THETA = 10000.0
"""What every program takes where a config names none."""


class _Nested(BaseModel):
    """`eagle_config`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    use_aux_hidden_state: Literal[True] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_fc: bool | None = None


class ForeignConfig(BaseModel):
    """The keys that shape a forward pass, of one flat config; a literal is all that is read.

    `eagle_aux_hidden_state_layer_ids` are inputs of layers as vLLM and the speculators library
    count; those of `eagle_config` are outputs as SGLang counts.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model_type: Literal["llama", "qwen3"] = "llama"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    max_position_embeddings: int | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    num_aux_hidden_states: int | None = None
    eagle_config: _Nested | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    mask_token_id: int | None = None
    pard_token: int | None = None
    ptd_token_id: int | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] | None = None
    mlp_bias: Literal[False] | None = None
    bias: Literal[False] | None = None
    qkv_bias: Literal[False] | None = None
    use_sliding_window: bool | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    logit_scale: Literal[1.0] | None = None
    quantization_config: None = None

    @property
    def names_mask_token(self) -> bool:
        """Return whether it names a mask token, as configs of parallel heads do."""
        return any(getattr(self, name) is not None for name in _MASKS)


@dataclass(frozen=True)
class Foreign:
    """A foreign config, before its target is known.

    Attributes:
        kind: "speculators" or "native".
        family: draftlab's.
        config: its keys.
        k: tokens it says a server drafts.
        verifier: the target it names.
    """

    kind: Literal["speculators", "native"]
    family: Family
    config: ForeignConfig
    k: int | None = None
    verifier: str | None = None

    def mask_token(self) -> int | None:
        """The one mask token that the config's three names for it agree on.

        Raises:
            ValueError: they do not.
        """
        found = {getattr(self.config, n) for n in _MASKS} - {None}
        if len(found) > 1:
            raise ValueError(f"{', '.join(_MASKS)} name different tokens: {sorted(found)}")
        return found.pop() if found else None


def read_foreign(
    folder: Path, tensors: Collection[str], ignore: frozenset[str] = frozenset()
) -> Foreign:
    """Reads a foreign head's config.json.

    Args:
        tensors: names of the head's tensors, which tell EAGLE heads of one architecture apart.
        ignore: keys that the user knows to change nothing.

    Raises:
        UserError: no such file, another kind of model, a key of the wrong type, a key that might
            change the forward pass.
    """
    where = folder / "config.json"
    if (folder / "draftlab.json").is_file():
        raise UserError(
            "expected another program's head, found one of draftlab's own",
            where=folder,
            do="use it as it is: draftlab eval --head FOLDER",
        )
    config = read_json(where, kind="head's config.json")
    if not isinstance(config, dict):
        raise UserError("expected a head's config.json, found no object in it", where=where)
    if not any(name.endswith("fc.weight") for name in tensors):
        raise UserError(
            "expected a draft head, found no fc.weight among its tensors",
            where=folder,
            do="a draft head's folder is not its target's",
        )
    if "speculators_model_type" in config:
        return _speculators(config, where, ignore)
    return _native(config, tensors, where, ignore)


def _speculators(config: dict[str, Any], where: Path, ignore: frozenset[str]) -> Foreign:
    rest = dict(config)
    kind, said = rest.pop("speculators_model_type"), rest.pop("speculators_config", None)
    layer = rest.pop("transformer_layer_config", None)
    by_type = {f.speculators_type: f for f in families() if f.speculators_type is not None}
    if kind not in by_type:
        raise UserError(
            f"expected a speculators_model_type out of {', '.join(by_type)}, found {kind!r}",
            where=where,
        )
    try:
        k = int(said["proposal_methods"][0]["speculative_tokens"])
        verifier = said["verifier"]["name_or_path"]
        if k < 1 or not (verifier is None or isinstance(verifier, str)):
            raise ValueError
    except (KeyError, IndexError, TypeError, ValueError):
        raise UserError(
            "expected speculators_config with proposal_methods and a verifier", where=where
        ) from None
    if not isinstance(layer, dict):
        raise UserError("expected a transformer_layer_config, found none", where=where)
    # Both name the dtype, tying and versions; nothing else may stand in both.
    if doubled := sorted((rest.keys() & layer.keys()) - _PASSED_OVER):
        raise UserError(
            f"{doubled[0]} stands at the top and in transformer_layer_config", where=where
        )
    return Foreign("speculators", by_type[kind], _parse(rest | layer, where, ignore), k, verifier)


def _native(
    config: dict[str, Any], tensors: Collection[str], where: Path, ignore: frozenset[str]
) -> Foreign:
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    known = dict.fromkeys(a for family in families() for a in family.architectures)
    if name not in known:
        raise UserError(
            f"expected a draft head of an architecture out of {', '.join(known)}, found {name}",
            where=where,
            do="dense Llama 4 drafters are not read back: use the head folder it was exported from"
            if name in LLAMA4
            else "",
        )
    parsed = _parse(config, where, ignore)
    family = next(f for f in families() if f.reads(name, parsed, tensors))
    return Foreign("native", family, parsed)


def _parse(config: dict[str, Any], where: Path, ignore: frozenset[str]) -> ForeignConfig:
    kept = {
        key: value
        for key, value in config.items()
        if key in ForeignConfig.model_fields
        # An unknown key that is off can change nothing.
        or not (key in _PASSED_OVER or key in ignore or value in (None, False, "", [], {}))
    }
    try:
        return ForeignConfig.model_validate(kept)
    except ValidationError as error:
        lines, unknown = [], []
        for fault in error.errors():
            key = ".".join(str(part) for part in fault["loc"])
            if fault["type"] == "extra_forbidden":
                unknown.append(key)
                lines.append(
                    f"{key}: unknown, {fault['input']!r}; it might change what is computed"
                )
            elif fault["type"] == "missing":
                lines.append(f"{key}: missing")
            else:
                said = fault["msg"].removeprefix("Input should be ")
                lines.append(f"{key}: expected {said}, found {fault['input']!r}")
        do = " ".join(f"--ignore {key}" for key in unknown)
        raise UserError(
            "the config is not one of a head that draftlab can compute:\n  " + "\n  ".join(lines),
            where=where,
            do=f"where you know that it changes nothing: {do}" if do else "",
        ) from None


def rope_of(config: ForeignConfig) -> tuple[dict[str, Any], bool]:
    """Its `rope_parameters`, from the spelling of transformers 4 or 5, and whether it names a base.

    Raises:
        ValueError: two spellings that contradict each other.
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
    named = "rope_theta" in old or "rope_theta" in new
    merged = {"rope_type": "default", "rope_theta": ROPE_THETA} | old | new
    theta = merged["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e30:
        raise ValueError(f"rope_theta {theta!r} is no base")
    return merged, named
