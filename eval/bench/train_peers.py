"""Peers of `bench_train.py`: their own code on the same work, timed the same way.

- `speculators`: the library from PyPI, if it can be imported. Its model, loss and loop: one packed
  row, autocast, AdamW (fused here, since that is what it is beside), clipping; lm_head frozen. Its
  eager loss; `speculators:fused` takes its fused one, which did not compile on torch 2.11. Beside a
  parallel head its P-EAGLE: it samples (anchor, depth) pairs anew each step, and `predictions` are
  those that its loss counts, on average. It trains all embeddings; `speculators:frozen` none.
- `specforge`: the library from PyPI (0.2). Its OnlineEagle3Model with flex attention on a GPU, its
  loss and optimizer, weights in 16 bit beside float32 masters; lm_head trained. By default it makes
  the target's logits over the whole vocabulary from normed states; `specforge:compact` takes its
  teacher in pieces of the vocabulary.

An EAGLE3 of theirs leaves no position out, so its time does not depend on where loss is; P-EAGLE
samples depths of answers alone, and computes depth 0 and its logits everywhere.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_work import GAMMA, Shape, Work
from transformers import LlamaConfig

from draftlab.errors import UserError
from draftlab.train.metrics import peak_memory
from draftlab.train.profiler import PhaseTimer

RATE = 1e-4
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COUNTED = "full_acc_total"  # of speculators' metrics: predictions that its P-EAGLE's loss counts
Step = Callable[[], tuple[Tensor, Mapping[str, Tensor]]]  # the loss; metrics, perhaps none


@dataclass(frozen=True)
class Peer:
    """A model, its forward pass to the loss, and what it does with gradients: clip, step, clear."""

    model: nn.Module
    forward: Step
    update: Callable[[], object]


def peer_seconds(
    name: str, work: Work, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of a peer's step and its phases, speed and memory."""
    kind, _, choices = name.partition(":")
    if kind not in PEERS:
        raise UserError(f"expected a peer among {', '.join(PEERS)}, found {kind!r}")
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)  # what it is timed beside keeps
    asked = frozenset(filter(None, choices.split(",")))
    peer = PEERS[kind](asked, work, device, DTYPES[options.precision])
    clock, found = PhaseTimer(device), []
    counted: list[float] = []
    for number in range(options.warmup + options.repeats):
        clock.start()
        value, metrics = peer.forward()
        clock.mark("forward")
        value.backward()
        clock.mark("backward")
        peer.update()
        clock.mark("optimizer")
        phases = clock.read()
        if number >= options.warmup:
            found.append(phases)
            if work.shape.family == "peagle":
                counted.append(float(metrics[COUNTED]))
    seconds = median(sum(each.values()) for each in found)
    row = {
        "engine": kind,
        "step_ms": 1e3 * seconds,
        "phases_ms": {key: 1e3 * median(each[key] for each in found) for key in found[0]},
        "tokens_per_s": work.shape.tokens / seconds,
        "trained_parameters": sum(p.numel() for p in peer.model.parameters() if p.requires_grad),
        "peak_gib": (peak_memory(device) - before) / 2**30,
        "loss": float(value.detach()),
    }
    if counted:
        mean = fmean(counted)
        row |= {"predictions": mean, "predictions_per_s": mean / seconds}
    return row


def _llama(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.row_tokens,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )


def _filled(model: nn.Module, work: Work) -> None:
    """Gives weights that a checkpoint would bring the work's, and makes all others finite."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter.copy_(work.head.embed_tokens.weight)
            elif name.endswith("verifier_lm_head.weight"):
                parameter.copy_(work.target.weight)
            elif name.endswith("lm_head.weight"):
                parameter.copy_(work.head.lm_head.weight)
            elif not bool(parameter.isfinite().all()):
                parameter.normal_(0, parameter.shape[-1] ** -0.5)


def _flat(work: Work, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [B, S], loss mask [B, S], features and last states, of the records as they are."""
    fields = zip(*((r.tokens, r.spans, r.features, r.last) for r in work.records), strict=True)
    tokens, spans, features, last = (torch.stack(field).to(device) for field in fields)
    return tokens, spans > 0, features, last


def _imported(library: str, *modules: str) -> list[Any]:
    try:
        return [importlib.import_module(module) for module in modules]
    except ImportError as error:
        raise UserError(
            f"{library} cannot be imported: {error}",
            do=f"pip install --no-deps {library.lower()}, and what it then asks for",
        ) from None


