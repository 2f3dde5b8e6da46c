"""Every architecture of the tests' zoo on a GPU: captured steps, checked and timed.

    python tests/engine/test_on_gpu.py [--kinds llama,gpt_oss] [--device cpu]

Random models of four layers, hidden size 256, plain and with a random EAGLE3 head, K = 4. A line
for each:

- float32: generations whose tokens and steps (drafted, accepted) equal the reference engine's, at
  T = 0 and 0.8, batch 1 and 8, from CUDA graphs. Anything less than all fails.
- bits: in bfloat16, prompts whose tokens, steps, and all keys and draft logits left on the device,
  are the same to the bit with graphs and without (batch 1). Anything less than all fails.
- bfloat16: generations equal to the reference engine's (near ties fall either way; for
  information).
- error: of bfloat16 states against float32's, as transformers writes the layers and with small
  operations compiled; "fused" where our own kernels run instead. Compiled layers that err more
  than twice as much (and 0.02: a router may flip) fail.
- ms: a step at batch 1: graph, graph without compiled operations, no graph.

On a CPU: float32 and bfloat16 without graphs, torch.compile without code generation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.target_model.compiled import compile_layers
from draftlab.target_model.fused_decoder import has_known_layers
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.probe import can_capture
from draftlab.target_model.settings import TargetSettings
from tests.helpers.head_toys import make_config
from tests.helpers.zoo import ZOO, wide, zoo_folder

KINDS = (*ZOO, "qwen2", "olmo2")
K, LENGTHS, NEW_TOKENS, MAX_LENGTH = 4, (41, 3, 17, 30, 8, 25), 20, 80
TEMPERATURES = (0.0, 0.8)


def make_head(target: Target) -> Eagle3Head:
    """A random head over half of the vocabulary, on the target's device in its dtype."""
    size, vocabulary = target.hidden_size, target.vocab_size
    config = make_config(
        boundaries=(1, 2, 4),
        target_num_layers=4,
        target_hidden_size=size,
        hidden_size=size,
        intermediate_size=2 * size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        vocab_size=vocabulary,
        draft_vocab_size=vocabulary // 2,
    )
    generator = torch.Generator().manual_seed(1)
    head = Eagle3Head(config)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.06 * noise)
    chosen = torch.randperm(vocabulary, generator=generator)[: vocabulary // 2]
    head.set_draft_vocabulary(chosen.sort().values)
    return head.to(target.device, target.dtype).requires_grad_(False)


def requests(target: Target, temperature: float) -> list[Request]:
    """Prompts of several lengths; windows, chunks and temperature steps end within them."""
    generator = torch.Generator().manual_seed(0)
    return [
        Request(
            f"p{i}",
            tuple(torch.randint(3, target.vocab_size, (n,), generator=generator).tolist()),
            NEW_TOKENS,
            Sampling(temperature),
        )
        for i, n in enumerate(LENGTHS)
    ]


def drafter_for(head: Eagle3Head | None, temperature: float) -> ChainDrafter | None:
    return ChainDrafter(head, K, draft_probs=temperature > 0) if head else None


def decode(engine: Engine | ReferenceEngine, asked: list[Request]) -> dict[str, Generation]:
    return {generation.id: generation for generation in engine.generate(asked)}


def equal(found: dict[str, Generation], expected: dict[str, Generation]) -> list[bool]:
    return [
        (found[i].token_ids, found[i].steps) == (g.token_ids, g.steps) for i, g in expected.items()
    ]


def against_reference(target: Target, heads: list[Eagle3Head | None]) -> tuple[list[bool], int]:
    """Which generations equal the reference engine's; and how many drafts that one accepted."""
    same, accepted = [], 0
    for head in heads:
        for temperature in TEMPERATURES:
            asked, options = requests(target, temperature), {"max_length": MAX_LENGTH}
            expected = decode(
                ReferenceEngine(target, drafter_for(head, temperature), batch=8, **options), asked
            )
            accepted += sum(g.counters.accepted for g in expected.values())
            for batch in (1, 8):
                engine = Engine(target, drafter_for(head, temperature), batch=batch, **options)
                found = decode(engine, asked)
                same += equal(found, expected)
                for i, right in zip(expected, same[-len(expected) :], strict=True):
                    if not right and target.dtype == torch.float32:
                        tell(target, asked, found[i], expected[i], temperature, batch)
    return same, accepted


def tell(
    target: Target,
    asked: list[Request],
    found: Generation,
    expected: Generation,
    temperature: float,
    batch: int,
) -> None:
    """Prints where two generations part, and how near to a tie the target is there."""
    where = f"    T={temperature:g} batch {batch} {found.id}:"
    pairs = zip(found.token_ids, expected.token_ids, strict=True)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        print(f"{where} tokens equal, steps {found.steps} for {expected.steps}")
        return
    prompt = next(request.prompt_ids for request in asked if request.id == found.id)
    known = torch.tensor([[*prompt, *expected.token_ids[:at]]], device=target.device)
    logits = target.logits(target.states(known).last[0, -1])
    one, other = logits[found.token_ids[at]], logits[expected.token_ids[at]]
    print(
        f"{where} token {at} is {found.token_ids[at]} for {expected.token_ids[at]}, their logits "
        f"{float(one):.6f} and {float(other):.6f}"
    )


def same_bits(target: Target, head: Eagle3Head) -> list[bool]:
    """Which prompts leave the same bits with graphs and without, one prompt at a time."""
    same = []
    for temperature in TEMPERATURES:
        engines = [
            Engine(
                target,
                drafter_for(head, temperature),
                batch=1,
                max_length=MAX_LENGTH,
                graphs=graphs and target.device.type == "cuda",
            )
            for graphs in (True, False)
        ]
        for request in requests(target, temperature):
            done = [decode(engine, [request]) for engine in engines]
            left = [
                [*e.cache.key_pool, *e.cache.value_pool, e.slots.length, e.slots.newest]
                + ([] if e.slots.draft_logits is None else [e.slots.draft_logits])
                for e in engines
            ]
            # The dummy's entries and block 0 belong to nobody, but both engines treat them alike;
            # a warm-up before capture touches them once more, so they are left out.
            bits = all(
                torch.equal(real(one), real(other)) for one, other in zip(*left, strict=True)
            )
            same.append(bits and all(equal(*done)))
    return same


def real(tensor: Tensor) -> Tensor:
    """Without block 0 of a pool, without the dummy of the slots."""
    return tensor[1:] if tensor.ndim == 4 else tensor[:-1]


@torch.inference_mode()
def step_ms(target: Target, head: Eagle3Head, graphs: bool) -> float:
    """Milliseconds of a step of one slot; it is empty, which costs what an early one costs."""
    on_gpu = target.device.type == "cuda"
    engine = Engine(
        target, drafter_for(head, 0.0), batch=1, max_length=MAX_LENGTH, graphs=graphs and on_gpu
    )
    index = engine.input_batch.index([0])

    def run() -> None:
        if engine.graphs is not None:
            engine.graphs((0,), limited=False)
        else:
            engine.step(index, limited=False)

    run()
    rounds = 50 if on_gpu else 2
    wait(target.device)
    started = time.perf_counter()
    for _ in range(rounds):
        run()
    wait(target.device)
    return (time.perf_counter() - started) / rounds * 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def error_of(target: Target, exact: Target) -> float:
    """Relative error of the last states of random rows against float32's."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, target.vocab_size, (4, 24), generator=generator).to(target.device)
    expected = exact.states(ids).last
    return float((target.states(ids).last.float() - expected).norm() / expected.norm())


def check(kind: str, folder: Path, device: str) -> bool:
    """Prints the line of an architecture; False when a check of it fails."""
    started = time.perf_counter()
    zoo_folder(folder, kind, **wide(kind))

    def load(dtype: str, compiled: bool = False) -> Target:
        settings = TargetSettings(path=str(folder), device=device, dtype=dtype, compile=compiled)
        return load_target(settings)

    exact = load("float32")
    single, accepted = against_reference(exact, [None, make_head(exact)])
    plain, target = load("bfloat16"), load("bfloat16", compiled=True)
    if device == "cpu":  # where loading compiles nothing
        compile_layers(target, "eager")
    fused = device != "cpu" and has_known_layers(target)
    compiled = any({"forward", "_apply_gate"} & vars(m).keys() for m in target.layers.modules())
    if device != "cpu" and not can_capture(target):
        raise AssertionError("a pass waits for the device")
    head = make_head(target)
    bits = same_bits(target, head)
    half, _ = against_reference(target, [None, head])
    errors = [error_of(plain, exact), error_of(target, exact)]
    times = [step_ms(target, head, True), step_ms(plain, head, True), step_ms(target, head, False)]
    good = all(single) and all(bits) and (fused or compiled) and errors[1] <= 2 * errors[0] + 0.02
    print(
        f"{kind:12} float32 {sum(single)}/{len(single)} ({accepted} accepted)  bits {sum(bits)}/"
        f"{len(bits)}  bfloat16 {sum(half)}/{len(half)}  error {errors[0]:.4f} "
        + ("fused " if fused else f"{errors[1]:.4f}" if compiled else "NOT COMPILED")
        + f"  ms {times[0]:.3f} {times[1]:.3f} {times[2]:.3f}  "
        + ("captured" if device != "cpu" else "no graphs")
        + f"  {time.perf_counter() - started:.0f} s{'' if good else '  FAILED'}",
        flush=True,
    )
    return good


def check_waiting(folder: Path) -> bool:
    """transformers' loop over the experts that were hit must be found to wait."""
    zoo_folder(folder, "mixtral", **wide("mixtral"))
    target = load_target(TargetSettings(path=str(folder), device="cuda", dtype="bfloat16"))
    target.model.set_experts_implementation("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = not can_capture(target)
    print(f"a loop over experts is {'found to wait' if found else 'NOT found to wait: FAILED'}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False
    on_gpu = options.device == "cuda"
    print(torch.cuda.get_device_name() if on_gpu else "CPU", "torch", torch.__version__)
    failed = []
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            try:
                good = check(kind, Path(folder), options.device)
            except Exception as error:  # the others are still worth looking at
                reason = " ".join(str(error).split())[:400]
                print(f"{kind:12} FAILED {type(error).__name__}: {reason}", flush=True)
                good = False
        failed += [] if good else [kind]
    if on_gpu:
        with tempfile.TemporaryDirectory() as folder:
            failed += [] if check_waiting(Path(folder)) else ["loop over experts"]
    print("failed: " + ", ".join(failed) if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
