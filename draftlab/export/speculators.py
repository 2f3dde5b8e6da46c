"""The speculators layout (CONTRACTS §9), which vLLM serves as it stands.

Tensor names are those of the head's own files, so an export is the head's tensors, the target's
embeddings where the head ships none, and a config.json written out in full: vLLM reads it without
any model's defaults, and a missing key is a silently different head (CONTRACTS §1.6). EAGLE3 heads
are of the library's type eagle3, PTD heads of its type peagle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftlab.base import Monitor, UserError, atomic_path, read_json, write_json, write_text
from draftlab.export.compare import (
    SAFETENSORS_METADATA,
    compare_tensors,
    first_difference,
    read_tensors,
)
from draftlab.export.launch import is_hub_id, launch_text, readme_text
from draftlab.export.place import check_place, whole_folder
from draftlab.export.speculators_config import layout_name, positions, speculators_config
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import EMBEDDINGS, WEIGHTS, head_tensors, load_config, load_head
from draftlab.target.model import fingerprint
from draftlab.target.parts import load_parts

MASK_HIDDEN = "mask_hidden"
_CONFIG, _LAUNCH, _README = "config.json", "launch.md", "README.md"
_FILES = frozenset({_CONFIG, WEIGHTS, _LAUNCH, _README})


def export_speculators(
    head_folder: Path,
    target_folder: Path,
    out: Path,
    *,
    target_name: str,
    k: int | None = None,
    dtype: torch.dtype | str | None = None,
    monitor: Monitor | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Writes a head in the speculators layout, reads it back, and only then puts it at `out`.

    Weights go into one file whatever its size; readers take that as well as 5 GB pieces.

    Args:
        head_folder: the head.
        target_folder: local checkpoint of the very target the head was trained for.
        out: folder to write; an earlier export there is replaced whole, and only on success.
        target_name: the target's Hub id, written as the verifier's name; anything that is not a Hub
            id is written as the resolved `target_folder`.
        k: speculative tokens in the config; None: the head's k_trained.
        dtype: of floating tensors; None: the one the head is stored in.
        monitor: where defaults that were chosen are said.
        trust_remote_code: whether code shipped with the target may run.

    Returns:
        `out`, holding config.json, model.safetensors, launch.md and README.md.

    Raises:
        UserError: a missing or broken head, another target, a head this layout cannot hold, a place
            that cannot be written, or an export that does not read back as the head.
    """
    say = (monitor or Monitor()).say
    place = Path(out).expanduser().resolve()
    check_place(place, _FILES)
    if _is_another_model(place):
        raise UserError("the folder holds a model that is no speculators export", where=place)
    head = load_config(head_folder)
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
    kind = _dtype(dtype) if dtype is not None else _stored_dtype(head_folder)
    name = _verifier_name(target_name, target_folder)
    target_config = _target_config(head, target_folder)
    if k >= (longest := positions(head, target_config)):
        raise UserError(
            f"expected fewer speculative tokens than the target's {longest} positions, found {k}: "
            "a server drafts only where all of them fit",
            where="export.k",
        )
    config = speculators_config(head, target_config, name, k, kind)
    embeddings = _embeddings(head, target_folder, trust_remote_code)
    loaded = load_head(head_folder, embeddings=embeddings, dtype=kind, device="cpu")
    tensors = _as_files(head_tensors(loaded, kind))
    if head.draft_vocab_size == head.vocab_size:
        del tensors["d2t"], tensors["t2d"]  # readers have no place for identity maps
    with whole_folder(place) as folder:
        with atomic_path(folder / WEIGHTS) as file:
            save_file(tensors, file, metadata=SAFETENSORS_METADATA)
        write_json(folder / _CONFIG, config)
        write_text(folder / _LAUNCH, launch_text(head, place, name, k))
        write_text(folder / _README, readme_text(head, name, layout_name(head)))
        verify_export(folder, head_folder, target_folder, trust_remote_code=trust_remote_code)
    return Path(out)


