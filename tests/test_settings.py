from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from draftlab.errors import UserError
from draftlab.settings import Settings, describe_errors, update_settings


class Inner(Settings):
    rate: Annotated[float, Field(gt=0)] = 1.0


class Outer(Settings):
    many: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (1,)
    inner: Inner = Inner()
    name: str = Field(default="a", pattern="^a")
    parts: str | list[Inner] = ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"many": [0]}, "many.0: expected a number greater than or equal to 1, found 0"),
        ({"many": []}, "many: expected at least one value, found none"),
        ({"inner": 3}, "inner: expected a mapping, found 3"),
        ({"inner": {"rate": 0}}, "inner.rate: expected a number greater than 0, found 0"),
        ({"inner": {"rat": 1}}, "inner.rat: unknown key"),
        ({"name": "b"}, "name: expected a text that matches ^a, found 'b'"),
        ({"name": "b" * 99}, f"name: expected a text that matches ^a, found '{'b' * 79}…"),
        ({"parts": None}, "parts: expected a text or a list, found null"),
        ({"parts": [{"rate": 0}]}, "parts.0.rate: expected a number greater than 0, found 0"),
        (5, "whole: expected a mapping, found 5"),
    ],
)
def test_each_error_is_one_line(values: object, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(values)
    assert describe_errors(caught.value, "whole") == message


def test_long_lists_of_errors_are_cut() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"many": [0] * 30})
    lines = describe_errors(caught.value).splitlines()
    assert (len(lines), lines[-1].strip()) == (13, "and 18 more")


def test_update_settings_validates_new_values() -> None:
    settings = Inner()
    assert update_settings(settings, {"rate": 5}, where="here").rate == 5
    assert update_settings(settings, {"rate": None}, where="here") == settings
    with pytest.raises(UserError, match=r"--rate: expected .*found -1"):
        update_settings(settings, {"rate": -1}, where="here", options={"rate": "--rate"})
