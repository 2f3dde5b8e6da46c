"""What a run and its plan check before anything is computed: one list, `CHECKS`.

The plan downloads nothing and loads no weights, so that two checks are left to the run: whether a
URL answers, and the files of a target on the Hub that this machine does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.quantizers.auto import AutoHfQuantizer

from draftlab.errors import UserError
from draftlab.evaluate.vllm_compare import check_heads, check_settings
from draftlab.export.gguf import find_converter
from draftlab.export.layout import Export, layout_for
from draftlab.export.refusals import serving_warnings
from draftlab.heads.family import get_family
from draftlab.heads.folder import load_config
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.recipe.head_spec import planned_head, planned_identity, target_config
from draftlab.recipe.recipe import Recipe
from draftlab.run.head_workspace import input_files
from draftlab.run.held_out_prompts import check_suite
from draftlab.run.resolve import find_head
from draftlab.servers.state_servers import check_folder, serve_command
from draftlab.servers.vllm_process import find_python
from draftlab.store.shard_cache import machine_cache
from draftlab.store.shard_files import open_shard_files
from draftlab.store.urls import check_scheme
from draftlab.target_model.adapter import read_adapter
from draftlab.target_model.auto_model import meta_model, model_class
from draftlab.target_model.hidden_states import default_boundaries
from draftlab.target_model.loading import load_tokenizer, quiet_transformers
from draftlab.target_model.locate import (
    explain_loading,
    local_target,
    max_positions,
    resolve_device,
    resolve_target,
)
from draftlab.target_model.parts import check_llama_style, text_decoder
from draftlab.target_model.quantisation import (
    VLLM_ADVICE,
    check_files,
    format_name,
    is_dequantised_here,
    quantisation_fields,
)
from draftlab.target_model.stand_in import check_architecture
from draftlab.text.chat_template import Chat, RenderError, stop_ids, tokenizer_sha256
from draftlab.text.conversations import Conversation
from draftlab.text.data_sets import check_available
from draftlab.text.loss_mask import find_turns
from draftlab.text.mask_token import choose_mask_token
from draftlab.text.prompts import find_prompts
from draftlab.text.self_prompts import find_user_turn
from draftlab.text.settings import SELF
from draftlab.text.tokenizer_check import check_tokenizer
from draftlab.train.fast.choose_forward import check_fp8_device, check_fp8_sizes
from draftlab.train.initial_weights import check_start
from draftlab.train.metrics import check_trackers
from draftlab.workers.window.devices import check_memory_for_vllm

MOST_GIVEN = 64
"""Conversations of which prompts or given answers are rendered before a run."""


@dataclass(frozen=True)
class Planned:
    """A recipe whose stages are to run.

    Attributes:
        stages: names of the stages that run.
        plan: whether nothing is downloaded, and no weights are read.
        here: whether this machine's devices and packages do the work.
    """

    recipe: Recipe
    stages: Collection[str]
    plan: bool
    here: bool

    def runs(self, *names: str) -> bool:
        """Return whether one of these stages runs."""
        return not set(names).isdisjoint(self.stages)

    @cached_property
    def config(self) -> Any:
        """The target's config."""
        return target_config(self.recipe.target)

    @cached_property
    def folder(self) -> Path | None:
        """The target's folder; None: a plan of a target that this machine does not have."""
        if not self.plan:
            return resolve_target(self.recipe.target)
        folder = local_target(self.recipe.target)
        has_tokenizer = folder and any(map(Path.is_file, folder.glob("tokenizer*")))
        return folder if has_tokenizer else None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The target's tokenizer; None: as `folder`."""
        return None if self.folder is None else load_tokenizer(self.recipe.target)


def check_before_run(
    recipe: Recipe, stages: Collection[str], *, plan: bool = False, here: bool = True
) -> list[str]:
    """Check what would otherwise fail after hours of work, by the list `CHECKS`; return
    warnings, or raise a `UserError` about the first fault.
    """
    planned = Planned(recipe, stages, plan, here)
    return [warning for check in CHECKS for warning in check(planned) or ()]


