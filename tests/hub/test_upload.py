"""Pushing to a stand-in of the Hub: what is sent, what is refused, what a broken line leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants
from safetensors.torch import save_file

from draftlab.errors import UserError
from draftlab.hub.upload import upload
from tests.helpers.hub_stub import TOKEN, Repo, StubHub, stub_hub
from tests.helpers.small_run import Heard, contents


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    # Xet has a protocol of its own, in a compiled client: files go by LFS here.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with stub_hub() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "push"
    place.mkdir()
    for number in range(2):
        tensors = {"w": torch.full((5000,), float(number))}
        save_file(tensors, place / f"model-{number}.safetensors")
    (place / "README.md").write_text("---\ntags:\n- draftlab\n---\n\n# a head\n")
    (place / "config.json").write_text("{}\n")
    return place


def push(hub: StubHub, folder: Path, repo: str = "org/head", **options: bool) -> Heard:
    monitor = Heard()
    api = HfApi(endpoint=hub.url, token=TOKEN)
    url = upload(folder, repo, **({"public": False} | options), api=api, monitor=monitor)
    assert url == f"{hub.url}/{repo}"
    assert TOKEN not in monitor.text
    return monitor


def test_a_new_repository_is_private_and_holds_the_folder(hub: StubHub, folder: Path) -> None:
    heard = push(hub, folder)
    repo = hub.repos["org/head"]
    assert repo.private
    assert repo.files == contents(folder)
    assert "made org/head, private" in heard.text
    assert set(hub.authorizations) <= {f"Bearer {TOKEN}", None}
    assert f"Bearer {TOKEN}" in hub.authorizations


def test_public_only_when_asked(hub: StubHub, folder: Path) -> None:
    push(hub, folder, public=True)
    assert not hub.repos["org/head"].private


def test_pushed_again_it_replaces_what_was(hub: StubHub, folder: Path) -> None:
    push(hub, folder)
    (folder / "model-1.safetensors").unlink()
    (folder / "config.json").write_text('{"new": 1}\n')
    heard = push(hub, folder)
    assert hub.repos["org/head"].files == contents(folder)  # stale weights are gone
    assert "org/head is there" in heard.text
    assert len(hub.uploads) == 2  # weights that the Hub has are not sent again


def test_a_dropped_connection_is_said_and_the_same_call_goes_on(
    hub: StubHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # the client's own retries
    hub.allow = 1  # of two weights the first arrives, the second breaks off
    with pytest.raises(UserError, match="broke off") as caught:
        push(hub, folder)
    assert "goes on" in caught.value.do
    assert TOKEN not in str(caught.value)
    assert not hub.repos["org/head"].files  # nothing half-made is shown
    assert len(hub.uploads) == 1
    hub.allow = None
    push(hub, folder)
    assert hub.repos["org/head"].files == contents(folder)
    assert len(hub.uploads) == len(set(hub.uploads)) == 2  # what had arrived was not sent again


@pytest.mark.parametrize(
    ("status", "what", "do"),
    [
        (401, "does not accept the login", "hf auth login"),
        (403, "does not let this login write to org", "token with the right"),
        (500, "the Hub failed", "goes on"),
    ],
)
def test_refusals_say_what_to_do(
    hub: StubHub, folder: Path, status: int, what: str, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.refuse = status
    with pytest.raises(UserError, match=what) as caught:
        push(hub, folder)
    assert do in caught.value.do
    assert TOKEN not in str(caught.value)
    assert not hub.repos


def test_without_a_login(hub: StubHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.refuse = 401
    with pytest.raises(UserError, match="login"):
        upload(folder, "org/head", public=False, api=HfApi(hub.url, token=False), monitor=Heard())


def test_a_repository_of_something_else_is_left_alone(hub: StubHub, folder: Path) -> None:
    hub.repos["org/head"] = Repo(True, {"model.safetensors": b"theirs"})
    with pytest.raises(UserError, match=r"holds something else: model\.safetensors"):
        push(hub, folder)
    assert hub.repos["org/head"].files == {"model.safetensors": b"theirs"}


def test_a_public_repository_needs_the_word(hub: StubHub, folder: Path) -> None:
    hub.repos["org/head"] = Repo(False)
    with pytest.raises(UserError, match="public, and --public was not given"):
        push(hub, folder)
    push(hub, folder, public=True)
    hub.repos["org/mine"] = Repo(True)
    heard = push(hub, folder, repo="org/mine", public=True)
    assert "is private and stays so" in heard.text
    assert hub.repos["org/mine"].private


@pytest.mark.parametrize("name", ["head", "a/b/c", "org/na me", "../x", ""])
def test_a_name_that_is_none(hub: StubHub, folder: Path, name: str) -> None:
    with pytest.raises(UserError, match="expected a repository"):
        upload(folder, name, public=False, monitor=Heard())
    assert not hub.requests
