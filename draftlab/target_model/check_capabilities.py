"""Test by experiment whether a loaded model can decode ragged rows, pages and packed rows.

An experiment is two passes that must give the same states. Except for `_rows_and_pages` and
`_alone_and_packed` both passes have the same shapes and differ only in what must have no effect, so
the tolerance is that of rounding in any dtype and faults of any size are found.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from draftlab.errors import UserError
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model.packed_rows import PackedRow
from draftlab.target_model.paged_cache import PagedCache, RowCache
from draftlab.target_model.recurrent_layer import unknown_recurrence

if TYPE_CHECKING:
    from draftlab.target_model.model import Target

Experiment = Callable[["Target"], Iterable[Tensor]]
"""Gives the states of two passes."""
Reduction = Callable[[Tensor], Tensor]
WITHOUT_ENGINE = (
    "use another target; or let vLLM answer (regenerate.backend=vllm), then `draftlab train` and "
    "`draftlab export`: only `eval` decodes with draftlab's engine"
)
"""Advice for a target that draftlab's engine cannot decode."""
_LARGE_LENGTH = 1_000_000  # a cache length that changes every temperature


class _WrongLengthCache(PagedCache):
    """A cache that reports a far larger length."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return _LARGE_LENGTH


def check_rows(target: Target) -> None:
    """Raise a `UserError` if rows influence each other or rejected tokens leave a trace."""
    exact = exact_tolerance(target)
    raise_fault(target, "keeps a state of tokens that were rejected", _after_rejection, exact)
    raise_fault(target, "takes positions from the length of the cache", _with_wrong_length, exact)
    raise_fault(
        target,
        "treats a row differently when the row beside it is longer",
        _beside_longer_row,
        exact,
    )


def check_pages(target: Target) -> None:
    """Raise a `UserError` if the model cannot read its keys from pages, as JetMoE, which does not
    attend through transformers' interface.
    """
    fault = "reads its cache in a way that pages of keys do not serve"
    raise_fault(target, fault, _rows_and_pages, *close_tolerance(target))


def padding_reason(target: Target) -> str | None:
    """Return why conversations cannot be packed into one row, such as recurrent layers of unknown
    functions or attention that does not use transformers' interface; None if they can.
    """
    experiments = [
        ("mixes packed conversations", _packed_with_others, exact_tolerance(target), torch.amax),
        (
            "treats packed conversations unlike single ones",
            _alone_and_packed,
            *close_tolerance(target),
        ),
    ]
    if target.device.type == "cuda":  # a small kernel a conversation and layer costs more there
        slow = "attends to packed conversations one by one on this device"
        experiments.append((slow, _in_one_kernel, *close_tolerance(target)))
    faults = (find_fault(target, *experiment) for experiment in experiments)
    return next((fault for fault in faults if fault), None)


def can_capture(target: Target) -> bool:
    """Return whether a CUDA graph can hold the target's passes; on a CPU it cannot.

    It cannot where the host must read values from the device, as in a loop over the selected
    experts (`target_model/experts.py` names such models). A warning then says why.
    """
    if target.device.type != "cuda":
        return False
    if target.pipeline_parallel:
        reason = "its layers are on several GPUs"
    elif (message := synchronisation_error(target)) is not None:
        reason = f"the host waits for the device in a pass ({message})"
    else:
        return True
    warnings.warn(
        f"{type(target.decoder).__name__} decodes without CUDA graphs, so more slowly: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@torch.inference_mode()
def synchronisation_error(target: Target) -> str | None:
    """Return torch's message if a pass makes the host wait for the device; None if none does."""
    pages = PagedCache(target.num_layers, 3, 16, 2 * target.recurrent, gathers=target.latent)
    table = torch.tensor([[1], [2]], dtype=torch.int32, device=target.device)
    ids, positions = (x.repeat(2, 1) for x in ids_and_positions(target, [5, 6, 7], 0))
    rows = torch.arange(2, device=target.device)

    def run(lengths: list[int] | None = None) -> None:
        pages.at(table, positions, slot_mapping(table, positions, 16), rows, lengths)
        target.states(ids, positions=positions, cache=pages)
        if pages.states and not lengths:
            pages.states.keep(rows + 1)

    run([3, 3])  # writes recurrent states
    run()  # allocates, compiles, loads libraries
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        except RuntimeError as error:
            return str(error).split("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return None


def exact_tolerance(target: Target) -> float:
    """Return the tolerance for passes of the same shapes."""
    return 1e-5 if target.dtype == torch.float32 else 1e-3


def close_tolerance(target: Target) -> tuple[float, Reduction]:
    """Return the tolerance for passes of other kernels, and the reduction over tokens.

    In half precision routers may select other experts for most tokens; a misread cache shows in
    all of them.
    """
    return (1e-3, torch.amax) if target.dtype == torch.float32 else (0.3, _lower_quartile)


def _lower_quartile(x: Tensor) -> Tensor:
    return x.quantile(0.25)


def raise_fault(target: Target, *experiment: Any) -> None:
    """Raise a `UserError` if there is a fault; the arguments are `find_fault`'s."""
    if fault := find_fault(target, *experiment):
        raise UserError(
            f"{type(target.decoder).__name__} {fault}, so drafts cannot be verified with it",
            where=target.folder,
            do=WITHOUT_ENGINE,
        )


@torch.inference_mode()
def find_fault(
    target: Target,
    description: str,
    experiment: Experiment,
    tolerance: float,
    reduction: Reduction = torch.amax,
) -> str | None:
    """Return the fault and its size if `reduction` of the relative differences of an experiment's
    results [..., Ht] exceeds `tolerance`.
    """
    try:
        one, other = experiment(target)
    except torch.OutOfMemoryError:  # it does not depend on the architecture
        raise
    except Exception as error:  # unsupported passes may fail in any way
        message = str(error).partition("\n")[0].rstrip(".")
        if isinstance(error, NotImplementedError):  # of a kernel that does not serve the layers
            return f"{description}: {message}"
        return (
            f"could not be tested with transformers {transformers.__version__} "
            f"({type(error).__name__}: {message}) and perhaps {description}"
        )
    norms = one.float().norm(dim=-1).clamp(min=1e-6)
    difference = float(reduction((one - other).float().norm(dim=-1) / norms))
    if difference <= tolerance:  # NaN is a fault too
        return None
    return f"{description} (its states change by {difference:.2g})"


def ids_and_positions(target: Target, tokens: list[int], start: int) -> tuple[Tensor, Tensor]:
    """Return ids and positions [1, M]."""
    ids = torch.tensor([tokens], device=target.device) % target.vocab_size
    return ids, torch.arange(start, start + len(tokens), device=target.device)[None]


def _after_rejection(target: Target) -> Iterator[Tensor]:
    """Run the same continuation without and with two rejected tokens before it."""
    for rejected in (False, True):
        rows = _Rows(target, 1, gathers=True)
        rows.run([[5, 6, 7]])
        if rejected:
            rows.run([[8, 9]], keep=[0])
        yield rows.run([[10, 11]])


def _with_wrong_length(target: Target) -> Iterator[Tensor]:
    """Run the same tokens on a cache that reports no length and on one that reports another."""
    for cls in (PagedCache, _WrongLengthCache):
        rows = _Rows(target, 1, cls, gathers=True)
        rows.run([[5, 6, 7]])
        yield rows.run([[10, 11]])


def _beside_longer_row(target: Target) -> Iterator[Tensor]:
    """Run a row beside one at the first positions and beside one at the last positions."""
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]], device=target.device) % target.vocab_size
    columns = torch.arange(3, device=target.device)
    for start in (0, target.max_length - 3):
        # Slots are columns here: the row at the last positions needs no cache of that length.
        cache = RowCache(target.num_layers, 2, 3)
        cache.at_rows([0, 1], columns.expand(2, 3), 3)
        positions = torch.stack([columns, columns + start])
        yield target.states(ids, positions=positions, cache=cache).last[0]


