"""The table of `--plan`: its lines, its warnings, and a plan of each recipe from a config.json."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftlab.formatting import size_text
from draftlab.pipeline import pipeline
from draftlab.plan.estimate import CHECKPOINTS, estimate_stages
from draftlab.plan.estimate_table import _shared, estimate_table
from draftlab.recipe.recipe import load_recipe, parse_recipe
from draftlab.run.stages import STAGES
from draftlab.text.prompts import EMBEDDED_PROMPTS
from tests.helpers.estimates import head_size, recipe
from tests.helpers.small_run import RECIPES, draftlab
from tests.helpers.zoo import zoo_config


def test_several_nodes_share_the_times_and_the_bottleneck_is_named(
    llama_8b: Path, tmp_path: Path
) -> None:
    settings = recipe(
        llama_8b,
        hardware={"gpu": "H200", "gpus": 8, "nodes": 4},
        train={"batch_rows": 16, "steps": 20000},
    )
    one = {row.name: row.seconds for row in estimate_stages(settings)}
    shared = {row.name: _shared(row, settings, 32).seconds for row in estimate_stages(settings)}
    for name, share in (("answers", 32), ("store", 32), ("head", 16), ("eval", 1)):
        assert shared[name] == pytest.approx(one[name] / share)
    halves = recipe(llama_8b, target={"gpus": 8}, hardware={"gpu": "H200"})
    (row,) = (row for row in estimate_stages(halves) if row.name == "store")
    assert _shared(row, halves, 32).seconds == pytest.approx(row.seconds / 4)
    lines = "\n".join(estimate_table(settings, tmp_path, list(STAGES), 32))
    assert "estimate (4 × 8 × H200; 32 work together)" in lines
    assert "bottleneck: head takes " in lines
    store = next(row for row in estimate_stages(settings) if row.name == "store")
    rate = store.disk / (2 * shared["store"])
    assert f"file system: up to writing {size_text(rate)}/s, then reading " in lines
    alone = "\n".join(estimate_table(settings, tmp_path, list(STAGES)))
    assert "bottleneck" not in alone
    arguments = ("run", "r.yaml", "--plan", "hardware={gpu: H200, gpus: 8, nodes: 4}")
    (tmp_path / "r.yaml").write_text(f"target: {llama_8b}\nprompts: {{source: embedded}}\n")
    assert "32 work together" in draftlab(tmp_path, *arguments, "--ray", "auto").output


def test_the_table(llama_8b: Path, tmp_path: Path) -> None:
    settings = recipe(
        llama_8b,
        hardware={"gpu": "H200"},
        record={"boundaries": [1, 20]},
        draft_vocab={"size": 1000},
    )
    by_name = {row.name: row for row in estimate_stages(settings)}
    assert list(by_name) == ["target", "answers", "store", "head", "eval"]
    tokens = 1000 * (256 + settings.regenerate.max_new_tokens)
    assert by_name["store"].disk == tokens * (2 * 3 * 4096 + 16)
    trained = head_size(settings).trained  # of three boundaries: 4096² more
    assert by_name["head"].disk == (CHECKPOINTS * 12 + 2) * (trained - 4096**2)
    lines = list(estimate_table(settings, tmp_path / "runs", STAGES))
    assert lines[0].startswith("estimate (1 × H200)")
    assert "LlamaForCausalLM: 8.03 B parameters" in lines[2]
    assert "256 tokens per prompt: there is no not-there.jsonl" in lines[3]
    assert lines[4].endswith("tokens of 24.6 kB, boundaries [1, 20] and the last state")
    assert lines[7].split()[:1] == ["total"]
    assert not any("minutes" in line for line in estimate_table(recipe(llama_8b), tmp_path, STAGES))
    compared = recipe(
        llama_8b, eval={"k": [3, 5], "temperatures": [0, 1], "compare": ["reference"]}
    )
    assert estimate_stages(compared)[-1].note.startswith("14 rows ")  # 1 + 2 · 2, and 1 + 2 · 2 · 2


def test_prompts_of_unknown_number(llama_8b: Path, tmp_path: Path) -> None:
    settings = recipe(llama_8b, prompts={"source": "no.jsonl"})
    lines = list(estimate_table(settings, tmp_path, STAGES))
    assert "unknown: there is no no.jsonl, and prompts.max_prompts is not set" in lines[3]
    assert "32.8 kB per token" in lines[4]
    online = recipe(llama_8b, prompts={"source": "no.jsonl"}, record={"online": True})
    for known in (
        lines,
        estimate_table(settings, tmp_path, ("answers",)),
        estimate_table(online, tmp_path, STAGES),
    ):
        (total,) = (line for line in known if line.startswith("  total"))
        assert total.endswith(", and what is unknown")
    (total,) = (
        x for x in estimate_table(recipe(llama_8b), tmp_path, STAGES) if x.startswith("  total")
    )
    assert "unknown" not in total


def test_warnings_about_memory_and_disk(llama_8b: Path, tmp_path: Path) -> None:
    small = recipe(llama_8b, hardware={"gpu": "RTX4090"}, regenerate={"batch": 256})
    lines = "\n".join(estimate_table(small, tmp_path, STAGES))
    assert "the target and its KV cache take" in lines
    assert re.search("target.gpus=[23] is enough", lines)
    assert "warning: training takes" in lines
    spread = recipe(llama_8b, target={"gpus": 4}, hardware={"gpu": "L40S", "gpus": 2})
    lines = "\n".join(estimate_table(spread, tmp_path, STAGES))
    assert "target.gpus is 4, and hardware.gpus 2" in lines
    assert "4.02 GB × 4" in lines
    many = recipe(llama_8b, prompts={"source": "no.jsonl", "max_prompts": 10**12})
    assert "of disk are free" in "\n".join(estimate_table(many, tmp_path, STAGES))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_can_be_planned_from_a_config(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan needs no weights, tokenizer, prompts or Hub, and writes no run folder.

    Its exit code says whether the prompts are missing.
    """

    def never(*_: object) -> None:
        raise AssertionError("the plan downloaded the target")

    monkeypatch.setattr(pipeline, "resolve_target", never)
    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    kind = "llama4" if "llama4" in path.stem else "gpt_oss" if "gpt_oss" in path.stem else "llama"
    zoo_config(kind, num_hidden_layers=48, no_rope_layers=None, vocab_size=40_000).save_pretrained(
        tmp_path / "t"
    )
    result = draftlab(tmp_path, "train", str(path), f"target={tmp_path / 't'}", "--plan")
    missing = load_recipe(path).prompts.source not in EMBEDDED_PROMPTS
    assert result.exit_code == (2 if missing else 0), result.output
    lines = result.output.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("estimate ("))
    assert [line.split()[0] for line in lines[start + 2 : start + 6]] == [
        "target", "answers", "store", "head",
    ]  # fmt: skip
    assert not (tmp_path / "runs").exists()
    if load_recipe(path).target.path != "embedded":
        assert load_recipe(path).hardware.gpu, "a recipe for a large target names its hardware"


