"""Export of a head: written to a temporary folder, read back, compared, then renamed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.evaluate.results import Report, fastest_k
from draftlab.export.gguf import FILE
from draftlab.export.launch import LAUNCH, cached_target_text, readme_text, template_text
from draftlab.export.layout import CONFIG, README, Export, Layout, layout_for
from draftlab.export.refusals import serving_warnings
from draftlab.export.serving_tables import CALIBRATION, STS, ServingTables, read_serving_tables
from draftlab.export.settings import ExportSettings
from draftlab.export.weight_files import (
    DELTA,
    INDEX,
    WRITE_AGAIN,
    common_dtype,
    compare_tensors,
    delta_index,
    weight_files,
    write_delta,
    write_weights,
)
from draftlab.files import (
    atomic_folder,
    check_folder,
    known_sha256,
    read_fields,
    read_json,
    write_json,
    write_text,
)
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import EMBEDDINGS, WEIGHTS, load_config, meta_head
from draftlab.heads.validate import is_finite, refuse_faults, tensor_faults
from draftlab.progress import Monitor
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.locate import is_hub_id
from draftlab.target_model.parts import load_parts
from draftlab.target_model.quantisation import StoredWeights
from draftlab.tensor_files import reading_tensors

IN_VLLM, V1_K = ("vllm", "speculators"), 128
"""Layouts that vLLM reads, and the drafts that its older runner verifies (`MAX_SPEC_LEN`)."""


_EXPORT_FILES = {CONFIG, README, LAUNCH, CALIBRATION, STS, WEIGHTS, DELTA, INDEX, FILE}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


_LOADING = Lock()
"""Held by the thread that loads tensors: transformers sets torch's default dtype meanwhile."""


@dataclass(frozen=True)
class PlannedExport:
    """An export that has been checked and is not written yet.

    Attributes:
        out: the folder, as the user names it.
        head_folder, target_folder: see `plan_export`.
    """

    out: Path
    layout: Layout
    export: Export
    head_folder: Path
    target_folder: Path

    def write(self, *, trust_remote_code: bool = False) -> Path:
        """Write the export, compare its files with the head, and move them to its folder.

        Args:
            trust_remote_code: whether code shipped with the target may run.

        Returns:
            The folder, with config.json, safetensors, launch.md and README.md.

        Raises:
            UserError: the files differ from the head, or cannot be written.
        """
        layout, export = self.layout, self.export
        destination = self.out.expanduser().resolve()
        tensors = self._tensors(trust_remote_code)
        with atomic_folder(destination) as folder:
            (write_delta if layout.is_delta else write_weights)(tensors, folder)
            for name, content in self._json_files(tensors).items():
                write_json(folder / name, content)
            launch = layout.launch(export, destination)
            if (used := str(self.target_folder.resolve())) in launch:
                launch += cached_target_text(used, export.head.target.name)
            launch += template_text(export.head)
            write_text(folder / LAUNCH, launch)
            write_text(folder / README, readme_text(export.head, export.target_name, layout.title))
            del tensors  # the comparison reads them again
            self.verify(folder, trust_remote_code=trust_remote_code)
        return self.out

    def verify(self, out: Path, *, trust_remote_code: bool = False) -> None:
        """Compare an export on disk with the head, whose files are read again, bit by bit.

        Args:
            out: the export.
            trust_remote_code: whether code shipped with the target may run.

        Raises:
            UserError: the first difference, or a file that cannot be read.
        """
        tensors = self._tensors(trust_remote_code)
        for name, expected in self._json_files(tensors).items():
            found = read_json(out / name, kind=f"export's {name}")
            if difference := _first_difference(expected, found):
                what = f"the export's {name} differs: {difference}"
                raise UserError(what, where=out / name, do=WRITE_AGAIN)
        compare_tensors(tensors, out)

    def _json_files(self, tensors: Iterable[str]) -> dict[str, dict[str, Any]]:
        files = {CONFIG: self.layout.config(self.export)} | self.layout.json_files(self.export)
        if self.layout.is_delta:
            files[INDEX] = delta_index(self.target_folder, tensors)
        return files

    def _tensors(self, trust_remote_code: bool) -> dict[str, Tensor]:
        """Return the head's tensors, checked, cast, and in the layout's names."""
        export, file = self.export, self.head_folder / WEIGHTS
        with _LOADING:
            tensors = _stored_tensors(file)
            refuse_faults(tensor_faults(meta_head(export.head), tensors), file)
            if self.layout.ships_embeddings and export.head.embeddings == "target":
                parts = load_parts(self.target_folder, trust_remote_code=trust_remote_code)
                tensors[EMBEDDINGS] = parts.embeddings
        cast = {name: _cast(name, tensor, export.dtype) for name, tensor in tensors.items()}
        return self.layout.tensors(cast, export)


