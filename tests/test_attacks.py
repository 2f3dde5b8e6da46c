"""A table of attacks: a stranger's head, run, store or target.

Each is refused in a full sentence (or does no harm), no code of it runs, nothing outside of its
folder is read or written, and no secret is in a message. Recipes are attacked in
tests/recipe/test_recipe.py, templates in tests/text/test_template_limits.py, and a run's trust in
tests/run/test_resolve.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftlab.errors import UserError
from draftlab.export.importing import import_head
from draftlab.heads.folder import CONFIG, WEIGHTS, load_head, stored_shapes
from draftlab.progress import Monitor
from draftlab.recipe.head_spec import target_config
from draftlab.run.resolve import reference_head
from draftlab.store.manifest import MANIFEST
from draftlab.store.merge import merge
from draftlab.store.resume import Receipts
from draftlab.store.store import Store
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.parts import load_parts, read_tensor
from draftlab.target_model.settings import TargetSettings
from tests.helpers.small_run import draftlab
from tests.helpers.table_target import record_table, samples_of_lengths
from tests.helpers.toys import toy_target_folder

SECRET = "sk-not-to-be-seen"
SHARD = "shard-00000.safetensors"
SAMPLES = samples_of_lengths([12, 9, 25])


class Scene:
    """A stranger's folder, and what it must not reach.

    Attributes:
        own: the stranger's folder.
        canary: a file that code of the stranger would write.
        outside: a folder that must not change, with a secret in it.
    """

    def __init__(self, folder: Path) -> None:
        self.own, self.canary, self.outside = folder / "own", folder / "canary", folder / "outside"
        self.own.mkdir()
        self.outside.mkdir()
        (self.outside / "secret.txt").write_text(SECRET)
        (self.outside / f".mine.{2**30}.tmp").write_text("")  # as of a process that was killed
        save_file({"model.norm.weight": torch.ones(3)}, self.outside / "secret.safetensors")

    def pickled(self) -> bytes:
        return pickle.dumps(_Runs(self.canary))

    def head(self, **fields: Any) -> Path:
        """Return a copy of the reference head with other fields in draftlab.json."""
        shutil.copytree(reference_head(), self.own, dirs_exist_ok=True)
        known = json.loads((self.own / CONFIG).read_text())
        (self.own / CONFIG).write_text(json.dumps(known | fields))
        return self.own

    def target(self, **fields: Any) -> TargetSettings:
        folder = toy_target_folder(self.own / "toy", layers=2)
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(known | fields))
        return TargetSettings(path=str(folder), device="cpu")

    def coded_target(self) -> TargetSettings:
        """Return a target whose classes ship with it; importing them writes the canary."""
        settings = self.target(
            model_type="mine", auto_map={"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
        )
        tokens = Path(settings.path) / "tokenizer_config.json"
        known = json.loads(tokens.read_text())
        known |= {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["mine.T", "mine.T"]}}
        tokens.write_text(json.dumps(known))
        (Path(settings.path) / "mine.py").write_text(
            f"import pathlib\npathlib.Path({str(self.canary)!r}).touch()\n"
            "from transformers import PretrainedConfig\n"
            "class C(PretrainedConfig):\n    model_type = 'mine'\n"
        )
        return settings

    def run(self) -> Path:
        """Return a run folder with a head and a target that has code."""
        run, target = self.own / "run", self.coded_target().path
        shutil.copytree(reference_head(), run / "head")
        (run / "stages").mkdir()
        (run / "recipe.yaml").write_text(f"name: run\ntarget: {{path: {target}}}\n")
        return run

    def store(self) -> Path:
        record_table(self.own / "store", SAMPLES)
        return self.own / "store"

    def secrets(self) -> dict[str, tuple[bytes, int]]:
        """Return bytes and number of links of what lies outside."""
        files = [path for path in self.outside.rglob("*") if path.is_file()]
        return {str(path): (path.read_bytes(), path.stat().st_nlink) for path in files}


class _Runs:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def load(folder: Path) -> object:
    return load_head(folder, dtype=torch.float32, device="cpu")


# Heads


def pickled_weights(scene: Scene) -> object:
    head = scene.head()
    (head / WEIGHTS).write_bytes(scene.pickled())
    return load(head)


def pickled_bin(scene: Scene, layout: str = "") -> object:
    head = scene.head()
    (head / WEIGHTS).unlink()
    (head / "pytorch_model.bin").write_bytes(scene.pickled())
    if layout == "own":
        return load(head)
    (head / CONFIG).unlink()
    return import_head(head, scene.own / "new", target="embedded")


def index_outside(place: str) -> Callable[[Scene], object]:
    """Return the attack of a head whose index names a file; `{}` is the folder outside."""

    def attack(scene: Scene) -> object:
        head = scene.head()
        names = dict.fromkeys(load_file(head / WEIGHTS), place.format(scene.outside))
        (head / "sub").mkdir()
        (head / WEIGHTS).unlink()
        (head / CONFIG).unlink()
        (head / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))
        return import_head(head, scene.own / "new", target="embedded")

    return attack


def weights_are_a_pipe(scene: Scene) -> object:
    head = scene.head()
    (head / WEIGHTS).unlink()
    os.mkfifo(head / WEIGHTS)
    return stored_shapes(head)


def weights_claim_terabytes(scene: Scene) -> object:
    head = scene.head()
    (head / WEIGHTS).write_bytes((2**40).to_bytes(8, "little") + b"{}")
    return load(head)


def config_is_a_device(scene: Scene) -> object:
    head = scene.head()
    (head / CONFIG).unlink()
    (head / "config.json").unlink()
    (head / CONFIG).symlink_to("/dev/zero")
    return load(head)


def head_names_code(scene: Scene) -> object:
    """A head in another layout names the target whose code the user trusts."""
    target = scene.coded_target().path
    typed(scene, "export", "--head", "reference", "--to", "speculators", "--out", "own/foreign")
    config = scene.own / "foreign/config.json"
    fields = json.loads(config.read_text())
    fields["speculators_config"]["verifier"]["name_or_path"] = target
    config.write_text(json.dumps(fields))
    return typed(scene, "import", "own/foreign", "--to", "own/new", "--trust-remote-code")


def imported_for(scene: Scene, target: TargetSettings) -> object:
    typed(scene, "export", "--head", "reference", "--to", "speculators", "--out", "own/foreign")
    return import_head(scene.own / "foreign", scene.own / "new", target=target)


# Runs


def typed(scene: Scene, *arguments: str) -> None:
    """Run the command line; raise the error that it prints."""
    result = draftlab(scene.own.parent, *arguments)
    if result.exit_code == 2 and (error := _PRINTED.search(result.stderr)):
        raise UserError(error[1], where=error[2], do=error[3])
    assert result.exit_code == 0, result.output


_PRINTED = re.compile(r"^error: (.*)\nwhere: (.*)\ndo: (.*)", re.DOTALL | re.MULTILINE)
EXPORT = ("export", "--run", "own/run", "--to", "vllm")
PUSH = ("push", "own/run", "org/name", "--dry-run")


def link(name: str, to: str, *arguments: str) -> Callable[[Scene], object]:
    """Return the attack of a run that has a link."""

    def attack(scene: Scene) -> object:
        path = scene.run() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            path.rmdir()
        path.symlink_to(scene.outside / to)
        return typed(scene, *arguments)

    return attack


def full_folder(*arguments: str, names: tuple[str, ...]) -> Callable[[Scene], object]:
    """Return an attack that writes to a folder with files of others beside an export's."""

    def attack(scene: Scene) -> object:
        scene.run()
        for name in ("launch.md", "README.md", "head.json", "report.json", *names):
            path = scene.outside / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")
        (scene.own / "place").symlink_to(scene.outside)
        return typed(scene, *arguments, "--out", "own/place")

    return attack


