"""One process may write to a URL: the last one that has claimed it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.store.object_store import UrlFolder
from draftlab.store.url_claim import CLAIM, LostClaimError, UrlClaim
from tests.helpers.object_server import BUCKET, FaultyServer, object_server

server = object_server(retry_s=8.0)


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/there"
    request.getfixturevalue("server")
    return f"s3://{BUCKET}/there"


def new_claim(folder: Path, url: str) -> UrlClaim:
    folder.mkdir(exist_ok=True)
    return UrlClaim(UrlFolder(url), folder)


def test_the_last_one_has_it(tmp_path: Path, url: str) -> None:
    first, second = (new_claim(tmp_path / name, url) for name in ("a", "b"))
    with pytest.raises(LostClaimError):
        first.check()
    assert first.take("plan") == ""
    first.check()
    new_claim(tmp_path / "a", url).check()  # another process with the same folder
    assert new_claim(tmp_path / "a", url).take("plan") == "", "after it was killed"
    assert ", begun 20" in second.take("plan")
    second.check()
    for one in (first, new_claim(tmp_path / "a", url)):
        with pytest.raises(LostClaimError, match=r"begun to write there \(on .*, begun 20"):
            one.check()
    first.release()  # not its own any more
    second.check()
    with pytest.raises(UserError, match="another run writes there"):
        first.take("another plan")
    second.check()
    second.release()
    assert UrlFolder(url).read(CLAIM) is None
    with pytest.raises(LostClaimError, match="has been removed"):
        second.check()
    assert first.take("another plan") == ""


def test_what_another_has_created_is_not_created_again(url: str) -> None:
    """Both have seen an empty URL; which of them creates the object, the file system decides."""
    first, second = UrlFolder(url), UrlFolder(url)
    assert first.size(CLAIM) == second.size(CLAIM) == -1
    assert first.create(CLAIM, b"first")
    assert not second.create(CLAIM, b"second")
    assert second.read(CLAIM) == b"first"


def test_an_answer_that_is_lost_leaves_the_claim_with_its_writer(
    server: FaultyServer, tmp_path: Path
) -> None:
    """The object is written and the connection ends, so that the write is repeated."""
    left = ["cut"]
    server.faults = lambda method, path, number: left.pop() if method == "PUT" and left else None
    claim = new_claim(tmp_path / "a", f"s3://{BUCKET}/there")
    assert claim.take("plan") == ""
    claim.check()


def test_a_claim_that_is_of_something_else_stays(tmp_path: Path, url: str) -> None:
    UrlFolder(url).write(CLAIM, b"something else")
    with pytest.raises(UserError, match="another run writes there"):
        new_claim(tmp_path / "a", url).take("plan")
    UrlFolder(url).write(CLAIM, json.dumps([1]).encode())
    with pytest.raises(UserError, match="another run writes there"):
        new_claim(tmp_path / "a", url).take("plan")
