"""Bad inputs and damaged files, as a user would meet them: what each command answers.

Every case must be refused with what was expected and found and what to do, and never as an
internal error. A case of `ACCEPTED` ends well, and its consequence must be printed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.small_run import copy_of_finished, draftlab

pytestmark = pytest.mark.slow
RUN = "runs/small"
HEAD = f"{RUN}/head"
STORE = f"{RUN}/store"
SHARD = f"{STORE}/shard-00000.safetensors"
Damage = Callable[[Path], object]


def write(path: str, text: str | bytes) -> Damage:
    """Return what writes a file of a folder."""
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / path).write_bytes(data)


def remove(path: str) -> Damage:
    return lambda folder: (folder / path).unlink()


def cut(path: str, length: int) -> Damage:
    """Return what keeps the first bytes of a file only."""
    return lambda folder: (folder / path).write_bytes((folder / path).read_bytes()[:length])


def flip(path: str, position: int) -> Damage:
    """Return what inverts one byte of a file."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / path).read_bytes())
        data[position] ^= 0xFF
        (folder / path).write_bytes(data)

    return damage


def edit(path: str, **fields: Any) -> Damage:
    """Return what sets fields of a JSON file; `...` removes a field."""

    def damage(folder: Path) -> None:
        values = json.loads((folder / path).read_text()) | fields
        kept = {key: value for key, value in values.items() if value is not ...}
        (folder / path).write_text(json.dumps(kept))

    return damage


def conversation(**fields: Any) -> str:
    """Return a line of a prompt file."""
    return json.dumps({"id": "a", "messages": [{"role": "user", "content": "hello"}]} | fields)


@dataclass(frozen=True)
class Case:
    """A command on a damaged working directory.

    Attributes:
        command: the arguments, separated by spaces.
        words: text that the output must contain.
        damage: done before the command.
    """

    command: str
    words: str
    damage: Damage = lambda folder: None


def plans(*cases: tuple[str, str]) -> list[Case]:
    """Return a case for each override of a plan, in a run that does not exist yet."""
    return [Case(f"run small.yaml --plan name=new {override}", words) for override, words in cases]


def recipes(*cases: tuple[str | bytes, str]) -> list[Case]:
    """Return a case for each text of a recipe."""
    return [Case("run r.yaml --plan", words, write("r.yaml", text)) for text, words in cases]


def prompts(*cases: tuple[str, str]) -> list[Case]:
    """Return a case for each file of prompts."""
    command = "prepare small.yaml name=other prompts.source=p.jsonl"
    return [Case(command, words, write("p.jsonl", text)) for text, words in cases]


READERS = (
    f"inspect {HEAD}",
    f"eval --head {HEAD} --target toy --max-prompts 1 --max-new-tokens 4 --out e",
    f"export --head {HEAD} --target toy --to vllm --out x",
    f"doctor {HEAD} --target toy",
)


def heads(*cases: tuple[Damage, str]) -> list[Case]:
    """Return a case for each damage of a head and each command that reads heads."""
    return [Case(command, words, damage) for damage, words in cases for command in READERS]


