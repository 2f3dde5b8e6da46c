"""A run whose shards are at a URL: the head of a local store's, whatever fails on the way."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from draftlab.store import object_store
from draftlab.store import store as store_module
from draftlab.store.object_store import CLAIM, UrlClaim, UrlFolder
from draftlab.store.shard_cache import machine_cache
from draftlab.store.shard_files import RemoteShardFiles
from tests.helpers.object_server import BUCKET, FaultyServer, empty_cache, object_server, objects
from tests.helpers.small_run import (
    contents,
    copy_of_finished,
    draftlab,
    finished,
    new_workshop,
    ran,
)

URL = f"s3://{BUCKET}/small"
AT_URL = f"record.url={URL}"


server = object_server(retry_s=10.0)


def assert_same_run(workshop: Path) -> None:
    """Check that store and head have the bytes of the local run's."""
    expected = finished() / "runs/small"
    store = contents(expected / "store")
    assert objects(URL) == {name: data for name, data in store.items() if name != ".lock"}
    assert contents(workshop / "runs/small/head") == contents(expected / "head")


def test_a_run_equals_that_with_a_local_store(server: FaultyServer, workshop: Path) -> None:
    result = ran(workshop, "run", "small.yaml", AT_URL)
    assert_same_run(workshop)
    run = workshop / "runs/small"
    assert not list((run / "store").glob("shard-*"))
    assert re.search(rf"store: .* at {URL}, read through a cache of 20 GB", result.output)
    for path in run.rglob("*"):
        if path.is_file():
            assert b"secret-of-the-test" not in path.read_bytes(), path
    assert "secret-of-the-test" not in result.output
    # Again, everything is there.
    result = draftlab(workshop, "run", "small.yaml", AT_URL)
    assert result.output.count(": there (") == 5, result.output
    # The URL is a store for whoever has the address.
    inspected = ran(workshop, "inspect", URL, "--verify")
    assert URL in inspected.output
    assert re.search(r"SHA-256 hashes of all \d+ shards agree", inspected.output)
    inspected = ran(workshop, "inspect", "small")
    assert URL in inspected.output
    # Another run with the same recording uses it.
    server.requests.clear()
    other = ran(workshop, "record", "small.yaml", AT_URL, "name=other")
    assert server.count("PUT") == 0
    assert f"this recording is complete at {URL}, and is used" in other.output


def test_a_changed_url_of_a_complete_store_is_no_damage(
    server: FaultyServer, tmp_path: Path
) -> None:
    workshop = copy_of_finished(tmp_path / "workshop")
    result = ran(workshop, "run", "small.yaml", AT_URL)  # the store is needed no more
    elsewhere = "its shards are in runs/small/store, and record.url is s3://"
    assert f"store: elsewhere, and not needed ({elsewhere}" in result.output
    (workshop / "runs/small/head/draftlab.json").unlink()
    for _ in range(2):
        result = ran(workshop, "train", "small.yaml", AT_URL, code=2)
        assert elsewhere in " ".join(result.output.split())
        assert "copy the shards to the new place first" in " ".join(result.output.split())
    plan = draftlab(workshop, "train", "small.yaml", AT_URL, "--plan")
    assert f"would be refused: {elsewhere}" in plan.output
    assert not objects(URL)
    folder = UrlFolder(URL)
    for path in (workshop / "runs/small/store").glob("*.safetensors"):
        folder.upload(path, path.name)
    folder.upload(workshop / "runs/small/store/manifest.json", "manifest.json")
    result = ran(workshop, "train", "small.yaml", AT_URL)
    assert_same_run(workshop)


