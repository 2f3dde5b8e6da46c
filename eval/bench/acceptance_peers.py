"""Other trainers beside `bench_acceptance.py`: heads trained on a store's records.

- `speculators` (0.9): its models with its defaults (`TrainConfig`), its batches (`CollateFn`, its
  sampler, 8,192 tokens a step) and its `Trainer`. Four things differ from its command. Records come
  from our store. Logs do not wait for the GPU. The loss is its eager one, since its fused loss did
  not compile on torch 2.11. Layers have no sliding window, since one of 2,048 positions holds every
  conversation.
- `specforge` (0.2): its OnlineEagle3Model, loss and optimizer with its defaults, in a loop of ours,
  since its own wants SGLang. A step has as many tokens as speculators', in place of a single
  conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from train_peers import import_peer, shifted, specforge_model
from transformers import AutoConfig, LlamaConfig

from draftlab.errors import UserError
from draftlab.export.importing import import_head
from draftlab.heads.head import DraftHead
from draftlab.store.recording_plan import group_consecutive
from draftlab.store.store import Store
from draftlab.target_model.model import Target
from draftlab.train.batch.loader import prefetch
from draftlab.train.metrics import peak_memory
from eval.measurements import PrintMonitor

WARMUP_STEPS = 20
"""Steps that the steady speed leaves out: compilation and first allocations."""

MODULES = {
    "speculators": (
        "speculators.train.config.schema",
        "speculators.train.cli",
        "speculators.model",
        "speculators.train.data",
        "speculators.train.distributed_batch_sampler",
        "speculators.models.eagle3.data",
        "speculators.train.trainer",
    ),
    "specforge": (
        "specforge.config.schema",
        "specforge.optimizer",
        "specforge.algorithms.eagle3.model",
        "specforge.modeling.draft.llama3_eagle",
    ),
}
"""The modules of each trainer that are used here."""


@dataclass(frozen=True)
class Task:
    """What a peer trains on.

    Attributes:
        store, indices: the records to train on, the same as ours.
        target: the target model.
        head: our head of the family, whose draft vocabulary and mask token the peer takes.
        tokens, step_tokens: positions to train on, about, and the most of a step.
        rate: learning rate; None: the trainer's default.
        options: of speculators' command, beside its defaults, such as num_layers.
    """

    store: Store
    indices: Sequence[int]
    target: Target
    head: DraftHead
    tokens: int
    step_tokens: int
    seed: int
    rate: float | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.target.device


@dataclass(frozen=True)
class Trained:
    """A training that has ended.

    Attributes:
        seconds: of all steps. steady_seconds: at the speed after the first steps.
        peak_gib: of tensors on a GPU, the target included; of the process elsewhere.
    """

    steps: int
    tokens_seen: int
    parameters: int
    learning_rate: float
    seconds: float
    steady_seconds: float
    peak_gib: float


class StepClock:
    """Times a training's steps; `tick` is called after each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.compiler.reset()  # another model's compilations count towards a limit
        self.times = [self._now()]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def tick(self) -> None:
        """Note the end of a step; at the end of the warm-up the host waits for the GPU."""
        last = len(self.times) == WARMUP_STEPS
        self.times.append(self._now() if last else time.perf_counter())

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of all steps, and the same at the steady speed."""
        self.times[-1] = self._now()
        steps, total = len(self.times) - 1, self.times[-1] - self.times[0]
        first = min(WARMUP_STEPS, steps // 2)
        steady = (self.times[-1] - self.times[first]) / max(1, steps - first)
        return total, steady * steps


class _Records(Dataset[dict[str, Tensor]]):
    """A store's records as speculators' data sets return them."""

    def __init__(self, task: Task) -> None:
        self.store, self.indices = task.store, task.indices  # a worker gets no target

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        record = self.store[self.indices[number]]
        length = len(record.tokens)
        return {
            "hidden_states": record.features,
            "input_ids": record.tokens,
            "verifier_last_hidden_states": record.last,
            "loss_mask": record.spans > 0,
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }


class _Batches:
    """A loader that prefetches on a thread and counts the tokens that it yields."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.batch_sampler, self.tokens = loader, loader.batch_sampler, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with closing(prefetch(batch for batch in self.loader)) as batches:
            for batch in batches:
                self.tokens += int((batch["document_ids"] >= 0).sum())
                yield batch


