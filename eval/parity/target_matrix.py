"""Take random targets of many types through every stage, and compare with docs/targets.md.

    .venv/bin/python eval/parity/target_matrix.py [--write] [--types llama gemma3 …]

A target has four small layers of its type's default config, as transformers saves them, multimodal
ones whole. A refusal of `--plan` is a cell of the table. Whatever fails after its plan passed, and
an answer that differs from transformers' own, ends the program.

Exit status: 0 the page has these cells; 1 it has others, which are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import parity_transformers
from common import EQUAL

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab import Monitor, Pipeline
from draftlab.errors import UserError
from draftlab.recipe.recipe import parse_recipe
from draftlab.run.api import export_layouts
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.multimodal_zoo import random_folder
from tests.helpers.toys import toy_tokenizer
from tests.helpers.zoo import ZOO, zoo_folder_with_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
BEGIN = "<!-- made by eval/parity/target_matrix.py --write -->\n"
WHOLE, WARNED = "whole", "warned: "
STAGES = {"answer": "answers", "record": "store", "train": "head", "evaluate": "eval"}
EXPORTS = {
    "eagle3": {
        "vLLM": "vllm",
        "SGLang": "sglang",
        "llama.cpp": "llamacpp",
        "speculators": "speculators",
    },
    "eagle": {"EAGLE": "vllm"},
    "dspark": {"DSpark": "vllm"},
}
"""Columns of the exports of each family, with their layouts."""
HEAD = {"intermediate_size": 96}
"""Of every head: targets all of whose layers have experts give it no default."""
COLUMNS = (*STAGES, *(column for exports in EXPORTS.values() for column in exports))
TYPES = (
    "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "mistral",
    "ministral3", "mixtral", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss",
    "llama4_text", "deepseek_v2", "deepseek_v3", "glm4", "glm4_moe", "glm4_moe_lite", "cohere",
    "cohere2", "granite", "granitemoehybrid", "phi3", "phimoe", "olmo2", "olmo3", "olmo_hybrid",
    "olmoe", "smollm3", "exaone4", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "seed_oss",
    "apertus", "arcee", "afmoe", "minicpm3", "youtu", "nemotron_h", "falcon_h1", "bamba", "lfm2",
    "jamba", "minimax_m2", "starcoder2", "stablelm", "gemma3", "gemma4", "llama4", "mistral3",
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe", "internvl", "llava",
    "llava_onevision", "idefics3", "smolvlm", "glm4v", "lfm2_vl", "aria", "deepseek_vl",
    "deepseek_v32", "glm_moe_dsa", "minimax", "jetmoe", "rwkv", "gpt2", "phi", "gemma3n_text",
    "aya_vision", "recurrent_gemma", "diffllama", "mimo_v2_flash", "kimi_k25",
)  # fmt: skip


class Targets:
    """Random targets and their runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.prompts = folder, folder / "prompts.jsonl"
        rows = [
            [("user", f"def f{i}(use): the user"), ("assistant", "the " * (i + 1))]
            for i in range(6)
        ]
        self.prompts.write_text(
            "".join(
                json.dumps(
                    {"id": str(i), "messages": [{"role": r, "content": text} for r, text in turns]}
                )
                + "\n"
                for i, turns in enumerate(rows)
            )
        )

    def cells(self, kind: str) -> list[str]:
        """Make a target of a type, and everything of it that its plan does not refuse."""
        target = self.folder / kind
        if kind in (ZOO.keys() | HYBRID.keys()) - {"phi3"}:  # that one has few positions
            zoo_folder_with_tokenizer(target, kind)
        else:
            tokenizer = toy_tokenizer()
            names = ("bos", "eos", "pad")
            ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in names}
            random_folder(target, kind, vocab_size=len(tokenizer) + 64, **ids)
            tokenizer.save_pretrained(target)
        cells = {column: self.planned(target, last) for column, last in STAGES.items()}
        given: dict[str, Any] = {}
        if cells["answer"] != WHOLE:  # they may come from elsewhere
            given = {"regenerate": {"enabled": False}}
            for column in ("record", "train"):
                cells[column] = self.planned(target, STAGES[column], **given)
        last = "export" if cells["evaluate"] == WHOLE else "head"  # both check exports
        for family, exports in EXPORTS.items():
            head = given | {"head": HEAD | {"family": family}}
            for column, layout in exports.items():
                cells[column] = self.planned(target, last, **head, export={"formats": [layout]})
            written = [
                layout
                for name, layout in exports.items()
                if cells[name] == WHOLE or cells[name].startswith(WARNED)
            ]
            if written:
                made = "eval" if last == "export" and family == "eagle3" else "head"
                self.make(target, made, **head, export={"formats": written})
        return [cells[column] for column in COLUMNS]

    def pipeline(self, target: Path, **changes: object) -> Pipeline:
        """Return the pipeline of a target's run, with changed sections of its recipe."""
        sections = {
            "name": target.name,
            "target": {"path": str(target)},
            "prompts": {"source": str(self.prompts)},
            "regenerate": {"max_new_tokens": 8},
            "record": {"boundaries": [1, 2, 3]},
            "draft_vocab": {"size": 128},
            "head": HEAD,
            "train": {"steps": 3, "row_tokens": 128, "batch_rows": 1, "ttt_steps": 2},
            "eval": {
                "suite": str(self.prompts),
                "max_prompts": 2,
                "k": 2,
                "max_new_tokens": 8,
                "timing_prompts": 0,
            },
        }
        return Pipeline(parse_recipe(sections | changes), Said(), self.folder / "runs")

    def planned(self, target: Path, last: str, **changes: object) -> str:
        """Return "whole", or what the plan of the stages up to `last` says against it."""
        pipeline = self.pipeline(target, **changes)
        try:
            list(pipeline.estimate(last))
            pipeline.check(pipeline.plan(last), plan=True)
        except UserError as error:
            return sentence(error.what)
        said = [line for line in pipeline.monitor.lines if line.startswith("warning: export: ")]
        return WARNED + sentence(said[0].split(": ", 2)[2]) if said else WHOLE

    def make(self, target: Path, last: str, **changes: object) -> None:
        """Run the stages up to `last`, compare tokens after `eval`, and write the exports."""
        pipeline = self.pipeline(target, **changes)
        pipeline.make(last, force=True)
        head, recipe = pipeline.folder / "head", pipeline.recipe
        if last == "eval":
            compared = {"head": str(head), "target": str(target), "suite": str(self.prompts)}
            numbers = {"prompts": 3, "k": 2, "max_new_tokens": 12}
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                status = parity_transformers.run(argparse.Namespace(**compared, **numbers))
            if status != EQUAL:
                raise SystemExit(f"{target.name}: {printed.getvalue()}")
        folders = {layout: head.with_name("exports") / layout for layout in recipe.export.formats}
        export_layouts(head, recipe.target, folders, settings=recipe.export, monitor=Monitor())


