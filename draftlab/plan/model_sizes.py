"""Sizes of targets, heads and conversations for estimates, without weights.

Models are built on torch's "meta" device, and their parameters are counted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from draftlab.errors import UserError
from draftlab.files import canonical_json
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
from draftlab.text.conversations import Conversation, parse_conversation, split_rounds
from draftlab.text.prompts import find_prompts, with_arguments
from draftlab.train.flops import StepWork, kept_bytes

PROMPT_TOKENS = 256
"""Assumed length of a prompt, if there is no prompt file."""
BYTES_PER_TOKEN = 4
"""Assumed bytes of a text per token, if the target's tokenizer is not here: of English with a
vocabulary of 100,000 tokens or more."""
MOST_MEASURED = 4096
"""Lines of a file of prompts that are parsed; the longest line is one more."""


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
        prompt, long_prompt: tokens of a prompt, on average and at the 99th percentile; with those
            of the given answers that are kept.
        asked: tokens of a prompt without given answers, on average.
        answer: most tokens of a conversation's answers together, on average.
        longest: most tokens of a conversation.
        loss_share: share of the positions trained on that carry loss, since they are answers.
        most_loss_share: that of a conversation, at the 99th percentile; 1 if it is not measured.
        assumed: whether the prompts' length is assumed, since there is no file of prompts.
    """

    prompts: int
    count: int
    prompt: float
    long_prompt: float
    asked: float
    answer: float
    longest: float
    loss_share: float
    most_loss_share: float
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
        count, sizes = _prompt_sizes(recipe)
        if not sizes and number is None:
            return None
        written = recipe.prompts.self_written or 0
        own = round(len(sizes) * written / count) if sizes else 1
        asked, given, turns = np.array([*sizes, *[(PROMPT_TOKENS, 0, 1)] * own]).T
        samples, most, tokens = 1, 0, np.maximum(asked + given, 1)
        if regenerate.enabled:
            samples, most = regenerate.samples, regenerate.max_new_tokens
        prompt = min(float(tokens.mean()), max_length)
        lengths = tokens + turns * most
        recorded = np.minimum(lengths, recipe.record.length_limit(max_length))
        # What is cut of several turns are prompts and answers, of one turn its answer.
        several = recorded * (1 - asked / lengths)
        with_loss = np.where(turns > 1, several, np.maximum(recorded - asked, 0))
        if not with_loss.any():
            with_loss = recorded
        used = with_loss > 0  # others are dropped
        with_loss, recorded = with_loss[used], recorded[used]
        measured = sizes and not written
        prompts = (count or number or 0) + written
        return cls(
            prompts=prompts,
            count=prompts * samples,
            prompt=prompt,
            long_prompt=min(float(np.quantile(tokens, 0.99)), max_length),
            asked=min(float(asked.mean()), max_length),
            answer=min(float(turns.mean()) * most, max_length - prompt),
            longest=min(float(lengths.max()), max_length),
            loss_share=float(with_loss.sum() / recorded.sum()),
            most_loss_share=float(np.quantile(with_loss / recorded, 0.99)) if measured else 1.0,
            assumed=not sizes,
        )


