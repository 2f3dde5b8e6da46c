"""Peers of `bench_train.py`: their own code on the same work, timed the same way.

- `speculators`: the library from PyPI, if it can be imported. Its model, loss and loop: one packed
  row, autocast, AdamW (fused here, since that is what it is beside), clipping; lm_head frozen. Its
  eager loss; `speculators:fused` takes its fused one, which did not compile on torch 2.11. Beside a
  parallel head its P-EAGLE: it samples (anchor, depth) pairs anew each step, and `predictions` are
  those that its loss counts, on average. It trains all embeddings; `speculators:frozen` none.
- `specforge:PATH`: a checkout. Its OnlineEagle3Model with flex attention, its loss, the target's
  logits over the whole vocabulary from the last states; lm_head trained. Written for the API of
  late 2025 and NOT RUN here: a checkout with another one is refused.

An EAGLE3 of theirs leaves no position out, so its time does not depend on where loss is; P-EAGLE
samples depths of answers alone, and computes depth 0 and its logits everywhere.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_work import GAMMA, Shape, Work
from transformers import LlamaConfig

from draftlab.base import UserError
from draftlab.train.clock import Clock
from draftlab.train.metrics import peak_memory

RATE = 1e-4
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COUNTED = "full_acc_total"  # of speculators' metrics: predictions that its P-EAGLE's loss counts
Step = Callable[[], tuple[Tensor, Mapping[str, Tensor]]]  # the loss; metrics, perhaps none


def peer_seconds(
    name: str, work: Work, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of a peer's step and its phases, speed and memory."""
    kind, _, path = name.partition(":")
    if kind not in PEERS:
        raise UserError(f"expected a peer among {', '.join(PEERS)}, found {kind!r}")
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)  # what it is timed beside keeps
    model, run = PEERS[kind](path, work, device)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, fused=device.type == "cuda")
    clock, found, dtype = Clock(device), [], DTYPES[options.precision]
    counted: list[float] = []
    for number in range(options.warmup + options.repeats):
        clock.start()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            value, metrics = run()
        clock.mark("forward")
        optimizer.zero_grad()
        value.backward()
        clock.mark("backward")
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        clock.mark("optimizer")
        phases = clock.read()
        if number >= options.warmup:
            found.append(phases)
            if work.shape.family == "ptd":
                counted.append(float(metrics[COUNTED]))
    seconds = median(sum(each.values()) for each in found)
    row = {
        "engine": kind,
        "step_ms": 1e3 * seconds,
        "phases_ms": {key: 1e3 * median(each[key] for each in found) for key in found[0]},
        "tokens_per_s": work.shape.tokens / seconds,
        "trained_parameters": sum(p.numel() for p in weights),
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


def _speculators(path: str, work: Work, device: torch.device) -> tuple[nn.Module, Step]:
    asked, parallel = set(filter(None, path.split(","))), work.shape.family == "ptd"
    if asked - {"fused", "frozen"} or ("frozen" in asked and not parallel):
        raise UserError(
            f"expected speculators[:fused] or, for --family ptd, speculators[:fused,frozen]; found "
            f"speculators:{path}"
        )
    algorithm, name = ("peagle", "PEagle") if parallel else ("eagle3", "Eagle3")
    try:
        models = importlib.import_module(f"speculators.models.{algorithm}")
        config = importlib.import_module("speculators.config")
        greedy = importlib.import_module("speculators.proposals.greedy")
    except ImportError as error:
        raise UserError(
            f"speculators cannot be imported: {error}",
            do="pip install --no-deps speculators, and what it then asks for",
        ) from None
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
    losses = importlib.import_module("speculators.losses")
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
    return model, lambda: model(**given)[1:]


def _specforge(path: str, work: Work, device: torch.device) -> tuple[nn.Module, Step]:
    if work.shape.family != "eagle3":
        raise UserError(
            f"SpecForge trains chains alone, found --family {work.shape.family}",
            do="take --peer speculators",
        )
    sys.path.insert(0, path)
    try:
        core = importlib.import_module("specforge.core.eagle3")
        draft = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    except ImportError as error:
        raise UserError(
            f"SpecForge cannot be imported: {error}", where=path, do="give its checkout's folder"
        ) from None
    expected = ["input_ids", "attention_mask", "target", "loss_mask", "hidden_states"]
    found = list(inspect.signature(core.OnlineEagle3Model.forward).parameters)[1:]
    if found[: len(expected)] != expected:
        raise UserError(
            f"expected OnlineEagle3Model.forward({', '.join(expected)}, …), found {found}",
            where=path,
            do="take a checkout of late 2025, or mend eval/train_peers.py",
        )
    config = _llama(work.shape)
    config.draft_vocab_size = work.shape.draft_vocab
    model = draft.LlamaForCausalLMEagle3(config, attention_backend="flex_attention").to(device)
    model.t2d.copy_(work.head.t2d)
    model.d2t.copy_(work.head.d2t)
    _filled(model, work)
    model.freeze_embedding()
    online = core.OnlineEagle3Model(model, work.shape.steps, attention_backend="flex_attention")
    tokens, mask, features, last = _flat(work, device)
    lm_head = torch.zeros(work.shape.vocab, work.shape.hidden, device=device, dtype=last.dtype)
    lm_head[: work.shape.draft_vocab] = work.target.weight
    ones = torch.ones_like(tokens)

    def run() -> tuple[Tensor, Mapping[str, Tensor]]:
        with torch.no_grad():
            target = F.linear(work.target.norm(last).to(last.dtype), lm_head)
        losses, *_ = online(tokens, ones, target, mask[..., None].long(), features)
        return sum(GAMMA**k * each for k, each in enumerate(losses)), {}

    return model, run


PEERS = {"speculators": _speculators, "specforge": _specforge}
