"""Find the checkpoint folder and the device that a target's settings name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC, EROFS
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from draftlab.errors import UserError
from draftlab.files import read_fields
from draftlab.formatting import is_positive
from draftlab.target_model.settings import EMBEDDED, TargetSettings

MOST_LAYERS = 1024
CONFIG_FILES = ("*config.json", "*.py")
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
TARGET_FILES = (*TOKENIZER_FILES, "*.safetensors")
DAMAGED_GGUF = "fetch the file again: it is cut off or damaged, or of a newer format"


def is_hub_id(name: str) -> bool:
    """Return whether a target's name is a Hub id ("org/name"), and no file or folder."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:  # such as a space, or a second "/"
        return False
    return name.count("/") == 1 and not name.endswith(".gguf") and not Path(name).exists()


def local_target(settings: TargetSettings) -> Path | None:
    """Return the folder of the embedded or a local target; None: the path is a Hub id.

    That of a GGUF file has its config and tokenizer, and its weights after `resolve_target`. Raises
    a `UserError` if the path is neither of these.
    """
    if settings.path == EMBEDDED:
        return Path(str(resources.files("draftlab") / "embedded" / "target"))
    path = Path(settings.path).expanduser()
    if settings.revision is not None and path.exists():
        raise UserError(
            f"expected no revision of a folder or file, found {settings.revision!r}",
            where=f"target.revision, of {settings.path}",
            do="leave it out, or name the target by its id on the Hub",
        )
    _check_no_adapter(path)
    if (path / "config.json").is_file():
        return path
    if path.suffix == ".gguf" and path.is_file():
        from draftlab.target_model.gguf import gguf_folder  # imports transformers

        with explain_loading("the target", path, DAMAGED_GGUF):
            return gguf_folder(path)
    if not is_hub_id(settings.path):
        raise UserError(
            "expected a checkpoint folder with config.json or a GGUF file, found neither",
            where=settings.path,
            do='give a folder, a GGUF file, a Hub id such as "org/name", or "embedded"',
        )
    return None


def _check_no_adapter(path: Path) -> None:
    if (path / "adapter_config.json").is_file():  # transformers would load it, or not, by itself
        raise UserError(
            "expected a checkpoint, found a LoRA adapter"
            + (" beside one" if (path / "config.json").is_file() else ""),
            where=path,
            do="name the adapter's folder as target.adapter, and as target.path its base model, in "
            "a folder without the adapter's files",
        )


def config_folder(settings: TargetSettings) -> Path | None:
    """Return a folder with the target's config.json that needs no network: local, in the Hub's
    cache or a `shipped_config`; None: there is none.
    """
    if (path := local_target(settings)) is not None:
        return path
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(settings.path, "config.json", revision=settings.revision)
    return Path(cached).parent if isinstance(cached, str) else shipped_config(settings)


def shipped_config(settings: TargetSettings) -> Path | None:
    """Return the folder with the shapes of a target that a shipped recipe names; else None."""
    folder = Path(str(resources.files("draftlab") / "embedded" / "configs"))
    path = folder / settings.path.replace("/", "--")
    return path if settings.revision is None and (path / "config.json").is_file() else None