# Stores


def shard_links_outside(scene: Scene) -> object:
    store = scene.store()
    (store / SHARD).unlink()
    (store / SHARD).symlink_to(scene.outside / "secret.safetensors")
    return Store.open(store)


def temporary_files_link_outside(scene: Scene) -> object:
    store = scene.store()
    (store / SHARD).unlink()
    for name in (SHARD, "shard-00000.json", MANIFEST):
        (store / f".{name}.tmp").symlink_to(scene.outside / "secret.txt")
    (store / ".shard-link").symlink_to(scene.outside)
    return record_table(store, SAMPLES)


def manifest_names_files(read: Callable[[Path], object]) -> Callable[[Scene], object]:
    """Return an attack; a shard's file follows from its number, so that no manifest names one."""

    def attack(scene: Scene) -> object:
        store = scene.store()
        fields = json.loads((store / MANIFEST).read_text())
        shards = [{"file": f"../outside/{SHARD}"}]
        (store / MANIFEST).write_text(json.dumps(fields | {"shards": shards}))
        return read(store)

    return attack


def maker_is_a_command(scene: Scene) -> object:
    store = scene.store()
    fields = json.loads((store / MANIFEST).read_text())
    fields["settings"] |= {"made_by": f"x; cat {SECRET}"}
    (store / MANIFEST).write_text(json.dumps(fields))
    data = bytearray((store / SHARD).read_bytes())
    data[-1] ^= 1
    (store / SHARD).write_bytes(data)
    return Store.open(store).verify()


# Targets


def pickled_target(scene: Scene, read: Callable[[TargetSettings], object] = load_target) -> object:
    settings = scene.target()
    (Path(settings.path) / WEIGHTS).unlink()
    (Path(settings.path) / "pytorch_model.bin").write_bytes(scene.pickled())
    return read(settings)