class Said(Monitor):
    """Keeps what a plan says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def sentence(text: str) -> str:
    """Return a refusal without what differs from type to type."""
    while (shorter := re.sub(r" \([^()]*\)", "", text)) != text:
        text = shorter
    text = re.sub(r"\b\w+(Model|Decoder|CausalLM|Generation|Norm)\b", "…", text)
    return re.split(r", found …|(?<=scales them): ", text)[0]


def table(rows: Mapping[str, list[str]]) -> str:
    """Return the table, types with equal cells in one row, and the sentences below it."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind, cells in rows.items():
        kinds.setdefault(tuple(cells), []).append(kind)
    notes = list(dict.fromkeys(cell for cells in kinds for cell in cells if cell != WHOLE))
    lines = ["| targets | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for cells, names in sorted(kinds.items(), key=lambda item: -len(item[1])):
        words = [cell if cell == WHOLE else str(notes.index(cell) + 1) for cell in cells]
        lines.append(f"| {', '.join(sorted(names))} | {' | '.join(words)} |")
    return "\n".join([*lines, "", *(f"{i}. {text}" for i, text in enumerate(notes, 1)), ""])


def read(page: str) -> dict[str, list[str]]:
    """Return the cells of each type from the page."""
    lines = page.partition(BEGIN)[2].splitlines()
    notes = dict(line.split(". ", 1) for line in lines if re.match(r"\d+\. ", line))
    rows: dict[str, list[str]] = {}
    for line in lines[2:]:
        if line.startswith("| "):
            names, *words = line.strip("| ").split(" | ")
            cells = [notes.get(word, word) for word in words]
            rows |= dict.fromkeys(names.split(", "), cells)
    return rows


def differences(kinds: Collection[str]) -> Iterator[str]:
    """Yield a line for each cell that is not as the page says."""
    expected = read(PAGE.read_text())
    with tempfile.TemporaryDirectory() as folder:
        targets = Targets(Path(folder))
        for kind in kinds:
            pairs = zip(COLUMNS, targets.cells(kind), expected[kind], strict=True)
            yield from (f"{kind}, {c}: {one}, the page has {b}" for c, one, b in pairs if one != b)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES, metavar="TYPE")
    options = parser.parse_args()
    if options.write:
        with tempfile.TemporaryDirectory() as folder:
            targets = Targets(Path(folder))
            rows = read(PAGE.read_text()) | {kind: targets.cells(kind) for kind in options.types}
        text = PAGE.read_text().partition(BEGIN)[0]
        PAGE.write_text(text + BEGIN + table({kind: rows[kind] for kind in TYPES}))
        return 0
    found = list(differences(options.types))
    print("\n".join(found) or f"docs/targets.md has the cells of {len(options.types)} types")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
