"""Tiny random targets with an MTP layer in their checkpoint, and a plain pass of the layer."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftlab.heads.family import get_family
from draftlab.heads.mtp import MtpHead
from draftlab.progress import Monitor
from draftlab.recipe.head_spec import head_config, planned_identity, target_config
from draftlab.recipe.recipe import Recipe, parse_recipe
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.model import Target
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.zoo import zoo_folder, zoo_folder_with_tokenizer

MIMO_CODE = """
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"model.mtp_layers"]
"""
"""A stand-in for the code that MiMo's checkpoints ship, which transformers does not have."""
LATENT = ("glm4_moe_lite", "deepseek_v3")
KINDS = ("mimo", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "glm4_moe", *LATENT)
SIZE, WIDE, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 4, 2, 8
EXPERTS, CHOSEN, NARROW = 4, 2, 24
MIXTURE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": NARROW,
    "shared_expert_intermediate_size": NARROW,
}
# Two experts of two groups of two, a shared expert of twice their width.
GROUPED = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 1,
    # Of the router; vLLM reads them.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
RANK, TURNING, PLAIN = 16, 4, 8  # of latent attention
VALUES = {"glm4_moe_lite": 16, "deepseek_v3": 8}  # wider and narrower than keys
FIELDS = {
    "qwen3_5_moe_text": HYBRID["qwen3_5_text"] | MIXTURE,
    "glm4_moe": GROUPED | {"attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": GROUPED | {"v_head_dim": VALUES["glm4_moe_lite"]},
    "deepseek_v3": GROUPED
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        }
    },
}
_NAMES = {
    "mimo": {
        "fc": "model.mtp_layers.0.input_proj",
        "embedding": "model.mtp_layers.0.token_layernorm",
        "state": "model.mtp_layers.0.hidden_layernorm",
        "last": "model.mtp_layers.0.final_layernorm",
        "layer": "model.mtp_layers.0",
    },
    "qwen3_5_text": {
        "fc": "mtp.fc",
        "embedding": "mtp.pre_fc_norm_embedding",
        "state": "mtp.pre_fc_norm_hidden",
        "last": "mtp.norm",
        "layer": "mtp.layers.0",
    },
}
_NAMES |= dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), _NAMES["qwen3_5_text"])
_NAMES["glm4_moe"] = {
    "fc": "model.layers.4.eh_proj",
    "embedding": "model.layers.4.enorm",
    "state": "model.layers.4.hnorm",
    "last": "model.layers.4.shared_head.norm",
    "layer": "model.layers.4",
}
_NAMES |= dict.fromkeys(LATENT, _NAMES["glm4_moe"])


