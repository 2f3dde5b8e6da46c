"""Recording: the numbers in a record, the counts of the plan, and bytes that survive a kill."""

from __future__ import annotations

import json
import os
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
from draftlab.store import extraction, receipts
from draftlab.store import record as record_module
from draftlab.store.masks import teacher_mask
from draftlab.store.record import RecordSettings, record
from draftlab.store.samples import Sample
from draftlab.store.store import Store
from draftlab.target_model.model import Target
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.recordings import (
    BOUNDARIES,
    exit_codes,
    file_hashes,
    fork_recorder,
    identity_of,
    make_samples,
    record_store,
)


def test_records_equal_transformers_states_of_each_sequence(target: Target, tmp_path: Path) -> None:
    samples = make_samples()
    store = record_store(target, tmp_path, samples)
    assert len(store.manifest.shards) > 2
    assert any(len(batch) > 2 for shard in store.manifest.shards for batch in shard.batches)
    pre_norm: list[torch.Tensor] = []
    hook = target.norm.register_forward_pre_hook(lambda _, args: pre_norm.append(args[0]))
    for sample, stored in zip(samples, store, strict=True):
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            out = target.model(input_ids=ids, output_hidden_states=True)
        expected = torch.cat([out.hidden_states[b][0] for b in BOUNDARIES], -1)
        torch.testing.assert_close(stored.features, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(stored.last, pre_norm[-1][0], atol=1e-5, rtol=1e-5)
        logits = out.logits[0].double()
        taught = teacher_mask(stored.spans)
        assert 0 < int(taught.sum()) < len(taught)
        assert bool(stored.logsumexp[~taught].isnan().all())
        assert stored.argmax[~taught].unique().tolist() == [-1]
        torch.testing.assert_close(
            stored.logsumexp[taught].double(), logits.logsumexp(-1)[taught], atol=1e-4, rtol=0
        )
        # Another argmax is allowed only where two logits are equal to rounding.
        chosen = logits[taught].gather(1, stored.argmax[taught, None]).squeeze(1)
        torch.testing.assert_close(chosen, logits[taught].amax(-1), atol=1e-5, rtol=0)
        assert tuple(stored.tokens.tolist()) == sample.token_ids
        assert tuple(stored.spans.tolist()) == sample.spans
        assert (stored.id, stored.temperature) == (sample.id, sample.temperature)
    hook.remove()


def test_boundary_n_is_the_last_state_before_the_norm(target: Target, tmp_path: Path) -> None:
    identity = identity_of(target, boundaries=(1, target.num_layers))
    settings = RecordSettings(dtype="float32", boundaries=(1, target.num_layers))
    store = record(target, make_samples(3), tmp_path, settings, identity, monitor=Monitor())
    for stored in store:
        assert torch.equal(stored.features[:, target.hidden_size :], stored.last)
        normed = target.norm(stored.last)
        assert (normed - stored.last).abs().max() > 0.1


def test_bfloat16_rounds_states_only(target: Target, tmp_path: Path) -> None:
    exact = record_store(target, tmp_path / "a")
    rounded = record_store(target, tmp_path / "b", dtype="bfloat16")
    for a, b in zip(exact, rounded, strict=True):
        assert b.features.dtype == b.last.dtype == torch.bfloat16
        assert torch.equal(a.features.bfloat16(), b.features)
        assert torch.equal(a.last.bfloat16(), b.last)
        # From the unrounded state: the same bits, and the token that the target generates.
        taught = teacher_mask(a.spans)
        assert torch.equal(a.logsumexp[taught], b.logsumexp[taught])
        assert torch.equal(a.argmax, b.argmax)
        # A teacher made from the rounded state is a distribution to rounding.
        mass = (target.logits(b.last.float()) - b.logsumexp[:, None]).exp().sum(-1)
        assert (mass[taught] - 1).abs().max() < 0.05


def test_logits_are_summarised_in_chunks_and_ties_are_the_lowest_id(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = torch.randn(7, target.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = target.logits(last)
    for rows in (1, 3, 7, 100):
        monkeypatch.setattr(extraction, "MAX_LOGITS", rows * target.vocab_size)
        sums, tokens = extraction.summarise_logits(target, last)
        torch.testing.assert_close(sums, logits.logsumexp(-1))
        assert torch.equal(tokens, logits.argmax(-1))
    # All logits of a zero state are equal.
    assert extraction.summarise_logits(target, last * 0)[1].tolist() == [0] * 7


def test_dropped_and_truncated_samples_are_counted(target: Target, tmp_path: Path) -> None:
    spans = (0, 0, 1, 1, 1, 0, 2, 2, 2, 2)
    samples = [
        Sample("whole", tuple(range(10)), spans),
        Sample("long", tuple(range(30)), spans * 3),
        Sample("silent", (1, 2, 3, 4), (0, 0, 0, 0)),
        Sample("one token", (1, 2, 3, 4), (0, 0, 1, 0)),
        Sample("late answer", tuple(range(20)), (0,) * 12 + (1,) * 8),
    ]
    monitor = RecordingMonitor()
    store = record_store(target, tmp_path / "cut", samples, monitor, max_length=12)
    manifest = store.manifest
    assert store.ids == ["whole", "long"]
    assert store.lengths == [10, 12]
    assert manifest.truncated == 1
    assert manifest.dropped.model_dump() == {"overlong": 0, "nothing_to_predict": 3}
    assert manifest.counts.model_dump() == {"records": 2, "tokens": 22, "loss_tokens": 14}
    assert "1 of 5 samples truncated to 12" in monitor.text
    (line,) = (line for line in monitor.lines if "3 of 5 samples dropped" in line)
    assert "1 of them after truncation" in line
    assert monitor.last_progress[1:3] == (22, 22)
    with pytest.raises(UserError, match="1 longer than 12 tokens, 0 without an answer"):
        record_store(target, tmp_path / "none", samples[-1:], max_length=12)

    monitor = RecordingMonitor()
    skip = {"max_length": 12, "overlong": "skip"}
    store = record_store(target, tmp_path / "skip", samples, monitor, **skip)
    assert store.ids == ["whole"]
    assert store.manifest.truncated == 0
    assert store.manifest.dropped.model_dump() == {"overlong": 2, "nothing_to_predict": 2}
    assert "2 of 5 samples skipped" in monitor.text


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
def test_bad_samples_are_refused(
    target: Target, tmp_path: Path, samples: list[Sample], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        record_store(target, tmp_path / "store", samples)
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "store").exists()


def test_too_little_disk_is_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(record_module.shutil, "disk_usage", lambda _: usage(10_000))
    with pytest.raises(UserError, match="free disk"):
        record_store(target, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [receipts.LOCK]


def test_a_second_recorder_is_refused(target: Target, tmp_path: Path) -> None:
    class NestedRecorder(Monitor):
        def progress(self, *_: object) -> None:
            with pytest.raises(UserError, match="another process"):
                record_store(target, tmp_path)

    record_store(target, tmp_path, monitor=NestedRecorder())


def test_no_sample_is_longer_than_the_target_has_positions(target: Target, tmp_path: Path) -> None:
    samples = [*make_samples(4), Sample("long", (1,) * 70, (0,) * 10 + (1,) * 60)]
    hashes = []
    for limit, num_lines in ((4096, 1), (64, 0), (None, 0)):
        monitor, folder = RecordingMonitor(), tmp_path / str(limit)
        store = record_store(target, folder, samples, monitor, max_length=limit)
        assert max(store.lengths) == 64
        hashes.append(file_hashes(folder))
        lines = [line for line in monitor.lines if "record.max_length: 4,096 is cut to 64" in line]
        assert len(lines) == num_lines
    assert hashes[0] == hashes[1] == hashes[2]


def test_continuing_with_something_else_is_refused(target: Target, tmp_path: Path) -> None:
    samples = make_samples()
    record_store(target, tmp_path, samples)
    before = file_hashes(tmp_path)
    other_temperature = [*samples[:-1], replace(samples[-1], temperature=0.7)]
    for other_samples, settings, words in (
        (samples, {"shard_tokens": 50}, "shard_tokens: expected 50, found 100"),
        (samples, {"dtype": "bfloat16"}, "dtype: expected bfloat16, found float32"),
        (samples[:-1], {}, "expected 11 records, found 12"),
        (samples[1:] + samples[:1], {}, "record 0: expected 'c1'"),
        (other_temperature, {}, "the same ids and lengths, but other"),
    ):
        with pytest.raises(UserError, match=words):
            record_store(target, tmp_path, other_samples, **settings)
    assert file_hashes(tmp_path) == before


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_missing_and_truncated_shards_are_recorded_again(
    target: Target, tmp_path: Path, dtype: str
) -> None:
    record_store(target, tmp_path, dtype=dtype)
    before = file_hashes(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    os.truncate(tmp_path / "shard-00002.safetensors", 100)
    # A process was killed while it wrote the receipt of a good shard.
    (tmp_path / ".shard-00000.json.6285.tmp").write_text('{"plan"')
    with pytest.raises(UserError, match="shard-00001"):
        Store.open(tmp_path)
    monitor = RecordingMonitor()
    store = record_store(target, tmp_path, monitor=monitor, dtype=dtype)
    assert file_hashes(tmp_path) == before
    assert monitor.text.count("recorded again") == 2
    assert bool(store.manifest.shards[0].fp8_errors) == (dtype == "fp8")


@contextmanager
def recorded_shapes(target: Target) -> Iterator[list[tuple[int, ...]]]:
    """Yield a list to which the shape of each forward pass's token ids is appended."""
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
    assert target.padding_reason is None
    with recorded_shapes(target) as shapes:
        packed = record_store(target, tmp_path / "packed")
    assert packed.manifest.settings["side_by_side"] is True
    assert {rows for rows, _ in shapes} == {1}
    assert sum(tokens for _, tokens in shapes) == packed.manifest.counts.tokens
    monkeypatch.setitem(target.__dict__, "padding_reason", "mixes them")
    monitor = RecordingMonitor()
    with recorded_shapes(target) as shapes:
        padded = record_store(target, tmp_path / "padded", monitor=monitor)
    assert max(rows for rows, _ in shapes) > 1
    assert "right-padded rows: the target mixes them" in monitor.text
    assert "side_by_side" not in padded.manifest.settings
    for a, b in zip(packed, padded, strict=True):
        torch.testing.assert_close(a.features, b.features, atol=1e-5, rtol=1e-5)


def test_a_recording_is_continued_with_the_batches_of_its_plan(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padded plan, as of older stores, is followed; a packed one needs a target that packs."""
    assert target.padding_reason is None
    for name, reason in (("padded", "mixes them"), ("packed", None)):
        monkeypatch.setitem(target.__dict__, "padding_reason", reason)
        record_store(target, tmp_path / name)
    before = file_hashes(tmp_path / "padded")
    (tmp_path / "padded/shard-00001.safetensors").unlink()
    with recorded_shapes(target) as shapes:
        record_store(target, tmp_path / "padded")
    assert file_hashes(tmp_path / "padded") == before
    assert max(rows for rows, _ in shapes) > 1

    monkeypatch.setitem(target.__dict__, "padding_reason", "mixes them")
    record_store(target, tmp_path / "packed")  # complete: no pass is needed
    (tmp_path / "packed/shard-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"conversations side by side.*mixes them"):
        record_store(target, tmp_path / "packed")


def test_a_complete_store_is_not_touched(target: Target, tmp_path: Path) -> None:
    record_store(target, tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    (tmp_path / "shard-00000.json").write_text("{}")  # killed while it removed the receipts
    monitor = RecordingMonitor()
    record_store(target, tmp_path, monitor=monitor)
    assert monitor.last_progress == ()
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_receipts_of_another_plan_are_ignored(target: Target, tmp_path: Path) -> None:
    record_store(target, tmp_path / "clean", make_samples(seed=1))
    record_store(target, tmp_path / "reused", make_samples(seed=0))
    for shard in sorted((tmp_path / "reused").glob("*.safetensors")):
        receipt = {"plan": "other", "bytes": shard.stat().st_size, "sha256": "0"}
        shard.with_suffix(".json").write_text(json.dumps(receipt))
    (tmp_path / "reused/manifest.json").unlink()
    record_store(target, tmp_path / "reused", make_samples(seed=1)).verify()
    clean, reused = (file_hashes(tmp_path / name) for name in ("clean", "reused"))
    assert {name: reused[name] for name in clean} == clean


def test_the_manifest_has_no_path_or_time(
    target: Target, tmp_path: Path, expected_hashes: dict[str, str]
) -> None:
    record_store(target, tmp_path)
    assert file_hashes(tmp_path) == expected_hashes
    text = (tmp_path / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert str(target.folder.parent) not in text


# A process that loads the target once and forks a recorder for every step to be killed at. It does
# not spawn them, because importing transformers thirty times would take minutes.
_KILL_AT_EVERY_STEP = """
import json, os, shutil, signal, sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from tests.helpers.recordings import file_hashes, record_store
from draftlab.store import shard_writer
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings

work, target = Path({work!r}), load_target(TargetSettings(path={target!r}, device="cpu"))

def recorder_status(folder, kill_at):
    '''Fork a recorder that SIGKILLs itself at its kill_at-th step towards the disk.'''
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count, lock = 0, threading.Lock()
    def counted(original, before_kill=None):
        def step(*args, **kwargs):
            nonlocal count
            with lock:  # shards are written by threads
                count += 1
                number = count
            if number == kill_at:
                if before_kill:
                    before_kill(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return step
    write_shard = shard_writer.write_shard
    def write_half(tensors, path):
        write_shard(tensors, path)
        os.truncate(path, os.path.getsize(path) // 2)
    shard_writer.write_shard = counted(write_shard, write_half)
    os.fsync, os.replace, os.unlink = map(counted, (os.fsync, os.replace, os.unlink))
    try:
        record_store(target, folder)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)

assert recorder_status(work / "whole", 0) == 0
expected = file_hashes(work / "whole")
killed, states = 0, set()
for kill_at in range(1, 200):
    folder = work / f"at{{kill_at}}"
    status = recorder_status(folder, kill_at)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    killed += 1
    states.add(tuple(sorted(p.name.split(".safetensors.")[0] for p in folder.iterdir())))
    recorder_status(folder, 4)  # killed again while it resumes
    assert recorder_status(folder, 0) == 0
    hashes = file_hashes(folder)
    assert hashes == expected, (kill_at, set(expected.items()) ^ set(hashes.items()))
    shutil.rmtree(folder)
print(json.dumps({{"killed": killed, "states": len(states), "files": sorted(expected)}}))
"""


def test_killed_at_every_step_a_recording_resumes_to_the_same_bytes(
    target: Target, tmp_path: Path
) -> None:
    script = _KILL_AT_EVERY_STEP.format(
        root=str(Path(__file__).parents[2]), work=str(tmp_path), target=str(target.folder)
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=1800,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads(process.stdout.splitlines()[-1])
    shards = [name for name in result["files"] if name.endswith(".safetensors")]
    assert result["files"] == [receipts.LOCK, "manifest.json", *shards]
    # For each shard: half its file, fsync, replace, fsync of the folder, the same for its receipt,
    # unlink; and the manifest twice.
    assert len(shards) > 2
    assert result["killed"] >= 6 + 8 * len(shards)
    assert result["states"] > 3 * len(shards)


def test_killed_from_outside_it_keeps_committed_shards(
    target: Target, tmp_path: Path, expected_hashes: dict[str, str]
) -> None:
    child = fork_recorder(target, tmp_path, pause=0.05)
    deadline = time.monotonic() + 30
    while not (tmp_path / "shard-00001.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert exit_codes(child) == [-signal.SIGKILL]
    assert not json.loads((tmp_path / "manifest.json").read_text())["complete"]
    with pytest.raises(UserError, match="interrupted"):
        Store.open(tmp_path)
    written = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    monitor = RecordingMonitor()
    record_store(target, tmp_path, monitor=monitor)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == written
    assert "of them there already" in monitor.text
    assert file_hashes(tmp_path) == expected_hashes