def _prompt_sizes(recipe: Recipe) -> tuple[int, list[tuple[float, float, int]]]:
    """Return the number of lines of the file of prompts, and of each about how many tokens the
    prompts and the kept answers have, and how many answers the target writes; of many lines those
    at equal distances and the longest. Without a file there are none.
    """
    sizes, part, path = [], [], None
    with suppress(UserError):
        path = find_prompts(recipe.prompts)
    if path is None:
        return 0, []
    with open(path, "rb") as file:
        starts = np.cumsum([0, *map(len, islice(file, recipe.prompts.max_prompts))])
        count = len(starts) - 1
        chosen = {*range(0, count, -(-count // MOST_MEASURED) or 1)}
        chosen |= {int(np.diff(starts).argmax())} if count else set()
        for number in sorted(chosen):
            file.seek(int(starts[number]))
            line = file.readline()
            try:
                one = parse_conversation(line, path, number + 1)
            except UserError:  # the checks report it
                sizes.append((len(line), 0, 1))
                continue
            if len(sizes) % max(1, len(chosen) // MOST_GIVEN) == 0:
                part.append(one)
            sizes.append(_text_sizes(one, keeps_answers=not recipe.regenerate.enabled))
    each = _token_bytes(recipe, part)
    return count, [(asked / each, given / each, turns) for asked, given, turns in sizes]


def _text_sizes(conversation: Conversation, *, keeps_answers: bool) -> tuple[int, int, int]:
    """Return the bytes of a conversation's prompts and of its answers, if they are kept, and the
    number of its answers.
    """
    rounds, given = split_rounds(conversation.messages), []
    asked, answers = [message for messages in rounds for message in messages], len(rounds) or 1
    if keeps_answers:
        asked = [one for one in conversation.messages if one["role"] != "assistant"]
        given = [one for one in conversation.messages if one["role"] == "assistant"]
        answers = len(given)
    tools = sum(len(canonical_json(tool)) for tool in conversation.tools)
    return sum(map(_text_bytes, asked)) + tools, sum(map(_text_bytes, given)), answers


def _text_bytes(message: dict[str, Any]) -> int:
    """Return the bytes of a message's texts and calls."""
    calls = message.get("tool_calls")
    texts = (message["content"], message.get("reasoning_content") or "")
    return len("".join(texts).encode()) + (len(canonical_json(calls)) if calls else 0)


def _token_bytes(recipe: Recipe, conversations: list[Conversation]) -> float:
    """Return the bytes of the texts of conversations per token, which the chat template adds to,
    too; of the first prompts, if the target answers.
    """
    keeps_answers = not recipe.regenerate.enabled
    with suppress(UserError):  # the checks report it
        if tokenizer := Planned(recipe, (), plan=True, here=True).tokenizer:
            parsed = with_arguments(conversations, recipe.target.modes, recipe.seed)
            if not keeps_answers:
                rounds = [(one, split_rounds(one.messages)) for one in parsed]
                parsed = [replace(one, messages=first[0]) for one, first in rounds if first]
            found = list(encode_prompts(tokenizer, map(Chat.of, parsed)))
            tokens = {n: len(one.ids) for n, one in enumerate(found) if isinstance(one, Encoded)}
            if total := sum(tokens.values()):  # a template may write nothing
                sizes = [_text_sizes(parsed[n], keeps_answers=keeps_answers) for n in tokens]
                return max(sum(asked + given for asked, given, _ in sizes), 1) / total
    return BYTES_PER_TOKEN


class HeadSize:
    """The size of a head and of its training by a recipe, without the savings of compaction.

    Args:
        conversations: those that it is trained on; None: all positions carry loss.
        on_cpu: whether a CPU trains it, which computes in 32 bits.

    Attributes:
        trained: number of parameters that training changes.
        flops: floating-point operations of training for one position of the data.
        memory: approximate bytes of memory that training takes, of a pass of conversations whose
            answers are long beside their prompts.
    """

    def __init__(
        self,
        head: DraftHead,
        recipe: Recipe,
        conversations: Conversations | None = None,
        *,
        on_cpu: bool = False,
    ) -> None:
        settings, config, objective = recipe.train, head.config, head.family.objective()
        self.trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
        shares = np.array(objective.step_shares(settings))
        mean = conversations.loss_share if conversations else 1.0
        most = conversations.most_loss_share if conversations else 1.0
        work = StepWork(1, (mean * shares).tolist(), mean, settings.row_tokens / 2)
        self.flops = objective.flops(head, work)
        frozen = sum(p.numel() for p in head.parameters() if not p.requires_grad)
        target_lm_head = config.draft_vocab_size * config.target_hidden_size
        positions = (settings.micro_rows or settings.batch_rows) * settings.row_tokens
        dtype = torch.float32 if on_cpu else torch.bfloat16
        # The first step has keys and values at all positions.
        steps = float(shares[0] + most * shares[1:].sum()) / settings.anchor_parts
        kept = steps * kept_bytes(config, dtype)
        if on_cpu:  # without a kernel short rows keep the weights of all keys, and long ones a part
            scores = config.num_attention_heads * settings.row_tokens**2
            every = float(shares.sum()) / settings.anchor_parts
            scores = every * scores if scores <= MOST_SCORES else 4 * MOST_SCORES
            kept += 4 * scores / settings.row_tokens
        # In 32 bits: weights, gradients, two moments; frozen weights and the target's lm_head.
        weights = 16 * self.trained + 4 * (frozen + target_lm_head)
        self.memory = weights + positions * (kept + dtype.itemsize * config.feature_size)