def test_of_two_recordings_at_one_url_one_ends(
    server: FaultyServer, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write = UrlFolder(URL), RemoteShardFiles.write
    other = UrlClaim(folder, workshop)  # of another run
    other.take("another plan")
    result = ran(workshop, "record", "small.yaml", AT_URL, code=2)
    assert "another run writes there" in result.output
    assert objects(URL).keys() == {CLAIM}
    other.release()
    # A run with the same plan begins while this one records: it is the one that goes on.
    one_at_a_time = Lock()  # several threads write

    def write_after_another_began(files: RemoteShardFiles, *arguments: Any) -> None:
        with one_at_a_time:
            plan = json.loads(folder.read(CLAIM))["of"]
            assert plan
            other.take(plan)
        write(files, *arguments)

    monkeypatch.setattr(RemoteShardFiles, "write", write_after_another_began)
    result = ran(workshop, "record", "small.yaml", AT_URL, code=2)
    assert "another process has begun to write there" in result.output
    assert not [name for name in objects(URL) if name.startswith("shard-")]
    monkeypatch.setattr(RemoteShardFiles, "write", write)
    result = ran(workshop, "record", "small.yaml", AT_URL)
    assert "began this recording" in result.output
    store = contents(finished() / "runs/small/store")
    assert objects(URL) == {name: data for name, data in store.items() if name != ".lock"}
    assert contents(workshop / "runs/small/store").keys() == {
        name for name in store if not name.startswith("shard-")
    }


@pytest.mark.slow
def test_a_server_that_stays_down_ends_the_training_and_loses_nothing(
    server: FaultyServer, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "RETRY_S", 0.6)
    # Neither the cache nor open files keep all shards, so that every step needs the server.
    monkeypatch.setattr(store_module, "OPEN_REMOTE_SHARDS", 1)
    steps = ("train.steps=40", "train.checkpoint_every=1")
    local = new_workshop(workshop.parent / "local")
    assert draftlab(local, "train", "small.yaml", *steps).exit_code == 0
    assert draftlab(workshop, "record", "small.yaml", AT_URL).exit_code == 0
    empty_cache()
    sizes = [path.stat().st_size for path in (finished() / "runs/small/store").glob("shard-*")]
    monkeypatch.setenv("DRAFTLAB_CACHE_SIZE", f"{max(sizes)}B")
    machine_cache.cache_clear()

    checkpoints = workshop / "runs/small/train/checkpoints"

    def fault(method: str, path: str, number: int) -> None:
        server.is_down = server.is_down or any(checkpoints.glob("step-*"))

    server.faults = fault
    result = ran(workshop, "train", "small.yaml", AT_URL, *steps, code=2)
    assert f"{URL}/shard-" in result.output
    assert "failed again and again" in result.output
    assert any(checkpoints.glob("step-*"))
    again = ran(
        workshop, "train", "small.yaml", AT_URL, *steps, code=2
    )  # it is not taken for damage
    assert "made again" not in again.output
    server.is_down, server.faults = False, lambda *_: None
    result = ran(workshop, "train", "small.yaml", AT_URL, *steps)
    assert "resuming training after step" in result.output
    heads = [contents(folder / "runs/small/head") for folder in (local, workshop)]
    assert heads[0] == heads[1]


@pytest.mark.slow
def test_worker_processes_upload_from_where_they_run(server: FaultyServer, workshop: Path) -> None:
    ran(workshop, "record", "small.yaml", AT_URL, "--gpus", "2", "target.device=cpu")
    store = contents(finished() / "runs/small/store")
    assert objects(URL) == {name: data for name, data in store.items() if name != ".lock"}


@pytest.mark.slow
def test_three_nodes_of_a_cluster_share_the_url(server: FaultyServer, workshop: Path) -> None:
    """The nodes have the server's address from the environment in which they were started."""
    pytest.importorskip("ray")
    from tests.helpers.ray_nodes import processes, ray_cluster, start_driver

    generator = random.Random(3)

    def fault(method: str, path: str, number: int) -> str | None:
        return generator.choice(["error", "drop", "slow", "short"]) * (generator.random() < 0.1)

    server.faults = fault
    killed = False
    with ray_cluster(3) as cluster:
        command = ("run", "small.yaml", AT_URL, "--ray", cluster.address)
        with open(workshop / "output", "w") as output:
            driver = start_driver(workshop, *command, output=output)
            end = time.monotonic() + 400
            while driver.poll() is None:
                assert time.monotonic() < end, (workshop / "output").read_text()
                if not killed and server.count("PUT", "shard-"):
                    workers = [one for node in cluster.worker_nodes for one in processes(node)]
                    for worker in workers[:1]:
                        worker.kill()
                        killed = True
                time.sleep(0.02)
    assert driver.returncode == 0, (workshop / "output").read_text()
    assert killed
    server.faults = lambda *_: None
    assert_same_run(workshop)
    assert not list((workshop / "runs/small/store").glob("shard-*"))


def test_a_mistyped_size_of_the_cache_is_refused_before_anything_runs(
    server: FaultyServer, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTLAB_CACHE_SIZE", "20 gigs")
    machine_cache.cache_clear()
    result = draftlab(workshop, "record", "small.yaml", AT_URL)
    machine_cache.cache_clear()
    assert result.exit_code == 2
    assert "DRAFTLAB_CACHE_SIZE" in result.output
    assert not (workshop / "runs/small/answers.jsonl").exists()


def test_a_window_at_a_url_gives_the_head_of_a_local_one(
    server: FaultyServer, workshop: Path
) -> None:
    window = ("record.window=10MB", "record.keep=all")
    local = new_workshop(workshop.parent / "local")
    for folder, more in ((local, ()), (workshop, (AT_URL,))):
        ran(folder, "train", "small.yaml", *window, *more)
    heads = [contents(folder / "runs/small/head") for folder in (local, workshop)]
    assert heads[0] == heads[1]
    refused = ran(workshop, "train", "small.yaml", window[0], AT_URL, "name=other", code=2)
    assert "keep=all" in refused.output
