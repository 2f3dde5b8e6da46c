"""Creating a repository and uploading a folder; what the Hub answers becomes the user's errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
)

from draftlab.errors import UserError
from draftlab.hub.card import TAG
from draftlab.hub.names import check_repo
from draftlab.progress import Monitor

STALE = ["*.safetensors", "*.safetensors.index.json", "*.png"]
"""Of an earlier push: what this one may no longer have, and what would be read as if it did."""
_TOKEN = re.compile(r"hf_\w+")
LOGIN = "log in with `hf auth login`, or set HF_TOKEN, to a token that may write"
RESUMES = "the same command goes on: what the Hub has whole is not sent again"


def upload(
    folder: Path, repo: str, *, public: bool, api: HfApi | None = None, monitor: Monitor
) -> str:
    """Uploads a folder as a model repository, made where there is none.

    Args:
        repo: "org/name".
        public: whether a new repository is to be seen by all; one that is there stays as it is, and
            one that is seen by all is only written to when this says so.
        api: the Hub's client; None: the user's own login.

    Returns:
        The repository's address.

    Raises:
        UserError: no login, no right to write, a repository of something else, a broken connection.
    """
    api = api or HfApi()
    check_repo(repo)
    monitor.say(f"push: asking {api.endpoint} for {repo}; without a network that may take a minute")
    with _hub_errors(repo, api):
        if _exists(api, repo):
            _check_existing(api, repo, public, monitor)
        else:
            api.create_repo(repo, private=not public, exist_ok=True)
            monitor.say(f"push: made {repo}, {'public' if public else 'private'}")
        files = [file for file in folder.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        monitor.say(f"push: {len(files)} files, {size / 2**20:,.1f} MiB, to {repo}")
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Draft head pushed by draftlab",
            delete_patterns=STALE,
        )
    return f"{api.endpoint}/{repo}"


def _exists(api: HfApi, repo: str) -> bool:
    return api.repo_exists(repo)


def _check_existing(api: HfApi, repo: str, public: bool, monitor: Monitor) -> None:
    info = api.model_info(repo)
    files = {sibling.rfilename for sibling in info.siblings or []} - {".gitattributes"}
    if files and TAG not in (info.tags or []):
        raise UserError(
            f"the repository is there and holds something else: {', '.join(sorted(files)[:5])}",
            where=repo,
            do="name another repository",
        )
    if not info.private and not public:
        raise UserError(
            "the repository is there and public, and --public was not given",
            where=repo,
            do="give --public if all may see this head, or name another repository",
        )
    if info.private and public:
        monitor.say(f"push: {repo} is private and stays so; its settings on the Hub change that")
    monitor.say(f"push: {repo} is there; its files are replaced in one commit")


@contextmanager
def _hub_errors(repo: str, api: HfApi) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except LocalTokenNotFoundError:
        raise UserError("the Hub wants to know who pushes", where=repo, do=LOGIN) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        what, do = _refusal(status, repo)
        said = f": {_redacted(str(error), api)}" if status not in (401, 403, 404) else ""
        raise UserError(f"{what}{said}", where=repo, do=do) from None
    except Exception as error:  # the clients of HTTP and of Xet have many, and change them
        raise UserError(
            f"no connection to the Hub, or it broke off: {_redacted(str(error), api)}",
            where=repo,
            do=RESUMES,
        ) from None


def _refusal(status: int | None, repo: str) -> tuple[str, str]:
    """What a status means here, and what to do."""
    if status == 401:
        return "the Hub does not accept the login (401)", LOGIN
    if status == 403:
        owner = repo.split("/")[0]
        return (
            f"the Hub does not let this login write to {owner} (403)",
            "use a token with the right to write there, or another owner",
        )
    if status == 404:
        return "the Hub shows no such repository or owner to this login (404)", LOGIN
    if status is not None and status < 500:
        return f"the Hub refused the upload ({status})", "mend what it names, and push again"
    return f"the Hub failed ({status})", RESUMES


def _redacted(text: str, api: HfApi) -> str:
    """A message without the token, which no log should ever hold."""
    tokens = [t for t in (api.token, get_token()) if isinstance(t, str) and t]
    for token in tokens:
        text = text.replace(token, "hf_…")
    return _TOKEN.sub("hf_…", text)
