"""Random settings, prompts and templates: every verb refuses them in words, or works.

`--hypothesis-profile` is not needed: examples are derandomised. DRAFTLAB_FUZZ multiplies their
number for a longer search.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from draftlab.recipe.recipe import Recipe, flatten
from tests.helpers.small_run import copy_of_finished, draftlab

pytestmark = pytest.mark.slow
FACTOR = int(os.environ.get("DRAFTLAB_FUZZ", "1"))
RUN = Path("runs/small")
SETTINGS = sorted(flatten(Recipe(name="small")))
NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 3, 7, 10**6, 10**12, 10**25, 0.0, 0.5, 1e-30, 1e300]),
    st.floats(),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "auto", "cpu", "cuda:9", "bfloat16", "nowhere", "toy", "é", "\x00", "a/b"]
    ),
    st.text(max_size=8),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.text(max_size=4), SCALARS, max_size=2),
)


def examples(number: int) -> Callable[[Any], Any]:
    """Return hypothesis's settings for a number of examples, always the same ones."""
    return settings(
        max_examples=number * FACTOR,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with a finished run."""
    return copy_of_finished(tmp_path_factory.mktemp("fuzz") / "work")


@contextmanager
def replaced(path: Path, data: bytes) -> Iterator[None]:
    """Replace a file's bytes for the time of a block."""
    original = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(original)


def check(folder: Path, *command: str) -> None:
    """Run a command; it must work, or refuse in words."""
    result = draftlab(folder, *command)
    context = f"{command}\n{result.output}"
    assert "internal error" not in result.output, context
    assert "Traceback" not in result.output, context
    assert result.exit_code in ((0, 1, 2) if command[0] == "doctor" else (0, 2)), context
    if result.exit_code == 2:
        assert "do: " in result.output or "Usage" in result.output, context


def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """Return a JSON value in which one place has another value, or is gone."""
    if isinstance(tree, dict) and tree and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(tree)))
        if not draw(st.integers(0, 5)):
            return {k: v for k, v in tree.items() if k != key}
        return tree | {key: mutated(draw, tree[key])}
    if isinstance(tree, list) and tree and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(tree) - 1))
        return [*tree[:place], mutated(draw, tree[place]), *tree[place + 1 :]]
    return draw(VALUES)


def mutated_json(draw: st.DrawFn, path: Path) -> bytes:
    """Return the bytes of a JSON file with one change."""
    return json.dumps(mutated(draw, json.loads(path.read_text()))).encode()


@st.composite
def overrides(draw: st.DrawFn) -> str:
    return f"{draw(st.sampled_from(SETTINGS))}={json.dumps(draw(VALUES))}"


@examples(30)
@given(st.lists(overrides(), min_size=1, max_size=2))
def test_overrides(folder: Path, chosen: list[str]) -> None:
    check(folder, "run", "small.yaml", "--plan", "name=new", *chosen)


LINE = {"id": "a", "messages": [{"role": "user", "content": "hello"}], "source": "s"}


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    return b"\n".join(
        json.dumps(mutated(draw, LINE)).encode() for _ in range(draw(st.integers(1, 3)))
    )


@examples(16)
@given(lines() | st.binary(max_size=30))
def test_prompts(folder: Path, data: bytes) -> None:
    (folder / "p.jsonl").write_bytes(data)
    command = ("name=fuzz", "prompts.source=p.jsonl", "regenerate.max_new_tokens=2", "--force")
    check(folder, "prepare", "small.yaml", *command)


PIECES = st.sampled_from(
    [
        "{% for message in messages %}",
        "{% endfor %}",
        "{{ message.content }}",
        "{{ message['role'] }}: ",
        "{{ messages[0].content }}",
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "{{ bos_token }}",
        "{{ undefined.field }}",
        "{{ raise_exception('no') }}",
        "{% set x = 1 %}",
        "{{ ",
        "text",
        "{{ messages | tojson }}",
        "{% generation %}",
    ]
)


@examples(12)
@given(st.lists(PIECES, max_size=6))
@example([])  # it writes nothing
def test_chat_templates(folder: Path, pieces: list[str]) -> None:
    config = folder / "toy/tokenizer_config.json"
    template = folder / "toy/chat_template.jinja"
    path = template if template.exists() else config
    data = "".join(pieces)
    if path == config:
        data = json.dumps(json.loads(config.read_text()) | {"chat_template": data})
    with replaced(path, data.encode()):
        check(
            folder, "prepare", "small.yaml", "name=fuzz", "regenerate.max_new_tokens=2", "--force"
        )
