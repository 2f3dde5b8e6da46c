"""Any bytes in a small file of a head, a run, a store or a target: read, or refused in words."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.files import read_json
from draftlab.heads.folder import CONFIG, WEIGHTS, load_config, stored_shapes
from draftlab.recipe.head_spec import target_config
from draftlab.recipe.recipe import load_recipe
from draftlab.run.resolve import reference_head
from draftlab.run.stages import read_record
from draftlab.store.manifest import MANIFEST
from draftlab.store.store import Store
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import prompt_ids, stop_ids
from draftlab.train.best_head import STATE as BEST
from draftlab.train.checkpoint import STATE, read_checkpoint
from tests.helpers.messages import read_conversations, user
from tests.helpers.table_target import record_table, samples_of_lengths
from tests.helpers.toys import toy_target_folder, toy_tokenizer

READERS: dict[str, Callable[[Path], object]] = {
    f"head/{CONFIG}": lambda path: load_config(path.parent),
    f"head/{WEIGHTS}": lambda path: stored_shapes(path.parent),
    f"store/{MANIFEST}": lambda path: Store.open(path.parent),
    "store/records.safetensors": lambda path: Store.open(path.parent),
    "store/shards.safetensors": lambda path: Store.open(path.parent),
    "toy/config.json": lambda path: target_config(TargetSettings(path=str(path.parent))),
    "toy/generation_config.json": lambda path: stop_ids(toy_tokenizer(), path.parent),
    "toy/tokenizer.json": lambda path: load_tokenizer(TargetSettings(path=str(path.parent))),
    "toy/tokenizer_config.json": lambda path: load_tokenizer(TargetSettings(path=str(path.parent))),
    "toy/model.safetensors": lambda path: fingerprint(path.parent),
    "run/recipe.yaml": load_recipe,
    "run/stages/head.json": read_record,
    "run/report.json": Report.read,
    f"run/{STATE}": lambda path: read_checkpoint(path.parent, key="key"),
    f"run/{BEST}": read_json,
    "run/prompts.jsonl": read_conversations,
    "toy/chat_template.jinja": lambda path: prompt_ids(
        load_tokenizer(TargetSettings(path=str(path.parent))), [user("count")]
    ),
}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3)
)
DEPTHS = st.sampled_from([50, 99, 150, 900, 5000])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    shutil.copytree(reference_head(), folder / "head")
    record_table(folder / "store", samples_of_lengths([12, 9, 25]))
    toy_target_folder(folder / "toy", layers=2)
    (folder / "run" / "stages").mkdir(parents=True)
    return folder


def changed(draw: st.DrawFn, tree: Any) -> Any:
    """Return a JSON value with another one in one place."""
    if isinstance(tree, dict) and tree and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(tree)))
        return tree | {key: changed(draw, tree[key])}
    if isinstance(tree, list) and tree and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(tree) - 1))
        return [*tree[:place], changed(draw, tree[place]), *tree[place + 1 :]]
    return draw(VALUES)


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_are_read_or_refused(folder: Path, name: str) -> None:
    path = folder / name
    original = path.read_bytes() if path.exists() else b'{"messages": [{"role": "user"}]}'

    @settings(
        max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def read(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["bytes", "JSON", "cut", "deep", "changed"]))
        if kind == "bytes":
            content = data.draw(st.binary(max_size=60))
        elif kind == "JSON":
            content = json.dumps(data.draw(VALUES)).encode()
        elif kind == "deep":
            depth = data.draw(DEPTHS)
            content = b'{"a": ' + b"[" * depth + b"]" * depth + b"}"
        elif kind == "changed" and path.suffix == ".json":
            content = json.dumps(changed(data.draw, json.loads(original))).encode()
        else:
            content = original[: data.draw(st.integers(0, len(original)))]
        path.write_bytes(content)
        with contextlib.suppress(UserError):
            READERS[name](path)

    try:
        read()
    finally:
        path.write_bytes(original)