def missing_input(recipe: Recipe, stage: str) -> UserError | None:
    """Return the error of an input file that a stage reads and that does not exist; raise that of
    one with another fault.
    """
    read: dict[str, Callable[[], object]] = {
        "answers": lambda: find_prompts(recipe.prompts),
        "head": lambda: recipe.head.init and find_head(recipe.head.init),
        "eval": lambda: input_files(recipe.eval),
    }
    try:
        read.get(stage, lambda: None)()
    except UserError as error:
        if Path(error.where).exists():
            raise
        return error
    return None


@contextmanager
def _at(where: str, do: str = "") -> Iterator[None]:
    """Name the setting that a `UserError` of this block is about."""
    try:
        yield
    except UserError as error:
        raise UserError(error.what, where=where, do=do or error.do) from None


def _check_inputs(planned: Planned) -> Iterable[str]:
    """Check that the input files exist, or that the Hub answers for a data set."""
    for stage in planned.stages:
        if error := missing_input(planned.recipe, stage):
            raise error
    prompts = planned.recipe.prompts
    if planned.runs("answers") and prompts.source != SELF and find_prompts(prompts) is None:
        check_available(prompts.source)
        yield f"the run reads the data set {prompts.source} from the Hub"


def _check_adapter(planned: Planned) -> None:
    """Check that the target's adapter is one, which a plan does not merge."""
    if planned.plan and (adapter := planned.recipe.target.adapter) is not None:
        read_adapter(Path(adapter).expanduser())


def _check_url(planned: Planned) -> None:
    """Check that shards can be at a URL: its scheme and package, then its server and the cache."""
    if (url := planned.recipe.record.url) is None or not planned.runs("store", "head"):
        return
    with _at("record.url"):
        check_scheme(url)
    if not planned.plan:
        open_shard_files(Path(), url).read_manifest()
        machine_cache()


def _check_machine(planned: Planned) -> None:
    """Check the devices and packages of this machine that the stages need."""
    recipe = planned.recipe
    if not planned.here:
        return
    if "vllm" in (recipe.regenerate.backend, recipe.record.backend):
        find_python()
    if planned.runs("head"):
        with _at("train.device"):
            device = resolve_device(recipe.train.device)
        if recipe.train.precision == "fp8":
            check_fp8_device(device)
        check_trackers(recipe.train)
        if recipe.record.rolls and recipe.record.backend == "vllm":
            check_memory_for_vllm(recipe, device)
    if planned.runs("answers", "store", "eval"):
        with _at("target.device"):
            resolve_device(recipe.target.device)
    if planned.runs("export") and recipe.export.gguf:
        find_converter()
    if planned.runs("eval"):
        check_suite(recipe)
        if recipe.eval.engine == "vllm":
            check_settings(recipe.eval)


def _check_state_servers(planned: Planned) -> Iterable[str]:
    """Check the folder that servers share with this machine; in a plan say how one is started."""
    record, target = planned.recipe.record, planned.recipe.target
    if record.server is None or record.backend != "server" or not planned.runs("store"):
        return
    if planned.here:
        check_folder(record.server)
    if planned.plan:
        dtype = target.dtype
        if dtype == "auto":  # vLLM's own rule for it is another one
            on_cpu = planned.here and resolve_device(target.device).type == "cpu"
            known = planned.config.get_text_config().dtype or planned.config.dtype or dtype
            dtype = "float32" if on_cpu else str(known).removeprefix("torch.")
        command = serve_command(
            str(planned.folder or target.path),
            planned.config,
            dtype,
            planned_identity(planned.recipe, planned.config).boundaries,
            record.batch_tokens,
            record.length_limit(max_positions(planned.config.get_text_config())),
        )
        yield (
            f"each of record.server.urls is a server started by: {command}, where FOLDER is its "
            f"path of record.server.folder, {record.server.folder}"
            + ", and with --trust-remote-code"
            * target.trust_remote_code
        )