def _speculators(asked: Set[str], work: Work, device: torch.device, precision: torch.dtype) -> Peer:
    parallel = work.shape.family == "peagle"
    if asked - {"fused", "frozen"} or ("frozen" in asked and not parallel):
        raise UserError(
            f"expected speculators[:fused] or, for --family peagle, speculators[:fused,frozen]; found "
            f"speculators:{','.join(sorted(asked))}"
        )
    algorithm, name = ("peagle", "PEagle") if parallel else ("eagle3", "Eagle3")
    models, config, greedy, losses = _imported(
        "speculators",
        f"speculators.models.{algorithm}",
        "speculators.config",
        "speculators.proposals.greedy",
        "speculators.losses",
    )
    llama = _llama(work.shape)
    # On a CPU flex attention has no backward pass.
    llama._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "eager"
    own = {"mask_token_id": work.head.config.mask_token_id} if parallel else {}
    if "frozen" in asked:
        own["embed_requires_grad"] = False
    model = getattr(models, f"{name}DraftModel")(
        getattr(models, f"{name}SpeculatorConfig")(
            **own,
            transformer_layer_config=llama,
            draft_vocab_size=work.shape.draft_vocab,
            eagle_aux_hidden_state_layer_ids=list(range(1, work.shape.boundaries + 1)),
            speculators_config=config.SpeculatorsConfig(
                algorithm=algorithm,
                proposal_methods=[
                    greedy.GreedyTokenProposalConfig(speculative_tokens=work.shape.steps)
                ],
                default_proposal_method="greedy",
                verifier=config.VerifierConfig(
                    name_or_path=None, architectures=["LlamaForCausalLM"]
                ),
            ),
        )
    )
    model.load_vocab_mappings(work.head.t2d.cpu(), work.head.d2t.cpu())
    model = model.to(device)
    _filled(model, work)
    tokens, mask, features, last = _flat(work, device)
    documents = torch.arange(len(tokens), device=device)[:, None].expand_as(tokens)
    one_row = lambda x: x.flatten(0, 1)[None].contiguous()  # noqa: E731
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    given = {
        "hidden_states": one_row(features).to(dtype),
        "input_ids": one_row(tokens),
        "document_ids": one_row(documents),
        "loss_mask": one_row(mask),
        "verifier_last_hidden_states": one_row(last).to(dtype),
        "loss_config": losses.resolve_loss_config(
            "kl_div", "fused" if "fused" in asked else "eager"
        ),
    }
    if parallel:
        given |= {
            "num_depths": work.shape.steps,
            "down_sample_ratio": work.shape.cod_ratio,
            "down_sample_ratio_min": work.shape.cod_min,
        }
    else:
        given |= {"ttt_steps": work.shape.steps, "ttt_step_loss_decay": GAMMA}
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, fused=device.type == "cuda")

    def forward() -> tuple[Tensor, Mapping[str, Tensor]]:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            return model(**given)[1:]

    def update() -> None:
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Peer(model, forward, update)


def _specforge(asked: Set[str], work: Work, device: torch.device, precision: torch.dtype) -> Peer:
    shape = work.shape
    if shape.family != "eagle3":
        raise UserError(
            f"SpecForge trains chains alone, found --family {shape.family}",
            do="take --peer speculators",
        )
    if asked - {"compact"}:
        raise UserError(f"expected specforge[:compact], found specforge:{','.join(sorted(asked))}")
    eagle3, draft, optimizers = _imported(
        "SpecForge",
        "specforge.algorithms.eagle3.model",
        "specforge.modeling.draft.llama3_eagle",
        "specforge.optimizer",
    )
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    config = _llama(shape)
    config.draft_vocab_size, config.pretraining_tp = shape.draft_vocab, 1
    model = draft.LlamaForCausalLMEagle3(config, attention_backend=attention).to(device)
    model.t2d.copy_(work.head.t2d)
    model.d2t.copy_(work.head.d2t)
    _filled(model, work)
    model.freeze_embedding()
    model.to(precision)
    online = eagle3.OnlineEagle3Model(model, shape.steps, attention_backend=attention)
    optimizer = optimizers.BF16Optimizer(model, RATE, max_grad_norm=1.0, lr_scheduler="constant")
    tokens, mask, features, last = _flat(work, device)
    lm_head = torch.zeros(shape.vocab, shape.hidden, device=device, dtype=precision)
    lm_head[work.head.t2d.to(device)] = work.target.weight.to(precision)
    shifted = lambda x: F.pad(x[:, 1:], (0, 0) * (x.dim() - 2) + (0, 1))  # noqa: E731
    with torch.no_grad():
        normed = shifted(work.target.norm(last)).to(precision)
    given = {
        "input_ids": shifted(tokens),
        "attention_mask": torch.ones_like(tokens),
        "loss_mask": mask[..., None].long(),
        "hidden_states": features.to(precision),
    }
    if "compact" in asked:
        given |= {
            "target": None,
            "target_hidden_for_compact": normed,
            "target_head_weight": lm_head,
        }

    def forward() -> tuple[Tensor, Mapping[str, Tensor]]:
        with torch.no_grad():
            logits = {} if "compact" in asked else {"target": F.linear(normed, lm_head)}
        losses, *_ = online(**given, **logits)
        return sum(GAMMA**k * each for k, each in enumerate(losses)), {}

    return Peer(model, forward, optimizer.step)


PEERS = {"speculators": _speculators, "specforge": _specforge}
