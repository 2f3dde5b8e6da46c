"""Small random models of a target's architecture, on the CPU.

A rehearsal runs on one, and a plan tries on one what the engine needs of the architecture.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch

from draftlab.target_model.attention import text_attention
from draftlab.target_model.auto_model import auto_class, drop_other_modules, meta_model
from draftlab.target_model.loading import load_target, quiet_transformers
from draftlab.target_model.locate import load_config, resolve_target
from draftlab.target_model.model import Target
from draftlab.target_model.parts import text_decoder
from draftlab.target_model.replacements import replace_layers
from draftlab.target_model.settings import TargetSettings

_NAMES = {
    1: "topk_group",
    2: "num_experts_per_tok num_experts_per_token num_expert_group n_group n_groups "
    "linear_num_key_heads",
    4: "num_local_experts num_experts n_routed_experts linear_num_value_heads",
    8: "mamba_num_heads mamba_n_heads patch_size",
    16: "head_dim linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head "
    "mamba_d_state ssm_state_size chunk_size mamba_chunk_size query_pre_attn_scalar q_lora_rank "
    "kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim hidden_size_per_layer_input "
    "projector_output_dim projector_input_dim vision_output_dim image_size",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    64: "hidden_size",
    96: "intermediate_size intermediate_size_mlp",
}
WIDTHS = {name: width for width, names in _NAMES.items() for name in names.split()}
"""Largest values of a stand-in's config fields."""
INITIALIZER_RANGE = 0.12
"""Standard deviation of a stand-in's weights: products of width 64 keep the size of their inputs.
With 0.3 and many layers the states amplify rounding until draftlab refuses the target."""

LENGTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers")
"""Names of numbers of layers."""
TRIED = {"layers": 8, "vocab_size": 512}
"""Sizes of a model that is tried: rounding grows from layer to layer, and random routers may then
choose other experts."""
MOST_PARAMETERS = 200_000_000
"""Largest size of a model that is tried; a larger one has widths that `WIDTHS` does not name."""


def stand_in_config(
    config: Any, *, layers: int | None = None, vocab_size: int | None = None
) -> Any:
    """Return a copy of a target's config with the widths of `WIDTHS`.

    Windows and the ratio of query heads to key-value heads stay, and layers and vocabulary up to
    these numbers. Quantisation goes, since random weights are not quantised.
    """
    fields = copy.deepcopy(config.to_dict())
    cut = _cut(fields, 1 << 62 if layers is None else layers, vocab_size or 1 << 62)
    return type(config).from_dict(_shrink(cut))


def load_first_layers(settings: TargetSettings, layers: int) -> Target:
    """Load a target's first layers as `load_target`: its last states are then a boundary's."""
    source = resolve_target(settings)
    config = load_config(source, trust_remote_code=settings.trust_remote_code)
    with tempfile.TemporaryDirectory() as name:
        for file in source.iterdir():
            if file.is_file() and file.name != "config.json":
                (Path(name) / file.name).symlink_to(file.resolve())
        fields = _cut(config.to_dict(), layers, config.get_text_config().vocab_size)
        if "scale_depth" in fields:  # MiniCPM divides it by the root of the number of layers
            fields["scale_depth"] *= (layers / config.num_hidden_layers) ** 0.5
        type(config).from_dict(fields).save_pretrained(name)
        update = {"path": name, "revision": None, "adapter": None, "gpus": 1}
        return load_target(settings.model_copy(update=update), layers=layers)


