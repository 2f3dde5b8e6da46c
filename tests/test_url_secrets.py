"""Credentials in URLs: no setting takes them, and no message repeats them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from draftlab.cli.console import ConsoleMonitor, PlainConsole
from draftlab.errors import UserError
from draftlab.recipe.recipe import Recipe, load_recipe, to_yaml
from draftlab.url_secrets import secret_in, without_secrets

SECRET = "hunter2"
WITH_SECRET = [
    f"https://me:{SECRET}@host/path",
    f"https://{SECRET}@host/path",
    f"s3://KEY:{SECRET}@bucket/folder",
    f"s3://KEY:a/b{SECRET}@bucket/folder",
    f"s3://KEY:12/b{SECRET}@bucket/folder",
    f"sftp://me:{SECRET}@host:22/folder",
    *(
        f"https://host:8000/v1?a=b&{name}={SECRET}"
        for name in (
            *("api_key", "api-key", "apikey", "key", "token", "access_token", "sig", "code"),
            *("X-Amz-Signature", "X-Amz-Security-Token", "X-Goog-Credential", "AWSAccessKeyId"),
            *("subscription-key", "client_secret", "password", "%74oken", "SIG"),
            *("passphrase", "bearer", "pw", "db_pw", "session", "session_id", "client_assertion"),
        )
    ),
    f"https://account.blob.core.windows.net/c?sv=2024-01-01&sig={SECRET}%3D&se=2027",
    f"https://host/path#access_token={SECRET}",
    *(f"https://host/path?model={shape}{SECRET}12" for shape in ("sk-", "sk-proj-", "hf_")),
    f"https://host/path?a=b&user=AKIA{SECRET}12",
]
WITHOUT = [
    "s3://bucket/folder",
    "hf://datasets/me/store@main",
    "sftp://me@host/folder",
    "http://localhost:8000/a@b",
    "sftp://host:22/a@b",
    "https://host/v1?lang=sk-SK&pwm=3&head=hf_x",
    "https://host/v1?design=blue&monkey=1",
    "me@example.org wrote key=value",
    "expected a:b, found token=3",
]


@pytest.mark.parametrize("url", WITH_SECRET)
def test_a_secret_is_found_and_hidden(url: str) -> None:
    text = f"found {url!r}, and then {url}"
    assert secret_in(text)
    assert SECRET not in secret_in(text)
    hidden = without_secrets(text)
    assert SECRET not in hidden
    assert not secret_in(hidden)
    assert without_secrets(hidden) == hidden
    error = UserError(text, where=url, do=f"open {url}")
    assert SECRET not in f"{error} {error.what} {error.where} {error.do}"


@pytest.mark.parametrize("text", WITHOUT)
def test_other_texts_stay(text: str) -> None:
    assert secret_in(text) == ""
    assert without_secrets(text) == text


def test_printed_lines_hide_it() -> None:
    text = io.StringIO()
    ConsoleMonitor(PlainConsole(file=text, width=200)).say(f"uploading {WITH_SECRET[0]} failed")
    assert SECRET not in text.getvalue()
    assert "https://(hidden)@host/path failed" in text.getvalue()


SETTINGS = [
    "regenerate.server.url",
    "record.url",
    "prompts.source",
    "target.path",
    "eval.suite",
    "eval.compare",
    "head.init",
    "export.calibration",
    "train.wandb",
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_takes_a_url_with_credentials(setting: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{}")
    with pytest.raises(UserError) as caught:
        load_recipe(path, [f"{setting}={WITH_SECRET[0]}"])
    assert SECRET not in str(caught.value)
    section = setting.partition(".")[0]
    assert section in caught.value.what
    assert "expected a URL without credentials" in caught.value.what


def test_a_url_without_credentials_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{}")
    recipe = load_recipe(path, ["regenerate.server.url=http://localhost:8000/v1"])
    assert "http://localhost:8000/v1" in to_yaml(recipe)
    assert recipe != Recipe(name="mine")
    with pytest.raises(UserError, match=r"regenerate\.server\.url"):
        load_recipe(path, ["regenerate.server.url=http://localhost:8000/v1?model=a"])
