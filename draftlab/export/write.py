"""Writing a head in a layout: into a hidden folder, read back, compared, and only then in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.compare import compare_tensors, first_difference
from draftlab.export.destination import check_place, whole_folder
from draftlab.export.launch_text import is_hub_id, readme_text
from draftlab.export.layout import CONFIG, LAUNCH, README, Export
from draftlab.export.layouts import layout_for
from draftlab.export.settings import MAX_SHARD, check_program
from draftlab.export.weight_files import read_file, write_weights
from draftlab.files import read_json, write_json, write_text
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import EMBEDDINGS, WEIGHTS, load_config, new_head
from draftlab.heads.validate import refuse_faults, tensor_faults
from draftlab.progress import Monitor
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.parts import load_parts


def write_export(
    head_folder: Path,
    target_folder: Path,
    out: Path,
    program: str,
    *,
    target_name: str,
    k: int | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard: str = MAX_SHARD,
    monitor: Monitor | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Writes a head in a program's layout, reads it back, and only then puts it at `out`.

    Args:
        head_folder: the head.
        target_folder: local checkpoint of the very target the head was trained for.
        out: folder to write; an earlier export there is replaced whole, and only on success.
        program: "speculators", "vllm", "sglang" or "llamacpp".
        target_name: the target's Hub id; anything else is written as the resolved `target_folder`.
        k: tokens a server is told to draft; None: the head's k_trained.
        dtype: of floating tensors; None: the one the head is stored in.
        max_shard: size above which the weights go into several files, such as "5GB".
        monitor: where defaults that were chosen are said.
        trust_remote_code: whether code shipped with the target may run.

    Returns:
        `out`, holding config.json, safetensors, launch.md and README.md.

    Raises:
        UserError: a missing or broken head, another target, a head this layout cannot hold, a place
            that cannot be written, or an export that does not read back as the head.
    """
    say = (monitor or Monitor()).say
    place = Path(out).expanduser().resolve()
    check_program(program)
    check_place(place)
    head = load_config(head_folder)
    layout = layout_for(program, head.family)
    if k is None:
        k = head.k_trained
        say(f"export: {k} speculative tokens, as the head was trained for")
    elif k < 1:
        raise UserError(f"expected at least 1 speculative token, found {k}")
    elif k > head.k_trained:
        say(
            f"warning: export: {k} speculative tokens, though the head was trained for "
            f"{head.k_trained}"
        )
    export = Export(
        head,
        _target_config(head, target_folder),
        _target_name(target_name, target_folder),
        k,
        floating_dtype(dtype) if dtype is not None else _stored_dtype(head_folder),
    )
    if k >= export.positions:
        raise UserError(
            f"expected fewer speculative tokens than the target's {export.positions} positions, "
            f"found {k}: a server drafts only where all of them fit",
            where="export.k",
        )
    layout.check(export)
    embeddings = None
    if layout.ships_embeddings and head.embeddings == "target":
        embeddings = _embeddings(target_folder, trust_remote_code)
    tensors = layout.tensors(_head_tensors(head_folder, export, embeddings), export)
    with whole_folder(place) as folder:
        write_weights(tensors, folder, max_shard)
        write_json(folder / CONFIG, layout.config(export))
        write_text(folder / LAUNCH, layout.launch(export, place))
        write_text(folder / README, readme_text(head, export.target_name, layout.title()))
        del tensors  # read again, so that what is compared is the files
        verify_export(
            folder, head_folder, target_folder, program, trust_remote_code=trust_remote_code
        )
    return Path(out)


