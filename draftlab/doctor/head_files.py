"""Reading and checking a head's files; the target's tensors replace missing ones for scoring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.doctor.findings import Finding, fault, note
from draftlab.doctor.weight_hypotheses import can_unproject_mask, unproject_mask
from draftlab.export.weight_files import read_weights
from draftlab.files import read_json
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import NATIVE, load_config, meta_head
from draftlab.heads.head import EMBEDDINGS, LM_HEAD, TARGET_NORM
from draftlab.heads.validate import D2T, T2D, TensorFault, tensor_faults
from draftlab.heads.vllm_config import native_config

MASK_HIDDEN, NORM = "mask_hidden", "norm.weight"
RESTORE = "copy the head again, or export it again from its training run"
DO = {
    "unknown tensor": "remove it, or name the family and options that have it in the config",
    "not finite": "take an earlier checkpoint: training diverged, or the file is damaged",
    "zeros": RESTORE,
    "dtype": "store weights as bfloat16 or float32: quantised heads cannot be read",
    "d2t": RESTORE,
}
"""What to do about each kind of the validator's faults, in the order of the findings."""


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
    return HeadFiles(config, tensors), native_findings(folder, config, tensors)


def native_findings(
    folder: Path, config: HeadConfig, tensors: Mapping[str, Tensor]
) -> list[Finding]:
    """Return the keys of config.json that differ from what draftlab.json generates."""
    fc = tensors.get("fc.weight")
    expected = native_config(config, str(fc.dtype).removeprefix("torch.") if fc is not None else "")
    if not expected:  # no server loads such heads
        return []
    if not (folder / NATIVE).is_file():
        return [
            fault(
                "config.json",
                "config.json is missing: vLLM cannot load the folder as it stands",
                "export the head (draftlab export --to vllm)",
            )
        ]
    actual = read_json(folder / NATIVE, kind="head's config.json")
    if not isinstance(actual, dict):
        return [fault("config.json", "config.json holds no object")]
    differences = [
        f"{key}: {_value_text(actual, key)} (by draftlab.json {_value_text(expected, key)})"
        for key in sorted(expected.keys() | actual.keys())
        if (key in expected, expected.get(key)) != (key in actual, actual.get(key))
        and (key != "dtype" or fc is not None)
    ]
    if not differences:
        return []
    return [
        fault(
            "config.json",
            "config.json, which vLLM reads, differs from draftlab.json: " + "; ".join(differences),
            "export the head again, which rewrites it; or correct draftlab.json, if that is "
            "the wrong one",
        )
    ]


def _value_text(config: dict[str, Any], key: str) -> str:
    return str(config[key]) if key in config else "nothing"


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
    found = dict(files.tensors)
    if MASK_HIDDEN in found and MASK_HIDDEN in expected:
        mask, shape = found[MASK_HIDDEN], expected[MASK_HIDDEN]
        if mask.numel() == shape.numel():  # layouts have different leading dimensions
            found[MASK_HIDDEN] = mask.reshape(shape)
    # torch cannot compute with floats of 8 bits.
    stored = {
        name: tensor.float()
        if tensor.is_floating_point() and tensor.element_size() == 1
        else tensor
        for name, tensor in found.items()
    }
    shared, faults = head.shared_tensors(), tensor_faults(head, found, may_be_zero=())
    findings = [*_fault_findings(faults), *_dtype_findings(found)]
    shape_findings, tensors = _fitting_tensors(
        {n: t for n, t in stored.items() if n not in shared},
        expected,
        config,
        {f.tensor: f.message for f in faults if f.kind == "shape"},
    )
    tensors |= {name: target_tensors[name] for name in shared if name in target_tensors}
    if config.draft_vocab_size == config.vocab_size:  # other programs' files have no identity maps
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
    for name in sorted(expected.keys() - tensors.keys()):
        substitute = _substitute(name, tensors, config, target_tensors)
        if substitute is not None:
            tensors[name] = substitute
        if name not in stored and not (name == "t2d" and "d2t" in tensors):
            scored = "" if substitute is None else "; scored with a substitute"
            findings.append(
                fault(
                    "missing tensor",
                    f"missing tensor {name}: servers leave it uninitialised without a warning"
                    + scored,
                    RESTORE,
                )
            )
    return (tensors if expected.keys() <= tensors.keys() else None), findings + shape_findings


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


def vocabulary_mask(d2t: Tensor, size: int) -> Tensor:
    """Return t2d [V] for offsets; ids outside the vocabulary are left out."""
    ids = torch.arange(len(d2t)) + d2t.long()
    members = torch.zeros(size, dtype=torch.bool)
    members[ids[(ids >= 0) & (ids < size)]] = True
    return members


def _fitting_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, torch.Size],
    config: HeadConfig,
    messages: Mapping[str, str],
) -> tuple[list[Finding], dict[str, Tensor]]:
    """Return findings on tensors of a wrong shape, and the other tensors, made finite."""
    findings, fitting = [], {}
    for name, tensor in tensors.items():
        if name not in expected:
            continue
        if tensor.is_floating_point():
            tensor = tensor.nan_to_num(0, 0, 0)
        projected = name == MASK_HIDDEN and tensor.numel() == config.hidden_size
        if tensor.shape == expected[name]:
            fitting[name] = tensor
        elif projected and can_unproject_mask(config, tensors):
            fitting[name] = unproject_mask(tensor, tensors["fc.weight"])
            findings.append(
                fault(
                    "mask_hidden",
                    f"mask_hidden has {tensor.numel()} values, as many as a hidden state: it "
                    f"was projected by fc before it was stored, where the {config.feature_size} "
                    "values before fc are expected; scored with a vector that fc maps to it",
                    "store the vector before fc: servers project it once, when they load it",
                )
            )
        else:
            findings.append(fault("shape", messages[name], RESTORE))
    return findings, fitting


def _fault_findings(faults: list[TensorFault]) -> Iterator[Finding]:
    """Yield the validator's faults, each with what to do; shapes and maps' dtypes come later."""
    for kind, do in DO.items():
        found = [f for f in faults if f.kind == kind]
        if kind == "dtype":  # a quantised head has many
            found = [f for f in found if f.tensor not in (D2T, T2D)]
            if found:
                yield fault(kind, f"{found[0].message} ({len(found)} such tensors)", do)
            continue
        for f in found:
            absolute = kind == "d2t" and "absolute ids" in f.message
            scored = "; scored with zeros instead" if kind == "not finite" else ""
            yield fault(
                kind, f.message + scored, "store d2t − arange(len(d2t))" if absolute else do
            )


def _dtype_findings(tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Yield findings on d2t and t2d of other dtypes, and on weights of several dtypes."""
    for name, dtype in (("d2t", torch.int64), ("t2d", torch.bool)):
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
