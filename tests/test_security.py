"""Files from elsewhere: no code of theirs runs, nothing outside of their folder is read."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftlab.doctor.diagnose import diagnose
from draftlab.doctor.settings import DoctorSettings
from draftlab.doctor.target_session import TargetSession
from draftlab.errors import UserError
from draftlab.export.importing import import_head
from draftlab.export.write import write_export
from draftlab.heads.folder import CONFIG, WEIGHTS, load_head
from draftlab.progress import Monitor
from draftlab.recipe.head_spec import target_config
from draftlab.run.resolve import reference_head
from draftlab.store.manifest import MANIFEST
from draftlab.store.merge import merge
from draftlab.store.receipts import Receipts
from draftlab.store.store import Store
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.parts import load_parts, read_tensor
from draftlab.target_model.settings import TargetSettings
from tests.helpers.table_target import record_table, samples_of_lengths
from tests.helpers.toys import toy_target_folder

EMBEDDED = resolve_target(TargetSettings())


class Marker:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    out = tmp_path / "speculators"
    return write_export(reference_head(), EMBEDDED, out, "speculators", target_name="embedded")


def session(target: Path | str = "embedded") -> TargetSession:
    return TargetSession(
        TargetSettings(path=str(target), device="cpu"), DoctorSettings(), Monitor()
    )


# Pickles


def test_the_marker_works(marker: Path) -> None:
    pickle.loads(pickle.dumps(Marker(marker)))
    assert marker.exists()


def test_pickled_weights_are_never_read(exported: Path, marker: Path, tmp_path: Path) -> None:
    (exported / WEIGHTS).unlink()
    (exported / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(UserError, match="pickled files can run code") as caught:
        import_head(exported, tmp_path / "head", target="embedded")
    assert "weights_only=True" in caught.value.do
    assert "pickled files can run code" in diagnose(exported, session()).verdict
    head = tmp_path / "own"
    shutil.copytree(reference_head(), head)
    (head / WEIGHTS).unlink()
    (head / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(UserError, match="expected the head's weights"):
        load_head(head, embeddings=None, dtype=torch.float32, device="cpu")
    assert not marker.exists()


def test_a_pickled_target_is_never_read(tmp_path: Path, marker: Path) -> None:
    target = toy_target_folder(tmp_path / "toy", layers=2)
    (target / WEIGHTS).unlink()
    (target / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(marker)))
    for read in (load_target, lambda settings: load_parts(resolve_target(settings))):
        with pytest.raises(UserError, match="safetensors"):
            read(TargetSettings(path=str(target), device="cpu"))
    assert not marker.exists()


def test_a_pickle_that_calls_itself_safetensors(
    exported: Path, marker: Path, tmp_path: Path
) -> None:
    (exported / WEIGHTS).write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(UserError, match="cannot be read"):
        import_head(exported, tmp_path / "head", target="embedded")
    assert not diagnose(exported, session()).healthy
    assert not marker.exists()


# Paths


@pytest.mark.parametrize("name", ["../{}", "{folder}/{}", "sub/../../{}", "sub/{}", "weights.bin"])
def test_an_index_leads_nowhere_else(exported: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret.safetensors"
    shutil.move(exported / WEIGHTS, secret)
    (exported / "sub").mkdir()
    place = name.format(secret.name, folder=tmp_path)
    index = {"weight_map": dict.fromkeys(load_file(secret), place)}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="beside the index"):
        import_head(exported, tmp_path / "head", target="embedded")
    assert "beside the index" in diagnose(exported, session()).verdict


def test_a_targets_index_leads_nowhere_else(tmp_path: Path) -> None:
    target = toy_target_folder(tmp_path / "toy", layers=2)
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="beside the index"):
        read_tensor(target, "model.norm.weight")


# Stores

SHARD = "shard-00000.safetensors"
SAMPLES = samples_of_lengths([12, 9, 25])


READERS_OF_STORES: list[Callable[[Path], object]] = [
    lambda folder: Store.open(folder),
    lambda folder: merge([Store.open(folder)], folder.parent / "merged", Monitor()),
    lambda folder: Receipts.from_published(folder),
    lambda folder: record_table(folder, SAMPLES),
]


@pytest.mark.parametrize("read", READERS_OF_STORES)
def test_a_manifest_names_no_files(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """A shard's file follows from its number, so that no manifest leads out of its folder."""
    record_table(tmp_path / "store", SAMPLES)
    manifest = tmp_path / "store" / MANIFEST
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(fields | {"shards": [{"file": f"../victim/{SHARD}"}]}))
    with pytest.raises(UserError, match="shards"):
        read(tmp_path / "store")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("read", [READERS_OF_STORES[0], READERS_OF_STORES[-1]])
