"""Recording through vLLM on a GPU, beside recording by transformers: equal features, and speed.

    python eval/gpu/record_vllm.py [--python VLLM_PYTHON] [--tokens 400000] [--folder DIR]
    python eval/gpu/record_vllm.py --target FOLDER     # a checkpoint of yours; --tiny: a small one

Without --target a checkpoint of Llama-3.1-8B's shapes with random weights is written first (16 GB
in --folder). The same conversations are recorded by transformers and by vLLM, each warmed up on a
tenth of them; vLLM's start is not counted (it is printed). Then the two stores are compared record
by record: the relative error of each boundary, of the last state and of logsumexp, and the share of
equal argmax. In 16 bit two correct programs differ by their rounding: the bar is 2 % of a feature's
size, and the spread of transformers' own states over other batches is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.kernels.current import give_back_memory
from draftlab.progress import Monitor
from draftlab.store.record import RecordSettings, planned, record
from draftlab.store.store import Sample, Store
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import TargetSettings, load_target
from draftlab.vllm.hidden_states import VllmStates
from eval.gpu.record import SHAPES, TINY, Said, conversations, identity

BAR = 0.02


def checkpoint(folder: Path, tiny: bool) -> Path:
    """Random weights, written once; heads of 64, the least that vLLM's kernels take."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        shapes = {**TINY, "hidden_size": 256} if tiny else SHAPES
        with torch.device("cpu" if tiny else "cuda"):
            config = LlamaConfig(**shapes, tie_word_embeddings=False)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return folder


def by_transformers(
    settings: TargetSettings, samples: list[Sample], folder: Path
) -> tuple[Store, Store, float]:
    """The store, one whose batches were cut otherwise (its first tenth), and tokens a second."""
    target = load_target(settings)
    some = samples[: max(1, len(samples) // 10)]
    plain = RecordSettings()

    def run(name: str, these: list[Sample], how: RecordSettings) -> Store:
        who = identity(target, how.dtype)
        return record(target, these, folder / name, how, who, monitor=Said())

    other = run("alone", some, plain.model_copy(update={"batch_tokens": 1}))
    run("warm", some, plain)
    started = time.perf_counter()
    store = run("transformers", samples, plain)
    return store, other, store.manifest.counts.tokens / (time.perf_counter() - started)


def by_vllm(
    settings: TargetSettings, samples: list[Sample], folder: Path, python: str | None
) -> tuple[Store, float]:
    """The store, and tokens a second."""
    outline = TargetMetadata(settings)
    how = RecordSettings(backend="vllm", vllm={"python": python})
    who = identity(outline, how.dtype)
    plan, _ = planned(outline, samples, how, who, monitor=Monitor())
    with VllmStates(outline, how, Said(), plan) as states:
        run = partial(record, outline, settings=how, identity=who, monitor=Said())
        opened = lambda _plan: nullcontext(states)  # noqa: E731  # the same one twice
        run(samples[: max(1, len(samples) // 10)], folder / "vllm-warm", opened=opened)
        started = time.perf_counter()
        store = run(samples, folder / "vllm", opened=opened)
        seconds = time.perf_counter() - started  # vLLM's end takes its own
    return store, store.manifest.counts.tokens / seconds


def compare(found: Store, expected: Store) -> dict[str, float]:
    """Relative errors (root mean square over all positions), and the share of equal argmax."""
    width, boundaries = expected.identity.hidden_size, expected.identity.boundaries
    sums: dict[str, list[float]] = {}
    same = taught = 0
    for ours, theirs in zip(found, expected, strict=False):
        assert ours.id == theirs.id
        assert torch.equal(ours.tokens, theirs.tokens)
        pairs = {
            f"boundary {b}": (
                ours.features[:, i * width :][:, :width],
                theirs.features[:, i * width :][:, :width],
            )
            for i, b in enumerate(boundaries)
        }
        asked = theirs.argmax >= 0
        pairs["last"] = ours.last, theirs.last
        pairs["logsumexp"] = ours.logsumexp[asked], theirs.logsumexp[asked]
        for name, (a, b) in pairs.items():
            error, size = sums.setdefault(name, [0.0, 0.0])
            sums[name] = [
                error + float((a.double() - b.double()).square().sum()),
                size + float(b.double().square().sum()),
            ]
        same += int((ours.argmax == theirs.argmax)[asked].sum())
        taught += int(asked.sum())
    relative = {name: (error / size) ** 0.5 for name, (error, size) in sums.items()}
    return {**relative, "same argmax": same / taught}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="the Python that has vLLM; default: this one")
    parser.add_argument("--target", help="a checkpoint's folder or Hub id; default: random weights")
    parser.add_argument("--tokens", type=int, default=400_000, help="recorded for the timing")
    parser.add_argument("--folder", type=Path, help="for checkpoint and stores; default: TMPDIR")
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--tiny", action="store_true", help="a tiny target, a few conversations")
    options = parser.parse_args()
    if options.tiny:
        options.tokens = min(options.tokens, 4_000)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        path = options.target or str(checkpoint(folder / "target", options.tiny))
        settings = TargetSettings(path=path, dtype=options.dtype)
        outline = TargetMetadata(settings)
        samples = conversations(options.tokens, outline, 512 if options.tiny else 4096)
        expected, alone, theirs = by_transformers(settings, samples, folder)
        give_back_memory()  # vLLM takes what is free
        found, ours = by_vllm(settings, samples, folder, options.python)
        errors = compare(found, expected)
        rounding = compare(alone, expected)
    for label, values in (("vLLM", errors), ("transformers, other batches", rounding)):
        print(label, {name: f"{value:.2e}" for name, value in values.items()}, flush=True)
    worst = max(error for label, error in errors.items() if label != "same argmax")
    line = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "target_dtype": str(outline.dtype).removeprefix("torch."),
        "tokens": expected.manifest.counts.tokens,
        "vllm_tokens_s": round(ours),
        "transformers_tokens_s": round(theirs),
        "ratio": round(ours / theirs, 2),
        "worst_relative_error": float(f"{worst:.3g}"),
        "bar_met": worst <= BAR,
    }
    print(json.dumps(line), flush=True)
    return not line["bar_met"]


if __name__ == "__main__":
    sys.exit(main())