@pytest.mark.parametrize(
    ("window", "warning"),
    [
        ("1MB", "record.window is 1 MB, and four shards"),
        ("30MB", "half of record.window, 15 MB, may not hold an optimizer step"),
        ("200MB", None),
    ],
)
def test_a_window_that_would_be_refused_is_warned_of(
    window: str, warning: str | None, tmp_path: Path
) -> None:
    tree = {
        "target": "embedded",
        "record": {"shard_tokens": 1024, "window": window},
        "train": {"batch_rows": 4, "row_tokens": 2048},
    }
    lines = estimate_table(parse_recipe({"name": "small", **tree}), tmp_path, ["store", "head"])
    warnings = [line for line in lines if "warning: " in line and "record.window" in line]
    assert (warning in warnings[0]) if warning else not warnings


def test_a_plan_of_a_cpu_describes_a_cpu(tmp_path: Path) -> None:
    path, prompts = RECIPES / "quickstart.yaml", "prompts.max_prompts=64"
    on_cpu = load_recipe(path, [prompts, "target.device=cpu"])
    on_gpu = load_recipe(path, [prompts, "hardware.gpu=H100"])
    lines = list(estimate_table(on_cpu, tmp_path, STAGES))
    text = "\n".join(lines)
    assert lines[0].startswith("estimate (a CPU, whose times are not estimated; hardware.gpu=")
    assert lines[1].split() == ["disk", "memory"]
    assert "GPU memory" not in text
    assert "minute" not in text
    assert "GPU memory" in "\n".join(estimate_table(on_gpu, tmp_path, STAGES))
    # 11 M numbers of 2 bytes on the disk, of 4 in memory, with oneDNN's copy. The run of this
    # recipe took 1.03 GB for answers and 1.04 GB for training.
    target = estimate_stages(on_cpu)[0]
    assert target.memory == 4 * target.disk == 4 * estimate_stages(on_gpu)[0].memory
    (memory,) = (line for line in lines if line.startswith("  memory: about "))
    assert 0.8 < float(memory.split()[2]) < 1.3


def test_a_plan_of_a_cpu_warns_of_too_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse_recipe({"name": "r", "target": {"device": "cpu"}})
    warning = "warning: 400 MB of memory are available on this machine"
    assert warning not in "\n".join(estimate_table(settings, tmp_path, STAGES))
    free = SimpleNamespace(available=4e8)
    monkeypatch.setattr("draftlab.plan.estimate_table.psutil.virtual_memory", lambda: free)
    assert warning in "\n".join(estimate_table(settings, tmp_path, STAGES))