def verify_export(
    out: Path, head_folder: Path, target_folder: Path, *, trust_remote_code: bool = False
) -> None:
    """Reads an export from disk and compares it with the head, bit for bit and key by key.

    Args:
        out: the export.
        head_folder: the head it was made from; its files are read anew.
        target_folder: the head's target, for its embeddings and its config.
        trust_remote_code: whether code shipped with the target may run.

    Raises:
        UserError: naming the first difference, or the file that cannot be read.
    """
    found = read_json(out / _CONFIG, kind="speculators config.json")
    head = load_config(head_folder)
    try:
        proposal = found["speculators_config"]["proposal_methods"][0]
        k = proposal["speculative_tokens"]
        name = found["speculators_config"]["verifier"]["name_or_path"]
        kind = _dtype(found["dtype"])
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"the export's config lacks what every reader needs: {error!r}", where=out / _CONFIG
        ) from None
    if not (isinstance(k, int) and k >= 1 and isinstance(name, str) and name):
        raise UserError(
            f"expected speculative_tokens >= 1 and a verifier's name, found {k!r} and {name!r}",
            where=out / _CONFIG,
        )
    wanted = speculators_config(head, _target_config(head, target_folder), name, k, kind)
    if difference := first_difference(wanted, found):
        raise UserError(f"the export's config differs: {difference}", where=out / _CONFIG)

    tensors = read_tensors(head_folder / WEIGHTS, "head's weights")
    if head.embeddings == "target":
        tensors[EMBEDDINGS] = _embeddings(head, target_folder, trust_remote_code)
    cast = {n: t.to(kind) if t.is_floating_point() else t for n, t in tensors.items()}
    compare_tensors(_as_files(cast), out / WEIGHTS)


def _as_files(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors in the layout's shapes: the library keeps `mask_hidden` as [1, 1, F]."""
    masks = {MASK_HIDDEN: tensors[MASK_HIDDEN][None]} if MASK_HIDDEN in tensors else {}
    return tensors | masks


def _dtype(name: torch.dtype | str) -> torch.dtype:
    kind = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UserError(f"expected a floating dtype such as bfloat16 or float32, found {name!r}")
    return kind


def _stored_dtype(head_folder: Path) -> torch.dtype:
    """The one floating dtype of the head's file."""
    tensors = read_tensors(head_folder / WEIGHTS, "head's weights")
    kinds = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if len(kinds) != 1:
        raise UserError(
            f"expected one floating dtype in the head's weights, found {sorted(map(str, kinds))}",
            where=head_folder / WEIGHTS,
            do="name the dtype to export in",
        )
    return kinds.pop()


def _target_config(head: HeadConfig, folder: Path) -> dict[str, Any]:
    """The target's config.json, once shape and content say that it is the head's target."""
    where = Path(folder) / "config.json"
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
    # The library builds its layers from the config and puts the target's width into it.
    if head.hidden_size != head.target_hidden_size:
        raise UserError(
            f"this layout holds heads as wide as their target ({head.target_hidden_size}); this "
            f"one has hidden_size {head.hidden_size}"
        )
    if not head.qk_norm and head.hidden_size % head.num_attention_heads:
        raise UserError(
            f"this layout's Llama layers need num_attention_heads to divide hidden_size; this head "
            f"has {head.num_attention_heads} and {head.hidden_size}"
        )
    return config


def _embeddings(head: HeadConfig, folder: Path, trust_remote_code: bool) -> Tensor | None:
    """The target's embeddings [V, H], when the head ships none."""
    if head.embeddings == "own":
        return None
    try:
        return load_parts(Path(folder), trust_remote_code=trust_remote_code).embeddings
    except UserError:
        raise
    except Exception as error:  # transformers and safetensors raise many types
        raise UserError(f"the target's embeddings cannot be read: {error}", where=folder) from None


def _verifier_name(target_name: str, target_folder: Path) -> str:
    """A Hub id as it stands; else the folder, since readers open what is written here."""
    return target_name if is_hub_id(target_name) else str(Path(target_folder).resolve())


def _is_another_model(place: Path) -> bool:
    """Whether a config.json lies there that no speculators export has."""
    file = place / _CONFIG
    return file.exists() and "speculators_model_type" not in read_json(file, kind=_CONFIG)