def train_speculators(family: str, task: Task, out: Path) -> Trained:
    """Train a head with speculators, and write it to `out` in speculators' layout."""
    schema, cli, models, data, samplers, shift, trainers = import_peer(*MODULES["speculators"])
    device, config = task.device, task.head.config
    on_gpu = device.type == "cuda"
    # On a CPU flex attention has no backward pass, and eager attention makes padding NaN.
    attention = "simple_flex_attention" if on_gpu else "sdpa"
    arguments = schema.TrainConfig(speculator_type=family, seed=task.seed).flatten() | task.options
    arguments |= {
        "verifier_name_or_path": str(task.target.folder),
        "target_layer_ids": list(config.boundaries),
        "draft_attn_impl": attention,
        "loss_implementation": "eager",
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": getattr(config, "mask_token_id", None),
    }
    if task.rate is not None:
        arguments |= {"lr": task.rate, "muon_lr": task.rate}
    torch.manual_seed(task.seed)
    layer_config = cli.create_transformer_layer_config(
        arguments["verifier_name_or_path"],
        arguments["num_layers"],
        arguments["draft_arch"],
        arguments["draft_hidden_act"],
        arguments["sliding_window"],
        list(range(arguments["num_layers"])),
    )
    whole = config.draft_vocab_size == config.vocab_size
    mappings = (None, None) if whole else (task.head.t2d.cpu(), task.head.d2t.cpu())
    model_class = models.SpeculatorModel.registry[family]
    model = model_class.from_training_args(layer_config, *mappings, **arguments)
    records, dtype = _Records(task), torch.bfloat16
    collate = data.CollateFn(
        task.step_tokens,
        layer_config.hidden_size,
        len(config.boundaries),
        dtype,
        shift.shift_batch if family in ("eagle3", "peagle") else None,
    )
    lengths = [task.store.lengths[i] for i in task.indices]
    sampler = samplers.MultipackDistributedBatchSamplerV2(
        task.step_tokens, lengths, 1, 0, seed=task.seed
    )
    workers: dict[str, Any] = {}
    if on_gpu:
        names = ("num_workers", "prefetch_factor")
        workers = {name: arguments[name] for name in names} | {"pin_memory": True}
    loader = DataLoader(records, batch_sampler=sampler, collate_fn=collate, **workers)
    batches = _Batches(loader)
    steps = max(1, round(task.tokens * len(loader) / sum(lengths)))

    class OnDevice(trainers.Trainer):
        """speculators' trainer on a given device, without checkpoints and progress bars."""

        def setup_trainer(self) -> None:
            self.local_rank, self.device_type, self.rank = device, device.type, 1
            super().setup_trainer()

    call_options = model_class.get_trainer_kwargs(**arguments)[0]
    names = set(trainers.TrainerConfig._fields) & arguments.keys()
    settings = {name: arguments[name] for name in names} | {
        "num_epochs": 1,
        "save_path": str(out / "checkpoints"),
        "train_call_kwargs": call_options,
        "hidden_states_dtype": dtype,
        "max_steps": steps + 1,
        "log_freq": steps + 2,
    }
    if settings.get("scheduler_total_steps") is None:
        settings["scheduler_total_steps"] = steps
    trainer = OnDevice(model, trainers.TrainerConfig(**settings), batches)
    trainer.global_step = 1  # it logs step 0, which waits for a GPU
    clock, epoch = StepClock(device), 0
    while trainer.global_step <= steps:
        trainer.train_epoch(epoch, step_callback=clock.tick)
        epoch += 1
    trained = _trained(clock, model, batches.tokens, arguments["lr"])
    model.save_pretrained(out)
    return trained