def _rows_and_pages(target: Target) -> tuple[Tensor, Tensor]:
    """Run a prompt and more tokens with keys that are gathered and in scattered pages."""
    gathered, paged = (_Rows(target, 1, gathers=gathers) for gathers in (True, False))
    for tokens in (list(range(5, 23)), list(range(40, 65))):
        states = gathered.run([tokens]), paged.run([tokens])
    return states


def _packed_with_others(target: Target) -> tuple[Tensor, Tensor]:
    """Run a text packed between two texts, and between two others at the last positions."""
    size = 16
    texts = [list(range(first, first + size)) for first in (5, 21, 37, 53, 69)]
    late = torch.arange(size, device=target.device) + max(target.max_length - size, 0)
    one = _run_packed(target, [texts[0], texts[1], texts[2]])
    other = _run_packed(target, [texts[3], texts[1], texts[4]], {0: late, 2: late})
    return one[size : 2 * size], other[size : 2 * size]


def _alone_and_packed(target: Target) -> tuple[Tensor, Tensor]:
    """Run texts in rows of their own, and packed behind another."""
    texts = [list(range(5, 23)), list(range(40, 65)), list(range(70, 75))]
    alone = [target.states(ids_and_positions(target, text, 0)[0]).last[0] for text in texts[1:]]
    return torch.cat(alone), _run_packed(target, texts)[len(texts[0]) :]


def _in_one_kernel(target: Target) -> tuple[Tensor, Tensor]:
    """Run packed texts where anything but one kernel for the whole row is an error."""
    states = _run_packed(target, [list(range(5, 23)), list(range(40, 65))], require_varlen=True)
    return states, states


