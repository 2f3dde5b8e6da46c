"""An S3-compatible server on the loopback (moto's), behind a proxy that makes faults."""

from __future__ import annotations

import http.client
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftlab.store import object_store
from draftlab.store.shard_cache import machine_cache
from tests.helpers.http_server import Handler, Server, running

BUCKET = "bucket"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key-of-the-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # botocore's own; by default 5
}
_OWN_HEADERS = {"connection", "transfer-encoding", "content-length", "date", "server"}

Fault = str
"""error: status 500. denied: status 403. drop: no answer. slow: the body in pieces, with pauses.
cut: the connection ends in the body. short: half of the body, with a length that fits; of an upload
the server stores half and answers as if all was well. changed: one other byte, in an upload or a
download."""


class FaultyServer(Server):
    """The server with its proxy.

    Attributes:
        faults: (method, path, number of the request) → the fault of this request; None: none.
        requests: method and path of every request.
        is_down: whether every request is dropped.
    """

    def __init__(self, port: int) -> None:
        self.faults: Callable[[str, str, int], Fault | None] = lambda method, path, number: None
        self.requests: list[tuple[str, str]] = []
        self.is_down = False
        self.port, self._numbers = port, itertools.count()
        super().__init__(_Handler)

    def handle_error(self, *_: object) -> None:
        pass  # clients end connections, too

    def count(self, method: str, part: str = "") -> int:
        """Return the number of requests of a method whose path contains a text."""
        return sum(m == method and part in path for m, path in self.requests)

    def forward(self, handler: Handler) -> None:
        """Forward a request to the server at `port`, and its answer back."""
        method, path, number = handler.command, handler.path, next(self._numbers)
        self.requests.append((method, path))
        body = handler.body()
        fault = "drop" if self.is_down else self.faults(method, path, number)
        if fault == "drop":
            handler.close_connection = True
            return
        if fault in ("error", "denied"):
            code, status = ("InternalError", 500) if fault == "error" else ("AccessDenied", 403)
            text = f"<Error><Code>{code}</Code><Message>made up</Message></Error>".encode()
            self._answer(handler, status, {"Content-Type": "application/xml"}, text, None)
            return
        headers = dict(handler.headers.items())
        if method == "PUT" and fault in ("short", "changed"):
            body = body[: len(body) // 2] if fault == "short" else _changed(body)
            for name in list(headers):  # a server that checks nothing
                if name.lower().startswith(("x-amz-checksum", "content-md5", "content-length")):
                    del headers[name]
            fault = None
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if method == "GET" and response.status < 300:
            data = data[: len(data) // 2] if fault == "short" else data
            data = _changed(data) if fault == "changed" else data
        length = response.headers.get("Content-Length") if method == "HEAD" else None
        kept = {k: v for k, v in response.getheaders() if k.lower() not in _OWN_HEADERS}
        if length is not None:
            kept["Content-Length"] = length
        self._answer(handler, response.status, kept, data, fault)

    @staticmethod
    def _answer(
        handler: Handler,
        status: int,
        headers: dict[str, str],
        data: bytes,
        fault: Fault | None,
    ) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        if "Content-Length" not in headers:
            handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if fault == "cut":
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True
            return
        pieces = [data]
        if fault == "slow":
            step = max(1, len(data) // 8)
            pieces = [data[i : i + step] for i in range(0, len(data), step)]
        for piece in pieces:
            handler.wfile.write(piece)
            handler.wfile.flush()
            time.sleep(0.05 * (fault == "slow"))


class _Handler(Handler):
    protocol_version = "HTTP/1.1"

    def do_any(self) -> None:
        self.server.forward(self)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any


def _changed(data: bytes) -> bytes:
    """Return other bytes of the same number."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


def object_server(*, retry_s: float) -> Any:
    """Return a fixture that runs the server, with an empty bucket and the environment for it.

    Args:
        retry_s: seconds in which draftlab repeats a transfer that fails.
    """

    @pytest.fixture
    def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyServer]:
        pytest.importorskip("s3fs")
        from moto.server import ThreadedMotoServer
        from s3fs import S3FileSystem

        moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        moto.start()
        port = moto.get_host_and_port()[1]
        server = FaultyServer(port)
        environment = {"AWS_ENDPOINT_URL": server.url, "DRAFTLAB_CACHE": str(tmp_path / "cache")}
        for name, value in (ENVIRONMENT | environment).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_store, "RETRY_S", retry_s)
        _forget()
        try:
            with running(server):
                S3FileSystem().mkdir(BUCKET)
                server.requests.clear()
                yield server
        finally:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("POST", "/moto-api/reset")  # moto keeps buckets in this process
            connection.getresponse().read()
            connection.close()
            _forget()
            moto.stop()

    return server


def _forget() -> None:
    """Forget the file systems and the cache of another environment."""
    from s3fs import S3FileSystem

    from draftlab.store.shard_cache import machine_cache

    S3FileSystem.clear_instance_cache()
    machine_cache.cache_clear()


def objects(url: str) -> dict[str, bytes]:
    """Return all files at a URL."""
    folder = object_store.UrlFolder(url)
    return {name: folder.read(name) or b"" for name in sorted(folder.sizes())}


def empty_cache() -> None:
    for path in (machine_cache().folder / "shards").iterdir():
        path.unlink()
