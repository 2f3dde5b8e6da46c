"""The fast forward passes have the outputs and gradients of the references."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.kernels.fp8_linear import Fp8Weight
from draftlab.store.store import Record
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.distributed.backends import DistillationModule
from draftlab.train.fast import choose_forward
from draftlab.train.fast.block import FastBlock
from draftlab.train.fast.choose_forward import compiled_ops
from draftlab.train.fast.fused_ops import FP8_OPS, FUSED_OPS, FusedOps, normed, normed_backward
from draftlab.train.fast.parallel import FastParallel, attention_rows
from draftlab.train.fast.shared_gradients import Shared
from draftlab.train.fast.ttt import FastUnroll
from draftlab.train.objectives.block import block_outputs
from draftlab.train.objectives.loss import DraftTeacher, weighted_loss
from draftlab.train.objectives.parallel import parallel_outputs
from draftlab.train.objectives.ttt import unroll
from draftlab.train.settings import TrainSettings
from tests.helpers.gpu import kernels_compiled_ahead
from tests.helpers.synthetic import (
    EAGLE,
    VOCAB,
    assert_same,
    parts,
    ragged_batch,
    random_norms_head,
    record,
    spans_of,
    train_step,
)

PEAGLE = {"family": "peagle"}
DSPARK, DFLASH = ({"family": f, "k_trained": 4} for f in ("dspark", "dflash"))
DFLASH2 = {"family": "dflash2", "k_trained": 4}
DSPARK_CAUSAL = DSPARK | {"num_layers": 2, "is_causal": True, "draft_vocab_size": VOCAB}
FORWARDS = {"peagle": FastParallel} | dict.fromkeys(("dspark", "dflash", "dflash2"), FastBlock)
REFERENCES = {FastUnroll: unroll, FastParallel: parallel_outputs, FastBlock: block_outputs}
OPTIONS: list[dict[str, object]] = [
    {},
    {"qk_norm": True},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"num_layers": 2, "norm_before_residual": True},
    {"num_layers": 3, "qk_norm": True},
    {"num_layers": 2, "sliding_window": 5, "k_trained": 4},
    PEAGLE,
    PEAGLE | {"num_layers": 2},
    PEAGLE | {"num_layers": 3, "qk_norm": True},
    PEAGLE | {"norm_before_residual": True, "num_layers": 2},
    PEAGLE | {"norm_before_fc": True},
    PEAGLE | {"fc_norm": True},
    DSPARK,
    DSPARK | {"num_layers": 3},
    DSPARK_CAUSAL,
    DFLASH | {"num_layers": 2},
    DFLASH | {"is_causal": True},
    DSPARK | {"num_layers": 2, "sliding_window": 6},
    DFLASH2 | {"num_layers": 2, "sliding_window": 6},
    DFLASH2 | {"conv_kernel_size": 3, "is_causal": True, "embedding_scale": 2.0},
]


def fast_forward(model: DraftHead) -> Callable:
    return FORWARDS.get(model.config.family, FastUnroll)


def reference_step(model: DraftHead, batch: Batch) -> dict[str, Tensor]:
    """Return the outputs and gradients of the reference."""
    return train_step(model, list(REFERENCES[fast_forward(model)](model, batch)), batch)


def distillation_module(model: DraftHead, **settings: object) -> DistillationModule:
    teacher = DraftTeacher.of(parts(), model)
    return DistillationModule(model, teacher, TrainSettings(ttt_steps=4, **settings), torch.float32)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_outputs_and_gradients_equal_the_reference(changes: dict[str, object]) -> None:
    model, batch = random_norms_head(**changes), ragged_batch()
    fast = fast_forward(model)
    if fast is not FastUnroll:
        batch.tokens[:, ::5] = 5  # mask tokens in conversations, which nothing forbids
    assert fast.supports(model)
    actual = train_step(model, fast(torch.float64)(model, batch), batch)
    assert_same(actual, reference_step(model, batch))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("step", range(4))
def test_a_loss_may_read_one_step_alone(step: int) -> None:
    """The steps behind it then have no gradients."""
    model, batch = random_norms_head(norm_before_residual=True), ragged_batch()
    weights = [p for p in model.parameters() if p.requires_grad]
    actual, expected = (
        torch.autograd.grad(
            list(forward(model, batch))[step].output.square().sum(),
            weights,
            allow_unused=True,
            materialize_grads=True,
        )
        for forward in (FastUnroll(torch.float64), unroll)
    )
    torch.testing.assert_close(actual, expected)


def test_sums_of_steps_add_up_to_the_loss() -> None:
    model, batch = random_norms_head(), ragged_batch()
    teacher, weights = DraftTeacher.of(parts(), model), [0.8**k for k in range(4)]
    loss, sums = weighted_loss(unroll(model, batch), model, teacher, batch, weights)
    torch.testing.assert_close(sums.loss @ torch.tensor(weights), loss.detach())
    assert sums.count.tolist() == batch.counts
    assert torch.equal(sums.hits, sums.hits.round())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        PEAGLE,
        PEAGLE | {"num_layers": 2},
        DSPARK | {"num_layers": 2},
        DFLASH,
        DSPARK_CAUSAL,
        DFLASH2,
    ],
    ids=str,
)
def test_a_gpu_has_the_references_outputs(changes: dict[str, object], dtype: torch.dtype) -> None:
    """Compiled, with the kernels of attention."""
    model, batch = random_norms_head(**changes), ragged_batch()
    expected = reference_step(model, batch)
    model, batch = model.to("cuda"), batch.to(torch.device("cuda"))
    forward = fast_forward(model)(dtype, ops=compiled_ops())
    actual = {
        n: x.cpu().float() for n, x in train_step(model, forward(model, batch), batch).items()
    }
    bound = 1e-4 if dtype == torch.float32 else 0.05
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= bound * value.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, PEAGLE, DSPARK], ids=str)
def test_a_steps_kernels_are_compiled_before_it_runs(changes: dict[str, object]) -> None:
    head = random_norms_head(**changes).to("cuda")
    eager = fast_forward(head)(torch.float32, ops=FUSED_OPS)
    with kernels_compiled_ahead() as ahead:
        choose_forward.check_compiled(head, eager, eager, 64)
    assert sum(ahead) >= max(3, 0.9 * len(ahead))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("turns", [[(3, 6)], [(2, 3)], [(1, 2)]])
@pytest.mark.parametrize("one_row", [False, True])
def test_few_masked_slots_or_none(turns: list[tuple[int, int]], one_row: bool) -> None:
    """One conversation of 4 predictions, of one, of none at depth 1: one slot is also a row."""
    batch = pack([[record(spans_of(turns), parts())]], 16, 3, one_row=one_row)
    for changes in (
        PEAGLE,
        PEAGLE | {"num_layers": 2},
        DSPARK,
        DFLASH | {"num_layers": 2},
        DFLASH2,
    ):
        model = random_norms_head(**changes)
        actual = train_step(model, fast_forward(model)(torch.float64)(model, batch), batch)
        assert_same(actual, reference_step(model, batch))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": True}, PEAGLE | {"num_layers": 2, "qk_norm": True}, DSPARK, DFLASH2],
    ids=str,
)
def test_compiled_ops_are_equal_whatever_the_number_of_rows(changes: dict[str, object]) -> None:
    model = random_norms_head(**changes)
    fast = fast_forward(model)
    compiled = fast(torch.float64, ops=compiled_ops(backend="aot_eager"))
    for num_steps in (4, 2, 1):
        batch = ragged_batch(num_steps)
        expected = train_step(model, fast(torch.float64)(model, batch), batch)
        assert_same(train_step(model, compiled(model, batch), batch), expected)


@pytest.mark.parametrize("changes", [{}, PEAGLE | {"num_layers": 2}, DSPARK, DFLASH2], ids=str)
def test_in_16_bit_nothing_is_widened(changes: dict[str, object]) -> None:
    model, batch = random_norms_head(**changes), ragged_batch()
    dtypes: dict[bool, set[torch.dtype]] = {True: set(), False: set()}

    def recorded(op: Callable) -> Callable:
        def call(rows: Tensor, *rest: object) -> object:
            result = op(rows, *rest)
            results = result if isinstance(result, tuple) else (result,)
            for tensor in results:
                if tensor is not None:
                    dtypes[tensor.ndim == 1].add(tensor.dtype)
            return result

        return call

    ops = FusedOps(*(recorded(op) for op in FUSED_OPS if op is not None))
    with torch.autocast("cpu", torch.bfloat16):
        fast = fast_forward(model)(torch.bfloat16, ops=ops)
        actual = train_step(model, fast(model, batch), batch)
    # Vectors are gradients of norms' weights, which are float32.
    assert dtypes == {True: {torch.float32}, False: {torch.bfloat16}}
    for name, value in reference_step(model, batch).items():
        assert actual[name].dtype == (torch.bfloat16 if "step" in name else torch.float32)
        assert (actual[name].float() - value).norm() <= 0.05 * value.norm(), name


@pytest.mark.parametrize("ops", [FUSED_OPS, FP8_OPS], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("changes", [{}, PEAGLE, DSPARK, DFLASH2], ids=str)
def test_a_graph_keeps_no_weights_behind_its_backward_pass(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], ops: FusedOps
) -> None:
    """The loss lives on while the next pass runs."""
    weights: list[weakref.ref] = []
    initialise = Shared.__init__

    def recorded(self: Shared, *tensors: Tensor, **options: object) -> None:
        initialise(self, *tensors, **options)
        in_8_bits = self.matrix if isinstance(self.matrix, Fp8Weight) else ()
        weights.extend(map(weakref.ref, (self.tensor, *in_8_bits)))

    monkeypatch.setattr(Shared, "__init__", recorded)
    model, batch = random_norms_head(**changes), ragged_batch()
    gc.collect()
    gc.disable()
    try:
        outputs = fast_forward(model)(torch.float32, ops=ops)(model, batch)
        loss = sum(o.output.sum() for o in outputs)
        del outputs
        loss.backward()
        assert len(weights) > (3 if ops == FUSED_OPS else 15)
        assert [each() for each in weights] == [None] * len(weights)
    finally:
        gc.enable()


def test_training_runs_the_fast_unroll(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[FastUnroll] = []
    call = FastUnroll.__call__

    def recorded(self: FastUnroll, *arguments: object) -> object:
        calls.append(self)
        return call(self, *arguments)

    monkeypatch.setattr(FastUnroll, "__call__", recorded)
    batch = ragged_batch()
    distillation_module(random_norms_head())(batch, [1.0] * 4)
    assert len(calls) == 1
    module = distillation_module(random_norms_head(**EAGLE), compile=True)
    module(batch, [1.0] * 4)
    assert len(calls) == 1
    assert "train.compile has no effect on such heads" in module.description


def test_training_runs_all_depths_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = random_norms_head(**PEAGLE, num_layers=2), ragged_batch()
    module = distillation_module(model)
    assert isinstance(module.head_forward, FastParallel)
    module(batch, [1.0] * 4)
    monkeypatch.setattr(choose_forward, "compiled_ops", partial(compiled_ops, backend="aot_eager"))
    module = distillation_module(model, compile=True)
    assert module.description == "all depths run side by side, small operations are compiled"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 3, "qk_norm": True, "norm_before_residual": True},
        {"num_layers": 1},
        PEAGLE | {"num_layers": 2},
        DSPARK,
    ],
    ids=str,
)
def test_a_step_compiles_nothing_beyond_the_check(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(choose_forward, "compiled_ops", partial(compiled_ops, backend=backend))
    module = distillation_module(random_norms_head(**changes), compile=True)
    assert module.description.endswith("small operations are compiled")
    compiled = len(graphs)
    for num_steps in (4, 3):  # the loss reads all steps' outputs as parts of one tensor
        module(ragged_batch(num_steps), [1.0] * 4)[0].backward()
    assert len(graphs) == compiled <= 10


def test_heads_do_not_share_the_variants_of_compiled_ops() -> None:
    """torch.compile limits the variants of a code object, and runs eager steps beyond."""
    heads = [compiled_ops(FP8_OPS, backend="eager") for _ in range(2)]
    limits = {"recompile_limit": 1, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        for width, ops in enumerate(heads, 3):
            rows, weight = torch.ones(2, width), torch.zeros(width, width)
            weights = weight, torch.cat([weight, weight]), weight, None
            torch.testing.assert_close(ops.layer_output((rows, rows), weights, 0.0)[0], rows)
            assert not ops.quantise_weight(weight.requires_grad_()).scale.requires_grad


@pytest.mark.parametrize("precision", ["float32", "fp8"])
@pytest.mark.parametrize("changes", [{}, PEAGLE | {"num_layers": 2}, DSPARK], ids=str)
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda *rows: tuple(2 * x for x in FUSED_OPS.layer_output(*rows)), "eager steps differ"),
        (None, "TypeError"),
    ],
)
def test_failing_or_wrong_compiled_code_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    wrong: object,
    reason: str,
    precision: str,
) -> None:
    monkeypatch.setattr(
        choose_forward, "compiled_ops", lambda ops: ops._replace(layer_output=wrong)
    )
    module = distillation_module(random_norms_head(**changes), compile=True, precision=precision)
    assert module.head_forward.ops == (FP8_OPS if precision == "fp8" else FUSED_OPS)
    assert "not compiled" in module.description
    assert reason in module.description


EPS = 1e-5


def test_a_norms_gradients_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(512, 16, generator=generator).bfloat16() for _ in range(2))
    weight = torch.rand(16, generator=generator) + 0.5
    wide, wide_weight = x.double().requires_grad_(), weight.bfloat16().double().requires_grad_()
    own, exact_d_weight = torch.autograd.grad(
        normed(wide, wide_weight, EPS), (wide, wide_weight), gradient.double()
    )
    # It is nearly the opposite, so that a gradient that is rounded before the sum shows.
    other = (-1.05 * own).bfloat16()
    d_x, d_weight = normed_backward(gradient, x, weight, EPS, other)
    assert (d_x.dtype, d_weight.dtype) == (torch.bfloat16, torch.float32)
    exact = own + other.double()
    assert float((d_x.double() - exact).norm() / exact.norm()) < 2**-8
    torch.testing.assert_close(d_weight.double(), exact_d_weight, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("one_row", [False, True])
def test_anchors_may_keep_any_depths(one_row: bool, num_layers: int) -> None:
    batch = batch_of_any_depths(one_row)
    model = random_norms_head(family="peagle", num_layers=num_layers)
    actual = train_step(model, FastParallel(torch.float64)(model, batch), batch)
    assert_same(actual, train_step(model, list(parallel_outputs(model, batch)), batch))


def batch_of_any_depths(one_row: bool) -> Batch:
    """Neighbouring anchors have different numbers of masked slots, some none."""
    records = [record(spans_of([(2, 9)]), parts(), seed) for seed in range(4)]

    def depths(each: Record) -> Tensor:
        generator = np.random.default_rng(int(each.id.removeprefix("r")))
        return torch.from_numpy(generator.integers(1, 5, len(each.tokens)))

    batch = pack([records[:3], records[3:]], 40, 4, max_steps=depths, one_row=one_row)
    assert len({*batch.counts}) == 4
    return batch


@pytest.mark.parametrize("one_row", [False, True])
def test_what_kernels_alone_read(one_row: bool) -> None:
    """The readers of masked slots, padding and segments, which no CPU needs."""
    batch = batch_of_any_depths(one_row)
    num_masked = sum(batch.counts[1:])
    first = batch.tokens.numel(), batch.counts[0]
    for rows, num_first in zip(attention_rows(batch, batch.steps), first, strict=True):
        layout = rows.layout
        seeing = layout.starts <= layout.index
        is_row = rows.pad(torch.ones(num_first + num_masked)) == 1
        assert torch.equal(seeing, is_row & (batch.documents.gather(1, layout.index) >= 0))
        assert layout.segments[0] == 0
        assert layout.segments.diff().tolist() == list(layout.sizes)
        depth = torch.arange(4).repeat_interleave(torch.tensor(layout.sizes))
        readers = torch.full((3, num_masked), -1)
        for b, r in (seeing & (depth > 0)).nonzero().tolist():
            of_anchor = layout.slots[: depth[r], b, r]
            readers[depth[r] - 1, of_anchor] = b * len(depth) + r
        assert torch.equal(layout.readers, readers)