def _run_packed(
    target: Target,
    texts: list[list[int]],
    positions: dict[int, Tensor] | None = None,
    *,
    require_varlen: bool = False,
) -> Tensor:
    """Return last states [T, Ht] of packed texts, some of them at the given positions."""
    ids, _ = ids_and_positions(target, [token for text in texts for token in text], 0)
    row = PackedRow.of([len(text) for text in texts], target.device)
    row = replace(row, require_varlen=require_varlen)
    for number, text_positions in (positions or {}).items():
        row.positions[0, row.slices[number]] = text_positions
    return target.states(ids, packed_row=row).last[0]


def check_states(target: Target) -> None:
    """Raise a `UserError` if a model with recurrent layers cannot decode with rows of states."""
    if layer := unknown_recurrence(target.decoder):
        raise UserError(
            f"expected a convolution or a recurrence that draftlab can run for a few tokens, found "
            f"none in layer {layer}: its state cannot follow the accepted drafts",
            where=target.folder,
            do=WITHOUT_ENGINE,
        )
    close = close_tolerance(target)  # other tokens beside a row change the rounding of its experts
    raise_fault(target, "keeps a state of tokens that were rejected", _after_other_drafts, *close)
    raise_fault(target, "treats a row differently beside other rows", _beside_other_rows, *close)
    raise_fault(target, "computes other states token by token than at once", _in_steps, *close)


class _Rows:
    """Rows of one target with scattered pages, and recurrent states if it has any."""

    def __init__(
        self,
        target: Target,
        num_rows: int,
        cls: type[PagedCache] = PagedCache,
        *,
        gathers: bool = False,
    ) -> None:
        self.target, width, states = target, 4, num_rows * target.recurrent
        size = num_rows * width
        gathers = gathers or target.latent
        self.cache = cls(target.num_layers, size + 1, 16, states, gathers=gathers)
        blocks = torch.arange(size, 0, -1, dtype=torch.int32, device=target.device)
        self.table, self.ends = blocks.view(num_rows, width), [0] * num_rows
        self.rows = torch.arange(num_rows, device=target.device)

    def run(self, texts: list[list[int]], keep: list[int] | None = None) -> Tensor:
        """Run the rows' next tokens; return last states [B, M, Ht], those of padding undefined.

        Args:
            keep: tokens of each row that a verify step accepts; None: all, the texts being prompts
                for recurrent layers.
        """
        width, device = max(len(text) for text in texts), self.target.device
        ids = torch.tensor([t + [0] * (width - len(t)) for t in texts], device=device)
        columns = torch.arange(width, device=device)
        ends = torch.tensor(self.ends, device=device)[:, None]
        lengths = [len(text) for text in texts]
        is_real = columns < torch.tensor(lengths, device=device)[:, None]
        positions = (ends + columns).where(is_real, -1)
        slots = slot_mapping(self.table, positions, 16)
        self.cache.at(self.table, positions, slots, self.rows, None if keep else lengths)
        ids = ids % self.target.vocab_size
        last = self.target.states(ids, positions=positions, cache=self.cache).last
        if keep and self.cache.states:
            self.cache.states.keep(torch.tensor(keep, device=device))
        self.ends = [end + n for end, n in zip(self.ends, keep or lengths, strict=True)]
        return last


def _after_other_drafts(target: Target) -> Iterator[Tensor]:
    """Run the same continuation after steps in which different drafts were rejected."""
    for drafts in ([9, 10], [30, 40]):
        rows = _Rows(target, 1)
        rows.run([[5, 6, 7]])
        rows.run([[8, *drafts]], keep=[1])
        yield rows.run([[11, 12]], keep=[2])


def _beside_other_rows(target: Target) -> tuple[Tensor, Tensor]:
    """Run a row alone, and beside a longer and a shorter one that keep other numbers of tokens."""
    alone, beside = _Rows(target, 1), _Rows(target, 3)
    prompt, step = [5, 6, 7, 8, 9], [20, 21, 22]
    others = [list(range(30, 41)), [50]]
    alone.run([prompt])
    beside.run([others[0], prompt, others[1]])
    alone.run([step], keep=[2])
    beside.run([[60, 61, 62], step, [63, 64, 65]], keep=[3, 2, 1])
    last = alone.run([step], keep=[1])
    return last[0], beside.run([[70, 71], step, [72]], keep=[1, 1, 1])[1]


def _in_steps(target: Target) -> tuple[Tensor, Tensor]:
    """Run a text at once and without a cache, and as a prompt and verify steps."""
    text = list(range(5, 36))
    at_once = target.states(ids_and_positions(target, text, 0)[0]).last
    rows = _Rows(target, 1)
    states = [rows.run([text[:18]])]
    for start in range(18, len(text), 3):
        tokens = text[start : start + 3]
        states.append(rows.run([tokens], keep=[len(tokens)]))
    return at_once, torch.cat(states, 1)