CONFIG = f"{HEAD}/draftlab.json"
WEIGHTS = f"{HEAD}/model.safetensors"
REFUSED = [
    *plans(
        ("train.step=3", "did you mean train.steps?"),
        ("trainsteps=3", "unknown setting"),
        ("=3", "expected an override"),
        ("steps", "expected an override"),
        ("train.steps=", "train.steps"),
        ("train.steps=[1,2]", "train.steps"),
        ("train.steps={a:1}", "train.steps"),
        ("train.steps=1.5", "train.steps"),
        ("train.steps=many", "train.steps"),
        ("train.steps=0", "greater than or equal to 1"),
        ("train=3", "train"),
        ("train.learning_rate=nan", "train.learning_rate"),
        ("train.learning_rate=inf", "train.learning_rate"),
        ("train.learning_rate=-1", "train.learning_rate"),
        ("train.learning_rate=0", "train.learning_rate"),
        ("train.gamma=2", "train.gamma"),
        ("train.gamma=0", "train.gamma"),
        ("train.warmup=1", "train.warmup"),
        ("train.batch_rows=0", "train.batch_rows"),
        ("train.micro_rows=0", "train.micro_rows"),
        ("train.row_tokens=7", "train.row_tokens"),
        ("train.ttt_steps=0", "train.ttt_steps"),
        ("train.validation_share=1", "train.validation_share"),
        ("train.schedule=linear", "train.schedule"),
        ("train.loss=mse", "train.loss"),
        ("train.parallel=zero9", "train.parallel"),
        ("train.precision=int8", "train.precision"),
        ("train.reach=0.5", "train.acceptance_weighting"),
        ("train.device=cuda:7", "0 GPUs"),
        ("train.device=foo", "foo"),
        ("target.device=cuda:9", "0 GPUs"),
        ("target.device=tpu", "tpu"),
        ("target.gpus=0", "target.gpus"),
        ("target=nowhere", "expected a checkpoint folder"),
        ("target=/nonexistent", "expected a checkpoint folder"),
        ("target=runs", "expected a checkpoint folder"),
        ("target.dtype=int8", "target.dtype"),
        ("seed=-1", "seed"),
        ("seed=99999999999999999999999", "seed"),
        ("seed=x", "seed"),
        (f"name={'a' * 300}", "name"),
        ("name=latest", "name"),
        ("name=..", "expected a name"),
        ("name=a/b", "expected a name"),
        ("name=", "expected a name"),
        ("head.family=eagle9", "eagle9"),
        ("head.family=ptd,", "ptd"),
        ("head.num_attention_heads=5", "5 attention heads"),
        ("head.num_key_value_heads=3", "key-value heads"),
        ("head.head_dim=7", "head_dim"),
        ("head.num_layers=0", "num_layers"),
        ("head.num_layers=2", "at most 1 layer"),
        ("head.intermediate_size=0", "intermediate_size"),
        ("head.intermediate_size=-4", "intermediate_size"),
        ("head.init=nowhere", "nowhere"),
        ("head.norm_before_fc=maybe", "norm_before_fc"),
        ("head.mask_token=5", "mask_token"),
        ("record.boundaries=[9]", "expected boundaries in 0..4"),
        ("record.boundaries=[3,1]", "expected sorted unique boundaries"),
        ("record.boundaries=[1,1]", "expected sorted unique boundaries"),
        ("record.boundaries=[]", "boundaries"),
        ("record.dtype=int8", "record.dtype"),
        ("record.max_length=2", "record.max_length"),
        ("record.overlong=drop", "record.overlong"),
        ("draft_vocab.size=0", "draft_vocab.size"),
        ("draft_vocab.size=99999999", "draft_vocab.size"),
        ("regenerate.temperatures=[]", "regenerate.temperatures"),
        ("regenerate.temperatures=[-1]", "regenerate.temperatures"),
        ("regenerate.samples=0", "regenerate.samples"),
        ("regenerate.top_p=2", "regenerate.top_p"),
        ("regenerate.backend=openai", "server.url"),
        ("regenerate.server.url=localhost", "regenerate.server.url"),
        ("prompts.source=nowhere.jsonl", "nowhere.jsonl"),
        ("prompts.max_prompts=0", "prompts.max_prompts"),
        ("eval.suite=nowhere.jsonl", "nowhere.jsonl"),
        ("eval.k=0", "eval.k"),
        ("eval.k=500", "eval.k"),
        ("eval.k=[]", "eval.k"),
        ("eval.temperatures=[-1]", "eval.temperatures"),
        ("eval.compare=[nowhere]", "nowhere"),
        ("eval.engine=fast", "eval.engine"),
        ("eval.draft_probs=maybe", "eval.draft_probs"),
        ("export.formats=[vlm]", "vllm"),
        ("export.max_shard=lots", "export.max_shard"),
        ("export.max_shard=0GB", "export.max_shard"),
        ("export.k=0", "export.k"),
        ("export.gguf=true", "llamacpp"),
        ("hardware.gpu=B9000", "hardware.gpu"),
        ("hardware.gpus=0", "hardware.gpus"),
    ),
    *recipes(
        ("", "expected a mapping of settings"),
        ("null", "expected a mapping of settings"),
        ("- a", "expected a mapping of settings"),
        ("5", "expected a mapping of settings"),
        ("target: [", "expected YAML"),
        ("\x00", "expected YAML"),
        (b"\xff\xfe\x00\x01", "expected YAML"),
        ("target: toy\ntarget: toy", "twice"),
        ("steps: 5", "unknown setting"),
        ("train: 5", "train"),
        ("train: {steps: 5, stepz: 6}", "did you mean train.steps?"),
        ("target: {path: toy, revison: x}", "did you mean target.revision?"),
        ("a: &a [*a]", ""),
        ("!!python/object/apply:os.system ['true']", "expected YAML"),
    ),
    Case("run nowhere.yaml", "expected a recipe, found no such file"),
    Case("run toy", "expected a recipe"),
    *prompts(
        ("", "an empty data set"),
        ("\n\n", "an empty line"),
        ("{", "p.jsonl:1"),
        (conversation() + "\n{", "p.jsonl:2"),
        ("[]", "p.jsonl:1"),
        ("5", "p.jsonl:1"),
        ("null", "p.jsonl:1"),
        (conversation(messages=5), "messages"),
        (conversation(messages=[]), "messages"),
        (conversation(messages=[5]), "messages"),
        (conversation(messages=[{"role": "user"}]), "content"),
        (conversation(messages=[{"content": "x"}]), "role"),
        (conversation(messages=[{"role": "robot", "content": "x"}]), "role"),
        (conversation(messages=[{"role": "user", "content": None}]), "null"),
        (conversation(messages=[{"role": "user", "content": 5}]), "number"),
        (conversation(label=1), "label"),
        (conversation(id=[1]), "id"),
        (conversation() + "\n" + conversation(messages=[{"role": "user", "content": "b"}]), "a"),
        (conversation(messages=[{"role": "user", "content": "\ud800"}]), "Unicode"),
        (conversation(messages=[{"role": "user", "content": "x" * 5000}]), "no room"),
        (conversation(messages=[{"role": "assistant", "content": "x"}]), "user"),
    ),
    *heads(
        (edit(CONFIG, family="x"), "expected a family of heads"),
        (edit(CONFIG, schema=99), "schema"),
        (edit(CONFIG, hidden_size=-1), "hidden_size"),
        (edit(CONFIG, hidden_size="wide"), "hidden_size"),
        (edit(CONFIG, head_dim=7), "head_dim"),
        (edit(CONFIG, num_attention_heads=7), "attention heads"),
        (edit(CONFIG, num_layers=3), "at most 1 layer"),
        (edit(CONFIG, vocab_size=3), "vocab_size"),
        (edit(CONFIG, draft_vocab_size=99999), "draft_vocab_size"),
        (edit(CONFIG, boundaries=[99]), "boundaries"),
        (edit(CONFIG, boundaries=[]), "boundaries"),
        (edit(CONFIG, boundary_meaning="output-of-layer"), "boundary_meaning"),
        (edit(CONFIG, rope_parameters={"rope_type": "magic"}), "rope"),
        (edit(CONFIG, rms_norm_eps=-1), "rms_norm_eps"),
        (edit(CONFIG, k_trained=0), "k_trained"),
        (edit(CONFIG, extra=1), "extra"),
        (edit(CONFIG, target=3), "target"),
        (edit(CONFIG, target=...), "target"),
        (write(CONFIG, "[1]"), "draftlab.json"),
        (cut(CONFIG, 40), "not JSON"),
        (cut(CONFIG, 0), "not JSON"),
        (cut(WEIGHTS, 5000), "weights"),
        (cut(WEIGHTS, 0), "weights"),
        (remove(WEIGHTS), "safetensors"),
    ),
    *[Case(command, "shape", edit(CONFIG, hidden_size=64)) for command in READERS[1:]],
    Case("eval --head nowhere", "nowhere"),
    Case("eval --head toy", "toy"),
    Case(f"eval --head {HEAD} --target nowhere", "nowhere"),
    Case(f"eval --head {HEAD} --target embedded", "was trained for"),
    Case("eval --run nowhere", "nowhere"),
    Case(f"eval --run small --head {HEAD}", "expected a run or a head, found both"),
    Case("eval --run small --temps -1", "--temps"),
    Case("eval --run small --temps hot", "--temps"),
    Case("eval --run small --k 0", "k"),
    Case("eval --run small --k many", "k"),
    Case("eval --run small --suite nowhere", "nowhere"),
    Case("eval --run small --max-prompts 0", "--max-prompts"),
    Case("eval --run small --top-p 2", "--top-p"),
    Case("eval --run small --engine fast", "engine"),
    Case("eval --run small --adaptive", "--adaptive: expected concurrency too"),
    Case("eval --run small --adaptive --concurrency 1 --engine reference", "fixed K"),
    Case("export --run small --to vlm", "did you mean"),
    Case("export --run small --to vllm --k 0", "k"),
    Case("export --run small --to vllm --out small.yaml", "found a file"),
    Case("export --run small --to vllm --out toy", "toy"),
    Case("export --run small --to vllm --max-shard lots", "such as 200GB"),
    Case("export --run nowhere --to vllm", "nowhere"),
    Case("import nowhere --to h", "nowhere"),
    Case("import toy --to h", "toy"),
    Case(f"import {RUN}/export/speculators --to toy", "new or an empty folder"),
    Case(f"import {RUN}/export/speculators --to h --target nowhere", "nowhere"),
    Case(f"import {RUN}/export/speculators --to h --target toy --boundaries a", "boundaries"),
    Case(f"import {RUN}/export/speculators --to h --target toy --boundaries 9", "boundaries"),
    Case(f"import {RUN}/export/speculators --to h --target toy --k 0", "k"),
    Case(f"import {RUN}/export/speculators --to h --target toy --dtype int8", "int8"),
    Case("inspect small", "shard-00000", cut(SHARD, 200)),
    Case("inspect nowhere", "nowhere"),
    Case("inspect small.yaml", "small.yaml"),
    Case(f"inspect {STORE} --sample 9999", "expected a sample in"),
    Case("store sample nowhere --out o --records 2", "nowhere"),
    Case(f"store sample {STORE} --out o --records 9999", "at most the store's"),
    Case(f"store sample {STORE} --out toy --records 2", "new folder"),
    Case(f"store merge {STORE} --out toy", "new folder"),
    Case("store merge nowhere --out o", "nowhere"),
    Case(f"store merge {STORE} --out s3://bucket/o", "found the URL s3://bucket/o"),
    Case(f"store sample {STORE} --records 2 --out s3://b/o", "found the URL s3://b/o"),
    Case("doctor nowhere", "nowhere"),
    Case("push nowhere a/b", "nowhere"),
    Case("push small a", "repository"),
]
DAMAGED_STORE = [
    Case(command, words, damage)
    for damage, words in (
        (cut(f"{STORE}/manifest.json", 100), "manifest"),
        (write(f"{STORE}/manifest.json", "[]"), "manifest"),
        (edit(f"{STORE}/manifest.json", schema=99), "manifest"),
        (edit(f"{STORE}/manifest.json", shards=5), "manifest"),
        (edit(f"{STORE}/manifest.json", identity=...), "manifest"),
        (flip(SHARD, -200), "shard-00000"),
        (cut(SHARD, 200), "shard-00000"),
        (cut(SHARD, 0), "shard-00000"),
    )
    for command in (
        f"store sample {STORE} --out o --records 12",
        f"store split {STORE} --out o --out p",
        f"inspect {STORE} --verify",
    )
]
"""Damage that the store's verbs must name; `run` and `train` make such artefacts again."""
ACCEPTED = [
    Case("run small.yaml --plan record.max_length=20", "20"),
    Case("run small.yaml --plan train.micro_rows=99", ""),
    *[
        Case("prepare small.yaml name=other prompts.source=p.jsonl", words, write("p.jsonl", text))
        for text, words in (
            (conversation(id=5), "1 conversation"),
            ("\ufeff" + conversation(), "1 conversation"),
            (conversation() + "\r\n", "1 conversation"),
            (conversation() + "\n" + conversation(id="b"), "1 "),
        )
    ],
]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with a finished run, which every case copies."""
    return copy_of_finished(tmp_path_factory.mktemp("pristine") / "work")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(pristine, tmp_path / "work", symlinks=True)
    shutil.rmtree(tmp_path / "work")


def name(case: Case) -> str:
    return f"{case.command[:60]}: {case.words[:30]}"


def run_case(case: Case, folder: Path) -> tuple[int, str]:
    """Return the exit code and what was printed."""
    case.damage(folder)
    result = draftlab(folder, *case.command.split(" "))
    assert "internal error" not in result.output, result.output
    assert "Traceback" not in result.output, result.output
    return result.exit_code, result.output


@pytest.mark.parametrize("case", [*REFUSED, *DAMAGED_STORE], ids=name)
def test_refused(case: Case, folder: Path) -> None:
    code, output = run_case(case, folder)
    assert code == (1 if case.command.startswith("doctor runs") else 2), output
    assert case.words.lower() in " ".join(output.lower().split()), output
    # Typer words its own refusals of options.
    assert "do: " in output or "Usage: " in output or "╭" in output, output


@pytest.mark.parametrize("case", ACCEPTED, ids=name)
def test_accepted_with_its_consequence(case: Case, folder: Path) -> None:
    code, output = run_case(case, folder)
    assert code == 0, output
    assert case.words.lower() in " ".join(output.lower().split()), output


def test_the_table_is_large() -> None:
    assert len(REFUSED) + len(DAMAGED_STORE) + len(ACCEPTED) >= 250