def train_specforge(family: str, task: Task, out: Path) -> Trained:
    """Train an EAGLE3 head with SpecForge, and write it to `out` in the native layout.

    Raises:
        UserError: there is no GPU, or the family is another.
    """
    if family != "eagle3" or task.device.type != "cuda":
        raise UserError(
            f"expected an eagle3 head on a GPU, since SpecForge's loss is a Triton kernel; found "
            f"{family} on {task.device}"
        )
    schema, optimizers, *_ = import_peer(*MODULES["specforge"])
    defaults = schema.TrainingConfig.model_fields
    device = task.device
    torch.manual_seed(task.seed)
    layer = AutoConfig.from_pretrained(task.target.folder).to_dict() | {"num_hidden_layers": 1}
    layer = LlamaConfig(**layer | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"})
    num_steps = defaults["ttt_length"].default
    online = specforge_model(
        layer, task.head.t2d.to(device), task.head.d2t.to(device), num_steps, device
    )
    model = online.draft_model
    with torch.no_grad():
        model.embed_tokens.weight.copy_(task.target.parts.embeddings)
    model.freeze_embedding()
    model.to(torch.bfloat16)
    generator = np.random.default_rng(task.seed)
    batches: list[list[int]] = []
    while sum(task.store.lengths[i] for batch in batches for i in batch) < task.tokens:
        order = generator.permutation(len(task.indices)).tolist()
        order = [task.indices[i] for i in order]
        groups = group_consecutive([task.store.lengths[i] for i in order], task.step_tokens)
        batches += [[order[i] for i in group] for group in groups]
    tokens, needed = 0, []
    for batch in batches:
        needed.append(batch)
        tokens += sum(task.store.lengths[i] for i in batch)
        if tokens >= task.tokens:
            break
    rate = task.rate or defaults["learning_rate"].default
    optimizer = optimizers.BF16Optimizer(
        model,
        rate,
        max_grad_norm=defaults["max_grad_norm"].default,
        warmup_ratio=defaults["warmup_ratio"].default,
        total_steps=len(needed),
    )
    clock = StepClock(device)
    width = max(task.store.lengths)
    with closing(prefetch(_padded(task, batch, width) for batch in needed)) as inputs:
        for ids, mask, features, last in inputs:
            ids, mask, features, last = (x.to(device) for x in (ids, mask, features, last))
            with torch.no_grad():
                logits = task.target.logits(shifted(last.to(task.target.dtype)))
            losses, *_ = online(
                input_ids=shifted(ids),
                attention_mask=torch.ones_like(ids),
                loss_mask=mask[..., None].long(),
                target=logits.clone(),
                hidden_states=features.to(torch.bfloat16),
            )
            sum(0.8**k * loss for k, loss in enumerate(losses)).backward()  # its ploss_decay
            optimizer.step()
            clock.tick()
    trained = _trained(clock, model, tokens, rate)
    model.save_pretrained(out)
    return trained


def _padded(task: Task, batch: Sequence[int], width: int) -> tuple[Tensor, ...]:
    """Return tokens [B, S], loss mask [B, S], features and last states of records, padded."""
    records = [task.store[i] for i in batch]

    def stack(values: Sequence[Tensor]) -> Tensor:
        out = values[0].new_zeros(len(values), width, *values[0].shape[1:])
        for row, value in zip(out, values, strict=True):
            row[: len(value)] = value
        return out

    fields = zip(*((r.tokens, r.spans > 0, r.features, r.last) for r in records), strict=True)
    return tuple(stack(field) for field in fields)


def _trained(clock: StepClock, model: torch.nn.Module, tokens: int, rate: float) -> Trained:
    seconds, steady = clock.seconds()
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    peak = peak_memory(clock.device) / 2**30
    return Trained(len(clock.times) - 1, tokens, parameters, rate, seconds, steady, peak)


def train_head(peer: str, family: str, task: Task, folder: Path) -> Trained:
    """Train a peer's head, written to `folder`/export, and import it as `folder`/head."""
    export, config = folder / "export", task.head.config
    trained = PEERS[peer][0](family, task, export)
    import_head(
        export,
        folder / "head",
        target=str(task.target.folder),
        boundaries=config.boundaries,
        k=config.k_trained,
        monitor=PrintMonitor(),
    )
    return trained


Train = Callable[[str, Task, Path], Trained]
PEERS: dict[str, tuple[Train, tuple[str, ...]]] = {
    "speculators": (train_speculators, ("eagle3", "peagle", "dspark")),
    "specforge": (train_specforge, ("eagle3",)),
}
"""Each trainer's function, and the families that are compared with it."""
