"""A known target decoded with speculation: tables, exact joint, G-test and broken verifiers.

Target and head are tables of next-token logits. They are decoded by the real drafter's choice of
tokens and the real verifier, one row a prompt, on a CPU or a GPU.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.base_drafter import VerifiedFeatures
from draftlab.engine.draft_sampler import Proposal
from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.head_pass import PassLayout
from draftlab.evaluate.certificate.exact import g_test
from draftlab.kernels import sampling as sampling_module
from draftlab.kernels import verify as verify_module
from draftlab.kernels.sampling.types import SamplingMetadata, VerifyResult

VOCAB, K, ROWS, START = 5, 2, 100_000, 0
DRAFT_IDS = torch.tensor([0, 1, 3, 4])  # token 2 can only come from the target


@dataclass(frozen=True)
class Case:
    """Sampling parameters that the small model is decoded with."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    draft_probs: bool = True
    verification: Literal["token", "block"] = "token"


CASES = {
    "draft probabilities": Case(),
    "hotter": Case(temperature=1.4),
    "top-k": Case(top_k=3),
    "top-p": Case(temperature=1.3, top_p=0.8),
    "block": Case(temperature=0.8, verification="block"),
    "block, hotter": Case(temperature=1.5, verification="block"),
    "block, limits": Case(temperature=1.2, top_k=4, top_p=0.9, verification="block"),
    "argmax drafts": Case(draft_probs=False),
    "argmax drafts, limits": Case(temperature=1.2, top_k=4, top_p=0.9, draft_probs=False),
}


def by_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Return p by brute force: the likeliest token first, the lowest id first among equals."""
    size = len(logits)
    if temperature == 0:
        best = logits.index(max(logits))
        return [float(i == best) for i in range(size)]
    top = max(logits)
    weights = [math.exp((z - top) / temperature) for z in logits]
    order = sorted(range(size), key=lambda i: (-logits[i], i))[: top_k or size]
    total = sum(weights[i] for i in order)
    support, mass = [], 0.0
    for i in order:
        if top_p < 1 and mass >= top_p:
            break
        support.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in support)
    return [weights[i] / total if i in support else 0.0 for i in range(size)]


def tables() -> tuple[Tensor, Tensor]:
    """Return logits of the target [V, V] and of a mismatched head [V, D], by last token."""
    generator = torch.Generator().manual_seed(29)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.1
    head = target[:, DRAFT_IDS] + torch.randn(VOCAB, len(DRAFT_IDS), generator=generator)
    return target, head


TARGET, HEAD = tables()


def sampling_metadata(
    case: Case, count: int = ROWS, seed: int = 0, device: str = "cpu"
) -> SamplingMetadata:
    """Return `count` rows of different prompts that share the case's sampling parameters."""
    prompts = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(5))
    return SamplingMetadata(
        torch.full((count,), case.temperature, device=device),
        torch.full((count,), case.top_k, device=device),
        torch.full((count,), case.top_p, device=device),
        torch.full((count,), seed, device=device),
        prompts.to(device),
    )


def make_drafter(case: Case, device: str = "cpu") -> ChainDrafter:
    """Return the real drafter around a stub head: only its choice of tokens is used."""
    offsets = (DRAFT_IDS - torch.arange(len(DRAFT_IDS))).to(device)
    head: Any = SimpleNamespace(
        config=SimpleNamespace(boundaries=(0,)),
        d2t=offsets,
        t2d=torch.zeros(VOCAB, dtype=torch.bool, device=device),
        target_ids=lambda ids: ids + offsets[ids],
        check_drafts=lambda k: None,
    )
    drafter: Any = ChainDrafter(
        head,
        K,
        draft_probs=case.draft_probs,
        verification=case.verification,
    )
    table = HEAD.to(device)
    # A pass's output is its token, and the logits are the token's entry in a table.
    drafter._forward = lambda tokens, *_: tokens[..., None].float()
    drafter.runner.logits = lambda output, out=None: (
        table[output[:, 0].long()] if out is None else out.copy_(table[output[:, 0].long()])
    )
    return drafter


def propose(drafter: Any, last: Tensor, positions: Tensor, keys: SamplingMetadata) -> Proposal:
    """Return the drafts behind tokens `last` [B], the first of them for `positions` [B]."""
    at = (positions - 2)[:, None]
    drafter._pass_layouts = lambda *_, **__: [PassLayout(at, (at, at), at, at)] * K
    drafter._run_verified = lambda verified, _: verified.tokens[..., None].float()
    tokens, empty = last[:, None], keys.temperature.new_empty(len(last), 0)
    return drafter.propose(VerifiedFeatures(tokens, empty, at, torch.ones_like(last), empty, keys))