def test_a_link_out_of_a_store_is_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    store, secret = tmp_path / "store", tmp_path / "secret.safetensors"
    record_table(store, SAMPLES)
    shutil.move(store / SHARD, secret)
    (store / SHARD).symlink_to(secret)
    with pytest.raises(UserError, match="leads out of it") as caught:
        read(store)
    assert caught.value.where.endswith(SHARD)
    (tmp_path / "moved").symlink_to(store)  # the store itself may be a link
    shutil.move(secret, store / "other.safetensors")
    (store / SHARD).unlink()
    (store / SHARD).symlink_to("other.safetensors")
    assert len(Store.open(tmp_path / "moved")) == 3


def test_recording_writes_through_no_link(tmp_path: Path) -> None:
    store, victim = tmp_path / "store", tmp_path / "victim"
    record_table(store, SAMPLES)
    victim.write_text("unchanged")
    (store / SHARD).unlink()
    for name in (SHARD, "shard-00000.json", "shard-00001.safetensors", "shard-00001.json"):
        (store / f".{name}.tmp").symlink_to(victim)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    (store / ".shard-link").symlink_to(tmp_path / "folder")
    record_table(store, SAMPLES).verify()
    assert victim.read_text() == "unchanged"
    assert (tmp_path / "folder" / "kept").exists()
    assert not (store / ".shard-link").is_symlink()


# Configs


def test_unknown_keys_are_refused(exported: Path, tmp_path: Path) -> None:
    head = tmp_path / "own"
    shutil.copytree(reference_head(), head)
    fields = json.loads((head / CONFIG).read_text())
    (head / CONFIG).write_text(json.dumps(fields | {"scale": 2.0}))
    with pytest.raises(UserError, match="scale"):
        load_head(head, embeddings=None, dtype=torch.float32, device="cpu")
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | {"logit_bias": [1.0]}))
    with pytest.raises(UserError, match="logit_bias"):
        import_head(exported, tmp_path / "head", target="embedded")


# Code


@pytest.fixture
def coded(tmp_path: Path, marker: Path) -> Path:
    """A target of a class that ships with it; importing that leaves the marker."""
    target = toy_target_folder(tmp_path / "coded", layers=2)
    config = json.loads((target / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"},
    }
    (target / "config.json").write_text(json.dumps(config))
    tokens = json.loads((target / "tokenizer_config.json").read_text())
    tokens |= {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["mine.T", "mine.T"]}}
    (target / "tokenizer_config.json").write_text(json.dumps(tokens))
    (target / "mine.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from transformers import PretrainedConfig\n"
        "class C(PretrainedConfig):\n    model_type = 'mine'\n"
    )
    return target


READERS: list[Callable[[TargetSettings, Path], object]] = [
    lambda settings, _: load_target(settings),
    lambda settings, _: load_tokenizer(settings),
    lambda settings, _: target_config(settings),
    lambda settings, head: import_head(head, head.parent / "head", target=settings),
    lambda settings, head: diagnose(head, session(settings.path)),
]


@pytest.mark.parametrize("read", READERS)
def test_code_of_a_target_runs_only_when_asked(
    read: Callable[[TargetSettings, Path], object], coded: Path, exported: Path, marker: Path
) -> None:
    with pytest.raises(UserError):
        read(TargetSettings(path=str(coded), device="cpu"), exported)
    assert not marker.exists()


def test_code_of_a_target_runs_when_asked(coded: Path, marker: Path) -> None:
    settings = TargetSettings(path=str(coded), device="cpu", trust_remote_code=True)
    assert type(target_config(settings)).__name__ == "C"
    assert marker.exists()
