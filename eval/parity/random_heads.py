"""Random heads of all shapes that layouts can hold, and a target of another architecture.

Their weights are large: a new head's would hide errors of RoPE, norms and masks.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Subject, load_subject
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig, make_head_config
from draftlab.heads.family import get_family
from draftlab.heads.folder import load_head, new_head, save_head
from draftlab.heads.head import DraftHead
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.text.mask_token import choose_mask_token

WHOLE, FOUR = {"draft_vocab_size": None}, {"boundaries": 4}
AFTER, QK = {"norm_before_residual": True}, {"qk_norm": True}
PEAGLE = {"family": "peagle"}
FIVE = {"boundaries": 5}
DFLASH = {"family": "dflash", "sample_from_anchor": False}
DSPARK = {"family": "dspark", "sample_from_anchor": True, "markov_rank": 24, "confidence": True}
DFLASH2 = DFLASH | WHOLE | {"family": "dflash2", "selector_rank": 24}
CAUSAL = {"is_causal": True}
SHAPES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3, norm_before_residual": AFTER,
    "eagle3, whole vocabulary": WHOLE,
    "eagle3, whole vocabulary, norm_before_residual": WHOLE | AFTER,
    "eagle3, 2 layers": {"num_layers": 2},
    "eagle3, window of 24": {"sliding_window": 24},
    "eagle3, 4 boundaries": FOUR,
    "eagle3, 4 boundaries, whole vocabulary, norm_before_residual": FOUR | WHOLE | AFTER,
    "eagle3, qk_norm, 4 boundaries": QK | FOUR,
    "eagle3, norm_before_fc": {"norm_before_fc": True},
    "eagle3, fc_norm, norm_output": {"fc_norm": True, "norm_output": True},
    "peagle, 1 layer": PEAGLE,
    "peagle, 2 layers, qk_norm, norm_before_residual": PEAGLE | QK | AFTER | {"num_layers": 2},
    "peagle, 2 layers, 4 boundaries, whole vocabulary": PEAGLE | FOUR | WHOLE | {"num_layers": 2},
    "dspark, 1 layer, whole vocabulary": DSPARK | WHOLE,
    "dspark, 5 layers, 5 boundaries, 8 slots, whole vocabulary": DSPARK
    | WHOLE
    | FIVE
    | {"num_layers": 5, "k_trained": 8},
    "dspark, 2 layers, 7 slots": DSPARK | {"num_layers": 2, "k_trained": 7},
    "dspark, 2 layers, 4 slots, causal": DSPARK | CAUSAL | {"num_layers": 2, "k_trained": 4},
    "dspark, 1 layer, 5 slots, fill-in": DSPARK | {"sample_from_anchor": False, "k_trained": 4},
    "dflash, 1 layer, 3 slots": DFLASH | {"k_trained": 2},
    "dflash, 2 layers, whole vocabulary": DFLASH | WHOLE | {"num_layers": 2},
    "dflash, 2 layers, 5 slots, causal": DFLASH | CAUSAL | {"num_layers": 2, "k_trained": 4},
    "dflash, 5 layers, 5 boundaries, 8 slots": DFLASH | FIVE | {"num_layers": 5, "k_trained": 7},
    "dflash2, 1 layer, 3 slots": DFLASH2 | {"k_trained": 2},
    "dflash2, 3 layers, 8 slots, 3 taps": DFLASH2
    | {"num_layers": 3, "k_trained": 7, "conv_kernel_size": 3, "selector_top_k": 8},
}
"""The shapes of --random. draft_vocab_size None is the whole vocabulary; `boundaries` counts them,
at most as many as the target's layers allow. Blocks have the head's K slots if none are named."""

GAIN = 1.5
"""Standard deviation of a matrix times √fan_in. With 2, attention is so sharp that float32 programs
differ by 3e-5 because of their last bits."""


def chosen_subjects(
    options: argparse.Namespace, place: Path, *, grown: bool = False
) -> Iterator[Subject]:
    """Yield the requested head or, with --random, heads of all shapes for two targets.

    The targets are the head's own and a random Qwen3 with tied embeddings.

    Args:
        grown: heads of the trained head's target take over its weights, so that drafts are
            accepted. Others stay random, and all do if the trained head reads other features.

    Raises:
        UserError: no shape matches the pattern of --random.
    """
    subject = load_subject(options.head, options.target, options.prompts, options.suite)
    if options.random is None:
        yield subject
        return
    others, grown = [], grown and not subject.head.family.reads_last_state
    for target in (subject, stand_in(subject, place / "qwen3")):
        kind = target.target.config.model_type
        for number, (shape, fields) in enumerate(SHAPES.items()):
            grows = grown and target is subject and not _is_block(fields)
            trained = subject.head if grows else None
            name = f"{'random' if trained is None else 'grown'}, {kind}: {shape}"
            if options.random.search(name):
                folder = place / f"{target.target.fingerprint[:8]}-{number}"
                yield with_random_head(target, folder, name, trained, **fields)
            else:
                others.append(name)
    if len(others) == 2 * len(SHAPES):
        raise UserError(
            f"expected a pattern that is found in the name of a shape, found "
            f"{options.random.pattern}; they are:\n  " + "\n  ".join(others),
            where="--random",
        )


def _is_block(shape: dict[str, Any]) -> bool:
    """Return whether heads of a shape draft with the target's lm_head, which is not trained."""
    return get_family(shape.get("family", "eagle3")).freezes_lm_head


