"""Upload a folder to a model repository, and explain the Hub's errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from draftlab.errors import UserError
from draftlab.progress import Monitor

TAG = "draftlab"
"""The tag of every repository that draftlab uploads; others are never overwritten."""
OBSOLETE_FILES = ["*.safetensors", "*.safetensors.index.json", "*.png"]
"""Files that an upload deletes from the repository, unless it uploads them anew."""
LOGIN = "log in with `hf auth login`, or set HF_TOKEN, to a token with write access"
RESUMES = "the same command goes on: what the Hub has whole is not sent again"
_TOKEN = re.compile(r"hf_\w+")


def check_repo_id(repo: str, where: str = "command line") -> None:
    """Raise a `UserError` unless `repo` is a valid "org/name"."""
    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise HFValidationError("its owner is missing")
    except HFValidationError as error:
        raise UserError(
            f'expected a repository such as "org/name", found {repo!r}: {error}',
            where=where,
            do="write owner and name: OWNER/NAME",
        ) from None


def upload(
    folder: Path, repo: str, *, public: bool, api: HfApi | None = None, monitor: Monitor
) -> str:
    """Upload a folder to a model repository, "org/name", which is made if need be; return its
    address.

    A new one is private unless `public`. The visibility of an existing one is not changed, and a
    public one is written to only with `public`. The client is by default one with the user's own
    login. Raises a `UserError` without login or write access, of a repository with other content,
    or if the connection fails.
    """
    api = api or HfApi()
    check_repo_id(repo)
    monitor.say(
        f"push: looking up {repo} at {api.endpoint} (without a network this may take a minute)"
    )
    with _explain_errors(repo, api):
        if api.repo_exists(repo):
            _check_existing(api, repo, public, monitor)
        else:
            api.create_repo(repo, private=not public, exist_ok=True)
            monitor.say(f"push: created {repo}, {'public' if public else 'private'}")
        files = [file for file in folder.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        monitor.say(f"push: uploading {len(files)} files, {size / 2**20:,.1f} MiB, to {repo}")
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Draft head pushed by draftlab",
            delete_patterns=OBSOLETE_FILES,
        )
    return f"{api.endpoint}/{repo}"


def _check_existing(api: HfApi, repo: str, public: bool, monitor: Monitor) -> None:
    info = api.model_info(repo)
    files = {sibling.rfilename for sibling in info.siblings or []} - {".gitattributes"}
    if files and TAG not in (info.tags or []):
        raise UserError(
            "expected a new repository or one that draftlab uploaded, found one with other "
            f"content: {', '.join(sorted(files)[:5])}",
            where=repo,
            do="name another repository",
        )
    if not info.private and not public:
        raise UserError(
            "the repository is public, and --public was not given",
            where=repo,
            do="give --public if everyone may see this head, or name another repository",
        )
    if info.private and public:
        monitor.say(f"push: {repo} stays private; its settings on the Hub change that")
    monitor.say(f"push: {repo} exists; its files are replaced in one commit")


@contextmanager
def _explain_errors(repo: str, api: HfApi) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except LocalTokenNotFoundError:
        raise UserError("the Hub requires a login", where=repo, do=LOGIN) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        what, do = _explain_status(status, repo)
        details = "" if status in (401, 403, 404) else f": {_redact(str(error), api)}"
        raise UserError(f"{what}{details}", where=repo, do=do) from None
    except Exception as error:  # the HTTP and Xet clients raise many different errors
        raise UserError(
            f"the connection to the Hub failed: {_redact(str(error), api)}", where=repo, do=RESUMES
        ) from None


def _explain_status(status: int | None, repo: str) -> tuple[str, str]:
    """Return what an HTTP status means here, and what the user can do."""
    if status == 401:
        return "the Hub does not accept the login (401)", LOGIN
    if status == 403:
        return (
            f"the Hub does not let this login write to {repo.split('/')[0]} (403)",
            "use a token with write access to it, or another owner",
        )
    if status == 404:
        return "the Hub shows no such repository or owner to this login (404)", LOGIN
    if status is not None and status < 500:
        return f"the Hub refused the upload ({status})", "correct what it names, and push again"
    return f"the Hub failed ({status})", RESUMES


def _redact(text: str, api: HfApi) -> str:
    """Return a message without the access token."""
    for token in (api.token, get_token()):
        if isinstance(token, str) and token:
            text = text.replace(token, "hf_…")
    return _TOKEN.sub("hf_…", text)
