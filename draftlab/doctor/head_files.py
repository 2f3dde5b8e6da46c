"""A head's files: read without trust, checked, and made whole where the target can fill a gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.doctor.findings import Finding
from draftlab.doctor.weight_hypotheses import can_lift, lifted_mask
from draftlab.export.weight_files import read_weights
from draftlab.files import read_json
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import NATIVE, load_config, new_head
from draftlab.heads.head import EMBEDDINGS, LM_HEAD, TARGET_NORM
from draftlab.heads.native_config import native_config
from draftlab.heads.validate import draft_vocabulary_fault, tensor_faults

MASK_HIDDEN, NORM = "mask_hidden", "norm.weight"
UNREAD = "this head has no use for it; programs refuse it, or leave it out in silence"
RESTORE = "copy the head again, or export it again from its training run"


@dataclass(frozen=True)
class HeadFiles:
    """A head as its folder says.

    Attributes:
        layout: whose layout it is.
        config: what its config says, in our terms.
        tensors: by the names of our files; as stored.
        boundaries: further lists of boundaries that its files name.
    """

    layout: str
    config: HeadConfig
    tensors: dict[str, Tensor]
    boundaries: tuple[tuple[int, ...], ...] = ()


def read_own(folder: Path) -> tuple[HeadFiles, list[Finding]]:
    """A head in our layout, and what config.json, which other programs read, says otherwise.

    Raises:
        UserError: draftlab.json or the weights cannot be read.
    """
    config = load_config(folder)
    tensors = read_weights(folder, "head's weights")
    return HeadFiles("draftlab", config, tensors), native_findings(folder, config, tensors)


def native_findings(
    folder: Path, config: HeadConfig, tensors: Mapping[str, Tensor]
) -> list[Finding]:
    """Keys in which config.json, generated from draftlab.json, has since been changed."""
    fc = tensors.get("fc.weight")
    wanted = native_config(config, str(fc.dtype).removeprefix("torch.") if fc is not None else "")
    if not wanted:  # no server loads such heads
        return []
    if not (folder / NATIVE).is_file():
        return [
            Finding(
                kind="config.json",
                what="config.json is missing: vLLM cannot load the folder as it stands",
                do="export the head (draftlab export --to vllm)",
            )
        ]
    found = read_json(folder / NATIVE, kind="head's config.json")
    if not isinstance(found, dict):
        return [Finding(kind="config.json", what="config.json holds no object")]
    odd = [
        f"{key}: {_shown(found, key)} (by draftlab.json {_shown(wanted, key)})"
        for key in sorted(wanted.keys() | found.keys())
        if (key in wanted, wanted.get(key)) != (key in found, found.get(key))
        and (key != "dtype" or fc is not None)
    ]
    if not odd:
        return []
    return [
        Finding(
            kind="config.json",
            what=f"config.json, which vLLM reads, differs from draftlab.json: {'; '.join(odd)}",
            do="export the head anew, which writes it again; or mend draftlab.json, if that is the "
            "one that is wrong",
        )
    ]


def _shown(config: dict[str, Any], key: str) -> str:
    return str(config[key]) if key in config else "nothing"


def whole_tensors(
    files: HeadFiles, target_tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor] | None, list[Finding]]:
    """The head's tensors, complete, with what was wrong with them.

    What is missing and the target has is filled in, so that a head can be scored beside its faults;
    tensors that nothing reads are left out. None where that leaves gaps.

    Args:
        target_tensors: the target's embeddings, lm_head and final norm, by their names in heads.
    """
    config, stored = files.config, {n: _readable(t) for n, t in files.tensors.items()}
    head = new_head(config)
    wanted = {name: tensor.shape for name, tensor in head.tensors().items()}
    shared, faults = head.shared_tensors(), tensor_faults(head, stored)
    findings = [
        Finding(
            kind="unknown tensor",
            what=fault.message,
            do="remove it, or name the family and options that have it in the config",
        )
        for fault in faults
        if fault.kind == "unknown tensor"
    ]
    findings += _values(stored) + _dtypes(files.tensors) + vocabulary_findings(stored, config)
    misshapen, tensors = _shaped(
        {n: t for n, t in stored.items() if n not in shared},
        wanted,
        config,
        {fault.tensor: fault.message for fault in faults if fault.kind == "shape"},
    )
    tensors |= {name: target_tensors[name] for name in shared if name in target_tensors}
    if config.draft_vocab_size == config.vocab_size:  # readers have no place for identity maps
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
    for name in sorted(wanted.keys() - tensors.keys()):
        filled = _filling(name, tensors, config, target_tensors)
        if filled is not None:
            tensors[name] = filled
        if name not in stored and not (name == "t2d" and "d2t" in tensors):
            used = "" if filled is None else "; scored with a stand-in"
            findings.append(
                Finding(
                    kind="missing tensor",
                    what=f"missing tensor {name}: servers leave it uninitialised in silence{used}",
                    do=RESTORE,
                )
            )
    return (tensors if wanted.keys() <= tensors.keys() else None), findings + misshapen


def _readable(tensor: Tensor) -> Tensor:
    """A tensor in a dtype that torch computes with: floats of 8 bits become 32."""
    narrow = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.float() if narrow else tensor


def _filling(
    name: str,
    tensors: Mapping[str, Tensor],
    config: HeadConfig,
    target_tensors: Mapping[str, Tensor],
) -> Tensor | None:
    """A stand-in for a missing tensor; None: there is none."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if name == "d2t" and t2d is not None and int(t2d.sum()) == config.draft_vocab_size:
        return t2d.nonzero()[:, 0] - torch.arange(config.draft_vocab_size)
    if name == "t2d" and d2t is not None:
        return membership(d2t, config.vocab_size)
    if name == EMBEDDINGS:
        return target_tensors.get(EMBEDDINGS)
    if name == NORM:
        return target_tensors.get(TARGET_NORM)
    if name == LM_HEAD and LM_HEAD in target_tensors and d2t is not None:
        ids = (torch.arange(len(d2t)) + d2t.long()).clamp(0, config.vocab_size - 1)
        return target_tensors[LM_HEAD][ids.to(target_tensors[LM_HEAD].device)]
    return None


