"""Tiny random targets with an MTP layer in their checkpoint, and a plain pass of the layer."""

from __future__ import annotations

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
KINDS = ("mimo", "qwen3_5_text")
SIZE, WIDE, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 4, 2, 8
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


def mtp_tensors(kind: str, seed: int = 1) -> dict[str, Tensor]:
    """Return random tensors of a layer, named as its checkpoints do, in bfloat16's values."""
    names, gated = _NAMES[kind], kind != "mimo"
    queries, keys, layer = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, names["layer"]
    attention = f"{layer}.self_attn"
    shapes = {
        f"{names['fc']}.weight": (SIZE, 2 * SIZE),
        f"{attention}.q_proj.weight": (queries * (2 if gated else 1), SIZE),
        f"{attention}.k_proj.weight": (keys, SIZE),
        f"{attention}.v_proj.weight": (keys, SIZE),
        f"{attention}.o_proj.weight": (SIZE, queries),
        f"{layer}.mlp.gate_proj.weight": (WIDE, SIZE),
        f"{layer}.mlp.up_proj.weight": (WIDE, SIZE),
        f"{layer}.mlp.down_proj.weight": (SIZE, WIDE),
    }
    norms = [*(names[one] for one in ("embedding", "state", "last"))]
    norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    shapes |= {f"{norm}.weight": (SIZE,) for norm in norms}
    if gated:
        shapes |= {f"{attention}.{one}_norm.weight": (HEAD_DIM,) for one in "qk"}
    else:
        widths = {"q": queries, "k": keys, "v": keys}
        shapes |= {f"{attention}.{one}_proj.bias": (n,) for one, n in widths.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = 0.3 * torch.randn(shape, generator=generator)
        is_factor = name.endswith("norm.weight") and not gated
        tensors[name] = (values + is_factor).bfloat16()
    return tensors


def mtp_folder(
    path: Path, kind: str, *, own: bool = True, tokenizer: bool = True, **changes: Any
) -> Path:
    """Save a random target of a kind, with the toy tokenizer and an MTP layer, or without one."""
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
        save(path, kind, mtp_num_hidden_layers=1, **changes)
    file = path / "model.safetensors"
    tensors = load_file(file) | (mtp_tensors(kind) if own else {})
    save_file({n: t.float() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    return path


class PlainMtp:
    """Passes of a layer in float64 over a whole sequence, from its checkpoint's tensors by name.

    Written from vLLM 0.32's mimo_mtp.py, qwen3_5_mtp.py, qwen2.py and qwen3_next.py alone.

    Args:
        folder: the target. tensors: those of the layer, if not the folder's.
    """

    def __init__(self, folder: Path, tensors: dict[str, Tensor] | None = None) -> None:
        stored = load_file(folder / "model.safetensors") | (tensors or {})
        self.w = {name: t.double() for name, t in stored.items()}
        self.config = json.loads((folder / "config.json").read_text())
        self.kind = self.config["model_type"]
        self.names, self.offset = _NAMES[self.kind], 0.0 if self.kind == "mimo" else 1.0

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
        angles = torch.arange(len(x)).double()[:, None] * rope["rope_theta"] ** (
            -torch.arange(0, width, 2).double() / width
        )
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b, rest = x.split([width // 2, width // 2, HEAD_DIM - width], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def outputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Return the outputs [T, H] of a pass that reads tokens x_1 … x_T and states [T, H]."""
        names, layer = self.names, self.names["layer"]
        embedding = self.w["model.embed_tokens.weight"][tokens].clone()
        if self.kind == "mimo":
            embedding[0] = 0
        pair = [self.norm(embedding, names["embedding"]), self.norm(states, names["state"])]
        pair = pair[::-1] if self.kind == "mimo" else pair
        residual = self.linear(torch.cat(pair, -1), names["fc"])
        x = self.norm(residual, f"{layer}.input_layernorm")
        attention, count = f"{layer}.self_attn", len(tokens)
        query, key, value = (
            self.linear(x, f"{attention}.{one}_proj").view(count, n, -1)
            for one, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        gate = torch.ones(count, HEADS * HEAD_DIM).double()
        if self.kind != "mimo":
            query, gate = query.chunk(2, -1)
            gate = gate.reshape(count, -1).sigmoid()
            query, key = (
                self.norm(query, f"{attention}.q_norm"),
                self.norm(key, f"{attention}.k_norm"),
            )
        query, key = self.rotated(query), self.rotated(key)
        key, value = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value))
        scores = torch.einsum("tnd,snd->nts", query, key) / math.sqrt(HEAD_DIM)
        hidden_from = torch.ones(count, count).triu(1).bool()
        weights = scores.masked_fill(hidden_from, float("-inf")).softmax(-1)
        attended = torch.einsum("nts,snd->tnd", weights, value)
        hidden = residual + self.linear(attended.flatten(1) * gate, f"{attention}.o_proj")
        y = self.norm(hidden, f"{layer}.post_attention_layernorm")
        gated = torch.nn.functional.silu(self.linear(y, f"{layer}.mlp.gate_proj"))
        hidden = hidden + self.linear(
            gated * self.linear(y, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj"
        )
        return self.norm(hidden, names["last"])

    def logits(self, output: Tensor) -> Tensor:
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
