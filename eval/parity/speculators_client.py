"""Run a draft head in the speculators library and write its outputs.

This program runs in the environment that ``setup_speculators.sh`` makes. It must not import
draftlab, and draftlab must not import it::

    .envs/speculators/bin/python eval/parity/speculators_client.py request.json answer.safetensors

More such pairs may follow. The program writes ``answer.safetensors`` and, beside it,
``answer.json`` (versions, and how the checkpoint's tensors differ from the head's). The library's
``from_pretrained`` loads the head, which computes in float64. Its ``forward`` (teacher-forced
training steps) runs once. Hooks record the values, because that forward returns neither hidden
states nor logits.

A request is a JSON object::

    draft        folder of the head in speculators format: eagle3, peagle, dspark, dflash, dflash2
    target       folder of the target; the library loads its embeddings, lm_head and final norm
                 (the path in the head's own config is not used)
    features     safetensors file, see below
    steps        eagle3: steps to run; peagle: depths
    attention    "flex" (as the library trains) or "sdpa"
    causal       whether blocks are causal. The library's are in sliding layers alone, so all layers
                 get a window that is longer than any row

For dspark, dflash and dflash2 heads the features file holds all T positions of one packed row and
`anchors` [A] int64, the positions p of the blocks' first tokens. They replace the library's random
ones, and p + block_size must be at most T: the library reads whole blocks. The answer has, for
γ slots, `hidden` [A, γ, H] after ``norm`` (the input of lm_head), `logits` [A, γ, Vd] with the
Markov bias by the token before each draft, and DSpark's `confidence` [A, γ], logits of acceptance,
or DFlash2's `scores` [A, γ, top_k − 1] of the candidates but the last, which training may replace.
If the file also has `last` [T, H], the target's last states, the answer of a dflash2 head has
the library's `loss` (KL and the selector's, eager, γ = 4) of the blocks that end in their document,
and its `gradient.NAME` of each tensor.

For other heads the features file holds T rows, documents one after another::

    hidden_states      [T, n * H] float, target boundaries concatenated in the order of
                       eagle_aux_hidden_state_layer_ids, before any norm
    input_ids          [T] int64, target vocabulary
    document_ids       [T] int64: 0, 0, ..., 1, 1, ...
    anchor_pos, depth  [M] int64, peagle only: the rows to compute, which replace the library's
                       random ones; all T' rows of depth 0 must be among them

The library's forward takes these inputs:

* Row j is the pair (x_{p+1}, h_p): the feature of token p with the id of the next token; its
  step-0 output predicts x_{p+2}. Every document goes through the library's ``shift_batch``, which
  drops the first id and the last feature, so T' = T - number of documents rows remain.
* ``shift_batch`` drops position 0, so the pair of p has position p + 1. vLLM uses p; with plain
  RoPE only differences matter. Step k adds k. P-EAGLE ignores position_ids: it uses row numbers,
  which start at 0 and do not restart at documents, plus the depth.
* There is one packed row. document_ids keep attention inside a document; -1 marks padding. With
  flex attention eagle3's block masks need a multiple of 128 rows; padding is cut off the answer.
* eagle3's teacher forcing: step k feeds row j with the id of row j + k, shifted over the whole
  packed row with zeros at its end. The last k rows of every document see another document's ids or
  zeros at step k, so comparisons must leave them out. Attention at step k sees step 0 of earlier
  rows and steps 1..k of its own row.

The answer has S steps (1 for peagle), R rows (T' for eagle3, M for peagle) and Vd draft ids::

    fc            [R, H]      output of fc: the features after input_norm/fc_norm and projection
    prenorm       [S, R, H]   the last layer's output, before ``norm``
    hidden        [S, R, H]   after ``norm``: the input of lm_head
    logits        [S, R, Vd]
    draft_tokens  [S, R]      argmax of the logits, draft vocabulary
    anchor_pos, depth  [R]    peagle only: row anchor_pos + depth of the T' rows is computed
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_LOSS = "kl_div"
# What P-EAGLE's sampling of rows would use; the rows are given instead.
_SAMPLING = {"down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2, "max_anchors": None}
_ATTENTION = {"flex": "simple_flex_attention", "sdpa": "sdpa"}
# Entries of the head's state_dict that are copied from the target, never saved.
_NEVER_SAVED = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})
_FLEX_MULTIPLE = 128

Tensors = dict[str, "torch.Tensor"]


def load_head(request: dict[str, Any]) -> tuple[Any, dict[str, list[str]]]:
    """Load the head with the library's from_pretrained; return it and its tensors' faults.

    The library does not report every missing tensor (embed_tokens, d2t, t2d, input_norm), so the
    checkpoint is compared with the loaded head.
    """
    import torch
    from safetensors.torch import load_file
    from speculators import SpeculatorModel, SpeculatorModelConfig

    draft = Path(request["draft"])
    config = SpeculatorModelConfig.from_pretrained(str(draft))
    config.speculators_config.verifier.name_or_path = str(request["target"])
    layers = config.transformer_layer_config
    layers._attn_implementation = _ATTENTION[request["attention"]]
    if request["causal"]:
        layers.layer_types = ["sliding_attention"] * layers.num_hidden_layers
        layers.sliding_window, config.sliding_window_non_causal = 1 << 20, False
    model = SpeculatorModel.from_pretrained(str(draft), config=config, dtype=torch.float32).eval()
    compute_in_float64(model)

    saved = {
        name: list(tensor.shape)
        for path in draft.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    from_target = _NEVER_SAVED
    if hasattr(model, "block_size"):  # DSpark and DFlash also take these tables from the target
        from_target |= set(model._keys_to_ignore_on_save)
    state = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    return model, {
        "missing": sorted(set(state) - set(saved) - from_target),
        "unexpected": sorted(set(saved) - set(state)),
        "mismatched": sorted(
            f"{name}: checkpoint {saved[name]}, head {state[name]}"
            for name in set(state) & set(saved)
            if saved[name] != state[name]
        ),
    }


def compute_in_float64(model: Any) -> None:
    """Make the head compute in float64, its norms too, which round to float32 by themselves.

    Float32 would say little: random heads amplify differences of its last bit 170 times.

    Raises:
        RuntimeError: a norm of the library is not the root-mean-square norm of torch.
    """
    import torch
    from torch.nn import functional

    model.double()
    for name, norm in model.named_modules():
        if not type(norm).__name__.endswith("RMSNorm"):
            continue
        weight, eps = norm.weight, norm.variance_epsilon

        def forward(x: Any, weight: Any = weight, eps: float = eps) -> Any:
            return functional.rms_norm(x, weight.shape, weight, eps)

        values = torch.linspace(-3, 2, len(weight), dtype=torch.float64)
        difference = float((norm(values) - forward(values)).abs().max())
        if not difference < 1e-5:
            raise RuntimeError(f"{name} is not torch's rms_norm: {difference:.3g} apart")
        norm.forward = forward


def make_rows(features: Tensors, hidden_size: int) -> Tensors:
    """Return the shifted rows with positions and documents, without a batch dimension."""
    import torch
    from speculators.models.eagle3.data import shift_batch

    documents = features["document_ids"].long()
    shifted = []
    for document in documents.unique():
        part = documents == document
        count = int(part.sum())
        rows = shift_batch(
            {
                "hidden_states": features["hidden_states"][part].double(),
                "input_ids": features["input_ids"][part].long(),
                "position_ids": torch.arange(count),
                "loss_mask": torch.ones(count, dtype=torch.bool),
                # Only the loss depends on these states, and it is not used.
                "verifier_last_hidden_states": torch.zeros(count, hidden_size, dtype=torch.float64),
                "lengths": torch.tensor([count]),
            }
        )
        rows.pop("lengths")
        shifted.append({**rows, "document_ids": documents[part][1:]})
    return {name: torch.cat([rows[name] for rows in shifted]) for name in shifted[0]}


def pad_rows(rows: Tensors, multiple: int) -> Tensors:
    """Return rows padded at the end to a multiple; padding has document -1."""
    import torch

    extra = -rows["input_ids"].shape[0] % multiple
    padded: Tensors = {}
    for name, tensor in rows.items():
        filler = tensor.new_full((extra, *tensor.shape[1:]), -1 if name == "document_ids" else 0)
        padded[name] = torch.cat([tensor, filler])
    return padded


def run(request: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Run a request; return the answer's tensors and the report."""
    import torch
    from safetensors.torch import load_file
    from speculators.losses import resolve_loss_config

    model, tensor_faults = load_head(request)
    features = load_file(request["features"])
    report = {
        "engine_version": importlib.metadata.version("speculators"),
        "torch_version": torch.__version__,
        "tensors": tensor_faults,
    }
    if "anchors" in features:
        return run_blocks(model, features), report
    rows = make_rows(features, model.hidden_size)
    num_rows = rows["input_ids"].shape[0]
    parallel = type(model).__name__ == "PEagleDraftModel"
    pad_to = _FLEX_MULTIPLE if request["attention"] == "flex" and not parallel else 1
    inputs = {name: tensor.unsqueeze(0) for name, tensor in pad_rows(rows, pad_to).items()}
    recorded: dict[str, list[torch.Tensor]] = {"fc": [], "prenorm": [], "hidden": [], "logits": []}

    def record_lm_head(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        recorded["hidden"].append(inputs[0][0].clone())
        recorded["logits"].append(output[0].clone())

    hooks = [
        model.lm_head.register_forward_hook(record_lm_head),
        model.norm.register_forward_hook(
            lambda _module, inputs, _output: recorded["prenorm"].append(inputs[0][0].clone())
        ),
        model.fc.register_forward_hook(
            lambda _module, _inputs, output: recorded["fc"].append(output[0].clone())
        ),
    ]
    options: dict[str, Any] = {"loss_config": resolve_loss_config(_LOSS, "eager")}
    elements: Tensors = {}
    if parallel:
        options |= {"num_depths": request["steps"], **_SAMPLING}
        elements = {name: features[name].long() for name in ("anchor_pos", "depth")}
        num_rows = elements["depth"].shape[0]
        import speculators.models.peagle.core as peagle_core

        original = peagle_core.generate_cod_sample_indices
        peagle_core.generate_cod_sample_indices = lambda **_: tuple(elements.values())
    else:
        options |= {"ttt_steps": request["steps"], "ttt_step_loss_decay": 1.0}
        inputs.pop("verifier_last_hidden_states")
    try:
        with torch.no_grad():
            model(**inputs, **options)
    finally:
        for hook in hooks:
            hook.remove()
        if parallel:
            peagle_core.generate_cod_sample_indices = original

    answer: Tensors = {"fc": recorded["fc"][0][:num_rows], **elements}
    for name in ("prenorm", "hidden", "logits"):
        answer[name] = torch.stack([step[:num_rows] for step in recorded[name]])
    answer["draft_tokens"] = answer["logits"].argmax(-1)
    return {name: tensor.contiguous() for name, tensor in answer.items()}, report


def run_blocks(model: Any, features: Tensors) -> Tensors:
    """Run the library's forward on given anchors; return the answer's tensors."""
    import speculators.models.dflash.core as backbone
    import torch
    from speculators.losses import resolve_loss_config

    module = __import__(type(model).__module__, fromlist=["compute_metrics"])
    anchors, recorded = features["anchors"].long(), {}

    def metrics(*rest: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
        logits, *rest = rest[:1] + rest[2:] or [named["unary_logits"]]
        recorded["logits"] = logits[0]
        if "candidate_logits" in named:
            recorded["scores"] = named["candidate_logits"][0, :, :-1]
        if type(model).__name__ == "DSparkDraftModel":
            recorded["confidence"] = rest[0][0]
        return logits.sum(), {}

    def select(*_: Any) -> tuple[Any, Any]:
        return anchors, torch.ones_like(anchors, dtype=torch.bool)

    originals = backbone.select_anchors, module.compute_metrics
    backbone.select_anchors, module.compute_metrics = select, metrics
    hook = model.norm.register_forward_hook(
        lambda _module, _inputs, output: recorded.update(hidden=output[0].clone())
    )
    length, gradients = len(features["input_ids"]), {}
    blank = torch.zeros(length, model.fc.weight.shape[0])
    inputs = {
        "hidden_states": features["hidden_states"].double()[None],
        "input_ids": features["input_ids"].long()[None],
        "loss_mask": torch.ones(1, length, dtype=torch.int64),
        "verifier_last_hidden_states": features.get("last", blank).double()[None],
        "document_ids": features["document_ids"].long()[None],
        "max_anchors": len(anchors),
    }
    try:
        with torch.no_grad():
            model(**inputs)
        hook.remove()
        module.compute_metrics = originals[1]
        if "last" in features:
            kinds = {n: resolve_loss_config(n, "eager") for n in (_LOSS, "tv")}
            options = {"loss_config": kinds[_LOSS], "tv_loss_fn": kinds["tv"]["tv"][0]}
            documents = features["document_ids"]
            ends = documents[anchors + model.block_size - 1] == documents[anchors - 1]
            anchors, inputs["max_anchors"] = anchors[ends], int(ends.sum())
            loss = model(**inputs, **options, gamma=4.0)[1]
            loss.backward()
            gradients["loss"] = loss.detach()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradients[f"gradient.{name}"] = parameter.grad.contiguous()
    finally:
        backbone.select_anchors, module.compute_metrics = originals
    return gradients | {
        name: values.unflatten(0, (-1, model.block_size)).contiguous()
        for name, values in recorded.items()
    }


def main() -> None:
    """Run the command line: pairs of request and answer paths."""
    from safetensors.torch import save_file

    paths = [Path(argument) for argument in sys.argv[1:]]
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for request, answer in zip(paths[::2], paths[1::2], strict=True):
        tensors, report = run(json.loads(request.read_text()))
        save_file(tensors, str(answer))
        answer.with_suffix(".json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
