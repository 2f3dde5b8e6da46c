"""The comparison of trainers: its table, and on a CPU a tiny run beside installed peers."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.drivers import load

bench = load("bench/bench_acceptance")


def result(name: str, seed: int, accepted: list[int], family: str = "eagle3") -> object:
    trained = bench.Trained(10, 81920, 1_000_000, 1e-3, 4.0, 3.0, 1.5)
    counters = {t: [[10, a] for a in accepted] for t in ("0.0", "0.8")}
    return bench.Result(name, family, seed, trained, counters)


def test_the_table_compares_seeds_and_prompts_in_pairs() -> None:
    rng = np.random.default_rng(0)
    base = [rng.integers(5, 25, 40).tolist() for _ in range(2)]
    better = [[a + 2 for a in accepted] for accepted in base]
    results = [result(bench.OURS, seed, base[seed]) for seed in (0, 1)]
    results += [result("speculators", seed, better[seed]) for seed in (0, 1)]
    lines = bench.table(results).splitlines()
    ours, peer = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])
    assert ours[0] == "ours, eagle3"
    assert ours[7] == ""
    assert peer[7] == "+0.200 [+0.200, +0.200]"  # prompts differ, their differences do not
    assert peer[1] == "0 1"
    assert float(peer[6].split()[0]) == pytest.approx(float(ours[6].split()[0]) + 0.2, abs=2e-3)
    assert peer[10:] == ["4.0", "3.0", "1.5"]


def test_a_peer_is_compared_with_our_heads_of_its_seeds() -> None:
    results = [result(bench.OURS, 0, [10] * 4), result(bench.OURS, 1, [20] * 4)]
    results.append(result("specforge", 1, [20] * 4))
    assert bench.table(results).splitlines()[-1].count("+0.000 [+0.000, +0.000]") == 2


def test_settings_of_heads_are_for_the_families_that_are_compared() -> None:
    sizes = {"tokens": 1e4, "step_tokens": 512, "max_prompts": 12, "row_tokens": 256}
    settings = ["head.num_layers=2", "regenerate.batch=8"]
    options = Namespace(families=["peagle"], settings=settings, **sizes)
    assert bench.our_recipe(options, 1.0, "peagle", 0).head.num_layers == 2
    base = bench.our_recipe(options, 1.0, "eagle3", 0)  # which refuses two layers
    assert (base.regenerate.batch, base.head.num_layers) == (8, 1)


@pytest.mark.slow
def test_a_tiny_comparison_beside_installed_peers(tmp_path: Path) -> None:
    pytest.importorskip("speculators", reason="speculators 0.9 is not installed")
    sizes = "--max-prompts 12 --tokens 1000 --step-tokens 512 --prompts 2 --k 2"
    settings = "regenerate.max_new_tokens=24 eval.max_new_tokens=8 draft_vocab.size=256"
    only = ["--families", "eagle3", "--peers", "speculators"]
    options = [*sizes.split(), *only, "--out", str(tmp_path), *settings.split()]
    with pytest.raises(SystemExit) as ended:
        bench.main(options)
    assert not ended.value.code
    (saved,) = json.loads((tmp_path / "results.json").read_text())
    names = {part["name"] for part in saved["parts"].values()}
    assert names == {
        bench.OURS,
        *(bench.peer_name("speculators", our_rate=r) for r in (False, True)),
    }
