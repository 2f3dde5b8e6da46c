"""The recipe: all settings of a run in one strict tree, read from YAML."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from draftlab.errors import UserError
from draftlab.evaluate.settings import EvalSettings
from draftlab.export.settings import ExportSettings
from draftlab.files import read_text
from draftlab.heads.family import get_family
from draftlab.recipe.commented_yaml import settings_in
from draftlab.recipe.hardware import HardwareSettings
from draftlab.servers.settings import RegenerateSettings
from draftlab.settings import Settings, describe_error, merged_errors
from draftlab.store.settings import RecordSettings
from draftlab.target_model.settings import TargetSettings
from draftlab.text.settings import DraftVocabSettings, PromptSettings
from draftlab.train.settings import HeadSettings, TrainSettings

RECIPE = "recipe.yaml"
"""Name of the recipe in a run folder and in an upload."""
LATEST = "latest"
"""Name of the link to the latest run."""
MAX_NAME = 250
"""Most letters of a run's name: file systems allow 255, and `eval` adds some."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Names that a run can have."""
OWN_NAMES = f"{LATEST}|reference|rehearsals|eval-.*"
"""Names that no run can have: `--head reference` is the head that ships, and a head that belongs to
no run is evaluated in runs/eval-NAME."""
_MAX_BYTES, _MAX_NODES, _MAX_DEPTH = 1_000_000, 10_000, 50
"""Of a recipe: its size; its values, those of an alias as often as it occurs; levels of nesting."""
_TAG = "tag:yaml.org,2002:"
_MAX_SHOWN = 60
"""Most letters of an override's value in a message."""


class _Loader(yaml.SafeLoader):
    """A YAML loader of the values that settings have, which a person and YAML 1.2 read the same.

    Only true and false are booleans (`draft_probs: off` is a text), and numbers are decimal: 010
    and 1:30, which YAML 1.1 reads as 8 and 90, are texts, and a setting reads the first as 10.
    Dates are texts. A key that is there twice is refused, where PyYAML would use the last one.
    """

    yaml_implicit_resolvers: typing.ClassVar = {}
    yaml_constructors: typing.ClassVar = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "bool", "float", "str", "seq", "map")
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "expected the name of a setting as key", key.start_mark
                )
            if key.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        if not re.fullmatch("[-+]?[0-9][0-9_]{,99}", node.value):
            raise yaml.constructor.ConstructorError(
                None, None, "expected a whole number of at most 100 digits", node.start_mark
            )
        return int(node.value.replace("_", ""))


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_decimal)
for _kind, _pattern, _letters in (
    ("bool", "[Tt]rue|TRUE|[Ff]alse|FALSE", "tTfF"),
    ("null", "~|[Nn]ull|NULL|", "~nN"),
    ("merge", "<<", "<"),
    ("int", "[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+)([eE][-+][0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
):
    letters = [*_letters, *([""] if _kind == "null" else [])]
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(f"(?:{_pattern})$"), letters)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text, such as that of a recipe.

    Raises a `ValueError` if it is no YAML, has keys or values that no setting has, or is nested too
    deeply.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _check_size(node)
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"expected at most {_MAX_DEPTH} levels, found more") from None
    except LookupError as error:  # `!!bool x`
        raise ValueError(f"expected a value that fits its tag, found {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem or error.context}{place}") from None
    except yaml.YAMLError as error:  # of characters that no YAML has
        raise ValueError(" ".join(str(error).split())) from None


def _check_size(root: yaml.Node | None) -> None:
    """Raise a ValueError if a text is nested too deeply, or its aliases stand for too much."""
    count, rest = 0, [(root, 1)] if root is not None else []
    while rest:
        node, depth = rest.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(
                f"expected at most {_MAX_DEPTH} levels, found more, or an alias of a value that "
                f"holds it{node.start_mark}"
            )
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        else:
            parts = node.value if isinstance(node, yaml.SequenceNode) else []
        count += len(parts)
        if count > _MAX_NODES:
            raise ValueError(f"expected at most {_MAX_NODES:,} values, found more")
        rest += [(part, depth + 1) for part in parts]


