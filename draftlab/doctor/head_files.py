"""Reading and checking a head's files; the target's tensors replace missing ones for scoring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor

from draftlab.doctor.diagnosis import Finding, fault, note
from draftlab.doctor.identity import position_findings, vocabulary_mask
from draftlab.doctor.target_session import TargetSession
from draftlab.errors import UserError
from draftlab.export.foreign_config import ForeignHead, boundary_readings, read_foreign_config
from draftlab.export.importing import foreign_head_config, rename_tensors
from draftlab.export.weight_files import read_weights, weight_files
from draftlab.files import read_json, sha256_file
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import NATIVE, load_config, meta_head
from draftlab.heads.head import EMBEDDINGS, LM_HEAD, TARGET_NORM
from draftlab.heads.validate import D2T, T2D, TensorFault, tensor_faults
from draftlab.heads.vllm_config import native_config
from draftlab.run.resolve import run_of
from draftlab.run.stages import STAGES, read_record, record_path

MASK_HIDDEN, NORM = "mask_hidden", "norm.weight"
RESTORE = "copy the head again, or export it again from its training run"
ADVICE = {
    "missing tensor": RESTORE,
    "unknown tensor": "remove it, or name the family and options that have it in the config",
    "shape": RESTORE,
    "not finite": "take an earlier checkpoint: training diverged, or the file is damaged",
    "zeros": RESTORE,
    "d2t": RESTORE,
}
"""What to do about a fault, by its kind, in the order of the findings. Dtypes are not here."""


@dataclass(frozen=True)
class HeadFiles:
    """The contents of a head's folder.

    Attributes:
        config: its config as a draftlab.json.
        tensors: as stored, by their names in head folders.
        boundaries: further lists of boundaries that its files name.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    boundaries: tuple[tuple[int, ...], ...] = ()


def read_draftlab_head(folder: Path) -> tuple[HeadFiles, list[Finding]]:
    """Read a head folder, and compare its config.json, which other programs read.

    Raises:
        UserError: draftlab.json or the weights cannot be read.
    """
    config = load_config(folder)
    tensors = read_weights(folder, "head's weights")
    return HeadFiles(config, tensors), list(_native_findings(folder, config, tensors))


