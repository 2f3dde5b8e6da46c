"""Random settings: a plan refuses them in words, or works.

`--hypothesis-profile` is not needed: examples are derandomised. DRAFTLAB_FUZZ multiplies their
number for a longer search. tests/test_any_bytes.py changes files in this way.
"""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftlab.recipe.recipe import Recipe, flatten
from tests.helpers.small_run import draftlab, finished

FACTOR = int(os.environ.get("DRAFTLAB_FUZZ", "1"))
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


@st.composite
def overrides(draw: st.DrawFn) -> str:
    return f"{draw(st.sampled_from(SETTINGS))}={json.dumps(draw(VALUES))}"


@pytest.mark.slow
@settings(
    max_examples=30 * FACTOR,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(overrides(), min_size=1, max_size=2))
def test_overrides(chosen: list[str]) -> None:
    result = draftlab(finished(), "run", "small.yaml", "--plan", "name=new", *chosen)
    context = f"{chosen}\n{result.output}"
    assert "internal error" not in result.output, context
    assert "Traceback" not in result.output, context
    assert result.exit_code in (0, 2), context
    if result.exit_code == 2:
        assert "do: " in result.output or "Usage" in result.output, context
