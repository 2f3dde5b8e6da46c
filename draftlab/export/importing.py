"""Import of other programs' heads into head folders, for evaluation, training and export.

The import reads the speculators layout and the native one (vLLM, SGLang, SpecForge, SafeAILab, with
`midlayer.*` or `layers.0.*`), also of first-generation EAGLE heads. It renames and reshapes; it
never computes. Where a file is ambiguous, the user has to decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.foreign_config import (
    DEFAULT_ROPE_THETA,
    EXPORT_AGAIN,
    ForeignHead,
    read_boundaries,
    read_foreign_config,
    read_rope,
)
from draftlab.export.weight_files import (
    common_dtype,
    compare_tensors,
    floating_dtype,
    read_weights,
    weight_files,
)
from draftlab.files import atomic_folder, check_new_folder, sha256_file
from draftlab.heads.config import HeadConfig, TargetIdentity, make_head_config
from draftlab.heads.family import get_family
from draftlab.heads.folder import empty_head, meta_head, save_head
from draftlab.heads.head import EMBEDDINGS, LM_HEAD
from draftlab.heads.validate import draft_vocabulary_readings, refuse_faults, tensor_faults
from draftlab.progress import Monitor
from draftlab.settings import describe_errors
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.locate import check_named, is_hub_id, load_config, resolve_target
from draftlab.target_model.parts import load_parts
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import template_sha256, tokenizer_sha256

DEFAULT_K = 7
"""Unrolled steps of the usual EAGLE3 training, for heads whose files name no number."""
Log = Callable[[str], None]
_FC_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_ROPE_TABLES = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_LATER_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.weight")
_BIAS = re.compile(r"(^fc|_proj)\.bias$")


def import_head(
    source: str | Path,
    out: Path,
    *,
    target: TargetSettings | str | None = None,
    boundaries: tuple[int, ...] | None = None,
    norm_before_residual: bool | None = None,
    k: int | None = None,
    dtype: torch.dtype | str | None = None,
    ignore: frozenset[str] = frozenset(),
    trust_remote_code: bool = False,
    monitor: Monitor | None = None,
) -> Path:
    """Write another program's head as a head folder, compare the files, and move them to `out`.

    Args:
        source: its folder, or a Hub id.
        out: folder to write; must not exist, or be empty.
        target: the target it was trained for; None: the one that a speculators config names.
        boundaries: as inputs of layers; None: those of the config, if it is not ambiguous.
        norm_before_residual: needed if the config has no value and programs' defaults differ.
        k: tokens that the head was trained to draft; None: the number that a speculators config
            or the launch command of a draftlab export names, else 7.
        dtype: of floating tensors, needed if the file mixes several; None: the file's.
        ignore: unknown config keys that are known to change nothing.
        trust_remote_code: whether code shipped with the target may run.
        monitor: prints every choice.

    Returns:
        `out`, a head folder.

    Raises:
        UserError: no such head, pickled weights, a head that draftlab cannot compute, an ambiguity
            that no argument resolves, a target of another shape, tensors that do not fit.
    """
    log = (monitor or Monitor()).say
    destination = Path(out).expanduser().resolve()
    check_new_folder(destination, "name another folder: --to FOLDER")
    torch_dtype = None if dtype is None else floating_dtype(dtype)
    folder = _source_folder(source)
    stored = read_weights(folder, "head's weights")
    foreign = read_foreign_config(folder, stored, ignore)
    where = weight_files(folder)[0]
    settings = _target_settings(target, foreign, folder, trust_remote_code, log)
    config = foreign_head_config(
        foreign, folder, settings, boundaries, norm_before_residual, k, log
    )

    tensors = rename_tensors(stored, where, log)
    tensors = normalise_vocabulary(tensors, config, where, log)
    parts = load_parts(resolve_target(settings), trust_remote_code=settings.trust_remote_code)
    try:
        tensors, config = add_target_tensors(tensors, config, parts.embeddings, parts.lm_head, log)
    except UserError as error:
        raise UserError(error.what, where=where, do=error.do) from None
    refuse_faults(tensor_faults(meta_head(config), tensors), where)
    torch_dtype = torch_dtype or common_dtype(tensors, where)
    head, maps = empty_head(config), {}
    if config.draft_vocab_size == config.vocab_size:
        head.set_draft_vocabulary(torch.arange(config.vocab_size))
        maps = {"d2t": head.d2t, "t2d": head.t2d}
    shared = {name: parts.shared_tensors[name] for name in head.shared_tensors()}
    head.load_tensors(tensors | maps | shared)
    expected = {n: t.to(torch_dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    with atomic_folder(destination) as temporary:
        save_head(temporary, head, torch_dtype)
        compare_tensors(expected, temporary)
    log(f"import: {out} holds the head, {config.family}, boundaries {list(config.boundaries)}")
    return Path(out)


def _source_folder(source: str | Path) -> Path:
    """Return the folder of a head, which is downloaded first if the source is a Hub id."""
    path = Path(source).expanduser()
    if (path / "config.json").is_file():
        return path
    if path.exists() or not is_hub_id(str(source)):
        found = "one without" if path.is_dir() else "a file" if path.exists() else "none"
        raise UserError(
            f"expected the folder of another program's head, with config.json, found {found}",
            where=source,
            do="name the folder with the head's config.json and weights, or a Hub id such as "
            '"org/name"',
        )
    return resolve_target(TargetSettings(path=str(source)))


def _target_settings(
    target: TargetSettings | str | None,
    foreign: ForeignHead,
    folder: Path,
    trust_remote_code: bool,
    log: Log,
) -> TargetSettings:
    """Return the target that the user or the head's config names."""
    if isinstance(target, TargetSettings):
        return target
    check_named(target, trust_remote_code)
    if target is None and foreign.verifier is None:
        raise UserError(
            "expected the name of the head's target, but its config names none",
            where=folder / "config.json",
            do="name it with --target",
        )
    path = str(target or foreign.verifier)
    log(f"target: {path}, from {'--target' if target else folder / 'config.json'}")
    return TargetSettings(path=path, trust_remote_code=trust_remote_code)


