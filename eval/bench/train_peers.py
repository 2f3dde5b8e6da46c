"""Other trainers beside `bench_train.py`: their own code on the same work, timed in the same way.

- `speculators` (PyPI) runs its model, loss and loop: one packed row, autocast, fused AdamW,
  clipping, lm_head frozen. It uses its eager loss, since its fused loss did not compile on torch
  2.11. Beside a parallel head its P-EAGLE runs, which samples (anchor,
  depth) pairs in each step; `predictions` is the mean number that its loss counts. It trains all
  embeddings. Beside a block head its DSpark runs, with as many anchors as ours has on average.
- `specforge` (PyPI, 0.2) runs its OnlineEagle3Model, with flex attention on a GPU, its loss and its
  optimizer, with 16-bit weights beside float32 masters and lm_head trained. It computes the
  target's logits over the whole vocabulary from normed states.

Their EAGLE3 computes every position, so its time does not depend on the loss mask. P-EAGLE samples
depths of answers alone, and computes depth 0 and its logits everywhere.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_work import GAMMA, Shape, Work, timed_steps
from transformers import LlamaConfig, Qwen3Config

from draftlab.errors import UserError
from draftlab.train.metrics import PhaseTimer, peak_memory
from eval.measurements import import_error

RATE = 1e-4
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COUNTED = "full_acc_total"  # of speculators' metrics: predictions that its P-EAGLE's loss counts
Step = Callable[[], tuple[Tensor, Mapping[str, Tensor]]]  # the loss; metrics, perhaps none


@dataclass(frozen=True)
class Peer:
    """A model, its forward pass to the loss, and its update: clip, step, clear gradients."""

    model: nn.Module
    forward: Step
    update: Callable[[], object]


def peer_seconds(
    name: str, work: Work, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Return milliseconds of a peer's step and its phases, speed and memory."""
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)  # memory of our trainer
    peer = PEERS[name](work, device, DTYPES[options.precision])
    counted: list[Tensor] = []

    def step(clock: PhaseTimer) -> None:
        value, metrics = peer.forward()
        clock.mark("forward")
        value.backward()
        clock.mark("backward")
        peer.update()
        clock.mark("optimizer")
        if COUNTED in metrics:
            counted.append(torch.as_tensor(metrics[COUNTED]).detach())

    seconds, phases = timed_steps(step, device, options.warmup, options.repeats)
    row = {
        "engine": name,
        "step_ms": 1e3 * seconds,
        "phases_ms": phases,
        "tokens_per_s": work.shape.tokens / seconds,
        "trained_parameters": sum(p.numel() for p in peer.model.parameters() if p.requires_grad),
        "peak_gib": (peak_memory(device) - before) / 2**30,
    }
    if counted and work.shape.family == "peagle":
        mean = fmean(map(float, counted[options.warmup :]))
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


def _qwen(shape: Shape) -> Qwen3Config:
    return Qwen3Config(**{**_llama(shape).to_diff_dict(), "model_type": "qwen3"})


def _filled(model: nn.Module, work: Work) -> None:
    """Copy the work's weights into those that a checkpoint would fill; make others finite."""
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
    """Return tokens [B, S], loss mask [B, S], features and last states of the records."""
    fields = zip(*((r.tokens, r.spans, r.features, r.last) for r in work.records), strict=True)
    tokens, spans, features, last = (torch.stack(field).to(device) for field in fields)
    return tokens, spans > 0, features, last


def import_peer(*modules: str) -> list[Any]:
    """Import modules of another trainer.

    Raises:
        UserError: one of them cannot be imported.
    """
    if text := import_error(*modules):
        library = modules[0].partition(".")[0]
        raise UserError(
            f"expected {text}",
            do=f"pip install --no-deps {library}, and each module that it then misses",
        )
    return [importlib.import_module(module) for module in modules]