def membership(d2t: Tensor, size: int) -> Tensor:
    """t2d of offsets; ids outside of the vocabulary are left out."""
    ids = torch.arange(len(d2t)) + d2t.long()
    members = torch.zeros(size, dtype=torch.bool)
    members[ids[(ids >= 0) & (ids < size)]] = True
    return members


def _shaped(
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, torch.Size],
    config: HeadConfig,
    messages: Mapping[str, str],
) -> tuple[list[Finding], dict[str, Tensor]]:
    """Findings on misshapen tensors, and the others, finite and in the shapes wanted."""
    findings, fitting = [], {}
    for name, tensor in tensors.items():
        if name not in wanted:
            continue
        if tensor.is_floating_point():
            tensor = tensor.nan_to_num(0, 0, 0)
        if name == MASK_HIDDEN and tensor.numel() == wanted[name].numel():
            tensor = tensor.reshape(wanted[name])  # layouts differ in leading ones
        projected = name == MASK_HIDDEN and tensor.numel() == config.hidden_size
        if tensor.shape == wanted[name]:
            fitting[name] = tensor
        elif projected and can_lift(config, tensors):
            fitting[name] = lifted_mask(tensor, tensors["fc.weight"])
            findings.append(
                Finding(
                    kind="mask_hidden",
                    what=f"mask_hidden has {tensor.numel()} values, as many as a hidden state: it "
                    f"was projected by fc before it was stored, where the {config.feature_size} "
                    "values before fc are expected; scored with a vector that fc maps to it",
                    do="store the vector before fc: servers project it once, when they load it",
                )
            )
        else:
            findings.append(Finding(kind="shape", what=messages[name], do=RESTORE))
    return findings, fitting


def _values(tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Tensors that hold NaN or infinities, or nothing but zeros."""
    findings = []
    for name, tensor in sorted(tensors.items()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if bad := int((~tensor.isfinite()).sum()):
            findings.append(
                Finding(
                    kind="not finite",
                    what=f"{name}: {bad:,} of {tensor.numel():,} values NaN or infinite; scored "
                    "with zeros in their place",
                    do="take an earlier checkpoint: training diverged, or the file is damaged",
                )
            )
        elif not bool((tensor != 0).any()):
            findings.append(
                Finding(kind="zeros", what=f"{name} holds nothing but zeros", do=RESTORE)
            )
    return findings


def _dtypes(tensors: Mapping[str, Tensor]) -> list[Finding]:
    """d2t and t2d of other types, weights of several."""
    findings = []
    for name, dtype in (("d2t", torch.int64), ("t2d", torch.bool)):
        if name in tensors and tensors[name].dtype != dtype:
            findings.append(
                Finding(
                    kind="dtype",
                    what=f"{name}: expected {dtype}, found {tensors[name].dtype}: readers cast it "
                    "or misread it without a word",
                    do=f"store it as {dtype}",
                )
            )
    others = {n: t.dtype for n, t in sorted(tensors.items()) if n not in ("d2t", "t2d")}
    odd = {n: k for n, k in others.items() if not k.is_floating_point}
    if odd:
        name, kind = next(iter(odd.items()))
        findings.append(
            Finding(
                kind="dtype",
                what=f"{name}: expected a floating dtype, found {kind} ({len(odd)} such tensors)",
                do="store weights as bfloat16 or float32: quantised heads are not read here",
            )
        )
    kinds = sorted({str(k).removeprefix("torch.") for k in others.values() if k.is_floating_point})
    if len(kinds) > 1:
        findings.append(
            Finding(
                kind="dtype",
                what=f"weights of several dtypes: {', '.join(kinds)}",
                do="servers cast them to the target's dtype; store them in one",
                severity="note",
            )
        )
    return findings


def vocabulary_findings(tensors: Mapping[str, Tensor], config: HeadConfig) -> list[Finding]:
    """Return what d2t contradicts: t2d, or the vocabulary (servers §9.2)."""
    fault = draft_vocabulary_fault(tensors.get("d2t"), tensors.get("t2d"), config)
    if fault is None:
        return []
    do = "store d2t − arange(len(d2t))" if "absolute ids" in fault else RESTORE
    return [Finding(kind="d2t", what=fault, do=do)]
