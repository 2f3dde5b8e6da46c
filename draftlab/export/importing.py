"""Other programs' heads become head folders: to evaluate, to train on, to export again.

Read are the speculators layout and the native one (vLLM, SGLang, SpecForge, SafeAILab, with
`midlayer.*` or `layers.0.*`), the latter of first-generation EAGLE heads, too. An import renames
and reshapes; it never computes. What a file does not say and programs read differently has to be
named, never guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoConfig

from draftlab.errors import UserError
from draftlab.export.boundaries import read_boundaries
from draftlab.export.compare import compare_tensors
from draftlab.export.destination import whole_folder
from draftlab.export.foreign_config import ROPE_THETA, Foreign, read_foreign, rope_of
from draftlab.export.renaming import fill, read_maps, rename
from draftlab.export.weight_files import read_weights, weight_files
from draftlab.export.write import FLOATING, floating_dtype
from draftlab.files import sha256_file
from draftlab.heads.config import HeadConfig, TargetIdentity, make_head_config
from draftlab.heads.folder import new_head, save_head
from draftlab.heads.validate import refuse_faults, tensor_faults
from draftlab.progress import Monitor
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.parts import load_parts
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import template_sha256, tokenizer_sha256

DEFAULT_K = 7
"""Unrolled steps of the usual EAGLE3 training, of heads whose files do not say."""


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
    """Makes a head folder of another program's head, reads it back, and only then puts it at `out`.

    Args:
        source: its folder, or a Hub id.
        out: folder to make; must not exist, or be empty.
        target: the target it was trained for; None: the one that a speculators config names.
        boundaries: as inputs of layers; None: those of the config, where it is not ambiguous.
        norm_before_residual: where the config does not say and programs differ.
        k: tokens the head was trained to draft; None: a speculators config's, else 7.
        dtype: of floating tensors, needed where the file mixes several; None: the file's.
        ignore: config keys that are unknown here and known to change nothing.
        trust_remote_code: whether code shipped with the target may run.
        monitor: where every choice is said.

    Returns:
        `out`, a head folder.

    Raises:
        UserError: no such head, pickled weights, a head that draftlab cannot compute, something
            ambiguous that was not named, a target of another shape, tensors that do not fit.
    """
    say = (monitor or Monitor()).say
    place = Path(out).expanduser().resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError("expected a new or an empty folder to import into", where=place)
    kind = None if dtype is None else floating_dtype(dtype)
    folder = resolve_target(TargetSettings(path=str(source)))
    found = read_weights(folder, "head's weights")
    foreign = read_foreign(folder, found, ignore)
    where = weight_files(folder)[0]
    _refuse_packed(found, where)
    settings = _target_settings(target, foreign, folder, trust_remote_code)
    made = foreign_head_config(foreign, folder, settings, boundaries, norm_before_residual, k, say)

    tensors = read_maps(rename(found, where, say), made, where, say)
    parts = load_parts(resolve_target(settings), trust_remote_code=settings.trust_remote_code)
    try:
        tensors, made = fill(tensors, made, parts.embeddings, parts.lm_head, say)
    except UserError as error:
        raise UserError(error.what, where=where, do=error.do) from None
    kind = kind or _one_dtype(tensors, where)
    head = new_head(made)
    whole = made.draft_vocab_size == made.vocab_size
    if whole:
        head.set_draft_vocabulary(torch.arange(made.vocab_size))
    maps = {"d2t": head.d2t, "t2d": head.t2d} if whole else {}
    shared = {name: parts.shared_tensors[name] for name in head.shared_tensors()}
    refuse_faults(tensor_faults(head, tensors), where)
    head.load_tensors(tensors | maps | shared)
    wanted = {n: t.to(kind) if t.is_floating_point() else t for n, t in tensors.items()}
    with whole_folder(place) as temporary:
        save_head(temporary, head, kind)
        compare_tensors(wanted, temporary)
    say(f"import: {out} holds the head, {made.family}, boundaries {list(made.boundaries)}")
    return Path(out)


def _target_settings(
    target: TargetSettings | str | None, foreign: Foreign, folder: Path, trust_remote_code: bool
) -> TargetSettings:
    if isinstance(target, TargetSettings):
        return target
    if target is None and foreign.verifier is None:
        raise UserError(
            "expected the target the head was trained for: its config names none",
            where=folder / "config.json",
            do="give it with --target",
        )
    path = str(target or foreign.verifier)
    return TargetSettings(path=path, trust_remote_code=trust_remote_code)


def _one_dtype(tensors: dict[str, Tensor], where: Path) -> torch.dtype:
    kinds = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if len(kinds) == 1:
        return floating_dtype(kinds.pop())
    raise UserError(
        f"expected one floating dtype in the head's weights, found {sorted(map(str, kinds))}",
        where=where,
        do="name the one to keep them in with --dtype (float32 holds all)",
    )


def _refuse_packed(tensors: dict[str, Tensor], where: Path) -> None:
    """Refuses weights that only mean something with scales beside them."""
    for name, tensor in tensors.items():
        if name not in ("d2t", "t2d") and tensor.dtype not in FLOATING:
            raise UserError(
                f"{name}: expected float32, bfloat16 or float16, found {tensor.dtype}: quantised "
                "heads are not imported",
                where=where,
                do="import the head it was made from",
            )


def foreign_head_config(
    foreign: Foreign,
    folder: Path,
    settings: TargetSettings,
    boundaries: tuple[int, ...] | None,
    norm_before_residual: bool | None,
    k: int | None,
    say: Any,
) -> HeadConfig:
    """draftlab.json of a foreign head, with the target's embeddings until its own are found."""
    config, where = foreign.config, folder / "config.json"
    target_folder = resolve_target(settings)
    try:
        whole = AutoConfig.from_pretrained(
            target_folder, trust_remote_code=settings.trust_remote_code
        )
    except Exception as error:  # OSError, ValueError, and what remote code raises
        raise UserError(
            f"the target's config does not load: {error}", where=target_folder
        ) from None
    text = whole.get_text_config()
    theirs = {
        "vocab_size": (config.vocab_size, text.vocab_size),
        "target_hidden_size": (config.target_hidden_size or config.hidden_size, text.hidden_size),
    }
    for key, (said, there) in theirs.items():
        if said != there:
            raise UserError(
                f"the head was trained for a target with {key} {said}, this one has {there}",
                where=where,
                do="give the target the head was trained for with --target",
            )
    if foreign.family.reads_last_state:  # reads the last state, whatever a config says
        chosen = (text.num_hidden_layers,)
    else:
        chosen = read_boundaries(foreign, text.num_hidden_layers, boundaries, where, say)
    if config.num_aux_hidden_states not in (None, len(chosen)):
        raise UserError(
            f"num_aux_hidden_states is {config.num_aux_hidden_states}, and there are {len(chosen)} "
            f"boundaries: {list(chosen)}",
            where=where,
        )
    try:
        rope, named = rope_of(config)
        mask = foreign.mask_token()
    except ValueError as error:
        raise UserError(f"the config contradicts itself: {error}", where=where) from None
    if not named:
        say(f"import: no base of RoPE in the config, so {ROPE_THETA:g}, as every program takes it")
    positions = text.max_position_embeddings
    if config.max_position_embeddings != positions:
        say(
            f"import: max_position_embeddings {config.max_position_embeddings} becomes the "
            f"target's {positions}: servers stop drafting at the head's"
        )
    if k is None and (k := foreign.k) is None:
        k = DEFAULT_K
        say(f"import: trained for {k} drafts, as is usual: the config does not say (--k)")
    tokenizer = load_tokenizer(settings)
    nested = config.eagle_config
    before_fc = config.norm_before_fc or (nested.norm_before_fc if nested else None)
    try:
        return make_head_config(
            family=foreign.family.name,
            boundaries=chosen,
            target_num_layers=text.num_hidden_layers,
            target_hidden_size=text.hidden_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=rope,
            max_position_embeddings=positions,
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size or config.vocab_size,
            num_layers=config.num_hidden_layers,
            norm_before_residual=_norm_before_residual(foreign, norm_before_residual, where),
            norm_before_fc=bool(before_fc),
            fc_norm=bool(config.fc_norm),
            norm_output=bool(config.norm_output),
            qk_norm=config.model_type == "qwen3",
            mask_token_id=mask,
            embeddings="own" if foreign.family.has_mask_token else "target",
            k_trained=k,
            target=TargetIdentity(
                name=settings.path,
                fingerprint=fingerprint(target_folder),
                architecture=(whole.architectures or [type(whole).__name__])[0],
                tokenizer_sha256=tokenizer_sha256(tokenizer),
                template_sha256=template_sha256(tokenizer),
            ),
            provenance={
                "imported": {
                    "layout": foreign.kind,
                    "sha256": {
                        file.name: sha256_file(file) for file in (where, *weight_files(folder))
                    },
                }
            },
        )
    except (ValidationError, ValueError, TypeError) as error:
        faults = error.errors() if isinstance(error, ValidationError) else []
        said = "; ".join(f["msg"].removeprefix("Value error, ") for f in faults) or str(error)
        raise UserError(f"draftlab cannot compute this head: {said}", where=where) from None


def _norm_before_residual(foreign: Foreign, asked: bool | None, where: Path) -> bool:
    """vLLM reads a missing flag as true in one layout and false in the other (servers §1.6)."""
    said = foreign.config.norm_before_residual
    if asked is not None or said is not None:
        return bool(said if asked is None else asked)
    if foreign.kind == "speculators" and foreign.family.norm_flag_must_be_named:
        raise UserError(
            "norm_before_residual is not in the config: the library reads that as false, vLLM as "
            "true",
            where=where,
            do="name it: --norm-before-residual or --no-norm-before-residual",
        )
    return False
