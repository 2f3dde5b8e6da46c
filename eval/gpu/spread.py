"""A target spread over several GPUs (`target.gpus`) against the same target on one.

    python tests/target_model/test_on_gpu.py [--kinds llama4,gpt_oss,llama] [--gpus 2]

Random models of the tests' zoo, as recorded and as decoded, a line for each kind:

- float32: boundary states and last states of a padded batch, equal to the bit; tokens and accepted
  drafts of the engine with a random EAGLE3 head, at T = 0 and 0.8, equal.
- GB: weights on each GPU, for information.

Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from architectures import make_head

from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.zoo import wide, zoo_folder

BOUNDARIES = (1, 2, 4)


def decoded(target: Target, temperature: float) -> list[Generation]:
    """Eight answers, with drafts."""
    sampling = Sampling(temperature=temperature, seed=3)
    asked = [
        Request(str(n), tuple(range(3, 3 + n)), 40, sampling) for n in (41, 3, 17, 30, 8, 25, 2, 90)
    ]
    drafter = new_drafter(make_head(target), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a spread target has no graphs
        engine = Engine(target, drafter, batch=4, max_length=160)
    done = {g.id: g for g in engine.generate(asked)}
    return [done[request.id] for request in asked]


def weights(target: Target) -> list[int]:
    """Bytes of weights on each GPU."""
    found = [0] * torch.cuda.device_count()
    for parameter in target.model.parameters():
        found[parameter.device.index] += parameter.numel() * parameter.element_size()
    return found


def compare(kind: str, gpus: int) -> bool:
    """One kind; prints its line."""
    with tempfile.TemporaryDirectory() as folder:
        zoo_folder(Path(folder), kind, **wide(kind))
        settings = TargetSettings(path=folder, device="cuda:0", dtype="float32")
        one, many = load_target(settings), load_target(settings.model_copy(update={"gpus": gpus}))
    ids = torch.arange(3, 3 + 2 * 100, device="cuda:0").view(2, 100) % 1000
    states = [t.states(ids, BOUNDARIES) for t in (one, many)]
    bits = torch.equal(states[0].features, states[1].features)
    bits &= torch.equal(states[0].last, states[1].last)
    same = []
    for temperature in (0.0, 0.8):
        pairs = zip(decoded(one, temperature), decoded(many, temperature), strict=True)
        same += [(a.token_ids, a.steps) == (b.token_ids, b.steps) for a, b in pairs]
    shares = " ".join(f"{size / 1e9:.3f}" for size in weights(many)[:gpus])
    print(
        f"{kind:12} states {'equal' if bits else 'DIFFER'}; generations equal "
        f"{sum(same)}/{len(same)}; GB {shares}; {many.notes[-1]}",
        flush=True,
    )
    return bits and all(same) and many.pipeline_parallel and not one.pipeline_parallel


def main() -> int:
    """Compares every kind."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default="llama4,gpt_oss,llama,gemma2")
    parser.add_argument("--gpus", type=int, default=2)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.gpus:
        print(f"skipped: {options.gpus} GPUs are needed, found {torch.cuda.device_count()}")
        return 77
    found = [compare(kind, options.gpus) for kind in options.kinds.split(",")]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
