"""Upload to a stub of the Hub: new and existing repositories, refusals, broken connections."""

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
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import contents


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    # The stub knows LFS only; Xet has its own protocol, in a compiled client.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr("time.sleep", lambda _: None)  # the client's retries
    with stub_hub() as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        yield stub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "push"
    path.mkdir()
    for number in range(2):
        tensors = {"w": torch.full((5000,), float(number))}
        save_file(tensors, path / f"model-{number}.safetensors")
    (path / "README.md").write_text("---\ntags:\n- draftlab\n---\n\n# a head\n")
    (path / "config.json").write_text("{}\n")
    return path


def push(
    hub: StubHub,
    folder: Path,
    repo: str = "org/head",
    *,
    public: bool = False,
    token: str | bool = TOKEN,
) -> str:
    """Upload the folder and return the monitor's lines."""
    monitor, api = RecordingMonitor(), HfApi(endpoint=hub.url, token=token)
    assert upload(folder, repo, public=public, api=api, monitor=monitor) == f"{hub.url}/{repo}"
    assert TOKEN not in monitor.text
    return monitor.text


@pytest.mark.parametrize(("public", "visibility"), [(False, "private"), (True, "public")])
def test_a_new_repository_has_the_folders_files(
    hub: StubHub, folder: Path, public: bool, visibility: str
) -> None:
    assert f"created org/head, {visibility}" in push(hub, folder, public=public)
    repo = hub.repos["org/head"]
    assert repo.private is not public
    assert repo.files == contents(folder)
    assert set(hub.authorizations) <= {f"Bearer {TOKEN}", None}
    assert f"Bearer {TOKEN}" in hub.authorizations


def test_a_second_push_replaces_the_first(hub: StubHub, folder: Path) -> None:
    push(hub, folder)
    (folder / "model-1.safetensors").unlink()
    (folder / "config.json").write_text('{"new": 1}\n')
    assert "org/head exists" in push(hub, folder)
    assert hub.repos["org/head"].files == contents(folder)  # without the obsolete weights
    assert len(hub.uploads) == 2  # the unchanged weights are not sent again


def test_an_upload_resumes_after_a_broken_connection(hub: StubHub, folder: Path) -> None:
    hub.allow = 1  # of two weight files
    with pytest.raises(UserError, match="connection to the Hub failed") as caught:
        push(hub, folder)
    assert "goes on" in caught.value.do
    assert TOKEN not in str(caught.value)
    assert not hub.repos["org/head"].files  # an incomplete upload is not visible
    assert len(hub.uploads) == 1
    hub.allow = None
    push(hub, folder)
    assert hub.repos["org/head"].files == contents(folder)
    assert len(hub.uploads) == len(set(hub.uploads)) == 2  # the first file is not sent again


@pytest.mark.parametrize(
    ("status", "token", "what", "do"),
    [
        (401, TOKEN, "does not accept the login", "hf auth login"),
        (401, False, "login", "hf auth login"),
        (403, TOKEN, "does not let this login write to org", "token with write access"),
        (500, TOKEN, "the Hub failed", "goes on"),
    ],
)
def test_a_refusal_says_what_to_do(hub: StubHub, folder: Path, status, token, what, do) -> None:
    hub.refuse = status
    with pytest.raises(UserError, match=what) as caught:
        push(hub, folder, token=token)
    assert do in caught.value.do
    assert TOKEN not in str(caught.value)
    assert not hub.repos


def test_a_repository_with_other_content_is_not_changed(hub: StubHub, folder: Path) -> None:
    hub.repos["org/head"] = Repo(True, {"model.safetensors": b"other"})
    with pytest.raises(UserError, match=r"found one with other content: model\.safetensors"):
        push(hub, folder)
    assert hub.repos["org/head"].files == {"model.safetensors": b"other"}


def test_an_existing_repository_keeps_its_visibility(hub: StubHub, folder: Path) -> None:
    hub.repos = {"org/public": Repo(False), "org/private": Repo(True)}
    with pytest.raises(UserError, match="public, and --public was not given"):
        push(hub, folder, "org/public")
    push(hub, folder, "org/public", public=True)
    assert "stays private" in push(hub, folder, "org/private", public=True)
    assert hub.repos["org/private"].private


@pytest.mark.parametrize("name", ["head", "a/b/c", "org/na me", "../x", ""])
def test_an_invalid_name_is_refused(hub: StubHub, folder: Path, name: str) -> None:
    with pytest.raises(UserError, match="expected a repository"):
        upload(folder, name, public=False, monitor=RecordingMonitor())
    assert not hub.requests