def target_index_outside(scene: Scene) -> object:
    folder = Path(scene.target().path)
    index = {"weight_map": {"model.norm.weight": "../../outside/secret.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    return read_tensor(folder, "model.norm.weight")


def target_of_nan(scene: Scene) -> object:
    rope = {"rope_type": "default", "rope_theta": float("nan")}
    return load_target(scene.target(rope_parameters=rope))


ATTACKS: list[tuple[str, Callable[[Scene], object], str]] = [
    ("head: a pickle as model.safetensors", pickled_weights, "weights cannot be read"),
    ("head: pickled weights to import", pickled_bin, "pickled files can run code"),
    ("head: pickled weights beside its config", lambda s: pickled_bin(s, "own"), "weights"),
    *(
        (f"head: an index of {place}", index_outside(place), "beside the index")
        for place in (
            *("../outside/secret.safetensors", "{}/secret.safetensors", "sub/x.safetensors"),
            *("sub/../../outside/secret.safetensors", "weights.bin"),
        )
    ),
    ("head: weights that are a pipe", weights_are_a_pipe, "a device or a pipe"),
    ("head: a header of a terabyte", weights_claim_terabytes, "weights cannot be read"),
    ("head: an endless device as config", config_is_a_device, "a device or a pipe"),
    (
        "head: a base of RoPE of 0",
        lambda s: load(s.head(rope_parameters={"rope_theta": 0})),
        "rope",
    ),
    ("run: stages elsewhere", link("stages", "", *EXPORT), "no links"),
    ("run: a training elsewhere", link("train", "", *EXPORT), "no links"),
    ("run: a report elsewhere", link("eval", "", *EXPORT), "no links"),
    ("run: a checkpoint elsewhere", link("train/checkpoints/step-1/x", "", *EXPORT), "no links"),
    ("run: an export elsewhere", link("export/vllm", "", *EXPORT), "no links"),
    ("run: metrics elsewhere", link("train/metrics.jsonl", "secret.txt", *EXPORT), "no links"),
    ("run: answers elsewhere", link("answers.partial.jsonl", "secret.txt", *EXPORT), "no links"),
    ("run: a lock elsewhere", link(".lock", "new", *EXPORT), "no links"),
    ("run: uploads elsewhere", link("hub", "", *PUSH), "no links"),
    ("run: an upload elsewhere", link("hub/org--name", "", *PUSH), "no links"),
    ("place: an export over a model", full_folder(*EXPORT, names=("a.gguf",)), "a.gguf"),
    ("place: a push over a repository", full_folder(*PUSH, names=(".git/HEAD",)), ".git"),
    ("import: code of the target that it names", head_names_code, "--target"),
    ("store: a shard that leads outside", shard_links_outside, "leads out of it"),
    ("store: temporary files that lead outside", temporary_files_link_outside, ""),
    *(
        (f"store: a manifest that names files, to {name}", manifest_names_files(read), "shards")
        for name, read in (
            ("open", Store.open),
            ("merge", lambda store: merge([Store.open(store)], store.parent / "new", Monitor())),
            ("count", Receipts.from_published),
            ("record", lambda store: record_table(store, SAMPLES)),
        )
    ),
    ("store: a command as its maker", maker_is_a_command, "damaged"),
    ("target: pickled weights", pickled_target, "safetensors"),
    (
        "target: pickled weights, read in parts",
        lambda s: pickled_target(s, lambda settings: load_parts(resolve_target(settings))),
        "safetensors",
    ),
    ("target: an index of files outside", target_index_outside, "beside the index"),
    ("target: its own code, as tokenizer", lambda s: load_tokenizer(s.coded_target()), ""),
    ("target: its own code, to import", lambda s: imported_for(s, s.coded_target()), "code"),
    ("target: a base of RoPE that is NaN", target_of_nan, "rope_theta"),
]
HARMLESS = {"store: temporary files that lead outside"}
"""Attacks that may be ignored instead of refused."""


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """Let an attack take 4 GiB more than there is."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "attack", "words"), ATTACKS, ids=[name for name, *_ in ATTACKS])
def test_an_attack_does_no_harm(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    attack: Callable[[Scene], object],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    scene = Scene(tmp_path)
    before = scene.secrets()
    message = ""
    if name in HARMLESS:
        with contextlib.suppress(UserError):
            attack(scene)
    else:
        with pytest.raises(UserError) as caught:  # any other exception is an internal error
            attack(scene)
        message = str(caught.value)
        assert words in message
        assert len(caught.value.what.split()) > 3
        assert caught.value.do
    assert not scene.canary.exists()
    after = scene.secrets()
    assert before.items() <= after.items()
    assert {Path(path).read_text() for path in after.keys() - before.keys()} <= {"mine"}
    assert {p.name for p in tmp_path.iterdir()} <= {"own", "outside"}
    assert SECRET not in message + "".join(capfd.readouterr())


def test_code_of_a_target_runs_when_asked(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    trusted = scene.coded_target().model_copy(update={"trust_remote_code": True})
    assert type(target_config(trusted)).__name__ == "C"
    assert scene.canary.exists()