def check_destination(
    destination: Path, kind: str = "earlier export", more: Collection[str] = ()
) -> None:
    """Check that a folder can be created, or has only files that draftlab writes into one.

    Args:
        destination: an absolute path.
        kind: what may be replaced, for the error.
        more: names of files beside those of an export.

    Raises:
        UserError: it cannot be created, or has other content.
    """
    check_folder(destination)
    paths = sorted(destination.iterdir()) if destination.exists() else []
    known = {*_EXPORT_FILES, *more}
    if (destination / INDEX).is_file():
        with suppress(UserError):  # of a damaged index no shard is known
            known |= {
                file.name for file in weight_files(destination) if _SHARD.fullmatch(file.name)
            }
    foreign = [p.name for p in paths if p.name not in known or p.is_symlink() or not p.is_file()]
    if foreign or (paths and destination / LAUNCH not in paths):
        raise UserError(
            f"expected a new folder or an {kind}, found "
            + (", ".join(foreign[:20]) or f"a model without {LAUNCH}")
            + f" and {len(foreign) - 20:,} more" * (len(foreign) > 20),
            where=destination,
            do="name another folder with --out, or move these files",
        )


def plan_export(
    head_folder: Path,
    target_folder: Path,
    out: Path,
    program: str,
    *,
    target_name: str,
    settings: ExportSettings,
    report: Path | None = None,
    say: Callable[[str], None],
) -> PlannedExport:
    """Check that a head can be exported in a program's layout.

    Args:
        head_folder: the head.
        target_folder: local checkpoint of the target that the head was trained for.
        out: folder to write; an earlier export there is replaced on success.
        program: "speculators", "vllm", "sglang" or "llamacpp".
        target_name: the target's Hub id, or for llama.cpp its GGUF file; anything else is written
            as the resolved `target_folder`.
        report: report.json of the head's evaluation, whose fastest K is the default.
        say: prints which defaults were chosen, and warnings.

    Raises:
        UserError: a missing or broken head, another target, a head that this layout cannot hold, or
            a folder that cannot be written.
    """
    destination = Path(out).expanduser().resolve()
    check_destination(destination)
    head = load_config(head_folder)
    layout = layout_for(program, head.family)
    k, serving = settings.k, read_serving_tables(settings, head_folder)
    if k is None:
        k, reason = served_k(head, head_folder, serving, report)
        say(f"export: K = {k} speculative tokens, {reason}")
    elif k > head.k_trained:
        say(
            f"warning: export: {k} speculative tokens, but the head was trained for "
            f"{head.k_trained}"
            + f"; vLLM's runner V1 verifies at most {V1_K}"
            * (k > V1_K and program in IN_VLLM)
        )
    if settings.dtype is None:
        file = head_folder / WEIGHTS
        dtype = common_dtype(_stored_tensors(file), file)
    else:
        dtype = getattr(torch, settings.dtype)
    if target_name.endswith(".gguf") and program == "llamacpp":
        target_name = str(Path(target_name).expanduser().resolve())
    elif not is_hub_id(target_name):  # readers open what is written here
        target_name = str(Path(target_folder).resolve())
    target_config = _target_config(head, target_folder)
    checkpoint = StoredWeights(target_folder) if layout.is_delta else None
    export = Export(head, target_config, target_name, k, dtype, serving, checkpoint)
    export.check_k()
    try:
        layout.check(export)
    except UserError as error:
        raise UserError(error.what, where=error.where or f"--to {program}", do=error.do) from None
    for warning in serving_warnings(program, export):
        say(warning)
    return PlannedExport(Path(out), layout, export, head_folder, target_folder)