class Recipe(Settings):
    """All settings of a run, from target and prompts to a measured, exported head."""

    name: str = Field(pattern=NAME)
    """Name of the run, whose files are in runs/<name>/."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of sampled answers, initial weights and data order; eval.seed is that of evaluation."""
    target: TargetSettings = TargetSettings()
    """The frozen model that the head drafts for. A plain text is its path."""
    prompts: PromptSettings = PromptSettings()
    """The conversations that the target answers, or that are used as they are."""
    regenerate: RegenerateSettings = RegenerateSettings()
    """How the target answers the prompts."""
    record: RecordSettings = RecordSettings()
    """Which of the target's hidden states are recorded, and how."""
    draft_vocab: DraftVocabSettings = DraftVocabSettings()
    """The tokens that the head can draft."""
    head: HeadSettings = HeadSettings()
    """Family and shape of the head."""
    train: TrainSettings = TrainSettings()
    """How the head is trained."""
    eval: EvalSettings = EvalSettings()
    """What is measured, and with which prompts."""
    export: ExportSettings = ExportSettings()
    """The exports that are written for other programs."""
    hardware: HardwareSettings = HardwareSettings()
    """The machine for the estimates of `--plan`."""

    @field_validator("name", mode="before")
    @classmethod
    def _check_name(cls, value: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(OWN_NAMES, value):
            raise ValueError(
                f"draftlab uses {value!r} itself, for a head, a link or a folder in runs/: "
                "expected another name="
            )
        if isinstance(value, str) and len(value) > MAX_NAME:
            raise ValueError(
                f"expected a name of at most {MAX_NAME} letters, found one of {len(value)}"
            )
        if isinstance(value, str) and not re.match(NAME, value):
            raise ValueError(
                "expected a name of letters, digits, '.', '_' and '-' that begins with a letter or "
                f"digit (without one it is the recipe's file name: name=other), found {value!r}"
            )
        return value

    @field_validator("target", mode="before")
    @classmethod
    def _accept_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _sections_fit(self) -> Recipe:
        family, train = get_family(self.head.family), self.train
        if family.has_own_loss and train.loss != TrainSettings.model_fields["loss"].default:
            raise ValueError(
                f"train.loss: {family.title} heads have a loss of their own, found {train.loss}"
            )
        if self.record.dtype == "fp8" and family.reads_last_state and not self.record.boundaries:
            raise ValueError(
                f"record.dtype: fp8 is for features at boundaries, and {family.name} heads need "
                "none: expected bfloat16, since the last state is never quantised"
            )
        if self.prompts.num_self_written and not self.regenerate.enabled:
            raise ValueError(
                "prompts: the target writes prompts without answers: expected "
                "regenerate.enabled true, found false"
            )
        return self


_VLLM_PYTHON = "set the environment variable DRAFTLAB_VLLM_PYTHON; a recipe names no program"
_LLAMA4 = "the head has the target's value, else Llama 4's"
_LLAMA4_NAMES = (
    "attention_chunk_size",
    "attn_scale",
    "attn_temperature_tuning",
    "floor_scale",
    "use_qk_norm",
)
REMOVED_SETTINGS = {
    "eval.draft_temperature": "drafts are sampled at the temperature of their row",
    "head.layer_types": "all layers of a block head have head.sliding_window, or none",
    "train.weight_decay": "fewer steps or more conversations help against overfitting",
    "train.early_stopping": "train/best/ keeps the head of the best validation",
    "train.recompute": "lower train.micro_rows, or train.row_tokens if one row does not fit",
    "train.dpace": "train.acceptance_weighting weighs drafts by how often they are reached",
    "train.replay": "a head trains on recorded answers alone",
    "prompts.per_source": "data_prep/chats.py takes SOURCE:N, so many conversations of a data set",
    "record.not_finite": "a state with NaN or infinity ends the recording, which names its sample",
    "record.overlong": "samples longer than record.max_length are cut at their end",
    "record.online": "record.window=4GB stores no more than that, and records while training reads",
    "target.compile": "layers without a fast path of draftlab run as transformers writes them",
    "eval.adaptive": "servers choose how many drafts they verify; every row here has a fixed K",
    "eval.concurrency": "eval.timing_batches times several prompts at once",
    **{f"{s}.vllm.python": _VLLM_PYTHON for s in ("regenerate", "record", "eval")},
    "train.beta2": "AdamW's second moment decays by 0.95",
    "train.regression": "it is 1: train.distillation weighs the loss on tokens against it",
    "eval.greedy_below": "eval.draft_probs=off drafts greedily",
    "export.max_shard": "weights of more than 5 GB go into several files",
    **{f"head.llama4.{name}": _LLAMA4 for name in _LLAMA4_NAMES},
    "run.url": "sync the run folder with a tool of your own, such as `rclone` or `aws s3 sync`",
}
"""Dotted name of a setting, or of a whole section, that draftlab no longer has → what to do."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides (dotted keys, YAML values).

    The recipe of a run may be a stranger's, so only overrides can let a target's code run.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown (the message has the nearest
            name), or a value does not fit.
    """
    tree = read_yaml(path)
    tree.setdefault("name", path.stem)
    is_of_run = path.name == RECIPE or (path.parent / "stages").is_dir()
    if is_of_run and isinstance(target := tree.get("target"), dict):
        target.pop("trust_remote_code", None)
    for override in overrides:
        _override(tree, override)
    recipe = parse_recipe(tree, where=path, overrides=overrides)
    if is_of_run and recipe.target.trust_remote_code:
        _check_names_code(recipe, path, {text.partition("=")[0].strip() for text in overrides})
    return recipe


def _check_names_code(recipe: Recipe, path: Path, keys: set[str]) -> None:
    """Raise a `UserError` unless overrides name the target, and its revision, whose code runs."""
    missing = [] if keys & {"target", "target.path"} else ["target"]
    if recipe.target.revision is not None and "target.revision" not in keys:
        missing.append("target.revision")
    if missing:
        raise UserError(
            f"expected the overrides to name {' and '.join(missing)}, too, since they let the "
            "target's code run: the recipe of a run may be a stranger's",
            where=path,
            do=f"add {' '.join(f'{key}=VALUE' for key in missing)}, or copy the recipe elsewhere "
            "under another name, once you have read it",
        )


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping."""
    try:
        if path.is_file() and path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"expected at most {_MAX_BYTES:,} bytes")
        tree = load_yaml(
            read_text(path, kind="recipe", do="check the path; the shipped ones are in recipes/")
        )
    except ValueError as error:
        raise UserError(
            f"expected YAML, found text that is not: {error}",
            where=path,
            do="correct that line",
        ) from None
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else repr(tree)[:60]
        raise UserError(
            f"expected a mapping of settings, found {found}",
            where=path,
            do="write settings as `train: {steps: 200}`; recipes/quickstart.yaml is an example",
        )
    return tree


def parse_recipe(
    tree: dict[str, Any], *, where: Path | str = "recipe", overrides: Sequence[str] = ()
) -> Recipe:
    """Validate a tree of settings; a `UserError` about one that is removed, unknown or does not
    fit locates it by its file and its `key=value` overrides.
    """
    removed = {key: do for key, do in REMOVED_SETTINGS.items() if _has(tree, key)}
    if removed:
        lines = [f"{key}: removed: {do}" for key, do in removed.items()]
        raise UserError(
            "the recipe has settings that draftlab no longer has:\n  " + "\n  ".join(lines),
            where=_where(removed, where, overrides),
            do="delete these settings",
        )
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        errors = [
            # An error of several sections together has no location, and begins with its setting.
            (_key(one["loc"], tree) or describe_error(one).partition(":")[0], one)
            for one in merged_errors(error)
        ]
        raise UserError(
            "the recipe does not fit:\n  " + "\n  ".join(_explain(*one) for one in errors),
            where=_where((key for key, _ in errors), where, overrides),
            do="`draftlab recipe schema` prints every setting with its unit and default",
        ) from None


def _where(keys: Iterable[str], file: Path | str, overrides: Sequence[str]) -> str:
    """Return where settings come from: overrides of the command line, or the file of the recipe."""
    places: dict[str, bool] = {}
    for key in keys:
        given = [text for text in overrides if _concerns(text.partition("=")[0].strip(), key)]
        places |= dict.fromkeys(map(_shown, given) if given else [str(file)], True)
    return " and ".join(places)


def _concerns(one: str, other: str) -> bool:
    """Return whether two dotted names are one setting, or a section and a setting in it."""
    a, b = one.split("."), other.split(".")
    length = min(len(a), len(b))
    return a[:length] == b[:length]


def _shown(override: str) -> str:
    """Return an override for an error, without a URL, which may contain credentials."""
    key, _, value = override.partition("=")
    value = "…" if "://" in value or len(value) > _MAX_SHOWN else value
    return f"the override {key}={value}"


def _has(tree: Any, key: str) -> bool:
    """Return whether a tree of settings has a dotted name."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _override(tree: dict[str, Any], text: str) -> None:
    """Set one `a.b=value` in a tree."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(
            f"expected an override such as train.steps=200, found {text!r}",
            where="command line",
            do="write SETTING=VALUE; `draftlab recipe schema` prints every setting",
        )
    *parents, leaf = key.strip().split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if isinstance(child, str) and parent == "target":
            child = {"path": child}
        node[parent] = child if isinstance(child, dict) else {}
        node = node[parent]
    try:
        parsed = load_yaml(value)
    except ValueError:
        raise UserError(
            f"the value of {key} is not YAML: {value!r}",
            where="command line",
            do="write the value as in a recipe, in quotes for the shell",
        ) from None
    if key == "name":  # names such as 7 and 2025-01-01 stay texts
        parsed = value
    # target=PATH replaces the path and keeps the other settings of the target.
    if key == "target" and isinstance(node.get(leaf), dict) and isinstance(parsed, str):
        node[leaf]["path"] = parsed
    else:
        node[leaf] = parsed


def _key(loc: Sequence[Any], tree: Any) -> str:
    """Return a dotted name; a number at its end is the place in a list that the tree has."""
    if len(loc) > 1 and isinstance(loc[-1], int):
        for part in loc[:-1]:
            tree = tree.get(part) if isinstance(tree, dict) else None
        if not isinstance(tree, list) and "," not in str(tree):
            loc = loc[:-1]  # one value stands for a list of it
    return ".".join(map(str, loc))


def _explain(key: str, error: Any) -> str:
    """Return a line for one of `merged_errors`; for an unknown key, with the nearest name."""
    loc = error["loc"]
    if error["type"] != "extra_forbidden":
        return f"{key}: {describe_error(error)}" if loc else describe_error(error)
    model: type[BaseModel] = Recipe
    for part in loc[:-1]:
        model = settings_in(model.model_fields[str(part)].annotation) or model
    near = difflib.get_close_matches(str(loc[-1]), model.model_fields, n=1, cutoff=0.5)
    path = ".".join([*map(str, loc[:-1]), near[0]]) if near else ""
    hint = f"did you mean {path}?" if near else f"known: {', '.join(model.model_fields)}"
    return f"{key}: unknown setting; {hint}"


def flatten(model: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Return every setting by its dotted name, as JSON values."""
    result: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            result |= flatten(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = list(value) if isinstance(value, tuple) else value
    return result


def to_yaml(recipe: Recipe) -> str:
    """Return a recipe as YAML, with all defaults written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