def verify_export(
    out: Path,
    head_folder: Path,
    target_folder: Path,
    program: str,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Reads an export from disk and compares it with the head, bit for bit and key by key.

    Args:
        out: the export.
        head_folder: the head it was made from; its files are read anew.
        target_folder: the head's target, for its embeddings and its config.
        program: the layout's name.
        trust_remote_code: whether code shipped with the target may run.

    Raises:
        UserError: naming the first difference, or the file that cannot be read.
    """
    found = read_json(out / CONFIG, kind=f"{program} config.json")
    head = load_config(head_folder)
    layout = layout_for(program, head.family)
    try:
        stated = {"k": head.k_trained, "target_name": head.target.name} | layout.stated(found)
        kind = floating_dtype(found["dtype"])
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"the export's config lacks what every reader needs: {error!r}", where=out / CONFIG
        ) from None
    k, name = stated["k"], stated["target_name"]
    if not (isinstance(k, int) and k >= 1 and isinstance(name, str) and name):
        raise UserError(
            f"expected speculative_tokens >= 1 and a verifier's name, found {k!r} and {name!r}",
            where=out / CONFIG,
        )
    export = Export(head, _target_config(head, target_folder), name, k, kind)
    if difference := first_difference(layout.config(export), found):
        raise UserError(f"the export's config differs: {difference}", where=out / CONFIG)
    embeddings = None
    if layout.ships_embeddings and head.embeddings == "target":
        embeddings = _embeddings(target_folder, trust_remote_code)
    compare_tensors(layout.tensors(_head_tensors(head_folder, export, embeddings), export), out)


def _head_tensors(folder: Path, export: Export, embeddings: Tensor | None) -> dict[str, Tensor]:
    """The tensors of a head's file, every one there and sound, cast.

    Args:
        embeddings: the target's [V, H], where the layout ships them and the head has none.
    """
    tensors = read_file(folder / WEIGHTS, "head's weights")
    with torch.device("meta"):
        head = new_head(export.head)
    refuse_faults(tensor_faults(head, tensors), folder / WEIGHTS)
    if embeddings is not None:
        tensors[EMBEDDINGS] = embeddings
    return {name: _cast(name, tensor, export.dtype) for name, tensor in tensors.items()}


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor.contiguous()
    found = tensor.to(dtype)
    if not bool(found.isfinite().all()):
        raise UserError(
            f"{name} does not fit {dtype}: its largest value is {float(tensor.abs().max()):.3g}",
            where="export.dtype",
            do="export in bfloat16 or float32",
        )
    return found


FLOATING = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that heads are written in."""


def floating_dtype(name: torch.dtype | str) -> torch.dtype:
    """One of `FLOATING`, by itself or by its name; another is a `UserError`."""
    kind = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if kind not in FLOATING:
        raise UserError(f"expected the dtype float32, bfloat16 or float16, found {name!r}")
    return kind


def _stored_dtype(head_folder: Path) -> torch.dtype:
    """The one floating dtype of the head's file."""
    tensors = read_file(head_folder / WEIGHTS, "head's weights")
    kinds = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if len(kinds) != 1:
        raise UserError(
            f"expected one floating dtype in the head's weights, found {sorted(map(str, kinds))}",
            where=head_folder / WEIGHTS,
            do="name the dtype to export in",
        )
    return floating_dtype(kinds.pop())


def _target_config(head: HeadConfig, folder: Path) -> dict[str, Any]:
    """The target's config.json, once shape and content say that it is the head's target."""
    where = Path(folder) / CONFIG
    config = read_json(where, kind="target's config.json")
    if not isinstance(config, dict):
        raise UserError("expected a target's config.json, found no object in it", where=where)
    text = config.get("text_config", config)
    shape = {
        "num_hidden_layers": head.target_num_layers,
        "hidden_size": head.target_hidden_size,
        "vocab_size": head.vocab_size,
    }
    for key, wanted in shape.items():
        if text.get(key, wanted) != wanted:
            raise UserError(
                f"the head was trained for a target with {key} {wanted}, this one has {text[key]}",
                where=where,
                do=f"give the target the head was trained for: {head.target.name}",
            )
    if (found := fingerprint(Path(folder))) != head.target.fingerprint:
        raise UserError(
            f"expected the target with fingerprint {head.target.fingerprint}, found {found}",
            where=folder,
            do=f"give the target the head was trained for: {head.target.name}",
        )
    return config


def _embeddings(folder: Path, trust_remote_code: bool) -> Tensor:
    """The target's embeddings [V, H]."""
    try:
        return load_parts(Path(folder), trust_remote_code=trust_remote_code).embeddings
    except UserError:
        raise
    except Exception as error:  # transformers and safetensors raise many types
        raise UserError(f"the target's embeddings cannot be read: {error}", where=folder) from None


def _target_name(name: str, folder: Path) -> str:
    """A Hub id as it stands; else the folder, since readers open what is written here."""
    return name if is_hub_id(name) else str(Path(folder).resolve())