def decode(
    case: Case, verify: Callable[..., VerifyResult], keys: SamplingMetadata
) -> tuple[Tensor, list[tuple[Tensor, VerifyResult]]]:
    """Decode every row from START until all have three tokens, on the device of the keys.

    Returns:
        Tokens [B, 3], and for every step the indices of its rows and their verdict.
    """
    device = keys.seed.device
    drafter, target = make_drafter(case, str(device)), TARGET.to(device)
    count = len(keys.seed)
    tokens = torch.full((count, 3 + K + 1), START, device=device)
    length = torch.zeros(count, dtype=torch.int64, device=device)
    steps = []
    while bool((length < 3).any()):
        rows = (length < 3).nonzero()[:, 0]
        row_keys, at = keys[rows], length[rows] + 1  # the prompt is START, at position 0
        last = torch.where(length[rows] > 0, tokens[rows, (length[rows] - 1).clamp(min=0)], START)
        proposal = propose(drafter, last, at, row_keys)
        chain = torch.cat([last[:, None], proposal.tokens], 1)
        num_drafts = torch.full((len(rows),), K, device=device)
        verdict = verify(
            target[chain],
            chain[:, 1:],
            num_drafts,
            proposal.distribution,
            at,
            row_keys,
            block=case.verification == "block",
        )
        steps.append((rows, verdict))
        for depth in range(K + 1):
            emits = verdict.accepted >= depth
            token = verdict.emitted
            if depth < K:
                token = chain[:, depth + 1].where(verdict.accepted > depth, token)
            tokens[rows[emits], length[rows[emits]] + depth] = token[emits]
        length[rows] += verdict.accepted + 1
    return tokens[:, :3].cpu(), steps


def exact_joint(case: Case) -> np.ndarray:
    """Return P(x1, x2, x3) from the definition in float64, [V, V, V]."""
    p = np.array(
        [by_definition(z, case.temperature, case.top_k, case.top_p) for z in TARGET.tolist()]
    )
    return p[START][:, None, None] * p[:, :, None] * p[None]


def joint_counts(tokens: Tensor) -> np.ndarray:
    """Return how often each three tokens occurred, [V, V, V]."""
    code = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    return code.bincount(minlength=VOCAB**3).double().numpy().reshape(VOCAB, VOCAB, VOCAB)


def p_value(tokens: Tensor, joint: np.ndarray) -> float:
    """Return the p-value of the hypothesis that the tokens come from the joint."""
    return g_test(joint_counts(tokens), joint).p_value


def assert_rejected(tokens: Tensor, joint: np.ndarray) -> None:
    """Assert that the fault is found with half of the samples that were drawn."""
    assert p_value(tokens[: ROWS // 2], joint) < 1e-6


def broken(old: str, new: str) -> ModuleType:
    """Return verify/ or sampling/, whichever contains `old`, with `new` in its place."""
    modules = (verify_module, sampling_module)
    sources = {module.__name__: inspect.getsource(module) for module in modules}
    (name,) = [name for name, source in sources.items() if source.count(old) == 1]
    module = ModuleType(name)
    exec(compile(sources[name].replace(old, new), f"broken {name}", "exec"), module.__dict__)
    return module


FAULTS = {
    "accepts 5 % too often": ("u * q_draft < p_draft", "u * q_draft < 1.05 * p_draft"),
    "residual is p": ("(scale * p_next - q_next).clamp(min=0)", "p_next"),
    "residual not clamped": ("(scale * p_next - q_next).clamp(min=0)", "(p_next - q_next)"),
    "residual is |p − q|": ("(scale * p_next - q_next).clamp(min=0)", "(p_next - q_next).abs()"),
    "one u a step": (
        "positions[:, None] + depth, Purpose",
        "positions[:, None] + 0 * depth, Purpose",
    ),
    "bonus from q": (
        "    p_next = p.gather(",
        "    p = torch.cat([p[:, :k], q[:, -1:]], 1)\n    p_next = p.gather(",
    ),
    "bonus from the row before": (
        "    p_next = p.gather(1, accepted[",
        "    p_next = p.gather(1, accepted.clamp(max=k - 1)[",
    ),
}


BLOCK_FAULTS = {
    "the residual of token verification": ("(scale * p_next - q_next)", "(p_next - q_next)"),
    "r is not clamped": ("q_draft[:, depth]).clamp(max=1))", "q_draft[:, depth]))"),
    "O after the last draft": (
        "torch.cat([overlap[:, 1:], torch.zeros_like(overlap[:, :1])], 1)",
        "torch.cat([overlap[:, 1:], overlap[:, -1:]], 1)",
    ),
    "one u a step": ("starts + depth, Purpose", "starts + 0 * depth, Purpose"),
    "u of a position, as another step reads": ("* BLOCK_STRIDE\n", "\n"),
}


ARGMAX_DRAFT_FAULTS = {
    "accepts 5 % too often": FAULTS["accepts 5 % too often"],
    "recovers the rejected token": (
        "= p_next.scatter(-1, drafts.gather(1, rejected[:, None]), 0.0)",
        "= p_next",
    ),
    "one u a step": FAULTS["one u a step"],
}