def stand_in(subject: Subject, folder: Path) -> Subject:
    """The subject with a random Qwen3 of six layers in place of its target, embeddings tied."""
    config = Qwen3Config(
        vocab_size=subject.target.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        initializer_range=0.2,  # answers that differ from prompt to prompt
        eos_token_id=sorted(subject.stops),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in (*tokenizer, "generation_config.json"):
        if (subject.target.folder / name).is_file():
            shutil.copy(subject.target.folder / name, folder / name)
    settings = subject.settings.model_copy(update={"path": str(folder)})
    return replace(subject, settings=settings, target=load_target(settings))


def with_random_head(
    subject: Subject, folder: Path, name: str, trained: DraftHead | None = None, **shape: Any
) -> Subject:
    """Return the subject with a random head of another shape, saved in `folder`.

    Embeddings and lm_head are the target's; the draft vocabulary is the subject's.

    Args:
        trained: a head whose weights are copied where they fit.
        shape: fields as in `SHAPES`.
    """
    head = new_head(_config(subject, shape))
    generator = torch.Generator().manual_seed(0)
    parts = subject.target.parts
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.5 * noise)
            else:  # mask_hidden [1, F] stands beside features, not before a product
                parameter.copy_(
                    noise * (GAIN * parameter.shape[1] ** -0.5 if len(noise) > 1 else 1)
                )
        ids = torch.arange(head.config.vocab_size)
        if head.config.draft_vocab_size < len(ids):
            ids = subject.head.t2d.nonzero()[:, 0]
        head.set_draft_vocabulary(ids)
        head.embed_tokens.weight.copy_(parts.embeddings)
        head.lm_head.weight.copy_(parts.lm_head[ids])
        if trained is not None:
            _grow(head, trained)
    save_head(folder, head, torch.float32)
    return replace(subject, name=name, folder=folder, head=_load(folder, subject))


def _grow(head: DraftHead, trained: DraftHead) -> None:
    """Copy the weights that fit; a further boundary's weights stay random, but small."""
    weights = trained.state_dict()
    for name, parameter in head.named_parameters():
        if name in weights and weights[name].shape == parameter.shape:
            parameter.copy_(weights[name])
    width = trained.config.feature_size  # a further boundary comes after the trained ones
    head.fc.weight[:, :width] = trained.fc.weight
    head.fc.weight[:, width:] *= 0.1
    ids = trained.t2d.nonzero()[:, 0]
    rows = head.t2d.cumsum(0)[ids] - 1
    head.lm_head.weight[rows] = trained.lm_head.weight


def _load(folder: Path, subject: Subject) -> DraftHead:
    shared = subject.target.parts.shared_tensors
    return load_head(folder, target_tensors=shared, dtype=torch.float32, device="cpu")


def _config(subject: Subject, shape: dict[str, Any]) -> HeadConfig:
    """Return the config of a head of that shape for the subject's target."""
    target, own = subject.target, subject.head.config
    config, layers = target.config, target.num_layers
    tokenizer = load_tokenizer(subject.settings)
    family = get_family(shape.get("family", "eagle3"))
    mask = choose_mask_token("auto", tokenizer, target.vocab_size, subject.stops, None)
    count = shape.get("boundaries", 3)
    spread = [1 + i * (layers - 2) // (count - 1) for i in range(count)]
    if count > layers - 1:
        spread = [*range(1, layers)]
    elif own.target_num_layers == layers and own.boundaries[-1] < layers - 1 and count <= 4:
        spread = [*own.boundaries, layers - 1][:count]  # so that its weights fit
    size = shape.get("draft_vocab_size", own.draft_vocab_size) or target.vocab_size
    fields = {"k_trained": own.k_trained, **shape, "boundaries": spread, "draft_vocab_size": size}
    identity = own.target.model_copy(update={"fingerprint": fingerprint(target.folder)})
    return make_head_config(
        target_num_layers=layers,
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=target.vocab_size,
        mask_token_id=mask if family.has_mask_token else None,
        embeddings="own" if family.trains_mask else "target",
        target=identity,
        **fields,
    )