def _speculators(work: Work, device: torch.device, dtype: torch.dtype) -> Peer:
    family = work.shape.family
    parallel, block = family == "peagle", family == "dspark"
    name = {"peagle": "PEagle", "dspark": "DSpark", "eagle3": "Eagle3"}[family]
    models, config, greedy, losses = import_peer(
        f"speculators.models.{family}",
        "speculators.config",
        "speculators.proposals.greedy",
        "speculators.losses",
    )
    llama = _qwen(work.shape) if block else _llama(work.shape)
    # On a CPU flex attention has no backward pass.
    llama._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "eager"
    options = {} if family == "eagle3" else {"mask_token_id": work.head.config.mask_token_id}
    boundaries = list(range(1, work.shape.boundaries + 1))
    if block:
        options |= {
            "block_size": work.shape.steps,
            "markov_rank": work.head.config.markov_rank,
            "aux_hidden_state_layer_ids": boundaries,
        }
    else:
        options["eagle_aux_hidden_state_layer_ids"] = boundaries
    model = getattr(models, f"{name}DraftModel")(
        getattr(models, f"{name}SpeculatorConfig")(
            **options,
            transformer_layer_config=llama,
            draft_vocab_size=work.shape.draft_vocab,
            speculators_config=config.SpeculatorsConfig(
                algorithm=family,
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
    if not block:  # its vocabulary is the whole one
        model.load_vocab_mappings(work.head.t2d.cpu(), work.head.d2t.cpu())
    model = model.to(device)
    _filled(model, work)
    tokens, mask, features, last = _flat(work, device)
    documents = torch.arange(len(tokens), device=device)[:, None].expand_as(tokens)
    one_row = lambda x: x.flatten(0, 1)[None].contiguous()  # noqa: E731
    state_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = {
        "hidden_states": one_row(features).to(state_dtype),
        "input_ids": one_row(tokens),
        "document_ids": one_row(documents),
        "loss_mask": one_row(mask),
        "verifier_last_hidden_states": one_row(last).to(state_dtype),
        "loss_config": losses.resolve_loss_config(
            '{"ce": 0.1, "tv": 1.8}' if block else "kl_div",  # its tv is half of L1
            "eager",
        ),
    }
    if block:
        inputs |= {
            "max_anchors": round(work.shape.anchor_share * work.shape.tokens),
            "tv_loss_fn": losses.resolve_loss_config("tv", "eager")["tv"][0],
        }
    elif parallel:
        inputs |= {
            "num_depths": work.shape.steps,
            "down_sample_ratio": work.shape.cod_ratio,
            "down_sample_ratio_min": work.shape.cod_min,
        }
    else:
        inputs |= {"ttt_steps": work.shape.steps, "ttt_step_loss_decay": GAMMA}
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, fused=device.type == "cuda")

    def forward() -> tuple[Tensor, Mapping[str, Tensor]]:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return model(**inputs)[1:]

    def update() -> None:
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Peer(model, forward, update)


def specforge_model(
    config: LlamaConfig, t2d: Tensor, d2t: Tensor, num_steps: int, device: torch.device
) -> Any:
    """Return SpecForge's OnlineEagle3Model with a new draft model of a layer config."""
    eagle3, draft = import_peer(
        "specforge.algorithms.eagle3.model", "specforge.modeling.draft.llama3_eagle"
    )
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    config.draft_vocab_size, config.pretraining_tp = len(d2t), 1
    model = draft.LlamaForCausalLMEagle3(config, attention_backend=attention).to(device)
    model.t2d.copy_(t2d)
    model.d2t.copy_(d2t)
    return eagle3.OnlineEagle3Model(model, num_steps, attention_backend=attention)


def shifted(x: Tensor) -> Tensor:
    """Return x [B, S, …] one position earlier, with zeros at the end."""
    return F.pad(x[:, 1:], (0, 0) * (x.dim() - 2) + (0, 1))


def _specforge(work: Work, device: torch.device, dtype: torch.dtype) -> Peer:
    shape = work.shape
    if shape.family != "eagle3":
        raise UserError(
            f"SpecForge trains chains only, found --family {shape.family}",
            do="use --peer speculators",
        )
    online = specforge_model(_llama(shape), work.head.t2d, work.head.d2t, shape.steps, device)
    model = online.draft_model
    _filled(model, work)
    model.freeze_embedding()
    model.to(dtype)
    (optimizers,) = import_peer("specforge.optimizer")
    optimizer = optimizers.BF16Optimizer(model, RATE, max_grad_norm=1.0, lr_scheduler="constant")
    tokens, mask, features, last = _flat(work, device)
    lm_head = torch.zeros(shape.vocab, shape.hidden, device=device, dtype=dtype)
    lm_head[work.head.t2d.to(device)] = work.target.weight.to(dtype)
    with torch.no_grad():
        normed = shifted(work.target.norm(last)).to(dtype)
    inputs = {
        "input_ids": shifted(tokens),
        "attention_mask": torch.ones_like(tokens),
        "loss_mask": mask[..., None].long(),
        "hidden_states": features.to(dtype),
    }

    def forward() -> tuple[Tensor, Mapping[str, Tensor]]:
        with torch.no_grad():
            logits = F.linear(normed, lm_head)
        losses, *_ = online(**inputs, target=logits)
        return sum(GAMMA**k * each for k, each in enumerate(losses)), {}

    return Peer(model, forward, optimizer.step)


PEERS = {"speculators": _speculators, "specforge": _specforge}
