"""Measure how well the confidence of chain, P-EAGLE and DSpark heads can be calibrated.

    python eval/lab/calibration.py --out DIR [--results FILE] [--minutes 5]

Each family trains a head for the embedded target on the first of the package's prompts, all at the
same time, in turn on the GPUs that are visible, and is then evaluated with `calibrate` on all other
prompts, which no training saw. Half of them are for the fits, the others for the errors; for 40,000
steps of the latter nearly all of the package's prompts are needed. --minutes ends what still runs;
the next call goes on from the stages that are finished. The table has, for each head, temperature
and kind of drafts, the largest error of a position before and after the calibration, and that of a
perfect predictor with as many steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.evaluate.calibration.result import Calibration
from draftlab.evaluate.results import Report
from eval.measurements import ROOT, Measurements, add_options, child_environment, option_values

RECIPES = {
    "chain": "quickstart.yaml",
    "peagle": "quickstart_peagle.yaml",
    "dspark": "quickstart_dspark.yaml",
}
K = 6
GOAL = 0.015
"""Largest error of a position after the calibration."""


def split_prompts(out: Path, count: int) -> None:
    """Write train.jsonl with the first prompts, and other.jsonl with all others."""
    folder = Path(str(resources.files("draftlab"))) / "embedded" / "prompts"
    head, held_out = (
        (folder / f"{name}.jsonl").read_text().splitlines() for name in ("head", "heldout")
    )
    (out / "train.jsonl").write_text("\n".join(head[:count]) + "\n")
    (out / "other.jsonl").write_text("\n".join(head[count:] + held_out) + "\n")


def command(family: str, options: argparse.Namespace) -> list[str]:
    """Return the command that trains and evaluates a head."""
    settings = {
        "target.dtype": "float32",
        "prompts.source": options.out / "train.jsonl",
        "regenerate.samples": 4,
        "regenerate.batch": 1024,
        "train.ttt_steps": K,
        "train.steps": options.steps,
        "train.batch_rows": options.rows,
        "eval.suite": options.out / "other.jsonl",
        "eval.max_prompts": options.evaluated,
        "eval.k": K,
        "eval.batch": 512,
        "eval.draft_probs": "both",
        "eval.compare": "[]",
        "eval.timing_prompts": 0,
        "eval.calibrate": "true",
        "export.formats": "[]",
        "name": f"calibration-{family}",
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    recipe = ROOT / "recipes" / RECIPES[family]
    program = [sys.executable, "-m", "draftlab", "run", str(recipe)]
    return [*program, *words, *options.settings]


def line(one: Calibration) -> str:
    """Return a row of the table."""
    drafts = "sampled" if one.draft_probs and one.temperature else "argmax"
    errors = [p.error_after for p in one.positions]
    worst = one.positions[errors.index(max(errors))]
    own = "–"
    if one.common_temperature is not None:
        own = f"{max(p.error_temperature or 0.0 for p in one.positions):.4f}"
    lengths = 1 + sum(p.survived / p.blocks for p in one.positions)
    return (
        f"| {one.head.removeprefix('calibration-')} | {one.temperature:g} | {drafts} "
        f"| {lengths:.2f} | {one.blocks:,} | {max(p.error_before for p in one.positions):.4f} "
        f"| {max(errors):.4f} | {worst.error_perfect:.4f} | {worst.error_perfect_high:.4f} "
        f"| {own} | {'yes' if max(errors) <= GOAL else 'NO'} |"
    )


def start(family: str, number: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start the run of a head, with its output in OUT/FAMILY.log."""
    gpus = torch.cuda.device_count()
    visible = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus > 1 else {}
    with (options.out / f"{family}.log").open("w") as log:
        return subprocess.Popen(
            command(family, options),
            cwd=options.out,  # its folder of runs
            env=child_environment(**visible),
            stdout=log,
            stderr=log,
        )


def main() -> int:
    """Train, evaluate and print the table; return 1 if a run failed or an error is too large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--prompts", type=int, default=512, help="prompts to train on")
    parser.add_argument("--evaluated", type=int, default=3000, help="other prompts to evaluate")
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--rows", type=int, default=16, help="rows of 384 tokens a step")
    parser.add_argument("--families", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("settings", nargs="*", help="of the recipes, such as eval.max_new_tokens=8")
    add_options(parser)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.results = options.results or options.out / "results.json"
    conditions = option_values(options, "prompts", "evaluated", "steps", "rows", "settings")
    parts = Measurements(options, conditions)
    options.out.mkdir(parents=True, exist_ok=True)
    split_prompts(options.out, options.prompts)
    print("| head | T | drafts | AL | steps | error before | after | perfect | perfect, 97.5 % "
          "| after, temperatures alone | ≤ 0.015 |\n" + "|---" * 11 + "|")  # fmt: skip
    passed = True

    def show(family: str) -> bool:
        calibrations = [Calibration.model_validate(one) for one in parts.parts[family]]
        for one in calibrations:
            print(line(one), flush=True)
        if not calibrations:
            print(f"{family}: too few steps for a calibration, see {family}.log", flush=True)
            return False
        return all(p.error_after <= GOAL for one in calibrations for p in one.positions)

    running = {}
    for number, family in enumerate(options.families):
        if family in parts.parts:
            passed &= show(family)
        else:
            running[family] = start(family, number, options)
    while running:
        time.sleep(0.2)
        for family in [f for f, process in running.items() if process.poll() is not None]:
            if running.pop(family).returncode:
                passed = False
                text = (options.out / f"{family}.log").read_text()
                print(f"{family} failed:\n{text[-2000:]}", flush=True)
                continue
            report = options.out / "runs" / f"calibration-{family}" / "eval" / "report.json"
            found = Report.read(report).calibrations
            parts.save(family, [one.model_dump(mode="json") for one in found])
            passed &= show(family)
        if parts.time_is_up:
            for family, process in running.items():
                process.terminate()
                print(f"no time is left for {family}", flush=True)
            return 1
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