def _check_tokenizer(planned: Planned) -> Iterable[str]:
    """Check tokenizer, chat template, stop tokens and the mask token."""
    recipe, tokenizer, folder = planned.recipe, planned.tokenizer, planned.folder
    if tokenizer is None or folder is None:
        yield (
            f"the run checks the tokenizer and the chat template of {recipe.target.path}, which "
            "are not on this machine"
        )
        return
    family = get_family(recipe.head.family)
    rows = planned.config.get_text_config().vocab_size
    if planned.runs("answers", "store", "eval"):
        yield from check_tokenizer(tokenizer, folder, rows, recipe.target.modes)
    if planned.runs("answers") and recipe.prompts.num_self_written:
        find_user_turn(tokenizer, recipe.target.modes[0])
    if family.has_mask_token:
        choose_mask_token(
            recipe.head.mask_token, tokenizer, rows, stop_ids(tokenizer, folder), None
        )


def _check_target(planned: Planned) -> Iterable[str]:
    """Check that draftlab can use the target's text model, on a small random one."""
    recipe, settings = planned.recipe, planned.recipe.target
    trust = settings.trust_remote_code
    answers = planned.runs("answers") and recipe.regenerate.enabled
    decodes = planned.runs("eval") or (answers and recipe.regenerate.backend == "paged")
    with explain_loading("the target", settings.path):
        text_decoder(meta_model(planned.config, trust_remote_code=trust))
        untested = planned.runs("answers", "store", "head", "eval") and check_architecture(
            planned.config, settings.path, decodes=decodes, trust_remote_code=trust
        )
    if get_family(recipe.head.family).uses_target_lm_head:
        check_llama_style(planned.config, settings.path, trust_remote_code=trust)
    if untested:
        yield (
            "warning: target: draftlab tests the architecture only once the weights are loaded, "
            f"since transformers makes no small model of it ({untested})"
        )


def _check_quantisation(planned: Planned) -> Iterable[str]:
    """Check that this machine has what quantised weights need; warn in a plan for another one."""
    recipe, fields = planned.recipe, quantisation_fields(planned.config)
    decodes = planned.runs("answers") and recipe.regenerate.backend == "paged"
    records = planned.runs("store") and recipe.record.backend == "transformers"
    if not fields or not (decodes or records or planned.runs("eval")):
        return
    if planned.folder is not None and any(planned.folder.glob("*.safetensors")):
        check_files(planned.folder, fields)
    if is_dequantised_here(fields):
        with _at(recipe.target.path):
            model_class(planned.config)
        return
    weights = f"the target's weights are quantised ({format_name(fields)})"
    if fields.get("load_in_8bit") and (decodes or planned.runs("eval")):
        raise UserError(
            f"{weights}, and with 8 bits of bitsandbytes a row's states depend on the rows beside "
            "it, so drafts cannot be verified",
            where=recipe.target.path,
            do=f"use the checkpoint in 4 or 16 bits, or {VLLM_ADVICE}",
        )
    try:
        with quiet_transformers():
            quantizer = AutoHfQuantizer.from_config(dict(fields), pre_quantized=True)
            quantizer.validate_environment(device_map=None, weights_only=False)
    except Exception as error:  # each library has its own
        reason = f"{weights}, and transformers cannot load them here: {str(error).splitlines()[0]}"
        if not planned.here:
            yield f"warning: {reason}"
            return
        raise UserError(
            reason,
            where=recipe.target.path,
            do=f"install what it names, use the checkpoint that was quantised, or {VLLM_ADVICE}",
        ) from None


