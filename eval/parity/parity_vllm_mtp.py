"""Compare an MTP layer that draftlab has trained and written back with vLLM's own MTP path.

    DRAFTLAB_VLLM_PYTHON=… .venv/bin/python eval/parity/parity_vllm_mtp.py [--kind mimo]

A small random target with an MTP layer in its checkpoint is made, the layer is trained on the
target's greedy answers, exported, and joined with the checkpoint by the commands of launch.md. vLLM
serves that folder with method mtp, in float32 on the CPU. At T = 0 every token, every draft and the
counters of every prompt must be equal.

Exit status: 0 everything is equal; 1 something differs; 77 no Python with vLLM is named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import DIFFERENT, EQUAL, SKIPPED, client

from draftlab.engine.engine import Engine
from draftlab.export.settings import ExportSettings
from draftlab.export.write import write_export
from draftlab.heads.folder import save_head
from draftlab.servers.vllm_process import CLIENT, PYTHON_VARIABLE
from tests.helpers import mtp_toys
from tests.helpers.decoding import trained_head
from tests.helpers.greedy_answers import recording_drafter, requests
from tests.helpers.zoo import load_on_cpu

K, LENGTH = 3, 64


def sized_folder(path: Path, kind: str, width: float) -> Path:
    """Save a target with heads of 32 channels, the fewest that vLLM's CPU attention has."""
    mtp_toys.SIZE, mtp_toys.WIDE, mtp_toys.HEADS = 64, 96, 2
    mtp_toys.KV_HEADS, mtp_toys.HEAD_DIM = 1, 32
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "initializer_range": width,
    }
    if kind in mtp_toys.LATENT:  # the sizes that vLLM's kernels for a CPU have
        mtp_toys.RANK, mtp_toys.TURNING, mtp_toys.PLAIN = 512, 64, 128
        mtp_toys.VALUES = dict.fromkeys(mtp_toys.LATENT, 128)
        sizes |= {"q_lora_rank": 512, "kv_lora_rank": 512, "num_key_value_heads": 2, "head_dim": 64}
        sizes |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    elif kind != "mimo":  # vLLM's linear attention on a CPU is in bfloat16 alone
        sizes |= {"layer_types": ["full_attention"] * 4}
    return mtp_toys.mtp_folder(path, kind, **sizes)


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kind", choices=mtp_toys.KINDS, default="mimo")
    parser.add_argument("--steps", type=int, default=60, help="of training")
    parser.add_argument("--width", type=float, default=0.1, help="of the target's random weights")
    options = parser.parse_args()
    if PYTHON_VARIABLE not in os.environ:
        print(f"SKIPPED: {PYTHON_VARIABLE} names no Python with vLLM")
        return SKIPPED
    with tempfile.TemporaryDirectory() as place:
        return compare(Path(place), options)


def compare(place: Path, options: argparse.Namespace) -> int:
    """Train, export and join a layer in a folder, and compare its drafts; return the status."""
    folder = sized_folder(place / "target", options.kind, options.width)
    target = load_on_cpu(folder, trust_remote_code=True)
    head = trained_head(target, mtp_toys.native_head(target, K), options.steps)
    save_head(place / "head", head, torch.float32)
    settings = ExportSettings(k=K)
    out = place / "export"
    write_export(place / "head", folder, out, "vllm", target_name=str(folder), settings=settings)
    for line in (out / "launch.md").read_text().split("```")[1].strip().splitlines()[:-1]:
        subprocess.run(line, shell=True, check=True)

    asked, ours = requests(12, seed=100, shortest=3), []
    for request in asked:
        drafter, drafts = recording_drafter(head, K)
        (answer,) = Engine(target, drafter, batch=1, max_length=LENGTH).generate([request])
        ours.append((answer, drafts[: answer.counters.drafts]))

    engine: dict[str, Any] = {"trust_remote_code": True}
    draft: dict[str, Any] = {}
    if options.kind in mtp_toys.LATENT:
        # vLLM's other latent attention on a CPU has no float32.
        draft = {"attention_backend": "CPU_MLA"}
        # Its RoPE kernel for a CPU (0.32) turns queries [T, heads, head_dim] of several heads
        # wrongly, as latent attention calls it; its plain operations do not.
        engine |= draft | {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
    extra = {"engine_extra": engine, "speculative_extra": draft}
    info, theirs = their_answers(place, f"{out}-whole", asked, extra)
    differ = 0
    for (answer, drafts), other in zip(ours, theirs, strict=True):
        mine = [list(answer.token_ids), drafts, answer.counters.drafts, answer.counters.accepted]
        counters = other["per_prompt"][0]
        found = [other["outputs"][0], other["drafts"][: counters["drafts"]]]
        differ += mine != [*found, counters["drafts"], counters["accepted"]]
    steps, accepted = (sum(getattr(a.counters, n) for a, _ in ours) for n in ("drafts", "accepted"))
    print(
        f"{options.kind}, vLLM {info['version']} ({info['runner']}), K={K}: {len(asked)} prompts, "
        f"{steps} steps, {accepted} accepted, AL {1 + accepted / steps:.3f}: "
        f"{f'{differ} prompts DIFFER' if differ else 'EQUAL'}"
    )
    return DIFFERENT if differ else EQUAL


def their_answers(
    place: Path, model: str, asked: list[Any], extra: dict[str, Any]
) -> tuple[dict, list[dict]]:
    """Decode with vLLM; return its description and the answers to the prompts.

    Args:
        extra: more options of the engine and of its drafts, as fields of a setup.
    """
    shutil.copytree(CLIENT, place / "client" / CLIENT.name)
    sampling = [
        {
            "temperature": 0.0,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": sorted(request.stop_ids),
        }
        for request in asked
    ]
    setup = {
        "target": model,
        "draft": model,
        "method": "mtp",
        "k": K,
        "max_model_len": LENGTH,
        "parallel_drafting": False,
    } | extra
    prompts = [list(request.prompt_ids) for request in asked]
    request = {"client": str(place / "client"), "setup": setup}
    request |= {"prompts": prompts, "sampling": sampling}
    client(Path(os.environ[PYTHON_VARIABLE]), "vllm_drafts.py", {place / "answer.json": request})
    result = json.loads((place / "answer.json").read_text())
    return result["info"], result["answers"]


if __name__ == "__main__":
    sys.exit(main())
