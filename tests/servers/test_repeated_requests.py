"""Requests to several equal servers, of which one is silent."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Event
from typing import Any

import pytest

from draftlab.servers import connection, repeated_requests
from draftlab.servers.connection import Connection
from draftlab.servers.repeated_requests import RepeatedRequests, with_field
from draftlab.servers.settings import ServerSettings
from tests.helpers.bench_server import bench_server
from tests.helpers.monitors import RecordingMonitor


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a host that answers no packet: the queue of its socket is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_silent_server_is_left_soon_and_asked_last(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REACH_S", 0.5)
    monitor = RecordingMonitor()
    requests = RepeatedRequests("store", "record.server", ServerSettings(attempts=2), monitor)

    def seconds(*urls: Connection) -> float:
        start = time.monotonic()
        read: Any = with_field("data")
        assert requests.post(urls, "/v1/models", None, read, Event())["data"]
        return time.monotonic() - start

    with bench_server() as server:
        servers = Connection(silent), Connection(server.url)
        assert 0.4 < seconds(*servers) < 5, "of the 600 s for an answer"
        assert seconds(*servers) < 0.4, "the other one is asked first"
        monkeypatch.setattr(repeated_requests, "_LAST_S", 0.0)
        requests._last_until[servers[0]] = 0.0
        assert 0.4 < seconds(*servers) < 5, "after a while it is tried again"
        assert len([line for line in monitor.lines if "timed out" in line]) == 1


def test_a_host_that_vanishes_under_a_request_is_noticed() -> None:
    with bench_server() as server:
        reached = connection._reach(("127.0.0.1", server.server_port), 600.0)
        with reached:
            assert reached.gettimeout() == 600
            probes = [reached.getsockopt(socket.IPPROTO_TCP, n) for n in (4, 5, 6)]
            assert (reached.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), probes) == (
                1,
                [15, 5, 3],
            )
            late = reached.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert late == 0, "a busy server may read a long request late"