def foreign_head_config(
    foreign: ForeignHead,
    folder: Path,
    settings: TargetSettings,
    boundaries: tuple[int, ...] | None,
    norm_before_residual: bool | None,
    k: int | None = None,
    log: Log = lambda line: None,
) -> HeadConfig:
    """Return draftlab.json of a foreign head; only a mask token makes the embeddings its own."""
    config, where = foreign.config, folder / "config.json"
    target_folder = resolve_target(settings)
    target_config = load_config(target_folder, trust_remote_code=settings.trust_remote_code)
    text = target_config.get_text_config()
    sizes = {
        "vocab_size": (config.vocab_size, text.vocab_size),
        "target_hidden_size": (config.target_hidden_size or config.hidden_size, text.hidden_size),
    }
    for key, (expected, actual) in sizes.items():
        if expected != actual:
            raise UserError(
                f"the head was trained for a target with {key} {expected}, this one has {actual}",
                where=where,
                do="give the target the head was trained for with --target",
            )
    if foreign.family.reads_last_state:
        boundaries = (text.num_hidden_layers,)
    else:
        boundaries = read_boundaries(foreign, text.num_hidden_layers, boundaries, where, log)
    if config.num_aux_hidden_states not in (None, len(boundaries)):
        raise UserError(
            f"num_aux_hidden_states is {config.num_aux_hidden_states}, but there are "
            f"{len(boundaries)} boundaries: {list(boundaries)}",
            where=where,
            do="name the boundaries that the head was trained with: --boundaries",
        )
    try:
        rope, has_rope_base = read_rope(config)
        mask_token = foreign.mask_token()
    except ValueError as error:
        raise UserError(
            f"the config cannot be read: {error}",
            where=where,
            do="correct config.json: see what the program that trained the head was given",
        ) from None
    if not has_rope_base:
        default = f"{DEFAULT_ROPE_THETA:g}"
        log(f"import: no RoPE base in the config, so {default}, every program's default")
    positions = text.max_position_embeddings
    if config.max_position_embeddings != positions:
        log(
            f"import: max_position_embeddings {config.max_position_embeddings} becomes the "
            f"target's {positions}: servers stop drafting at the head's number"
        )
    requested_k = k
    if foreign.k is not None:
        trained = "; it counts as trained for as many (--k)" * (k is None)
        log(
            f"import: evaluated with {foreign.k} drafts a step by default, as its files "
            f"name{trained}"
        )
    if k is None and (k := foreign.k) is None:
        k = DEFAULT_K
        log(f"import: trained for {k} drafts, the usual number: the files name none (--k)")
    tokenizer = load_tokenizer(settings)
    nested = config.eagle_config
    before_fc = config.norm_before_fc or (nested.norm_before_fc if nested else None)
    try:
        own_fields = foreign.family.foreign_fields(config, foreign.layout)
        if "k_trained" in own_fields and requested_k not in (None, own_fields["k_trained"]):
            raise UserError(
                f"expected {own_fields['k_trained']} drafts, as many as the head's block has slots "
                f"for, found {requested_k}",
                where="--k",
                do="leave --k out; `draftlab eval --k` takes fewer drafts",
            )
        if config.sample_from_anchor is None and foreign.family.anchor_by_default:
            log(
                "import: sample_from_anchor is not in the config, read as "
                f"{str(own_fields['sample_from_anchor']).lower()}, which DeepSpec's folders leave "
                "out; `draftlab doctor` scores the other layout, too"
            )
        return make_head_config(
            **{
                "family": foreign.family.name,
                "boundaries": boundaries,
                "target_num_layers": text.num_hidden_layers,
                "target_hidden_size": text.hidden_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
                "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
                "rms_norm_eps": config.rms_norm_eps,
                "rope_parameters": rope,
                "max_position_embeddings": positions,
                "vocab_size": config.vocab_size,
                "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
                "num_layers": config.num_hidden_layers,
                "norm_before_residual": _norm_before_residual(foreign, norm_before_residual, where),
                "norm_before_fc": bool(before_fc),
                "fc_norm": bool(config.fc_norm),
                "norm_output": bool(config.norm_output),
                "qk_norm": config.model_type == "qwen3",
                "mask_token_id": mask_token,
                "embeddings": "own" if foreign.family.trains_mask else "target",
                "k_trained": k,
                "target": TargetIdentity(
                    name=settings.path,
                    fingerprint=fingerprint(target_folder),
                    architecture=(target_config.architectures or [type(target_config).__name__])[0],
                    tokenizer_sha256=tokenizer_sha256(tokenizer),
                    template_sha256=template_sha256(tokenizer),
                ),
                "provenance": {
                    "imported": {
                        "layout": foreign.layout,
                        "k": foreign.k,
                        "sha256": {
                            file.name: sha256_file(file) for file in (where, *weight_files(folder))
                        },
                    }
                },
            }
            | own_fields
        )
    except (ValidationError, ValueError, TypeError) as error:
        reason = describe_errors(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(
            f"draftlab cannot compute this head: {reason}",
            where=where,
            do="docs/servers.md lists the heads that draftlab can compute",
        ) from None


def _norm_before_residual(foreign: ForeignHead, requested: bool | None, where: Path) -> bool:
    """Return the flag; vLLM's default for a missing one depends on the layout (servers §1.6)."""
    stored = foreign.config.norm_before_residual
    if requested is not None or stored is not None:
        return bool(stored if requested is None else requested)
    if foreign.layout == "speculators" and foreign.family.norm_flag_must_be_named:
        raise UserError(
            "norm_before_residual is not in the config: the library's default is false, vLLM's is "
            "true",
            where=where,
            do="choose --norm-before-residual or --no-norm-before-residual",
        )
    return False


def rename_tensors(
    stored: dict[str, Tensor], where: Path, log: Log = lambda line: None
) -> dict[str, Tensor]:
    """Return tensors under the names of a head folder, without those that no head needs.

    The prefix `model.` is dropped, and `midlayer.` means `layers.0.`. SGLang requires a bias of
    zeros, which draftlab's layers do not have. SGLang calls the input norm of later layers
    `hidden_norm`, vLLM `input_layernorm`; both may be there if they are equal.

    Raises:
        UserError: two tensors of one name, two norms that differ.
    """
    tensors: dict[str, Tensor] = {}
    for original, tensor in stored.items():
        name = original.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        stem = name.split(".")[0]
        name = _FC_NORMS.get(stem, stem) + name.removeprefix(stem)
        if _ROPE_TABLES.search(name):
            log(f"import: {original} is left out: it follows from the config")
        elif _BIAS.search(name) and not bool(tensor.any()):
            log(f"import: {original} is left out: it is zero")
        elif name in tensors:
            raise UserError(
                f"the head holds {name} under two names, one of them {original}",
                where=where,
                do="remove one of the two tensors",
            )
        else:
            tensors[name] = tensor
    for name in [n for n in tensors if _LATER_NORM.fullmatch(n)]:
        norm, vllm_name = tensors.pop(name), name.replace("hidden_norm", "input_layernorm")
        if not torch.equal(tensors.setdefault(vllm_name, norm), norm):
            raise UserError(
                f"{name} and {vllm_name} differ: SGLang reads the first, vLLM the second",
                where=where,
                do="remove the tensor of the program it was not trained with",
            )
    return tensors


def normalise_vocabulary(
    tensors: dict[str, Tensor], config: HeadConfig, where: Path, log: Log
) -> dict[str, Tensor]:
    """Return the tensors with d2t as int64 offsets and t2d as bool, both present iff D < V.

    d2t may hold offsets or absolute ids: t2d decides, or only one of them gives ascending ids.

    Raises:
        UserError: maps that are missing, of another size, or ambiguous.
    """
    rest = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if size == vocab_size:
        identity = torch.arange(size)
        if d2t is not None and bool(d2t.any()) and not torch.equal(d2t.long(), identity):
            raise UserError(
                "d2t reorders the full vocabulary, which draftlab's heads cannot do",
                where=where,
                do="draftlab imports such a head only with d2t in ascending order",
            )
        return rest
    if d2t is None:
        raise UserError(
            f"missing d2t: a draft vocabulary of {size:,} of {vocab_size:,} tokens needs it",
            where=where,
            do="export the head again with its d2t; without it nobody knows which tokens it drafts",
        )
    for name, tensor, length in (("d2t", d2t, size), ("t2d", t2d, vocab_size)):
        if tensor is not None and (tensor.shape != (length,) or tensor.is_floating_point()):
            raise UserError(
                f"{name}: expected integers of shape [{length}], found {tensor.dtype} "
                f"{list(tensor.shape)}",
                where=where,
                do=EXPORT_AGAIN,
            )
    readings = draft_vocabulary_readings(d2t, t2d, vocab_size)
    if len(readings) != 1:
        ways = "both as offsets and as ids" if readings else "neither as offsets nor as ids"
        raise UserError(
            f"d2t can be read {ways} of a vocabulary of {vocab_size:,}"
            + ("" if t2d is None else " whose members t2d marks"),
            where=where,
            do="add t2d (bool, [V]), which marks the draft vocabulary"
            if readings
            else "correct d2t: entry i holds (target id of draft token i) − i, or the target id",
        )
    ((kind, ids),) = readings.items()
    if kind == "ids":
        log("import: d2t holds ids, which become offsets")
    if t2d is None:
        log("import: t2d is computed from d2t")
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[ids] = True
    return rest | {"d2t": ids - torch.arange(size), "t2d": members}


def add_target_tensors(
    tensors: dict[str, Tensor], config: HeadConfig, embeddings: Tensor, lm_head: Tensor, log: Log
) -> tuple[dict[str, Tensor], HeadConfig]:
    """Add the target's lm_head if the head shares it, and decide whose embeddings it has.

    Args:
        tensors: renamed.
        config: with "embeddings": "target", except of a head with a mask token.
        embeddings, lm_head: the target's, [V, Ht].

    Returns:
        The tensors of the head folder, and the config with the right `embeddings`.

    Raises:
        UserError: no embeddings in a head that is not as wide as its target.
    """
    tensors, name, family = dict(tensors), EMBEDDINGS, get_family(config.family)
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    floating = [t.dtype for t in tensors.values() if t.is_floating_point()]
    table = tensors.get(name)
    if table is None and config.hidden_size != config.target_hidden_size:
        raise UserError(
            f"missing {name}: the target's are {config.target_hidden_size} wide, the head "
            f"{config.hidden_size}",
            do=EXPORT_AGAIN,
        )
    if table is None:
        if family.trains_mask:
            raise UserError(
                f"missing {name}, in which a parallel head has a trained mask token",
                do=EXPORT_AGAIN,
            )
        log("import: the head has no embeddings and uses the target's")
    elif not family.trains_mask:
        if table.shape == embeddings.shape and torch.equal(table, embeddings.to(table.dtype)):
            del tensors[name]
            log("import: the head's embeddings equal the target's, and it uses those")
        else:
            config = config.model_copy(update={"embeddings": "own"})
            log("import: the head has embeddings of its own")
    full_vocabulary = config.draft_vocab_size == config.vocab_size
    shares_lm_head = family.freezes_lm_head and full_vocabulary
    if shares_lm_head and LM_HEAD in tensors:
        if not torch.equal(tensors[LM_HEAD], lm_head.to(tensors[LM_HEAD].dtype)):
            raise UserError(
                f"{LM_HEAD} differs from the target's, which servers use in its place",
                do="name the target that the head was trained for: --target",
            )
        del tensors[LM_HEAD]
        log("import: the head's lm_head equals the target's, and it uses that")
    needs_lm_head = LM_HEAD not in tensors and not (family.uses_target_lm_head or shares_lm_head)
    if needs_lm_head and full_vocabulary and floating:
        tensors[LM_HEAD] = lm_head.to(floating[0])
        log("import: the head has no lm_head and gets a copy: lm_head is the target's")
    return tensors, config
