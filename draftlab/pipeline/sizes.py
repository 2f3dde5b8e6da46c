"""Sizes of targets, heads and conversations, counted without a weight being there.

Models are built without memory (torch's "meta" device) and their shapes counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.folder import load_config, new_head
from draftlab.heads.head import DraftHead
from draftlab.heads.initial import check_start
from draftlab.pipeline.hardware import Gpu
from draftlab.pipeline.head_spec import choose_boundaries, head_config
from draftlab.pipeline.recipe import Recipe
from draftlab.pipeline.resolve import find_head
from draftlab.progress import Monitor
from draftlab.store.manifest import StoreIdentity
from draftlab.target_model.parts import text_decoder
from draftlab.target_model.replacements import freeze_rope
from draftlab.text.prompts import prompt_file
from draftlab.train.flops import dense_flops, kept_bytes

PROMPT_TOKENS = 256
"""Of a prompt, where its file is not there to be measured."""
BYTES_A_TOKEN = 4
"""Of text, about."""


def parameters(module: nn.Module) -> int:
    """How many a module has."""
    return sum(p.numel() for p in module.parameters())


def _first(config: Any, *names: str) -> Any:
    """The first of some fields that a config states."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


@dataclass(frozen=True)
class TargetSize:
    """A target in numbers.

    Attributes:
        parameters: of its text tower. experts: those of its experts. share: of its experts, that
            work on one token.
        bytes_each: of a parameter as it is loaded.
        kv_bytes: of a position's keys and values, all layers.
        num_layers: how many. hidden_size: of its states. vocab_size: rows of embeddings.
        max_length: positions it can be trusted with.
        quantised: whether its files are.
    """

    parameters: int
    experts: int
    share: float
    bytes_each: int
    kv_bytes: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int
    quantised: bool

    @classmethod
    def of(cls, recipe: Recipe, config: Any) -> TargetSize:
        """Of a target's config, as the recipe loads it."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=recipe.target.trust_remote_code
            )
        text = config.get_text_config()
        stored = text.dtype or getattr(config, "dtype", None) or torch.bfloat16
        each = {"float32": 4, "auto": stored.itemsize}.get(recipe.target.dtype, 2)
        heads = _first(text, "num_key_value_heads", "num_attention_heads")
        width = _first(text, "head_dim") or text.hidden_size // text.num_attention_heads
        decoder, layers, _ = text_decoder(model)
        experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
        count = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
        return cls(
            parameters=parameters(model),
            experts=experts,
            share=(_first(text, "num_experts_per_tok") or 1) / (count or 1) if experts else 1.0,
            bytes_each=each,
            kv_bytes=2 * len(layers) * heads * width * each,
            num_layers=len(layers),
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            max_length=freeze_rope(decoder) or text.max_position_embeddings,
            quantised=any(getattr(c, "quantization_config", None) for c in (config, text)),
        )

    @property
    def active(self) -> float:
        """Parameters that work on a token."""
        return self.parameters - self.experts * (1 - self.share)

    @property
    def bytes(self) -> int:
        """Of all parameters."""
        return self.parameters * self.bytes_each

    def step_seconds(self, gpu: Gpu, rows: int, length: float) -> float:
        """A decoding step of so many rows, whose positions are `length` on average, at best."""
        hit = 1 - (1 - self.share) ** rows  # of the experts
        read = self.bytes_each * (self.parameters - self.experts * (1 - hit))
        read += rows * length * self.kv_bytes
        return max(read / gpu.bandwidth, 2 * self.active * rows / gpu.products) / 1e12


@dataclass(frozen=True)
class Conversations:
    """What is answered and recorded.

    Attributes:
        count: how many. prompt, answer: their tokens, the answer's at most.
        assumed: whether the prompts' length is a guess, their file not being there.
    """

    count: int
    prompt: float
    answer: float
    assumed: bool

    @property
    def length(self) -> float:
        """Tokens of one, at most."""
        return self.prompt + self.answer

    @classmethod
    def of(cls, recipe: Recipe, positions: int) -> Conversations | None:
        """Of a recipe, from its file of prompts where that is there.

        None: it is not, and the recipe does not say how many it takes.

        Args:
            positions: that the target has.
        """
        settings, asked = recipe.prompts, recipe.regenerate
        try:
            with open(prompt_file(settings.source), "rb") as file:
                sizes = [len(line) for line in file][: settings.max_prompts]
            count, prompt = len(sizes), sum(sizes) / max(len(sizes), 1) / BYTES_A_TOKEN
        except UserError:
            if settings.max_prompts is None:
                return None
            sizes, count, prompt = [], settings.max_prompts, float(PROMPT_TOKENS)
        answer = asked.max_new_tokens if asked.enabled else 0
        prompt = min(prompt, positions)
        samples = asked.samples if asked.enabled else 1
        return cls(count * samples, prompt, min(answer, positions - prompt), not sizes)


@dataclass(frozen=True)
class HeadSize:
    """A head and its training in numbers.

    Attributes:
        parameters: all, the target's embeddings included. trained: those that training changes.
        flops: of training, for each position of the data.
        memory: of training, in bytes, about.
    """

    parameters: int
    trained: int
    flops: float
    memory: float

    @classmethod
    def of(cls, head: DraftHead, recipe: Recipe) -> HeadSize:
        """Of a head as the recipe trains it, without counting what compaction saves."""
        settings, shape = recipe.train, head.config
        steps = float(settings.ttt_steps)
        if head.family.objective().drops_anchors:
            steps = sum(
                max(settings.cod_ratio**d, settings.cod_min) for d in range(settings.ttt_steps)
            )
        trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
        frozen = parameters(head) - trained
        teacher = shape.draft_vocab_size * shape.target_hidden_size
        positions = (settings.micro_rows or settings.batch_rows) * settings.row_tokens
        kept = steps * kept_bytes(shape, torch.bfloat16) / settings.anchor_parts
        # Weights, gradients and two moments in 32 bits; what is frozen, and the teacher's lm_head.
        memory = 16 * trained + 4 * (frozen + teacher) + positions * (kept + 2 * shape.feature_size)
        flops = dense_flops(shape, steps, settings.row_tokens / 2)
        return cls(parameters(head), trained, flops, memory)


def planned_identity(recipe: Recipe, config: Any, fingerprint: str = "") -> StoreIdentity:
    """What is to be recorded of a target, as its config tells it.

    Args:
        fingerprint: the target's; without its weights nobody knows it.
    """
    text = config.get_text_config()
    return StoreIdentity(
        recipe.target.path,
        fingerprint,
        "",
        "",
        choose_boundaries(recipe, text.num_hidden_layers, Monitor()),
        text.num_hidden_layers,
        text.hidden_size,
        text.vocab_size,
        recipe.record.dtype,
    )


def check_initial(recipe: Recipe, planned: HeadConfig) -> None:
    """Refuses a planned head that cannot start from the recipe's head.init, before it is recorded.

    Raises:
        UserError: naming what differs; no head lies there.
    """
    if recipe.head.init is not None:
        where = find_head(recipe.head.init)
        check_start(planned, load_config(where), where)


def planned_head(recipe: Recipe, config: Any, identity: StoreIdentity) -> DraftHead:
    """The head to be made, without memory."""
    asked, rows = recipe.draft_vocab.size, identity.vocab_size
    family = get_family(recipe.head.family)
    whole = asked is None or family.uses_target_lm_head
    mask = 0 if family.has_mask_token else None
    size = rows if whole else min(asked, rows)
    shape = head_config(recipe, identity, size, Monitor(), mask=mask, target=config)
    with torch.device("meta"):
        return new_head(shape)
