"""Recording: the numbers in a record, the plan's counting, and bytes that survive a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store import extraction as states_module
from draftlab.store import record as record_module
from draftlab.store.record import RecordSettings, record
from draftlab.store.store import Sample, Store, teachers
from draftlab.target_model.model import Target, TargetSettings, load_target
from tests.helpers.recordings import BOUNDARIES, Lines, contents, identity_of, make, make_samples
from tests.helpers.toys import toy_target_folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target_folder(tmp_path_factory.mktemp("target"), layers=4, hidden=32, max_length=64)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return load_target(TargetSettings(path=str(target_folder), device="cpu"))


def test_records_equal_hf_states_of_each_sequence_alone(target: Target, tmp_path: Path) -> None:
    samples = make_samples()
    store = make(target, tmp_path, samples)
    assert len(store.manifest.shards) > 2
    assert any(len(batch) > 2 for shard in store.manifest.shards for batch in shard.batches)
    pre_norm: list[torch.Tensor] = []
    hook = target.norm.register_forward_pre_hook(lambda _, args: pre_norm.append(args[0]))
    for sample, got in zip(samples, store, strict=True):
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            out = target.model(input_ids=ids, output_hidden_states=True)
        expected = torch.cat([out.hidden_states[b][0] for b in BOUNDARIES], -1)
        torch.testing.assert_close(got.features, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got.last, pre_norm[-1][0], atol=1e-5, rtol=1e-5)
        logits = out.logits[0].double()
        taught = teachers(got.spans)
        assert 0 < int(taught.sum()) < len(taught)
        assert bool(got.logsumexp[~taught].isnan().all())
        assert got.argmax[~taught].unique().tolist() == [-1]
        torch.testing.assert_close(
            got.logsumexp[taught].double(), logits.logsumexp(-1)[taught], atol=1e-4, rtol=0
        )
        # Allow another argmax only where two logits are equal to rounding.
        chosen = logits[taught].gather(1, got.argmax[taught, None]).squeeze(1)
        torch.testing.assert_close(chosen, logits[taught].amax(-1), atol=1e-5, rtol=0)
        assert tuple(got.tokens.tolist()) == sample.token_ids
        assert tuple(got.spans.tolist()) == sample.spans
        assert (got.id, got.temperature) == (sample.id, sample.temperature)
    hook.remove()


def test_boundary_n_is_the_last_state_before_the_norm(target: Target, tmp_path: Path) -> None:
    identity = identity_of(target, boundaries=(1, target.num_layers))
    settings = RecordSettings(dtype="float32", boundaries=(1, target.num_layers))
    store = record(target, make_samples(3), tmp_path, settings, identity, monitor=Monitor())
    for got in store:
        assert torch.equal(got.features[:, target.hidden_size :], got.last)
        normed = target.norm(got.last)
        assert (normed - got.last).abs().max() > 0.1


def test_bfloat16_rounds_states_only(target: Target, tmp_path: Path) -> None:
    exact = make(target, tmp_path / "a")
    rounded = make(target, tmp_path / "b", dtype="bfloat16")
    for a, b in zip(exact, rounded, strict=True):
        assert b.features.dtype == b.last.dtype == torch.bfloat16
        assert torch.equal(a.features.bfloat16(), b.features)
        assert torch.equal(a.last.bfloat16(), b.last)
        # From the unrounded state: the same bits, and the token the target itself emits.
        taught = teachers(a.spans)
        assert torch.equal(a.logsumexp[taught], b.logsumexp[taught])
        assert torch.equal(a.argmax, b.argmax)
        # A teacher made from the rounded state stays a distribution to rounding.
        mass = (target.logits(b.last.float()) - b.logsumexp[:, None]).exp().sum(-1)
        assert (mass[taught] - 1).abs().max() < 0.05


def test_summary_in_pieces_and_ties(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    last = torch.randn(7, target.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = target.logits(last)
    for rows in (1, 3, 7, 100):
        monkeypatch.setattr(states_module, "LOGITS_AT_ONCE", rows * target.vocab_size)
        sums, tokens = states_module.summarise(target, last)
        torch.testing.assert_close(sums, logits.logsumexp(-1))
        assert torch.equal(tokens, logits.argmax(-1))
    # All logits of a zero state are equal: the lowest id wins.
    assert states_module.summarise(target, last * 0)[1].tolist() == [0] * 7


def test_counts_what_it_drops(target: Target, tmp_path: Path) -> None:
    spans = (0, 0, 1, 1, 1, 0, 2, 2, 2, 2)
    samples = [
        Sample("whole", tuple(range(10)), spans),
        Sample("long", tuple(range(30)), spans * 3),
        Sample("silent", (1, 2, 3, 4), (0, 0, 0, 0)),
        Sample("one token", (1, 2, 3, 4), (0, 0, 1, 0)),
        Sample("late answer", tuple(range(20)), (0,) * 12 + (1,) * 8),
    ]
    monitor = Lines()
    store = make(target, tmp_path / "cut", samples, monitor, max_length=12)
    manifest = store.manifest
    assert store.ids == ["whole", "long"]
    assert store.lengths == [10, 12]
    assert manifest.truncated == 1
    assert manifest.dropped.model_dump() == {"overlong": 0, "nothing_to_predict": 3}
    assert manifest.counts.model_dump() == {"records": 2, "tokens": 22, "loss_tokens": 14}
    assert any("1 of 5 samples truncated to 12" in line for line in monitor.lines)
    (dropped,) = (line for line in monitor.lines if "3 of 5 samples dropped" in line)
    assert "1 of them after a cut to 12 tokens" in dropped
    with pytest.raises(UserError, match="1 longer than 12 tokens, 0 without an answer"):
        make(target, tmp_path / "none", samples[-1:], max_length=12)
    assert monitor.steps[-1] == (22, 22)

    monitor = Lines()
    store = make(target, tmp_path / "skip", samples, monitor, max_length=12, overlong="skip")
    assert store.ids == ["whole"]
    assert store.manifest.truncated == 0
    assert store.manifest.dropped.model_dump() == {"overlong": 2, "nothing_to_predict": 2}
    assert any("2 of 5 samples skipped" in line for line in monitor.lines)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], ["found none"]),
        ([Sample("mute", (1, 2, 3), (0, 0, 0))], ["1 without an answer"]),
        ([Sample("alien", (1, 2, 289), (0, 1, 1))], ["alien", "289"]),
        ([Sample("negative", (1, -2, 3), (0, 1, 1))], ["negative", "-2"]),
        ([Sample("ragged", (1, 2, 3), (0, 1))], ["ragged", "found 2"]),
        ([Sample("twin", (1, 2, 3), (0, 1, 1))] * 2, ["twin", "twice"]),
    ],
)
def test_refuses_bad_samples(
    target: Target, tmp_path: Path, samples: list[Sample], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        make(target, tmp_path / "store", samples)
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "store").exists()


def test_refuses_states_that_are_not_finite(target: Target, tmp_path: Path) -> None:
    samples = make_samples(4)

    assert target.why_padded is None  # asked before anything is poisoned

    def poison(_module: object, args: tuple) -> tuple:
        states = args[0].clone()
        order = sorted(range(4), key=lambda i: -len(samples[i].token_ids))
        before = order[: order.index(2)]
        states[0, sum(len(samples[i].token_ids) for i in before) + 5, 3] = float("nan")
        return (states, *args[1:])

    hook = target.layers[2].register_forward_pre_hook(poison)
    try:
        with pytest.raises(UserError, match="boundary 2, position 5") as caught:
            make(target, tmp_path, samples, shard_tokens=1000, batch_tokens=1000)
    finally:
        hook.remove()
    assert "'c2'" in str(caught.value)
    with pytest.raises(UserError, match="same command again"):
        Store.open(tmp_path)


def test_refuses_too_little_disk(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(record_module.shutil, "disk_usage", lambda _: usage(10_000))
    with pytest.raises(UserError, match="free disk"):
        make(target, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_second_recorder(target: Target, tmp_path: Path) -> None:
    class Nested(Monitor):
        def progress(self, *_: object) -> None:
            with pytest.raises(UserError, match="another process"):
                make(target, tmp_path)

    make(target, tmp_path, monitor=Nested())


def test_no_sample_is_longer_than_the_target_has_positions(target: Target, tmp_path: Path) -> None:
    samples = [*make_samples(4), Sample("long", (1,) * 70, (0,) * 10 + (1,) * 60)]
    monitor = Lines()
    make(target, tmp_path / "clipped", samples, monitor, max_length=4096)
    said = "record.max_length: 4,096 cut to 64, the positions that the target has"
    assert monitor.lines.count(said) == 1
    monitor = Lines()
    for name, limit in (("exact", 64), ("left out", None)):
        store = make(target, tmp_path / name, samples, monitor, max_length=limit)
        assert max(store.lengths) == 64
        assert contents(tmp_path / name) == contents(tmp_path / "clipped")
    assert not any("record.max_length" in line for line in monitor.lines)


def test_a_restart_with_something_else_is_refused(target: Target, tmp_path: Path) -> None:
    samples = make_samples()
    make(target, tmp_path, samples)
    before = contents(tmp_path)
    with pytest.raises(UserError, match="shard_tokens: expected 50, found 100"):
        make(target, tmp_path, samples, shard_tokens=50)
    with pytest.raises(UserError, match="dtype: expected bfloat16, found float32"):
        make(target, tmp_path, samples, dtype="bfloat16")
    with pytest.raises(UserError, match="expected 11 records, found 12"):
        make(target, tmp_path, samples[:-1])
    with pytest.raises(UserError, match="record 0: expected 'c1'"):
        make(target, tmp_path, samples[1:] + samples[:1])
    changed = [*samples[:-1], replace(samples[-1], temperature=0.7)]
    with pytest.raises(UserError, match="the same ids and lengths, but other"):
        make(target, tmp_path, changed)
    assert contents(tmp_path) == before


def test_a_lost_or_cut_shard_is_recorded_again(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path)
    before = contents(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    os.truncate(tmp_path / "shard-00002.safetensors", 100)
    with pytest.raises(UserError, match="shard-00001"):
        Store.open(tmp_path)
    monitor = Lines()
    make(target, tmp_path, monitor=monitor)
    assert contents(tmp_path) == before
    assert sum("recorded again" in line for line in monitor.lines) == 2


@contextmanager
def shapes_of_passes(target: Target) -> Iterator[list[tuple[int, ...]]]:
    shapes: list[tuple[int, ...]] = []
    embeddings = target.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    try:
        yield shapes
    finally:
        hook.remove()


def test_passes_hold_conversations_side_by_side_or_in_padded_rows(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target.why_padded is None
    with shapes_of_passes(target) as shapes:
        store = make(target, tmp_path / "row")
    assert store.manifest.settings["side_by_side"] is True
    assert {rows for rows, _ in shapes} == {1}
    assert sum(tokens for _, tokens in shapes) == store.manifest.counts.tokens
    monkeypatch.setitem(target.__dict__, "why_padded", "mixes them")
    monitor = Lines()
    with shapes_of_passes(target) as shapes:
        padded = make(target, tmp_path / "rows", monitor=monitor)
    assert max(rows for rows, _ in shapes) > 1
    assert "a pass is of right-padded rows: the target mixes them" in monitor.lines
    assert "side_by_side" not in padded.manifest.settings
    for one, other in zip(store, padded, strict=True):
        torch.testing.assert_close(one.features, other.features, atol=1e-5, rtol=1e-5)


def test_who_goes_on_follows_the_plan_that_is_there(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store from before passes had conversations side by side, and the other way round."""
    assert target.why_padded is None
    for name, reason in (("rows", "mixes them"), ("row", None)):
        monkeypatch.setitem(target.__dict__, "why_padded", reason)
        make(target, tmp_path / name)
    before = contents(tmp_path / "rows")
    (tmp_path / "rows/shard-00001.safetensors").unlink()
    with shapes_of_passes(target) as shapes:
        make(target, tmp_path / "rows")
    assert contents(tmp_path / "rows") == before
    assert max(rows for rows, _ in shapes) > 1

    monkeypatch.setitem(target.__dict__, "why_padded", "mixes them")
    make(target, tmp_path / "row")  # nothing to do
    (tmp_path / "row/shard-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"conversations side by side.*mixes them"):
        make(target, tmp_path / "row")


def test_a_complete_store_is_left_alone(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    (tmp_path / "shard-00000.json").write_text("{}")  # killed while it removed the receipts
    monitor = Lines()
    make(target, tmp_path, monitor=monitor)
    assert monitor.steps == []
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_receipts_of_another_plan_vouch_for_nothing(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path / "clean", make_samples(seed=1))
    make(target, tmp_path / "reused", make_samples(seed=0))
    for shard in sorted((tmp_path / "reused").glob("*.safetensors")):
        receipt = {"plan": "other", "bytes": shard.stat().st_size, "sha256": "0"}
        shard.with_suffix(".json").write_text(json.dumps(receipt))
    (tmp_path / "reused/manifest.json").unlink()
    make(target, tmp_path / "reused", make_samples(seed=1)).verify()
    clean = contents(tmp_path / "clean")
    assert {k: v for k, v in contents(tmp_path / "reused").items() if k in clean} == clean


def test_the_manifest_names_no_place_or_time(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path / "a")
    make(target, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    text = (tmp_path / "a/manifest.json").read_text()
    assert str(tmp_path) not in text
    assert str(target.folder.parent) not in text


# A process that loads the target once and forks a recorder for every point of death. Forked, not
# spawned: importing transformers thirty times would take minutes.
_MASSACRE = """
import json, os, shutil, signal, sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from tests.data import recordings as t
from draftlab.progress import Monitor
from draftlab.store import shard_writer as module
from draftlab.target_model.model import TargetSettings, load_target

work, target = Path({work!r}), load_target(TargetSettings(path={target!r}, device="cpu"))

def recorder(folder, die_at):
    '''Forks a recorder that SIGKILLs itself at its die_at-th step towards the disk.'''
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count, lock = 0, threading.Lock()
    def counted(original, halve=None):
        def step(*args, **kwargs):
            nonlocal count
            with lock:  # shards are written by threads
                count += 1
                mine = count
            if mine == die_at:
                if halve:
                    halve(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return step
    def half_a_shard(tensors, path):
        module_save(tensors, path)
        os.truncate(path, os.path.getsize(path) // 2)
    module_save = module.save_file
    module.save_file = counted(module_save, half_a_shard)
    os.fsync, os.replace, os.unlink = map(counted, (os.fsync, os.replace, os.unlink))
    try:
        t.make(target, folder)
        print("steps", count, file=sys.stderr)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)

expected, killed = None, 0
assert recorder(work / "whole", 0) == 0
expected = t.contents(work / "whole")
states = set()
for die_at in range(1, 200):
    folder = work / f"at{{die_at}}"
    status = recorder(folder, die_at)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    killed += 1
    states.add(tuple(sorted(p.name.split(".safetensors.")[0] for p in folder.iterdir())))
    # Killed again while it resumes, then left alone.
    recorder(folder, 4)
    assert recorder(folder, 0) == 0
    found = t.contents(folder)
    assert found == expected, (die_at, set(expected.items()) ^ set(found.items()))
    shutil.rmtree(folder)
print(json.dumps({{"killed": killed, "states": len(states), "files": sorted(expected)}}))
"""


def test_killed_at_every_step_resumes_to_the_same_bytes(
    target_folder: Path, tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    script = _MASSACRE.format(
        root=str(root),
        work=str(tmp_path),
        target=str(target_folder),
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    shards = [name for name in result["files"] if name.endswith(".safetensors")]
    assert result["files"] == ["manifest.json", *shards]
    # For each shard: half its file, fsync, replace, fsync of the folder, the same for its receipt,
    # unlink; and the manifest twice.
    assert len(shards) > 2
    assert result["killed"] >= 6 + 8 * len(shards)
    assert result["states"] > 3 * len(shards)


class _Slow(Monitor):
    def progress(self, *_: object) -> None:
        time.sleep(0.05)


def test_killed_from_outside_while_recording(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path / "whole")
    folder = tmp_path / "killed"
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            make(target, folder, monitor=_Slow())
        finally:
            os._exit(0)
    deadline = time.monotonic() + 30
    while not (folder / "shard-00001.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not json.loads((folder / "manifest.json").read_text())["complete"]
    with pytest.raises(UserError, match="interrupted"):
        Store.open(folder)
    first = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    monitor = Lines()
    make(target, folder, monitor=monitor)
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == first
    assert any("of them there already" in line for line in monitor.lines)
    assert contents(folder) == contents(tmp_path / "whole")
    shutil.rmtree(folder)
