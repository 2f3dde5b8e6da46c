"""A store whose records are made on demand gives what a recording stores."""

from __future__ import annotations

import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.online import OnlineStore
from draftlab.store.record import RecordSettings, planned
from draftlab.store.store import Record, Sample
from draftlab.target_model.model import Target, TargetSettings, load_target
from draftlab.text.draft_vocabulary import build_draft_vocabulary
from tests.helpers.recordings import identity_of, make, make_samples
from tests.helpers.small_run import contents, draftlab, new_workshop
from tests.helpers.toys import toy_target_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    toy_target_folder(folder, layers=4, hidden=32, max_length=64)
    return load_target(TargetSettings(path=str(folder), device="cpu"))


def online(target: Target, samples: list[Sample], **changes: object) -> OnlineStore:
    settings = RecordSettings(**({"dtype": "float32", "batch_tokens": 96} | changes))
    plan, kept = planned(
        target, samples, settings, identity_of(target, settings.dtype), monitor=Monitor()
    )
    return OnlineStore(target, kept, plan)


def same(found: Record, expected: Record, **tolerance: float) -> None:
    for field in fields(Record):
        one, two = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(two, torch.Tensor):
            assert one.dtype == two.dtype, field.name
            torch.testing.assert_close(
                one, two, equal_nan=True, msg=field.name, **{"rtol": 0, "atol": 0} | tolerance
            )
        else:
            assert one == two, field.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_the_bits_are_those_of_a_recording(dtype: str, target: Target, tmp_path: Path) -> None:
    # A pass of its own for each sample, here and there.
    settings = {"dtype": dtype, "batch_tokens": 1, "max_length": 30}
    stored, made = make(target, tmp_path, **settings), online(target, make_samples(), **settings)
    assert (made.ids, made.lengths) == (stored.ids, stored.lengths)
    assert max(made.lengths) == 30
    for index in [3, 0, 11]:
        same(made[index], stored[index])
        same(made.view(index), stored.view(index))
        for one, two in zip(
            made.tokens_and_spans(index), stored.tokens_and_spans(index), strict=True
        ):
            assert torch.equal(one, two)
    words = [build_draft_vocabulary(s, 50, (), (), target.vocab_size) for s in (made, stored)]
    assert torch.equal(words[0].target_ids, words[1].target_ids)


def test_records_asked_for_together_share_passes(target: Target, tmp_path: Path) -> None:
    stored, made = make(target, tmp_path), online(target, make_samples())
    passes: list[tuple[int, ...]] = []
    hook = target.layers[0].register_forward_pre_hook(
        lambda _, args: passes.append(tuple(args[0].shape[:2]))
    )
    wanted = [7, 2, 9, 4, 0]
    found = made.views(wanted)
    hook.remove()
    assert 1 < len(passes) < len(wanted)
    assert all(rows * width <= 96 for rows, width in passes)
    for index, record in zip(wanted, found, strict=True):
        same(record, stored.view(index), rtol=1e-5, atol=1e-5)


def test_threads_do_not_see_each_others_passes(target: Target) -> None:
    made = online(target, make_samples(), batch_tokens=1)
    expected = made.views(range(12))
    found: dict[int, list[Record]] = {}

    def read(number: int) -> None:
        found[number] = made.views([(number + i) % 12 for i in range(12)])

    # A pause in the middle of each pass, in which another thread would begin its own.
    hook = target.layers[1].register_forward_pre_hook(lambda *_: time.sleep(1e-3))
    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hook.remove()
    assert len(found) == 4
    for number, records in found.items():
        for i, record in enumerate(records):
            same(record, expected[(number + i) % 12])


def test_states_that_are_not_finite_are_refused_or_taught_nothing(target: Target) -> None:
    samples = make_samples(2)

    def poison(_module: object, args: tuple) -> tuple:
        states = args[0].clone()
        states[0, 5, 3] = float("nan")
        return (states, *args[1:])

    hook = target.layers[2].register_forward_pre_hook(poison)
    try:
        with pytest.raises(UserError, match="boundary 2, position 5"):
            online(target, samples).view(1)
        record = online(target, samples, not_finite="skip").view(1)
    finally:
        hook.remove()
    assert not record.spans.any()
    assert bool(record.features.isfinite().all())


def test_training_online_ends_with_the_bits_of_training_from_a_store(tmp_path: Path) -> None:
    workshop = new_workshop(tmp_path)
    settings = ("record.batch_tokens=1", "record.dtype=float32", "train.validate_every=3")
    runs = {}
    for name, way in {"stored": "false", "online": "true"}.items():
        done = draftlab(
            workshop, "train", "small.yaml", f"name={name}", f"record.online={way}", *settings
        )
        assert done.exit_code == 0, done.output
        runs[name] = contents(workshop / "runs" / name)
    weights = Path("head/model.safetensors")
    assert runs["online"][str(weights)] == runs["stored"][str(weights)]
    assert {name for name in runs["online"] if name.startswith("store/")} == {"store/manifest.json"}
    assert len([name for name in runs["stored"] if name.startswith("store/")]) > 1
    again = draftlab(
        workshop, "train", "small.yaml", "name=online", "record.online=true", *settings
    )
    assert again.exit_code == 0
    assert "store: there" in again.output
    assert contents(workshop / "runs" / "online") == runs["online"]
    other = draftlab(workshop, "record", "small.yaml", "name=online", *settings)
    assert other.exit_code == 2
    assert "record.online: True in the run, False now" in other.output


def test_what_holds_no_states_says_so(tmp_path: Path) -> None:
    workshop = new_workshop(tmp_path)
    done = draftlab(workshop, "record", "small.yaml", "record.online=true")
    assert done.exit_code == 0, done.output
    assert "nothing is stored" in done.output
    looked = draftlab(workshop, "inspect", "runs/small/store")
    assert looked.exit_code == 2
    assert "this store holds no states" in looked.output