def _native_findings(
    folder: Path, config: HeadConfig, tensors: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Yield a finding if config.json differs from what draftlab.json generates."""
    fc = tensors.get("fc.weight")
    expected = native_config(config, str(fc.dtype).removeprefix("torch.") if fc is not None else "")
    if not expected:  # no server loads such heads
        return
    if not (folder / NATIVE).is_file():
        yield fault(
            "config.json",
            "config.json is missing: vLLM cannot load the folder as it stands",
            "export the head (draftlab export --to vllm)",
        )
        return
    actual = read_json(folder / NATIVE, kind="head's config.json")
    if not isinstance(actual, dict):
        yield fault("config.json", "config.json holds no object")
        return
    differences = [
        f"{key}: {actual.get(key, 'nothing')} (by draftlab.json {expected.get(key, 'nothing')})"
        for key in sorted(expected.keys() | actual.keys())
        if actual.get(key, "nothing") != expected.get(key, "nothing")
        and (key != "dtype" or fc is not None)
    ]
    if differences:
        yield fault(
            "config.json",
            "config.json, which vLLM reads, differs from draftlab.json: " + "; ".join(differences),
            "export the head again, which rewrites it; or correct draftlab.json, if that is "
            "the wrong one",
        )


def complete_tensors(
    files: HeadFiles, target_tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor] | None, list[Finding]]:
    """Return the tensors that a head is scored with, and the faults of its files.

    Missing tensors are replaced by the target's where possible, so that a head with faults can be
    scored; unknown tensors are left out. The tensors are None if some cannot be replaced.

    Args:
        target_tensors: the target's embeddings, lm_head and final norm, by their names in heads.
    """
    config, head = files.config, meta_head(files.config)
    expected = {name: tensor.shape for name, tensor in head.tensors().items()}
    found, findings = _with_raw_mask(files, expected)
    faults = tensor_faults(head, found, may_be_zero=())
    misfits = {f.tensor for f in faults if f.kind in ("unknown tensor", "shape")}
    tensors = {name: _computable(t) for name, t in found.items() if name not in misfits}
    tensors |= {name: target_tensors[name] for name in head.shared_tensors()}
    if config.draft_vocab_size == config.vocab_size:  # other programs' files have no identity maps
        tensors.setdefault(D2T, torch.zeros(config.vocab_size, dtype=torch.int64))
    for name in sorted(expected.keys() - tensors.keys()):
        if (substitute := _substitute(name, tensors, config, target_tensors)) is not None:
            tensors[name] = substitute
    findings += _fault_findings(faults, found, tensors)
    findings += _dtype_findings(faults, found)
    return (tensors if expected.keys() <= tensors.keys() else None), findings


def _with_raw_mask(
    files: HeadFiles, expected: Mapping[str, torch.Size]
) -> tuple[dict[str, Tensor], list[Finding]]:
    """Return the stored tensors with `mask_hidden` as it is before fc, in the head's shape."""
    tensors, config = files.tensors, files.config
    if MASK_HIDDEN not in tensors or MASK_HIDDEN not in expected:
        return tensors, []
    mask, shape = tensors[MASK_HIDDEN], expected[MASK_HIDDEN]
    if mask.numel() == shape.numel():  # layouts have different leading dimensions
        return tensors | {MASK_HIDDEN: mask.reshape(shape)}, []
    fc = tensors.get("fc.weight")
    invertible = fc is not None and not (config.norm_before_fc or config.fc_norm)
    if mask.numel() != config.hidden_size or not invertible:
        return tensors, []
    finding = fault(
        MASK_HIDDEN,
        f"mask_hidden has {mask.numel()} values, as many as a hidden state: it was projected by fc "
        f"before it was stored, where the {config.feature_size} values before fc are expected; "
        "scored with a vector that fc maps to it",
        "store the vector before fc: servers project it once, when they load it",
    )
    return tensors | {MASK_HIDDEN: unproject_mask(mask, fc)}, [finding]


def unproject_mask(projected: Tensor, fc: Tensor) -> Tensor:
    """Return the shortest vector [1, F] that fc [H, F] maps to `projected` (H values)."""
    fc, output = fc.double(), projected.double().flatten()[:, None]
    solution = fc.T @ torch.linalg.lstsq(fc @ fc.T, output).solution
    return solution.T.to(projected.dtype)


def _computable(tensor: Tensor) -> Tensor:
    """Return a tensor that torch computes with, without NaN and infinities."""
    if not tensor.is_floating_point():
        return tensor
    return (tensor.float() if tensor.element_size() == 1 else tensor).nan_to_num(0, 0, 0)


def _substitute(
    name: str,
    tensors: Mapping[str, Tensor],
    config: HeadConfig,
    target_tensors: Mapping[str, Tensor],
) -> Tensor | None:
    """Return a substitute for a missing tensor; None: there is none."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if name == "d2t" and t2d is not None and int(t2d.sum()) == config.draft_vocab_size:
        return t2d.nonzero()[:, 0] - torch.arange(config.draft_vocab_size)
    if name == "t2d" and d2t is not None:
        return vocabulary_mask(d2t, config.vocab_size)
    if name == EMBEDDINGS:
        return target_tensors.get(EMBEDDINGS)
    if name == NORM:
        return target_tensors.get(TARGET_NORM)
    if name == LM_HEAD and LM_HEAD in target_tensors and d2t is not None:
        ids = (torch.arange(len(d2t)) + d2t.long()).clamp(0, config.vocab_size - 1)
        return target_tensors[LM_HEAD][ids.to(target_tensors[LM_HEAD].device)]
    return None


def _fault_findings(
    faults: list[TensorFault], found: Mapping[str, Tensor], scored: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Yield the validator's faults, each with what to do; those of dtypes are not among them."""
    for kind, do in ADVICE.items():
        for f in faults:
            if f.kind != kind or (kind == "missing tensor" and f.tensor == T2D and D2T in found):
                continue  # a t2d that d2t gives may be missing
            message, advice = f.message, do
            if kind == "missing tensor":
                message += ": servers leave it uninitialised without a warning"
                message += "; scored with a substitute" * (f.tensor in scored)
            elif kind == "not finite":
                message += "; scored with zeros instead"
            elif "absolute ids" in message:
                advice = "store d2t − arange(len(d2t))"
            yield fault(kind, message, advice)


def _dtype_findings(faults: list[TensorFault], tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Yield findings on dtypes that cannot be computed with, and on those that programs cast."""
    wrong = [f for f in faults if f.kind == "dtype" and f.tensor not in (D2T, T2D)]
    if wrong:  # a quantised head has many
        yield fault(
            "dtype",
            f"{wrong[0].message} ({len(wrong)} such tensors)",
            "store weights as bfloat16 or float32: quantised heads cannot be read",
        )
    for name, dtype in ((D2T, torch.int64), (T2D, torch.bool)):
        if name in tensors and tensors[name].dtype != dtype:
            yield fault(
                "dtype",
                f"{name}: expected {dtype}, found {tensors[name].dtype}: programs "
                "cast it or misread it without a warning",
                f"store it as {dtype}",
            )
    others = {t.dtype for name, t in tensors.items() if name not in (D2T, T2D)}
    floats = {str(k).removeprefix("torch.") for k in others if k.is_floating_point}
    if len(floats) > 1:
        yield note(
            "dtype",
            f"weights of several dtypes: {', '.join(sorted(floats))}",
            "servers cast them to the target's dtype; store them in one",
        )


def read_foreign_head(folder: Path, session: TargetSession) -> tuple[HeadFiles, list[Finding]]:
    """Read a head in the speculators layout or the native one, and what is wrong with its config.

    Raises:
        UserError: a config or weights that draftlab cannot read or compute, a target of another
            shape.
    """
    weights = read_weights(folder, "head's weights")
    foreign = read_foreign_config(folder, weights)
    tensors = rename_tensors(weights, weight_files(folder)[0], _ignore)
    findings = list(_config_findings(foreign, session))
    readings = boundary_readings(foreign, session.text_config.num_hidden_layers)
    first, *others = dict.fromkeys(readings.values())
    if others:
        listed = "; ".join(f"{list(ids)} ({program})" for program, ids in readings.items())
        findings.append(
            note(
                "boundaries",
                f"programs read the boundaries in this config differently: {listed}",
                "the scores below show which fit; import with --boundaries, as inputs of layers",
            )
        )
    head_config = foreign_head_config(
        foreign,
        folder,
        session.target_settings,
        first,
        bool(foreign.config.norm_before_residual),
        None,
        _ignore,
    )
    has_own = EMBEDDINGS in tensors or foreign.family.trains_mask
    head_config = head_config.model_copy(update={"embeddings": "own" if has_own else "target"})
    return HeadFiles(head_config, tensors, tuple(others)), findings


def _ignore(line: str) -> None:
    """Ignore what an import would print: findings and scores say it here."""


def _config_findings(foreign: ForeignHead, session: TargetSession) -> Iterator[Finding]:
    """Yield findings on keys that are missing or too small."""
    config = foreign.config
    yield from position_findings(config.max_position_embeddings, session.text_config)
    if config.norm_before_residual is None and "norm_before_residual" in foreign.family.options:
        yield note(
            "norm flags",
            "norm_before_residual is not in the config, and programs have different "
            "defaults; read as false here",
            "write it: the scores below show which fits",
        )
    if not (config.rope_theta or config.rope_parameters or config.rope_scaling):
        yield fault(
            "rope",
            "no RoPE base in the config: every program takes 10,000 then, without a warning",
            "write rope_theta and rope_parameters",
        )
    path, name = session.target_settings.path, foreign.verifier
    if name and name != path and Path(name).resolve() != session.folder.resolve():
        yield note(
            "target",
            f"the config names the target {name}, but the diagnosis uses {path}",
            "nothing, if the two are the same model",
        )


def changed_file_findings(folder: Path) -> list[Finding]:
    """Return a finding for each file that is missing or has changed since its run wrote it.

    Args:
        folder: a head folder or an export; outside of a run it has no recorded hashes.
    """
    run = run_of(folder)
    if run is None:
        return []
    try:
        return list(_changed_files(folder.resolve(), run))
    except UserError as error:
        return [fault("unreadable", f"{error.where}: {error.what}", error.do)]


def _changed_files(folder: Path, run: Path) -> Iterator[Finding]:
    do = f"restore the file, or let `draftlab run {quote(str(run / 'recipe.yaml'))}` make it again"
    for stage in ("head", "export"):
        path = record_path(run, STAGES[stage])
        recorded = read_record(path).get("sha256", {}) if path.is_file() else {}
        for name, expected in recorded.items():
            file = run / name
            if file.parent != folder:
                continue
            if not file.is_file():
                yield fault("changed file", f"{file.name} is missing; the run wrote one", do)
            elif (actual := sha256_file(file)) != expected:
                what = f"{file.name} has SHA-256 {actual[:12]}, and {expected[:12]} when the run"
                yield fault("changed file", f"{what} wrote it", do)
