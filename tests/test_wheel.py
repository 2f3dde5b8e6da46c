"""The wheel, built and installed elsewhere, does what the source tree does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from draftlab import Report

ROOT = Path(__file__).parent.parent
DATA = (
    "embedded/target/config.json",
    "embedded/target/model.safetensors",
    "embedded/target/tokenizer.json",
    "embedded/target/chat_template.jinja",
    "embedded/target/generation_config.json",
    "embedded/prompts/head.jsonl",
    "embedded/prompts/heldout.jsonl",
    "embedded/heads/reference/draftlab.json",
    "embedded/heads/reference/model.safetensors",
    "embedded/heads/reference/config.json",
)


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what the build reads, so that nothing is left in the source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(
        ROOT / "draftlab", folder / "draftlab", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", folder)
    run(sys.executable, *build)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"draftlab"}
    templates = {str(p.relative_to(ROOT)) for p in (ROOT / "draftlab").glob("*/*.jinja")}
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "draftlab").rglob("*.py")}
    assert len(templates) == 2
    assert (modules | templates | {f"draftlab/{name}" for name in DATA}) - names == set()
    assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if "tests" in name or name.endswith((".pt", ".pkl", ".bin"))]


@pytest.mark.slow
def test_it_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    quiet = ("-q", "--disable-pip-version-check", "--no-deps", "--no-index")
    run(sys.executable, "-m", "pip", "install", *quiet, "--target", site, wheel)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    elsewhere = {"cwd": tmp_path, "env": environment}
    help_text = run(site / "bin" / "draftlab", "--help", **elsewhere).stdout
    for verb in ("run", "train", "eval", "export", "inspect"):
        assert verb in help_text
    # The embedded head and its target are found, fit each other, and the report has its template.
    code = (
        "from pathlib import Path; import draftlab; from draftlab import *\n"
        f"assert draftlab.__file__.startswith({str(site)!r}), draftlab.__file__\n"
        "from draftlab.run.head_workspace import open_head\n"
        "from draftlab.evaluate.evaluator import EvalSettings\n"
        "head = open_head(None, 'reference', None)\n"
        "settings = EvalSettings(\n"
        "    max_prompts=1, max_new_tokens=8, timing_prompts=0, temperatures=(0,))\n"
        "evaluate_head(head.target, head.head, settings, Path('out'), monitor=Monitor())"
    )
    run(sys.executable, "-c", code, **elsewhere)
    assert Report.read(tmp_path / "out" / "report.json").rows[-1].head == "reference"
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000
