"""A stub of the Hub's API with repositories in memory, LFS uploads and injected faults."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.helpers.http_server import Handler, Server, running

TOKEN = "hf_secretSECRETsecret"


@dataclass
class Repo:
    """A repository; `files` maps paths to contents."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)


class StubHub(Server):
    """The Hub's state, and the requests that it received.

    Attributes:
        objects: LFS contents by SHA-256.
        uploads: SHA-256 of each upload, in order.
        allow: the number of uploads before connections are closed midway; None: no limit.
        refuse: the status of every response; None: requests are served.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.requests: list[str] = []
        self.authorizations: list[str | None] = []
        self.allow: int | None = None
        self.refuse: int | None = None
        self.lock = threading.Lock()


class _Handler(Handler):
    server: StubHub
    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline().strip(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return super().body()

    def serve(self) -> None:
        hub, path = self.server, self.path.split("?")[0]
        with hub.lock:
            hub.requests.append(f"{self.command} {path}")
            hub.authorizations.append(self.headers.get("Authorization"))
        if hub.refuse is not None:
            self.body()
            self.answer(hub.refuse, {"error": "refused"})
            return
        if self.command == "PUT":
            self.upload(path.rsplit("/", 1)[-1])
            return
        data = self.body()
        for pattern, handle in self.routes:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                handle(self, data, *match.groups())
                return
        self.answer(404, {"error": f"the stub has no {self.command} {path}"})

    do_GET = do_POST = do_PUT = do_HEAD = serve

    def upload(self, oid: str) -> None:
        hub = self.server
        with hub.lock:
            dropped = hub.allow == 0
            hub.allow = None if hub.allow is None else max(hub.allow - 1, 0)
        if dropped:
            self.rfile.read(min(1000, int(self.headers.get("Content-Length", 0))))
            self.close_connection = True
            self.connection.close()
            return
        data = self.body()
        assert hashlib.sha256(data).hexdigest() == oid
        with hub.lock:
            hub.objects[oid] = data
            hub.uploads.append(oid)
        self.answer(200, {})

    def create(self, data: bytes) -> None:
        fields = json.loads(data)
        name = f"{fields['organization']}/{fields['name']}"
        private = fields.get("private", fields.get("visibility") == "private")
        self.server.repos[name] = Repo(bool(private))
        self.answer(200, {"url": f"{self.server.url}/{name}"})

    def info(self, _data: bytes, name: str, _revision: str | None = None) -> None:
        repo = self.server.repos.get(name)
        if repo is None:
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        files = [{"rfilename": path} for path in (".gitattributes", *repo.files)]
        body = {"id": name, "sha": "0" * 40, "siblings": files}
        self.answer(200, body | {"private": repo.private, "tags": repo.tags})

    def tree(self, _data: bytes, name: str) -> None:
        files = self.server.repos[name].files
        self.answer(
            200,
            [
                {"type": "file", "path": p, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for p, c in files.items()
            ],
        )

    def preupload(self, data: bytes, name: str) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(data)["files"]
        ]
        self.answer(200, {"files": files})

    def lfs(self, data: bytes, name: str) -> None:
        objects = []
        for item in json.loads(data)["objects"]:
            if item["oid"] not in self.server.objects:
                href = f"{self.server.url}/lfs/{item['oid']}"
                item["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(item)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, data: bytes, name: str) -> None:
        repo = self.server.repos[name]
        for line in map(json.loads, filter(None, data.splitlines())):
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del repo.files[value["path"]]
        card = repo.files.get("README.md", b"").decode()
        repo.tags = re.findall(r"^- (\S+)$", card.split("---")[1], re.M) if "---" in card else []
        self.answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/1", "commitOid": "1" * 40})

    def valid(self, _data: bytes) -> None:
        self.answer(200, {"errors": [], "warnings": []})

    routes = (
        (r"POST /api/repos/create", create),
        (r"POST /api/validate-yaml", valid),
        (r"GET /api/models/([^/]+/[^/]+)", info),
        (r"GET /api/models/([^/]+/[^/]+)/revision/([^/]+)", info),
        (r"GET /api/models/([^/]+/[^/]+)/tree/main", tree),
        (r"POST /api/models/([^/]+/[^/]+)/preupload/main", preupload),
        (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", lfs),
        (r"POST /api/models/([^/]+/[^/]+)/commit/main", commit),
    )


def stub_hub() -> AbstractContextManager[StubHub]:
    """Serve a stub on a free local port during a block."""
    return running(StubHub())
