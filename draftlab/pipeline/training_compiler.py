"""Compiles the training step's kernels in a process of its own, while answers are made.

A first training on a machine compiles for about a minute, in which its GPU idles. The process
makes the recipe's head with random values, runs a step of it, and ends; Triton and Inductor keep
what they compiled in their caches on disk, where the training finds it. A training without it
compiles the same itself, so that a failure here costs time alone.
"""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path

import torch

from draftlab.files import canonical_json, sha256_text
from draftlab.formatting import exit_text
from draftlab.heads.head import DraftHead
from draftlab.kernels.devices import use_device
from draftlab.progress import Monitor
from draftlab.recipe.head_spec import planned_head, planned_identity, target_config
from draftlab.recipe.recipe import Recipe
from draftlab.target_model.locate import resolve_device, resolve_target
from draftlab.target_model.parts import load_parts, shard_files
from draftlab.text.draft_vocabulary import DraftVocabulary
from draftlab.train.distributed.backends import DistillationModule
from draftlab.train.fast.choose_forward import NOT_COMPILED, gpu_check_tokens, random_batch
from draftlab.train.initial_weights import untrained_head
from draftlab.version import git_commit, package_version
from draftlab.workers.pool import begin_process, has_text

_SPAWN = get_context("spawn")
_MOST_MEMORY = 0.1
"""Share of a GPU's free memory, less the target, that the process may take: half of what answers
leave free."""
_CONTEXT_BYTES = 2**30
"""Bytes of a GPU for the context of CUDA and for the activations of a small step."""
_CHANNEL_BYTES = 64
"""Bytes of a token's activations in the check of the compiled step (`choose_forward`), for each
layer and channel of the hidden states, as measured with the shapes of a 135 M and an 8B target."""
_PATIENCE_S = 180.0
"""Seconds that a training waits for the process, which has begun before it."""
_TOKENS = 2048
"""Length of the conversation that the step is compiled for; it compiles others, too."""
_PRIORITY = 10
"""Added to the nice value: the processes that answer come first."""


class TrainingCompiler:
    """The process that compiles a recipe's training step.

    Args:
        run: the run folder, which gets the log of a process that fails.
    """

    def __init__(self, recipe: Recipe, run: Path) -> None:
        self._log = run / "compile.log"
        arguments = (recipe, self._log, os.getpid())
        self._process = _SPAWN.Process(target=_compile_apart, args=arguments, daemon=True)
        self._process.start()

    @classmethod
    def start(cls, recipe: Recipe, run: Path, monitor: Monitor) -> TrainingCompiler | None:
        """Start the process; None: on a CPU, if the step is compiled already, or if the memory of
        the GPU is too small for the process, too.
        """
        device = resolve_device(recipe.train.device)
        if device.type != "cuda" or recipe.train.compile is False:
            return None
        try:
            target = sum(path.stat().st_size for path in shard_files(resolve_target(recipe.target)))
            most = _MOST_MEMORY * (torch.cuda.mem_get_info(device)[0] - target)
            if compiled_mark(recipe, device).exists() or needed_bytes(recipe) > most:
                return None
        except Exception as error:  # of a cache's folder, or a GPU that takes no second process
            monitor.say(f"the training step is not compiled in advance: {error}")
            return None
        monitor.say("another process compiles the training step meanwhile")
        return cls(recipe, run)

    def finish(self, monitor: Monitor) -> None:
        """Wait for the process before the training, and say so if it failed."""
        if self._process.is_alive():
            monitor.say("waiting for the process that compiles the training step")
            self._process.join(_PATIENCE_S)
        code = self._process.exitcode
        self.close()
        if code != 0:
            how = f"has not ended in {_PATIENCE_S:.0f} s" if code is None else exit_text(code)
            log = f"; its log: {self._log}" if has_text(self._log) else ""
            monitor.say(
                f"the process that compiles the training step failed ({how}){log}; the training "
                "compiles it itself"
            )

    def close(self) -> None:
        """End the process; its log stays if it failed and said something."""
        failed = bool(self._process.exitcode)
        self._process.terminate()
        self._process.join()
        if not (failed and has_text(self._log)):
            self._log.unlink(missing_ok=True)


def _planned(recipe: Recipe) -> DraftHead:
    """Return the head that the recipe trains, on the meta device."""
    config = target_config(recipe.target)
    return planned_head(recipe, config, planned_identity(recipe, config))


def compiled_mark(recipe: Recipe, device: torch.device) -> Path:
    """Return the marker, in Inductor's cache, of a recipe's training step that is compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    shapes = _planned(recipe).config.model_dump(mode="json", exclude={"target", "provenance"})
    settings = recipe.train.model_dump(include={"precision", "compile", "loss", "ttt_steps"})
    programs = torch.__version__, package_version(), git_commit()
    key = sha256_text(
        canonical_json([shapes, settings, programs, torch.cuda.get_device_name(device)])
    )
    return Path(cache_dir()) / f"draftlab-{key[:16]}"


def needed_bytes(recipe: Recipe) -> int:
    """Return about how much memory of a GPU the process takes."""
    head = _planned(recipe)
    trained = sum(p.numel() * p.element_size() for p in head.parameters() if p.requires_grad)
    frozen = sum(2 * p.numel() for p in head.parameters() if not p.requires_grad)
    teacher = 4 * head.config.draft_vocab_size * head.config.target_hidden_size
    # A check keeps the gradients of two passes, and copies of weights.
    checked = gpu_check_tokens(head.config, recipe.train) * head.config.num_layers
    activations = _CHANNEL_BYTES * checked * head.config.hidden_size
    return 4 * trained + frozen + teacher + activations + _CONTEXT_BYTES


def _compile_apart(recipe: Recipe, log: Path, leader: int) -> None:
    """Compile a recipe's training step in this process, which prints into a file."""
    begin_process(log, leader)
    os.nice(_PRIORITY)
    device = resolve_device(recipe.train.device)
    with use_device(device):
        if device.type == "cuda":
            share = needed_bytes(recipe) / torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(share)
        compile_training(recipe, device)
        if device.type == "cuda":
            compiled_mark(recipe, device).touch()


def compile_training(recipe: Recipe, device: torch.device) -> None:
    """Compile the kernels of a recipe's training step on a device; raise a RuntimeError if
    torch.compile fails.
    """
    head, folder = _planned(recipe).config, resolve_target(recipe.target)
    parts = load_parts(folder, trust_remote_code=recipe.target.trust_remote_code)
    vocabulary = DraftVocabulary(torch.arange(head.draft_vocab_size), None)
    untrained = untrained_head(head, parts, vocabulary, recipe.seed)
    settings = recipe.train
    module = DistillationModule.on_device(untrained, parts, settings, device)
    if NOT_COMPILED in module.description:
        raise RuntimeError(module.description)
    length = min(_TOKENS, settings.row_tokens)
    batch = random_batch(untrained, length, settings.ttt_steps, parts.lm_head.dtype).to(device)
    weights = module.objective.step_weights(settings.gamma, batch.counts)
    module.compile_ahead(next(batch.split()), weights)