def served_k(
    head: HeadConfig, folder: Path, serving: ServingTables | None, report: Path | None
) -> tuple[int, str]:
    """Return K and a sentence's end that says why.

    It is the K of the calibration, else the fastest one that a report measured for these weights,
    else what an imported head's files name, or what the head was trained for.

    Args:
        folder: the head folder.
        report: report.json of the head's evaluation.

    Raises:
        UserError: the report is damaged.
    """
    if serving is not None:
        return serving.calibration.k, "as the head was calibrated for"
    if report is not None and report.is_file():
        measured = Report.read(report)
        names = measured.heads_with(known_sha256(folder / WEIGHTS))
        rows = [row for row in measured.rows if row.head in names]
        if best := fastest_k(rows):
            which = "the fastest" if best.measured > 1 else "the only one"
            engine = f" with {best.engine}" if len({row.engine for row in rows}) > 1 else ""
            at = f"at T = {best.temperature:g} ({best.speedup:.2f}×)"
            return best.k, f"{which} measured{engine} {at}"
    unmeasured = "no speed-up with an interval was measured"
    imported = (head.provenance.get("imported") or {}).get("k")
    if isinstance(imported, int) and imported > 0:
        return head.default_k, f"as the imported head's files name; {unmeasured}"
    return head.k_trained, f"as the head was trained for; {unmeasured}"


def write_export(
    *places: Any, trust_remote_code: bool = False, monitor: Monitor | None = None, **options: Any
) -> Path:
    """Write a head in a program's layout, as `plan_export` plans it, which has the arguments."""
    planned = plan_export(*places, say=(monitor or Monitor()).say, **options)
    return planned.write(trust_remote_code=trust_remote_code)


def _stored_tensors(file: Path) -> dict[str, Tensor]:
    with reading_tensors(file, "head's weights"):
        return load_file(file)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in `dtype`; raise a `UserError` if a value does not fit it."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor.contiguous()
    cast = tensor.to(dtype)
    if not is_finite(cast):
        raise UserError(
            f"{name} does not fit {dtype}: its largest value is {float(tensor.abs().max()):.3g}",
            where="export.dtype",
            do="export in bfloat16 or float32",
        )
    return cast


def _target_config(head: HeadConfig, folder: Path) -> dict[str, Any]:
    """Return the target's config.json if it is the target that the head was trained for."""
    config = read_fields(folder / CONFIG, {}, kind="target's config.json")
    actual = fingerprint(folder)
    if actual != head.target.fingerprint:
        raise UserError(
            f"expected the target with fingerprint {head.target.fingerprint}, found {actual}",
            where=folder,
            do=f"give the target the head was trained for: {head.target.name}",
        )
    return config


def _first_difference(expected: Any, actual: Any) -> str | None:
    """Return the first difference of two JSON values and their types; None if they are equal."""
    wanted, found = dict(_leaves(expected)), dict(_leaves(actual))
    for path in [*wanted, *found]:
        if (one := wanted.get(path, "no such key")) != (other := found.get(path, "nothing")):
            return f"{path}: expected {one}, found {other}"
    return None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths of a JSON object's values, and their JSON: unlike ==, 1 and true differ."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}".lstrip("."))
    else:
        yield path, json.dumps(value)