def mtp_tensors(kind: str, seed: int = 1) -> dict[str, Tensor]:
    """Return random tensors of a layer, named as its checkpoints do, in bfloat16's values."""
    names, gated = _NAMES[kind], kind.startswith("qwen")
    queries, keys, layer = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, names["layer"]
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    shapes = {f"{names['fc']}.weight": (SIZE, 2 * SIZE)}
    if kind in LATENT:
        values, both = VALUES[kind], PLAIN + TURNING
        shapes |= {
            f"{attention}.q_a_proj.weight": (RANK, SIZE),
            f"{attention}.q_a_layernorm.weight": (RANK,),
            f"{attention}.q_b_proj.weight": (HEADS * both, RANK),
            f"{attention}.kv_a_proj_with_mqa.weight": (RANK + TURNING, SIZE),
            f"{attention}.kv_a_layernorm.weight": (RANK,),
            f"{attention}.kv_b_proj.weight": (HEADS * (PLAIN + values), RANK),
            f"{attention}.o_proj.weight": (SIZE, HEADS * values),
        }
    else:
        shapes |= {
            f"{attention}.q_proj.weight": (queries * (2 if gated else 1), SIZE),
            f"{attention}.k_proj.weight": (keys, SIZE),
            f"{attention}.v_proj.weight": (keys, SIZE),
            f"{attention}.o_proj.weight": (SIZE, queries),
        }
    dense = {mlp: WIDE}
    if kind not in ("mimo", "qwen3_5_text"):
        shapes[f"{mlp}.gate.weight"] = (EXPERTS, SIZE)
        dense = {f"{mlp}.shared_expert": NARROW} if gated else {f"{mlp}.shared_experts": 2 * NARROW}
        if gated:
            shapes[f"{mlp}.shared_expert_gate.weight"] = (1, SIZE)
        if kind == "qwen3_5_moe_text":  # Qwen 3.6's layout; the others have Qwen 3.5's
            shapes[f"{mlp}.experts.gate_up_proj"] = (EXPERTS, 2 * NARROW, SIZE)
            shapes[f"{mlp}.experts.down_proj"] = (EXPERTS, SIZE, NARROW)
        else:
            dense |= {f"{mlp}.experts.{number}": NARROW for number in range(EXPERTS)}
    for part, width in dense.items():
        shapes |= {f"{part}.{one}_proj.weight": (width, SIZE) for one in ("gate", "up")}
        shapes[f"{part}.down_proj.weight"] = (SIZE, width)
    norms = [*(names[one] for one in ("embedding", "state", "last"))]
    norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    shapes |= {f"{norm}.weight": (SIZE,) for norm in norms}
    if gated or kind == "glm4_moe":
        shapes |= {f"{attention}.{one}_norm.weight": (HEAD_DIM,) for one in "qk"}
    if kind in ("mimo", "glm4_moe"):
        widths = {"q": queries, "k": keys, "v": keys}
        shapes |= {f"{attention}.{one}_proj.bias": (n,) for one, n in widths.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = 0.3 * torch.randn(shape, generator=generator)
        is_factor = name.endswith("norm.weight") and not gated
        values *= 4 if name.endswith("gate.weight") else 1  # so that routers choose clearly
        tensors[name] = (values + is_factor).bfloat16()
    return tensors


def layer_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the MTP layer in a target's file, but for the router's bias."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    names, stored = mtp_tensors(kind).keys(), load_file(folder / "model.safetensors")
    return {n: t for n, t in stored.items() if n in names or n.rpartition("_scale")[0] in names}


def to_eight_bits(folder: Path, block: tuple[int, int] = (16, 16)) -> None:
    """Store the layer's matrices as FP8 checkpoints do: GLM's with a factor for each row, others
    with one for each block, DeepSeek's with powers of two, and Qwen's with bfloat16 numbers."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    stored, kind = load_file(file), config["model_type"]
    for name, weight in layer_tensors(folder).items():
        if weight.ndim < 2 or not name.removesuffix(".weight").endswith("_proj") or "eh_" in name:
            continue
        rows, columns = block = (1, weight.shape[-1]) if kind == "glm4_moe" else block
        shape = [*weight.shape[:-2], -(-weight.shape[-2] // rows), -(-weight.shape[-1] // columns)]
        scale, codes = torch.empty(shape), weight.to(torch.float8_e4m3fn)
        for place in itertools.product(*map(range, shape)):
            *expert, i, j = place
            part = weight[(*expert, slice(i * rows, (i + 1) * rows), slice(j * columns, None))]
            part = part[..., :columns]
            factor = part.abs().max() / 448
            if kind == "deepseek_v3":
                factor = 2 ** factor.log2().ceil()
            elif kind != "glm4_moe":
                factor = factor.bfloat16().float()
            scale[place] = factor
            where = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            codes[(*expert, *where)] = (part / factor).clamp(-448, 448).to(codes.dtype)
        inverse = "_scale" if kind == "glm4_moe" else "_scale_inv"
        stored[name] = codes
        stored[f"{name}{inverse}"] = scale.bfloat16() if kind.startswith("qwen") else scale
    save_file(stored, file, metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    quantisation: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [*block]}
    if kind == "glm4_moe":
        group = {"targets": ["Linear"], "weights": weights}
        quantisation = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        quantisation |= {"config_groups": {"group_0": group}}
    config["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps(config))


def plain_weights(stored: dict[str, Tensor], block: list[int]) -> dict[str, Tensor]:
    """Return what the tensors of a file stand for, in float64."""
    plain = {name: tensor.double() for name, tensor in stored.items()}
    for name, scale in stored.items():
        weight, _, kind = name.rpartition("_scale")
        if weight in stored:
            rows, columns = block if kind else (1, stored[weight].shape[-1])
            factors = torch.kron(scale.double(), torch.ones(rows, columns).double())
            plain[weight] *= factors[..., : plain[weight].shape[-2], : plain[weight].shape[-1]]
    return plain


def mtp_folder(
    path: Path, kind: str, *, own: bool = True, tokenizer: bool = True, **changes: Any
) -> Path:
    """Save a random target of a kind, with the toy tokenizer and an MTP layer, or without one.

    Of a kind with " fp8" behind it the layer is stored in 8 bits.
    """
    kind, _, in_eight_bits = kind.partition(" ")
    save = zoo_folder_with_tokenizer if tokenizer else zoo_folder
    if kind == "mimo":
        shape = {"num_key_value_heads": KV_HEADS, "tie_word_embeddings": False}
        save(path, "qwen2", **(shape | changes))
        config = json.loads((path / "config.json").read_text())
        code = {"AutoConfig": "mimo.MiMoConfig", "AutoModelForCausalLM": "mimo.MiMoForCausalLM"}
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "auto_map": code}
        config |= {"num_nextn_predict_layers": 1}
        (path / "config.json").write_text(json.dumps(config))
        (path / "mimo.py").write_text(MIMO_CODE)
    else:
        save(path, kind, **({"mtp_num_hidden_layers": 1} | FIELDS.get(kind, {}) | changes))
    file = path / "model.safetensors"
    tensors = load_file(file) | (mtp_tensors(kind) if own else {})
    if "n_routed_experts" in FIELDS.get(kind, {}) and own:
        name = f"{_NAMES[kind]['layer']}.mlp.gate.e_score_correction_bias"
        tensors[name] = torch.linspace(-0.2, 0.2, EXPERTS)
    save_file({n: t.float() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    if in_eight_bits:
        to_eight_bits(path)
    return path


class PlainMtp:
    """Passes of a layer in float64 over a whole sequence, from its checkpoint's tensors by name.

    Written from vLLM 0.32's mimo_mtp.py, qwen3_5_mtp.py, qwen3_next_mtp.py, glm4_moe_mtp.py and
    the files of these targets alone.

    Args:
        folder: the target. tensors: those of the layer, if not the folder's.
    """

    def __init__(self, folder: Path, tensors: dict[str, Tensor] | None = None) -> None:
        stored = load_file(folder / "model.safetensors") | (tensors or {})
        self.config = json.loads((folder / "config.json").read_text())
        block = self.config.get("quantization_config", {}).get("weight_block_size", [])
        self.w = plain_weights(stored, block)
        self.kind = self.config["model_type"]
        self.names, self.gated = _NAMES[self.kind], self.kind.startswith("qwen")
        self.offset = float(self.gated)

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (self.w[f"{name}.weight"] + self.offset)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def first_states(self, last: Tensor) -> Tensor:
        """Return the states [T, H] that the first pass reads, from last states before the norm."""
        return last.double() if self.kind == "mimo" else self.norm(last.double(), "model.norm")

    def rotated(self, x: Tensor) -> Tensor:
        rope = self.config["rope_parameters"]
        width = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0))
        cos, sin = self.angles(len(x), width)
        a, b, rest = x.split([width // 2, width // 2, HEAD_DIM - width], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def angles(self, count: int, width: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, 1, width / 2]."""
        rope = self.config["rope_parameters"]
        rates = rope["rope_theta"] ** (-torch.arange(0, width, 2).double() / width)
        if rope["rope_type"] == "yarn":  # of these toys: ramps from channel `low` to `high`
            old, theta = rope["original_max_position_embeddings"], rope["rope_theta"]
            low, high = (
                width * math.log(old / (2 * math.pi * turns)) / (2 * math.log(theta))
                for turns in (32, 1)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
            share = ((torch.arange(width // 2) - low) / (high - low or 0.001)).clamp(0, 1)
            rates = rates * (1 - share) + rates / rope["factor"] * share
        angles = torch.arange(count).double()[:, None] * rates
        return angles.cos()[:, None], angles.sin()[:, None]

    def latent(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return queries, keys and values [T, heads, …] of latent attention, and their scale."""
        heads, count, rope = (HEADS, len(x), self.config["rope_parameters"])
        query = self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")
        query = self.linear(query, f"{name}.q_b_proj").view(count, heads, -1)
        latent, turning = self.linear(x, f"{name}.kv_a_proj_with_mqa").split([RANK, TURNING], -1)
        both = self.linear(self.norm(latent, f"{name}.kv_a_layernorm"), f"{name}.kv_b_proj")
        key, value = both.view(count, heads, -1).split([PLAIN, VALUES[self.kind]], -1)
        cos, sin = self.angles(count, TURNING)

        def turned(pairs: Tensor) -> Tensor:
            a, b = pairs[..., 0::2], pairs[..., 1::2]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        query = torch.cat([query[..., :PLAIN], turned(query[..., PLAIN:])], -1)
        shared = turned(turning[:, None]).expand(-1, heads, -1)
        mscale = 0.1 * math.log(rope["factor"]) + 1 if rope["rope_type"] == "yarn" else 1.0
        scale = mscale**2 / math.sqrt(PLAIN + TURNING)
        return query, torch.cat([key, shared], -1), value, scale

    def plain(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        """Return queries, keys and values [T, heads, …], and the gate [T, heads · …] or 1."""
        query, key, value = (
            self.linear(x, f"{name}.{one}_proj").view(len(x), n, -1)
            for one, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        gate: Tensor | float = 1.0
        if self.gated:
            query, gate = query.chunk(2, -1)
            gate = gate.reshape(len(x), -1).sigmoid()
        if self.kind != "mimo":
            query, key = self.norm(query, f"{name}.q_norm"), self.norm(key, f"{name}.k_norm")
        query, key = self.rotated(query), self.rotated(key)
        key, value = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value))
        return query, key, value, gate

    def outputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Return the outputs [T, H] of a pass that reads tokens x_1 … x_T and states [T, H].

        These are what the next pass reads.
        """
        names, layer = self.names, self.names["layer"]
        embedding = self.w["model.embed_tokens.weight"][tokens].clone()
        if not self.gated:
            embedding[0] = 0
        pair = [self.norm(embedding, names["embedding"]), self.norm(states, names["state"])]
        pair = pair[::-1] if self.kind == "mimo" else pair
        residual = self.linear(torch.cat(pair, -1), names["fc"])
        x = self.norm(residual, f"{layer}.input_layernorm")
        attention, count = f"{layer}.self_attn", len(tokens)
        gate, scale = 1.0, 1 / math.sqrt(HEAD_DIM)
        if self.kind in LATENT:
            query, key, value, scale = self.latent(x, attention)
        else:
            query, key, value, gate = self.plain(x, attention)
        scores = scale * torch.einsum("tnd,snd->nts", query, key)
        hidden_from = torch.ones(count, count).triu(1).bool()
        weights = scores.masked_fill(hidden_from, float("-inf")).softmax(-1)
        attended = torch.einsum("nts,snd->tnd", weights, value)
        hidden = residual + self.linear(attended.flatten(1) * gate, f"{attention}.o_proj")
        y = self.norm(hidden, f"{layer}.post_attention_layernorm")
        hidden = hidden + self.feed_forward(y, f"{layer}.mlp")
        return hidden if self.kind.startswith("glm") else self.norm(hidden, names["last"])

    def dense(self, x: Tensor, name: str) -> Tensor:
        gate = torch.nn.functional.silu(self.linear(x, f"{name}.gate_proj"))
        return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.gate.weight" not in self.w:
            return self.dense(x, name)
        return torch.stack([self.mixture(row, name) for row in x])

    def mixture(self, x: Tensor, name: str) -> Tensor:
        """Return the output [H] of experts, router and shared expert for one token [H]."""
        scores, scaling = self.linear(x, f"{name}.gate"), 1.0
        if self.gated:
            scores = scores.softmax(-1)
            chosen = sorted(range(EXPERTS), key=lambda e: -float(scores[e]))[:CHOSEN]
            shared = self.dense(x, f"{name}.shared_expert")
            shared = shared * self.linear(x, f"{name}.shared_expert_gate").sigmoid()
        else:
            scores, scaling = scores.sigmoid(), self.config["routed_scaling_factor"]
            ranked = scores + self.w[f"{name}.gate.e_score_correction_bias"]
            groups = [ranked[:2].sum(), ranked[2:].sum()]
            chosen = [0, 1] if groups[0] > groups[1] else [2, 3]
            shared = self.dense(x, f"{name}.shared_experts")
        total = scores[chosen].sum()
        for e in chosen:
            if f"{name}.experts.down_proj" in self.w:
                both = self.w[f"{name}.experts.gate_up_proj"][e] @ x
                gate, up = both.chunk(2)
                out = self.w[f"{name}.experts.down_proj"][e] @ (torch.nn.functional.silu(gate) * up)
            else:
                out = self.dense(x, f"{name}.experts.{e}")
            shared = shared + scaling * scores[e] / total * out
        return shared

    def logits(self, output: Tensor) -> Tensor:
        if self.kind.startswith("glm"):
            output = self.norm(output, self.names["last"])
        tied = self.w["model.embed_tokens.weight"]
        return output @ self.w.get("lm_head.weight", tied).T


def mtp_recipe(folder: Path, k: int = 3) -> Recipe:
    """Return a recipe that trains the layer of a target for `k` drafts."""
    return parse_recipe(
        {
            "name": "toy",
            "target": {"path": str(folder), "trust_remote_code": True},
            "prompts": {"source": "prompts.jsonl"},
            "head": {"family": "mtp"},
            "train": {"ttt_steps": k},
            "export": {"formats": ["vllm"]},
        }
    )


def native_head(target: Target, k: int = 3) -> MtpHead:
    """Return the layer in a loaded target's checkpoint, in float32, with the target's tensors."""
    recipe, folder = mtp_recipe(target.folder, k), target.folder
    config = target_config(recipe.target)
    identity = replace(
        planned_identity(recipe, config), target_fingerprint=fingerprint(folder), dtype="float32"
    )
    fields = head_config(recipe, identity, identity.vocab_size, Monitor(), target=config)
    head = get_family("mtp").head_of_target(fields, folder, Monitor())
    for name in head.shared_tensors():
        head.get_parameter(name).data = target.parts.shared_tensors[name].float()
    return head
