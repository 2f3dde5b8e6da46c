"""Sizes of targets, heads and conversations for estimates, without weights.

Models are built on torch's "meta" device, and their parameters are counted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftlab.errors import UserError
from draftlab.heads.head import DraftHead
from draftlab.kernels.ttt_attention import MOST_SCORES
from draftlab.plan.preflight import MOST_GIVEN, Planned
from draftlab.recipe.hardware import Gpu
from draftlab.recipe.recipe import Recipe
from draftlab.target_model.auto_model import drop_other_modules, meta_model
from draftlab.target_model.locate import local_target, max_positions
from draftlab.target_model.parts import text_decoder
from draftlab.target_model.quantisation import format_name, quantisation_fields, weight_bits
from draftlab.target_model.recurrent_layer import attention_layers, planned_state_bytes
from draftlab.target_model.replacements import freeze_rope
from draftlab.text.chat_template import Chat, Encoded, encode_prompts
from draftlab.text.conversations import parse_conversation
from draftlab.text.prompts import find_prompts, with_arguments
from draftlab.train.flops import StepWork, kept_bytes

PROMPT_TOKENS = 256
"""Assumed length of a prompt, if there is no prompt file."""
BYTES_PER_TOKEN = 4
"""Assumed bytes of a line of prompts per token, if the target's tokenizer is not here: of English
with a vocabulary of 100,000 tokens or more."""


def _first(config: Any, *names: str) -> Any:
    """Return the first of some fields that a config has."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _key_width(layer: Any) -> int:
    """Return the channels of one position's keys in a layer with this config."""
    heads = _first(layer, "num_key_value_heads", "num_attention_heads")
    return heads * (_first(layer, "head_dim") or layer.hidden_size // layer.num_attention_heads)


_RUN_PACKED = ("awq", "gptq", "auto-round", "bitsandbytes", "mxfp8")
"""Quantisations whose weights stay packed in memory."""


def _file_bytes(recipe: Recipe) -> int:
    """Return the bytes of a target's weights on this machine; 0: they are not here."""
    folder = local_target(recipe.target)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder else 0


class TargetSize:
    """The size of a target with this config, as the recipe loads it.

    Args:
        on_cpu: whether a CPU loads it, by default in 32 bits.

    Attributes:
        parameters, expert_parameters: of its text model, and of the experts among them.
        active_share: share of the experts that process one token.
        bytes: of all parameters as they are loaded.
        stored: bytes of the files, by their sizes if they are here and quantised.
        kv_bytes: bytes of one position's keys and values in all layers.
        state_bytes: bytes of one request's states in all recurrent layers; None: unknown.
        max_length: positions that the target supports.
        quantised: what is said of quantised files; empty: they are not.
        is_dequantised: whether their weights are not quantised in memory.
    """

    def __init__(self, recipe: Recipe, config: Any, *, on_cpu: bool = False) -> None:
        model = meta_model(config, trust_remote_code=recipe.target.trust_remote_code)
        decoder, _, _ = text_decoder(model)
        drop_other_modules(model, decoder)
        text = config.get_text_config()
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        self.parameters = sum(sizes.values())
        self.expert_parameters = sum(n for name, n in sizes.items() if ".experts." in name)
        count = _first(text, "num_local_experts", "num_experts", "n_routed_experts") or 1
        per_token = _first(text, "num_experts_per_tok") or 1
        self.active_share: float = per_token / count if self.expert_parameters else 1.0
        dtype = text.dtype or getattr(config, "dtype", None) or torch.bfloat16
        auto = 4 if on_cpu else dtype.itemsize
        each = {"float32": 4, "auto": auto}.get(recipe.target.dtype, 2)
        self.bytes: float = self.parameters * each
        self.stored: float = self.parameters * dtype.itemsize
        self.quantised, self.is_dequantised = "", False
        if fields := quantisation_fields(config):
            matrices = sum(p.numel() for p in decoder.layers.parameters() if p.ndim > 1)
            saved = (weight_bits(fields) or 8 * dtype.itemsize) / 8 - dtype.itemsize
            files = _file_bytes(recipe)
            self.stored = files or self.stored + matrices * saved
            self.quantised = f"; quantised ({format_name(fields)})"
            method = fields.get("quant_method")
            if method in _RUN_PACKED:
                self.bytes += matrices * (saved + dtype.itemsize - each)
            else:
                self.quantised, self.is_dequantised = (
                    f"{self.quantised}, dequantised in memory",
                    True,
                )
        layers = [text.per_layer_config[i] for i in range(text.num_hidden_layers)]
        kept = 2 * sum(map(_key_width, layers)) / len(layers)
        if latent := _first(text, "kv_lora_rank"):
            kept = latent + text.qk_rope_head_dim
        self.kv_bytes = round(attention_layers(decoder) * kept * each)
        self.state_bytes = planned_state_bytes(decoder)
        self.max_length = freeze_rope(decoder) or max_positions(text)

    @property
    def active(self) -> float:
        """Return the number of parameters that process one token."""
        return self.parameters - self.expert_parameters * (1 - self.active_share)

    def step_seconds(self, gpu: Gpu, rows: int, length: float) -> float:
        """Return the least time of a decoding step of `rows` sequences of `length` positions on
        average, bound by memory reads or matrix products.
        """
        used_share = 1 - (1 - self.active_share) ** rows  # of the experts
        reads = self.bytes * (1 - self.expert_parameters / self.parameters * (1 - used_share))
        states = 2 * (self.state_bytes or 0)  # they are read and written
        reads += rows * (length * self.kv_bytes + states)
        return max(reads / gpu.bandwidth, 2 * self.active * rows / gpu.products) / 1e12


@dataclass(frozen=True)
class Conversations:
    """The conversations that a recipe answers and records.

    Attributes:
        prompts: number of prompts.
        count: number of conversations, of several answers to each prompt as many.
        prompt, long_prompt: tokens of a prompt, on average and at the 99th percentile.
        answer: most tokens of a conversation's answers together, on average.
        longest: most tokens of a recorded conversation; 0: there is no file of prompts.
        assumed: whether the prompts' length is assumed, since there is no file of prompts.
    """

    prompts: int
    count: int
    prompt: float
    long_prompt: float
    answer: float
    longest: float
    assumed: bool

    @property
    def length(self) -> float:
        """Return the most tokens of a conversation, on average."""
        return self.prompt + self.answer

    @classmethod
    def of(cls, recipe: Recipe, max_length: int) -> Conversations | None:
        """Return a recipe's conversations, measured from its file of prompts if there is one; None:
        there is none, and the recipe does not limit the number of prompts.
        """
        number, regenerate = recipe.prompts.max_prompts, recipe.regenerate
        sizes = _prompt_sizes(recipe)
        if not sizes and number is None:
            return None
        tokens, turns = np.array(sizes or [(PROMPT_TOKENS, 1)]).T
        samples, most = 1, 0
        if regenerate.enabled:
            samples, most = regenerate.samples, regenerate.max_new_tokens
        prompt = min(float(tokens.mean()), max_length)
        longest = float((tokens + turns * most).max())
        prompts = (len(sizes) or number or 0) + (recipe.prompts.self_written or 0)
        return cls(
            prompts=prompts,
            count=prompts * samples,
            prompt=prompt,
            long_prompt=min(float(np.quantile(tokens, 0.99)), max_length),
            answer=min(float(turns.mean()) * most, max_length - prompt),
            longest=min(longest, recipe.record.length_limit(max_length)) if sizes else 0,
            assumed=not sizes,
        )


def _prompt_sizes(recipe: Recipe) -> list[tuple[float, int]]:
    """Return about how many tokens and user turns each prompt has; nothing without a file."""
    try:
        path = find_prompts(recipe.prompts)
    except UserError:
        return []
    if path is None:
        return []
    number = recipe.prompts.max_prompts
    with open(path, "rb") as file:
        # In a text the quotes would be escaped.
        sizes = [(len(line), max(1, line.count(b'"user"'))) for line in islice(file, number)]
        starts = np.cumsum([0, *(size for size, _ in sizes)]).tolist()
        part = []
        for start in starts[: -1 : max(1, len(sizes) // MOST_GIVEN)]:
            file.seek(start)
            part.append(file.readline())
    each = _token_bytes(recipe, part, path)
    return [(size / each, turns) for size, turns in sizes]


def _token_bytes(recipe: Recipe, lines: list[bytes], path: Path) -> float:
    """Return the bytes of a line of prompts per token, which the chat template adds to, too."""
    with suppress(UserError):  # the checks report it
        if tokenizer := Planned(recipe, (), plan=True, here=True).tokenizer:
            parsed = [parse_conversation(line, path, n) for n, line in enumerate(lines, 1)]
            prompts = with_arguments(parsed, recipe.target.modes, recipe.seed)
            found = list(encode_prompts(tokenizer, map(Chat.of, prompts)))
            tokens = {n: len(one.ids) for n, one in enumerate(found) if isinstance(one, Encoded)}
            if total := sum(tokens.values()):  # a template may write nothing
                return sum(len(lines[n]) for n in tokens) / total
    return BYTES_PER_TOKEN


class HeadSize:
    """The size of a head and of its training by a recipe, without the savings of compaction.

    Args:
        on_cpu: whether a CPU trains it, which computes in 32 bits.

    Attributes:
        trained: number of parameters that training changes.
        flops: floating-point operations of training for one position of the data.
        memory: approximate bytes of memory that training takes.
    """

    def __init__(self, head: DraftHead, recipe: Recipe, *, on_cpu: bool = False) -> None:
        settings, config, objective = recipe.train, head.config, head.family.objective()
        self.trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
        shares = objective.step_shares(settings)  # every position carries loss at all its steps
        self.flops = objective.flops(head, StepWork(1, shares, 1, settings.row_tokens / 2))
        frozen = sum(p.numel() for p in head.parameters() if not p.requires_grad)
        target_lm_head = config.draft_vocab_size * config.target_hidden_size
        positions = (settings.micro_rows or settings.batch_rows) * settings.row_tokens
        dtype = torch.float32 if on_cpu else torch.bfloat16
        steps = sum(shares) / settings.anchor_parts
        kept = steps * kept_bytes(config, dtype)
        if on_cpu:  # without a kernel short rows keep the weights of all keys, and long ones a part
            scores = config.num_attention_heads * settings.row_tokens**2
            scores = steps * scores if scores <= MOST_SCORES else 4 * MOST_SCORES
            kept += 4 * scores / settings.row_tokens
        # In 32 bits: weights, gradients, two moments; frozen weights and the target's lm_head.
        weights = 16 * self.trained + 4 * (frozen + target_lm_head)
        self.memory = weights + positions * (kept + dtype.itemsize * config.feature_size)
