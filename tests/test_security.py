"""Files from elsewhere: no code of theirs runs, nothing outside their folder is read."""

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
from draftlab.export import write_export
from draftlab.export.importing import import_head
from draftlab.heads.folder import CONFIG, WEIGHTS, load_head
from draftlab.pipeline.head_spec import target_config
from draftlab.pipeline.resolve import reference_head
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.parts import load_parts, read_tensor
from draftlab.target_model.settings import TargetSettings
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
    with pytest.raises(UserError, match="pickled files can run code"):
        import_head(exported, tmp_path / "head", target="embedded")
    diagnosis = diagnose(exported, session())
    assert "pickled files can run code" in diagnosis.verdict
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


@pytest.mark.parametrize("name", ["../{}", "{}", "sub/../../{}"])
def test_an_index_leads_nowhere_else(exported: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret.safetensors"
    shutil.move(exported / WEIGHTS, secret)
    (exported / "sub").mkdir()
    index = {"weight_map": dict.fromkeys(load_file(secret), name.format(secret.name))}
    if name == "{}":
        index["weight_map"] = dict.fromkeys(load_file(secret), str(secret))
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
