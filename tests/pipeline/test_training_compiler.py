"""The process that compiles the training step: when it runs, what it compiles, that it may fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from draftlab.kernels import compile_ahead
from draftlab.pipeline import pipeline as pipeline_module
from draftlab.pipeline import training_compiler
from draftlab.pipeline.training_compiler import (
    TrainingCompiler,
    compile_training,
    compiled_mark,
    needed_bytes,
)
from draftlab.recipe.recipe import load_recipe
from draftlab.train.distributed import backends
from draftlab.train.fast import choose_forward
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import pipeline

RECIPES = Path(__file__).parents[2] / "recipes"


def test_it_runs_while_stages_precede_the_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = RecordingMonitor()

    class Recorded:
        @classmethod
        def start(cls, *_: object) -> Recorded:
            monitor.say("compiler: started")
            return cls()

        def finish(self, _: object) -> None:
            monitor.say("compiler: finished")

        def close(self) -> None:
            monitor.say("compiler: closed")

    monkeypatch.setattr(pipeline_module, "TrainingCompiler", Recorded)
    pipeline("name=other", monitor=monitor).make("head")
    marks = ("compiler:", "stage ")
    assert [line for line in monitor.lines if line.startswith(marks)] == [
        "compiler: started",
        "stage 1 of 3: answers",
        "stage 2 of 3: store",
        "stage 3 of 3: head",
        "compiler: finished",
        "compiler: closed",
    ]
    before = len(monitor.lines)
    pipeline("name=other", "train.steps=2", monitor=monitor).make("head", force=True)
    assert not any(line.startswith("compiler:") for line in monitor.lines[before:])


def test_a_cpu_compiles_nothing_in_advance(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / "quickstart.yaml", ["train.device=cpu"])
    assert TrainingCompiler.start(recipe, tmp_path, RecordingMonitor()) is None


@pytest.mark.parametrize("name", ["", "_dspark", "_eagle", "_peagle"])
def test_a_step_of_each_family_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without values, as `CompileAhead` runs it, which hides errors."""
    passes: list[int] = []
    monkeypatch.setattr(
        backends, "CompileAhead", lambda _: lambda work: passes.append(compile_ahead._compile(work))
    )
    recipe = load_recipe(RECIPES / f"quickstart{name}.yaml")
    compile_training(recipe, torch.device("cpu"))
    assert passes == [0]  # a CPU has no kernels
    assert 2**30 < needed_bytes(recipe) < 2**31


@pytest.mark.parametrize(
    ("layers", "fields", "peak_gib"),
    [
        (3, {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}, 2.27),
        (1, {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}, 6.83),
    ],
    ids=["135M", "8B"],
)
def test_the_memory_covers_the_peak_of_an_h200(
    layers: int, fields: dict[str, int], peak_gib: float, tmp_path: Path
) -> None:
    """The peaks are what torch reserved there for recipes of these shapes."""
    heads = {"num_attention_heads": fields["hidden_size"] // 64, "num_hidden_layers": 30}
    config = LlamaConfig(**fields, **heads, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    settings = [f"target={tmp_path}", f"head.num_layers={layers}"]
    recipe = load_recipe(RECIPES / "smollm2_eagle3.yaml", settings)
    assert peak_gib < needed_bytes(recipe) / 2**30 < 2 * peak_gib


def test_a_step_that_cannot_be_compiled_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training goes on without torch.compile, and says so."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("too little memory")

    monkeypatch.setattr(choose_forward, "check_compiled", fail)
    recipe = load_recipe(RECIPES / "quickstart.yaml", ["train.compile=true"])
    with pytest.raises(RuntimeError, match="too little memory"):
        compile_training(recipe, torch.device("cpu"))


@pytest.mark.parametrize(
    ("free", "starts"), [(2**31, False), (2**34, True), (OSError("no such folder"), False)]
)
def test_it_starts_where_memory_and_folders_allow(
    free: int | OSError, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mem_get_info(_: torch.device) -> tuple[int, int]:
        if isinstance(free, OSError):
            raise free
        return free, 2**37

    monkeypatch.setattr(training_compiler, "resolve_device", lambda _: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(training_compiler, "compiled_mark", lambda *_: tmp_path / "mark")
    monkeypatch.setattr(TrainingCompiler, "__init__", lambda *_: None)
    recipe, monitor = load_recipe(RECIPES / "quickstart.yaml"), RecordingMonitor()
    compiler = TrainingCompiler.start(recipe, tmp_path, monitor)
    assert (compiler is not None) == starts
    assert ("not compiled in advance: no such folder" in monitor.text) == isinstance(free, OSError)
    (tmp_path / "mark").touch()
    assert TrainingCompiler.start(recipe, tmp_path, monitor) is None


def test_a_failure_costs_time_alone(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / "quickstart.yaml", [f"target={tmp_path}"])
    monitor = RecordingMonitor()
    TrainingCompiler(recipe, tmp_path).finish(monitor)
    log = tmp_path / "compile.log"
    assert f"failed (exit code 1); its log: {log}; the training compiles it itself" in monitor.text
    assert "expected a checkpoint folder" in log.read_text()


def test_it_ends_with_the_run(tmp_path: Path) -> None:
    compiler = TrainingCompiler(load_recipe(RECIPES / "quickstart.yaml"), tmp_path)
    compiler.close()
    assert compiler._process.exitcode is not None
    assert not any(tmp_path.iterdir())


def test_a_step_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")

    def mark(*changes: str) -> Path:
        recipe = load_recipe(RECIPES / "quickstart.yaml", changes)
        return compiled_mark(recipe, torch.device("cuda"))

    assert mark("name=other", "train.steps=9", "train.learning_rate=0.01") == mark()
    assert len({mark(), mark("head.num_layers=2"), mark("train.precision=fp8")}) == 3


@pytest.mark.gpu
def test_a_training_finds_what_it_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no second process is started for it."""
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    recipe, monitor = load_recipe(RECIPES / "quickstart.yaml"), RecordingMonitor()
    compiler = TrainingCompiler.start(recipe, tmp_path, monitor)
    assert compiler is not None
    compiler.finish(monitor)
    assert "failed" not in monitor.text
    kernels = {path.name for path in (tmp_path / "TRITON_CACHE_DIR").iterdir()}
    assert TrainingCompiler.start(recipe, tmp_path, monitor) is None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    of_other_tests = torch.cuda.memory_reserved()
    torch.compiler.reset()  # with the shapes of other tests, dynamic ones would be compiled here
    compile_training(recipe, torch.device("cuda"))
    assert torch.cuda.max_memory_reserved() - of_other_tests < needed_bytes(recipe)
    afterwards = {path.name for path in (tmp_path / "TRITON_CACHE_DIR").iterdir()}
    assert len(afterwards - kernels) <= len(kernels) // 10
    assert len(kernels) >= 5