def _cut(fields: dict[str, Any], layers: int, vocab_size: int) -> dict[str, Any]:
    """Return the fields of a config, or of a part of it, with its first layers and tokens."""
    number, cut = fields.get("num_hidden_layers"), {}
    for key, value in fields.items():
        if key == "per_layer_config" and value:
            kept = {str(int(i)): layer for i, layer in value.items() if int(i) < layers}
            last = value.get(str(number - 1))  # Gemma 4's last layer has full attention
            end = min(layers, number) - 1
            cut[key] = kept | ({str(end): last} if last else {})
        elif isinstance(value, dict):
            cut[key] = _cut(value, layers, vocab_size)
        elif isinstance(value, list) and len(value) == number:
            cut[key] = value[:layers]
        elif key == "num_kv_shared_layers" and value:
            cut[key] = min(value, layers // 4)
        elif key in ("vocab_size", "vocab_size_per_layer_input") and value:
            cut[key] = min(value, vocab_size)
        elif str(key).endswith("_token_id") and isinstance(value, int):
            cut[key] = min(value, vocab_size - 1)
        else:
            is_number = key in LENGTHS and isinstance(value, int)
            cut[key] = min(value, layers) if is_number else value
    return cut


def check_architecture(
    config: Any, name: str, *, decodes: bool, trust_remote_code: bool = False
) -> str | None:
    """Check on a small random model what draftlab needs of a target's architecture, also to decode
    with it; raise a `UserError` if it cannot be used.

    Returns:
        Why nothing was checked: transformers makes no such model of small widths. Else None.
    """
    with quiet_transformers():
        try:
            small = stand_in_config(config, **TRIED)
            skeleton = meta_model(small, trust_remote_code=trust_remote_code)
            size = sum(parameter.numel() for parameter in skeleton.parameters())
            if size > MOST_PARAMETERS:
                return f"it has {size:,} parameters: its config has other names for its widths"
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = auto_class(small).from_config(
                    small,
                    attn_implementation=text_attention(small),
                    trust_remote_code=trust_remote_code,
                )
            model = model.float().eval()
            with torch.no_grad():
                model(input_ids=torch.arange(1, 9)[None], use_cache=False)
        except Exception as error:  # whatever a modelling file raises at sizes it did not expect
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        drop_other_modules(model, text_decoder(model)[0])
        replace_layers(model)
        target = Target(model.requires_grad_(False), Path(name), name)
        target.check_parts()
        if decodes:
            target.new_paged_cache(2, 1)
    return None


def _shrink(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config, or of a part of it, with small widths."""
    fields.pop("quantization_config", None)
    heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    width = fields.get("head_dim")
    # Norms of OLMoE and BitNet need heads as wide as the states.
    joined = "qk_rope_head_dim" not in fields and (
        not width or not heads or heads * width == fields["hidden_size"]
    )
    for key, value in fields.items():
        if isinstance(value, dict) and key.endswith("_config"):
            fields[key] = _shrink(value)
            if key == "vision_config":
                fields[key] |= {"num_hidden_layers": 1, "num_attention_heads": 2}
        elif key in WIDTHS and isinstance(value, int):
            fields[key] = min(value, WIDTHS[key])
    rope = fields.get("rope_parameters") or {}
    if heads and kv_heads:
        fields["num_key_value_heads"] = min(kv_heads, 2)
        fields["num_attention_heads"] = heads // kv_heads * fields["num_key_value_heads"]
        heads = fields["num_attention_heads"]
        width, rest = divmod(fields["hidden_size"], heads)
        # Exports need a multiple, and Qwen2-VL has no other width of a head.
        widen = bool(rest) or "mrope_section" in rope
        fields["head_dim"] = WIDTHS["head_dim"]
        if joined and not widen and width >= 8:
            fields["head_dim"] = width
        elif joined or widen:
            fields["hidden_size"] = heads * fields["head_dim"]
    if fields.get("mamba_d_ssm"):
        fields["mamba_d_ssm"] = fields["mamba_n_heads"] * fields["mamba_d_head"]
    for key in ("short_factor", "long_factor"):
        if key in rope:
            rope[key] = rope[key][: fields["head_dim"] // 2]
    if "mrope_section" in rope:  # frequencies of time, height and width
        share = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
        half = int(WIDTHS["head_dim"] * share) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if "initializer_range" in fields:
        fields["initializer_range"] = INITIALIZER_RANGE
    return fields