def hub_answers() -> bool:
    """Return whether the Hub answers within 5 seconds; the Hub's client would try for a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # those of the client's HTTP library, which has changed before
        return False
    return True


def load_error(what: str, where: Path | str, error: Exception, do: str) -> UserError:
    """Return the error of a part of a checkpoint, such as "the target's config", that transformers
    cannot load; `do`: the advice, if the reason is not that the checkpoint ships code.
    """
    if "trust_remote_code" in str(error):  # transformers names the argument of its own function
        return UserError(
            f"{what} needs code that the checkpoint ships, and draftlab runs none unless told to",
            where=where,
            do="read its Python files; then add --target TARGET --trust-remote-code, or write "
            "target.trust_remote_code: true into your recipe (behind the recipe.yaml of a run, "
            "whose word does not count, write target=TARGET target.trust_remote_code=true)",
        )
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return UserError(f"{what} does not load: {kind}{error}", where=where, do=do)


@contextmanager
def explain_loading(
    what: str,
    where: Path | str,
    do: str = "check that config.json fits the weights and that all files are complete",
) -> Iterator[None]:
    """Turn what transformers, safetensors or a checkpoint's own code raises into a `load_error`.

    A `UserError` that names no place gets this one.
    """
    try:
        yield
    except UserError as error:
        if error.where:
            raise
        raise UserError(error.what, where=where, do=error.do) from None
    except Exception as error:  # they raise many types
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EROFS):
            raise  # of what is written into the cache
        raise load_error(what, where, error, do) from None


def check_named(target: object, trust_remote_code: bool) -> None:
    """Raise a `UserError` if the user trusts code of a target without naming it: files, which may
    be a stranger's, then name it.
    """
    if trust_remote_code and target is None:
        raise UserError(
            "expected --target beside --trust-remote-code, found none: files that may be a "
            "stranger's do not say whose code runs",
            where="command line",
            do="name the target whose Python files you have read: --target TARGET",
        )


def load_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """Return a checkpoint's config.json as transformers reads it; raise a `UserError` if it does
    not load, has more layers than any model, or a RoPE base that is no positive number.
    """
    from transformers import AutoConfig

    fields = read_fields(folder / "config.json", {}, kind="target's config.json")
    for part in (fields, *fields.values()):
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > MOST_LAYERS:  # a plan makes a module of each
            raise UserError(
                f"expected at most {MOST_LAYERS:,} layers, found {layers:,}",
                where=folder / "config.json",
                do="fetch it again from a source that you trust",
            )
    advice = "check that the folder is complete and that transformers knows the architecture"
    with explain_loading("the target's config", folder, advice):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
            getattr(text, name)  # which a config class of the checkpoint's own may not have
    if (file := folder / "hf_quant_config.json").is_file() and not hasattr(
        config, "quantization_config"
    ):  # as Model Optimizer writes it; transformers does not read it
        found = read_fields(file, {"quantization": dict}, kind="Model Optimizer's config")
        config.quantization_config = {"quant_method": "modelopt"} | found["quantization"]
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in (rope, *rope.values()):  # some targets have one for each kind of attention
        theta = kind.get("rope_theta", 1.0) if isinstance(kind, dict) else 1.0
        if not is_positive(theta):
            raise UserError(
                f"expected a positive finite number as rope_theta, found {theta!r}",
                where=folder / "config.json",
                do="fetch the file again",
            )
    return config


def resolve_target(settings: TargetSettings, files: Sequence[str] = TARGET_FILES) -> Path:
    """Return a local folder with the target; a target on the Hub is downloaded first.

    Args:
        files: patterns of the files that are needed. Without weights an adapter is not merged.
    """
    path = local_target(settings) or _download(settings, files)
    _check_no_adapter(path)  # of the Hub
    if "*.safetensors" not in files:
        return path
    if settings.path.endswith(".gguf"):
        from draftlab.target_model.gguf import add_weights  # imports transformers

        file = Path(settings.path).expanduser()
        with explain_loading("the target", file, DAMAGED_GGUF):
            add_weights(path, file)
    if settings.adapter is not None:
        from draftlab.target_model.adapter import merged_folder  # imports this module

        return merged_folder(path, Path(settings.adapter).expanduser())
    return path


def _download(settings: TargetSettings, files: Sequence[str]) -> Path:
    """Return the folder of a target on the Hub with files of these patterns."""
    from huggingface_hub import snapshot_download

    answers = hub_answers()
    try:
        return Path(
            snapshot_download(
                settings.path,
                revision=settings.revision,
                allow_patterns=list(files),
                local_files_only=not answers,
            )
        )
    except Exception as error:  # the Hub client has many: offline, gated, unknown, interrupted
        reason = str(error) if answers else "the Hub does not answer, and the local cache lacks it"
        raise UserError(
            f"the target could not be read from the Hub: {reason}",
            where=settings.path,
            do="check the id, your network and your login, or name a local folder",
        ) from None


def resolve_device(name: str) -> torch.device:
    """Return the device that a setting names; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("draftlab runs on no such device")
    except RuntimeError as error:
        raise UserError(
            f"expected a device such as cpu or cuda:0, found {name!r}: {error}",
            do="use device: auto, cpu or cuda:0",
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"expected device {name!r}, found {torch.cuda.device_count()} GPUs",
            do="use device: auto",
        )
    return device


def max_positions(config: Any) -> int:
    """Return the largest number of positions by the config of a target's text model; raise a
    `UserError` if it names none.
    """
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):  # as MPT and BLOOM, too
        if (limit := getattr(config, name, None)) is not None:
            return int(limit)
    raise UserError(
        f"expected max_position_embeddings in the config of a {config.model_type}, found none",
        where="target",
        do="write the longest context that it was trained with into a copy of its config.json",
    )