def check_given_answers(planned: Planned, prompts: Sequence[Conversation]) -> Iterable[str]:
    """Check on a part of the prompts that the target would write the given answers; raise a
    `UserError` if the chat template refuses all of them.
    """
    if planned.recipe.regenerate.enabled or planned.tokenizer is None:
        return
    part = [c for c in prompts[:: -(-len(prompts) // MOST_GIVEN)] if c.has_answer and not c.answers]
    given = [(Chat.of(c), c.id) for c in part]
    found = list(find_turns(planned.tokenizer, given))
    refused = [one for one in found if isinstance(one, RenderError)]
    if not refused:
        return
    line = f"{len(refused):,} of {len(found):,} given answers that were tried are not the target's"
    if len(refused) == len(found):
        raise UserError(f"{line}: {refused[0].what}", where=refused[0].where, do=refused[0].do)
    yield f"warning: {line}, and would be dropped (first: {refused[0].where}): {refused[0].what}"


def _check_head(planned: Planned) -> Iterable[str]:
    """Check that the head can be trained, and served by the programs of its exports."""
    tokenizer = planned.tokenizer
    digest = "" if tokenizer is None else tokenizer_sha256(tokenizer)
    head, export = check_head(planned.recipe, planned.config, digest)
    folder = planned.folder if planned.runs("head") and planned.recipe.head.init is None else None
    # A plan needs no weights.
    if folder is not None and (not planned.plan or any(folder.glob("*.safetensors"))):
        head.family.head_of_target(head.config, folder, Monitor(), meta=True)
    if planned.runs("eval") and planned.recipe.eval.engine == "vllm":
        check_heads([head.config])
    if planned.runs("export"):
        for program in planned.recipe.export.formats:
            yield from serving_warnings(program, export)


def check_head(recipe: Recipe, config: Any, tokenizer_hash: str = "") -> tuple[DraftHead, Export]:
    """Return the head that the recipe would train, on the meta device, and its export.

    Args:
        config: the target's. tokenizer_hash: its tokenizer_sha256, if it is available.

    Raises:
        UserError: such a head cannot be, cannot start from the recipe's head.init, or cannot be
            trained or exported as the recipe says; the message names the settings.
    """
    family, text = get_family(recipe.head.family), config.get_text_config()
    effect = f"takes this target's default ones, {list(default_boundaries(text.num_hidden_layers))}"
    if family.reads_last_state:
        effect = f"records none, which is enough for {family.name} heads"
    with _at("record.boundaries", f"record.boundaries=null {effect}"):
        identity = planned_identity(recipe, config, tokenizer_hash)
    formats = "in a recipe --to vllm is export.formats=[vllm]; export.formats=[] exports nothing"
    with _at("export.formats", formats):
        layouts = [layout_for(program, family.name) for program in recipe.export.formats]
    if (recipe.draft_vocab.size or 0) > text.vocab_size:
        raise UserError(
            f"expected at most the target's {text.vocab_size:,} tokens, found "
            f"{recipe.draft_vocab.size:,}",
            where="draft_vocab.size",
            do="lower it, or leave it out for all of the target's tokens",
        )
    head = planned_head(recipe, config, identity)
    if recipe.head.init is not None:
        folder = find_head(recipe.head.init)
        check_start(head.config, load_config(folder), folder)
    fast = family.objective().fast_forward
    if recipe.train.precision == "fp8" and fast is not None and fast.supports_fp8(head):
        check_fp8_sizes(head)
    k = recipe.export.k or head.config.k_trained
    export = Export(head.config, config.to_dict(), recipe.target.path, k, torch.bfloat16)
    for layout in layouts:
        with _at("export.formats"):
            layout.check(export)
    if layouts:
        export.check_k()
    return head, export


CHECKS: tuple[Callable[[Planned], Iterable[str] | None], ...] = (
    _check_inputs,
    _check_adapter,
    _check_url,
    _check_machine,
    _check_state_servers,
    _check_target,
    _check_quantisation,
    _check_tokenizer,
    _check_head,
)
"""Each yields warnings or raises a `UserError`; the first fault in this order is reported."""
