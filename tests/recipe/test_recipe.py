from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from draftlab.errors import UserError
from draftlab.recipe.commented_yaml import schema_lines, shown_lines
from draftlab.recipe.recipe import (
    Recipe,
    flatten,
    load_recipe,
    parse_recipe,
    to_yaml,
)

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def settings(model: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, Any]:
    """Return every field of the tree by its dotted name, inner nodes included."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        fields[prefix + name] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= settings(field.annotation, f"{prefix}{name}.")
    return fields


LEAVES = sorted(flatten(Recipe(name="x")))


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_the_schema_is_yaml_that_mentions_every_setting_with_its_default() -> None:
    text = "\n".join(schema_lines(Recipe))
    tree = yaml.safe_load(text)
    tree["name"] = "x"
    assert parse_recipe(tree) == Recipe(name="x")
    lines = text.splitlines()
    for name, field in settings().items():
        leaf_name = name.rpartition(".")[2]
        at = [i for i, line in enumerate(lines) if line.strip().startswith(f"{leaf_name}:")]
        meaning = " ".join(field.description.split())
        assert any(lines[i - 1].strip() == f"# {meaning}" for i in at), name
    assert "  window: null # size such as 200GB | null" in lines


@given(name=st.sampled_from(LEAVES), cut=st.integers(0, 5), letter=st.sampled_from("qxz_"))
def test_a_typo_anywhere_gets_the_nearest_name(name: str, cut: int, letter: str) -> None:
    parents, _, leaf = name.rpartition(".")
    typo = leaf[: cut % len(leaf)] + letter + leaf[cut % len(leaf) :]
    tree: dict[str, Any] = {"name": "x"}
    node = tree
    for parent in filter(None, parents.split(".")):
        node = node.setdefault(parent, {})
    node[typo] = 1
    if len(leaf) < 3 or typo in {n.rpartition(".")[2] for n in LEAVES}:
        return  # a letter more is most of such a name
    with pytest.raises(UserError) as caught:
        parse_recipe(tree)
    where = f"{parents}.{typo}" if parents else typo
    assert f"{where}: unknown setting; did you mean {name}?" in str(caught.value)


def test_an_unknown_setting_unlike_any_lists_the_known(tmp_path: Path) -> None:
    message = error_of(write(tmp_path, "draft_vocab: {wxyzzy: 1}"))
    assert "draft_vocab.wxyzzy: unknown setting; known: size" in message
    assert "recipe schema" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:", "train: expected a mapping, found null"),
        ("record: {keep: some}", "record.keep: expected 'window' or 'all', found 'some'"),
        (
            "eval: {k: [0]}",
            "fit:\n  eval.k.0: expected a number greater than or equal to 1, found 0\n",
        ),
        (
            "export: {formats: [gguf]}",
            "export.formats: expected a layout out of llamacpp, sglang, speculators, vllm; found "
            "'gguf'; did you mean 'llamacpp'?\n",
        ),
        (
            "{head: {family: dspark}, train: {loss: lk}}",
            "fit:\n  train.loss: DSpark heads have a loss of their own, found lk\n",
        ),
        (
            "{head: {family: eagle}, record: {dtype: fp8}}",
            "record.dtype: fp8 is for features at boundaries, and eagle heads need none",
        ),
        ("name: ../elsewhere", "name: expected a name of letters, digits, "),
        ("- a\n- b", "expected a mapping of settings, found ['a', 'b']"),
        ("", "expected a mapping of settings, found nothing"),
        ("train: {steps: 1", "expected YAML"),
        ("train: {steps: 1, steps: 2}", "the key 'steps' is there twice"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    error = error_of(path)
    assert message in error
    assert str(path) in error


def test_several_faults_come_at_once(tmp_path: Path) -> None:
    message = error_of(write(tmp_path, "train: {stepz: 1, clip: -1}\nseed: x"))
    for name in ("train.stepz", "train.clip", "seed"):
        assert name in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "found no such file" in error_of(tmp_path / "none.yaml")
    assert "found a folder" in error_of(tmp_path)
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00seed: 1")
    assert "expected YAML" in error_of(path)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("? [a, b]: 1", "name of a setting as key"),
        ("a: &a [*a]", "an alias of a value that holds it"),
        ("[" * 3000, "50 levels"),
        ("a: " + "[" * 3000 + "]" * 3000, "50 levels"),
        ("a: " + "{a: " * 200 + "1" + "}" * 200, "50 levels"),
        (LAUGHS, "10,000 values"),
        ("seed: 1\n" * 200_000, "1,000,000 bytes"),
        ("seed: " + "9" * 5000, "at most 100 digits"),
        ("seed: !!bool x", "fits its tag"),
        ("seed: !!int x", "whole number"),
        ("seed: !!float x", "expected YAML"),
        ("name: !!timestamp x", "expected YAML"),
        ("!!python/object/apply:os.system ['true']", "expected YAML"),
    ],
)
def test_yaml_that_is_no_recipe(tmp_path: Path, text: str, words: str) -> None:
    message = error_of(write(tmp_path, text))
    assert "expected YAML" in message
    assert words in message


@pytest.mark.parametrize(
    ("text", "value"), [("010", 10), ("1_000", 1000), ("7", 7), ("'8'", 8), ("+9", 9)]
)
def test_whole_numbers_are_decimal(tmp_path: Path, text: str, value: int) -> None:
    path = write(tmp_path, f"train: {{steps: {text}}}")
    assert load_recipe(path).train.steps == value
    assert load_recipe(write(tmp_path, "seed: 1"), [f"train.steps={text}"]).train.steps == value


@pytest.mark.parametrize("text", ["1:30", "0x10", "0o17", "1e3", "2025-01-02", "9" * 20])
def test_other_numbers_are_refused(tmp_path: Path, text: str) -> None:
    message = error_of(write(tmp_path, f"train: {{steps: {text}}}"))
    assert f"found {text}" in message.replace("'", "")


@pytest.mark.parametrize("text", ["2025-01-02", "2025-99-99", "1:30", "08", "1.5e3", "0x1F"])
def test_a_text_is_read_from_the_run_folder_as_it_was(tmp_path: Path, text: str) -> None:
    recipe = load_recipe(write(tmp_path, f"target: {{revision: '{text}'}}"))
    assert load_recipe(write(tmp_path, to_yaml(recipe))).target.revision == text


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_recipe_or_refused(tmp_path_factory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with contextlib.suppress(UserError):
        load_recipe(path)
    with contextlib.suppress(UserError):
        load_recipe(RECIPES[0], [text, f"train={text}", f"train.steps={text}"])


def test_a_run_is_named_after_its_recipe(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "seed: 1")).name == "recipe"
    assert load_recipe(write(tmp_path, "name: own")).name == "own"
    assert load_recipe(write(tmp_path, "seed: 1"), ["name=2025"]).name == "2025"


def test_a_target_is_a_path_or_a_mapping(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "target: org/name")).target.path == "org/name"
    path = write(tmp_path, "target: {path: org/name, revision: abc}")
    assert load_recipe(path).target.revision == "abc"
    moved = load_recipe(path, ["target=here", "target.dtype=float32"]).target
    assert (moved.path, moved.revision, moved.dtype) == ("here", "abc", "float32")
    mixed = load_recipe(write(tmp_path, "target: there"), ["target.device=cpu"]).target
    assert (mixed.path, mixed.device) == ("there", "cpu")


def test_overrides_are_dotted_keys_with_yaml_values(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {steps: 7, clip: 0.25}")
    recipe = load_recipe(
        path,
        [
            "train.steps=200",
            "eval.temperatures=[0, 0.7, 1.5]",
            "regenerate.enabled=false",
            "train.validate_every=null",
            "train.learning_rate=2e-3",
            "prompts.source=a=b.jsonl",
        ],
    )
    assert recipe.train.steps == 200
    assert recipe.train.clip == 0.25
    assert recipe.eval.temperatures == (0.0, 0.7, 1.5)
    assert recipe.regenerate.enabled is False
    assert recipe.train.validate_every is None
    assert recipe.train.learning_rate == 2e-3
    assert recipe.prompts.source == "a=b.jsonl"


def test_lists_may_be_written_with_commas(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, "regenerate: {temperatures: 0.7}"),
        [
            "eval.k=3,5",
            "eval.temperatures=0,0.8, 1.5",
            "eval.compare=reference, runs/other/head",
            "record.boundaries=2,6,9",
            "export.formats=vllm,sglang",
        ],
    )
    assert recipe.eval.k == (3, 5)
    assert recipe.eval.temperatures == (0.0, 0.8, 1.5)
    assert recipe.eval.compare == ("reference", "runs/other/head")
    assert recipe.record.boundaries == (2, 6, 9)
    assert recipe.export.formats == ("vllm", "sglang")
    assert recipe.regenerate.temperatures == (0.7,)
    path = write(tmp_path, "seed: 1")
    assert "eval.k.1: expected a whole number, found 'x'" in error_of(path, "eval.k=3,x")
    assert "a layout out of llamacpp, sglang, " in error_of(path, "export.formats=foo")


def test_off_is_a_word_where_words_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "eval: {draft_probs: off}\nregenerate: {enabled: off}")
    recipe = load_recipe(path)
    assert (recipe.eval.draft_probs, recipe.regenerate.enabled) == ("off", False)
    recipe = load_recipe(
        path, ["eval.draft_probs=on", "train.compile=on", "regenerate.enabled=True"]
    )
    assert (recipe.eval.draft_probs, recipe.train.compile) == ("on", True)
    assert recipe.regenerate.enabled is True
    assert load_recipe(path, ["prompts.source=no"]).prompts.source == "no"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "expected an override such as train.steps=200, found 'train.steps'"),
        ("train.stpes=3", "did you mean train.steps?"),
        ("regenerate.server.modle=x", "did you mean regenerate.server.model?"),
        ("regenerate.server={modle: x}", "did you mean regenerate.server.model?"),
        ("train.steps=[1", "the value of train.steps is not YAML"),
        ("seed.deep=1", "seed: expected a whole number"),
        ("train.steps=", "train.steps: expected a whole number, found null"),
        ("eval.k=[true, 3]", "eval.k: expected a whole number, found [true, 3]"),
        ("train.compile=maybe", "train.compile: expected 'auto' or true or false, found 'm"),
        ("head.mask_token=[1]", "head.mask_token: expected a whole number or a text, found [1]"),
        ("eval.raw=2", "eval.raw: expected true or false, found 2"),
        ("train.learning_rate=1e9", "train.learning_rate: expected"),
        ("train.steps=99999999999999999999", "train.steps: expected"),
        ("eval.k='3,,5'", "eval.k: expected values between commas, found '3,,5'"),
    ],
)
def test_overrides_that_do_not_fit(tmp_path: Path, override: str, message: str) -> None:
    assert message in error_of(write(tmp_path, "seed: 1"), override)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_resolved_recipe_reads_back(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert load_recipe(write(tmp_path, to_yaml(recipe))) == recipe
    assert set(flatten(recipe)) == set(LEAVES)
    shown = "\n".join(shown_lines(recipe))
    assert load_recipe(write(tmp_path, shown)) == recipe
    assert all(f"{leaf.rpartition('.')[2]}: " in shown for leaf in LEAVES)
    assert len(shown.splitlines()) < 100


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("run: {url: 's3://bucket/run'}", r"run\.url: removed: sync the run folder"),
        ("train: {replay: {share: 0.5}}", r"train\.replay: removed: a head trains on recorded"),
        ("head: {llama4: {use_qk_norm: true}}", r"llama4\.use_qk_norm: removed: the head has the"),
        ("record: {not_finite: skip}", r"record\.not_finite: removed: a state with NaN"),
        ("target: {compile: false}", r"target\.compile: removed: layers without a fast path"),
    ],
)
def test_a_removed_setting_is_refused_with_what_to_do(
    tmp_path: Path, setting: str, message: str
) -> None:
    path = write(tmp_path, setting)
    with pytest.raises(UserError, match=message) as caught:
        load_recipe(path)
    assert "unknown" not in str(caught.value)
    assert "delete" in caught.value.do


@pytest.mark.parametrize(
    ("text", "overrides", "where"),
    [
        ("train: {steps: 1}", ["train.stepz=3"], "the override train.stepz=3"),
        ("train: {steps: 1}", ["train.steps=0", "seed=1"], "the override train.steps=0"),
        ("train: {steps: 0}", ["seed=1"], "{path}"),
        ("train: {steps: 0}", ["seed=-1"], "the override seed=-1 and {path}"),
        ("seed: 0", ["train={steps: 0}"], "the override train={steps: 0}"),
        ("seed: 0", ["train.loss=lk", "head.family=dspark"], "the override train.loss=lk"),
        ("seed: 0", ["run.url=s3://me:secret@b/x"], "the override run.url=…"),
        ("seed: 0", ["eval.k=[" + "1," * 50 + "x]"], "the override eval.k=…"),
    ],
)
def test_mistakes_say_whether_they_are_in_the_file_or_on_the_command_line(
    text: str, overrides: list[str], where: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    expected = where.replace("{path}", str(path))
    assert sorted(caught.value.where.split(" and ")) == sorted(expected.split(" and "))
