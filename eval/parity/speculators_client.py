"""Runs a draft head through the real speculators library and writes what it computed.

This program runs inside the environment that ``setup_speculators.sh`` makes, so it must not import
draftlab, and draftlab must not import it::

    .envs/speculators/bin/python eval/parity/speculators_client.py request.json answer.safetensors

More such pairs may follow. It writes ``answer.safetensors`` and, beside it, ``answer.json``
(versions, what loading reported, metrics). The head is loaded with the library's own
``from_pretrained`` in float32, and its own ``forward`` (teacher-forced training steps, the only
forward the library has) runs once on the rows given. Values are taken with hooks, because that
forward returns neither hidden states nor logits.

Request (a JSON object; unknown keys are refused)::

    draft        folder of the head in speculators format, eagle3 or peagle (required)
    target       folder of the target model (required: the library loads its embeddings, lm_head and
                 final norm; the path in the head's own config is not used)
    features     safetensors file, described below (required)
    alignment    "raw" (default) or "pairs", described below
    ttt_steps    eagle3: steps to run (default 1)
    attention    "flex" (default, what the library trains with), "eager" or "sdpa"
    loss_fn      "kl_div" (default), "ce", "tv" or another name the library knows; needs
                 verifier_last_hidden_states
    step_decay   eagle3: weight of step k in the loss is step_decay ** k (default 1.0)
    seed         peagle: seed of the sampled rows (default 0)
    num_depths, down_sample_ratio, down_sample_ratio_min, max_anchors
                 peagle: passed on (defaults 8, 0.7, 0.2, null)

Features file, T rows, documents one after another::

    hidden_states                [T, n * H] float, target boundaries concatenated in the order of
                                 eagle_aux_hidden_state_layer_ids, before any norm
    input_ids                    [T] int64, target vocabulary
    document_ids                 [T] int64, optional: 0, 0, ..., 1, 1, ...; default one document
    position_ids                 [T] int64, optional; the default follows from the alignment
    loss_mask                    [T] bool, optional; default all true
    verifier_last_hidden_states  [T, H] float, optional for eagle3: output of the target's last
                                 layer *before* its final norm (the library applies the norm)
    anchor_pos, depth            [M] int64, optional, peagle only: rows to compute, in place of the
                                 library's random ones; the T' depth-0 rows must be all there

Input contract of the library, and what this program does about it:

* Row j of the forward is the pair (x_{p+1}, h_p): the feature of token p with the *next* token's
  id; its step-0 output predicts x_{p+2}. With ``alignment: raw`` the file holds x_p and h_p of the
  same p, and every document goes through the library's own ``shift_batch`` (first id, last feature
  and first loss_mask entry dropped), which makes T' = T - number of documents rows. With ``pairs``
  the file holds rows that are aligned already, with loss_mask and verifier_last_hidden_states
  belonging to x_{p+1}; T' = T.
* Positions: ``shift_batch`` drops position 0, so the pair of p has position p + 1 (1, 2, ... in
  each document); that is the default for both alignments. vLLM uses p; with plain RoPE only
  differences matter. Step k adds k. P-EAGLE ignores position_ids: it uses row numbers, 0-based and
  not restarted at document borders, plus the depth.
* One packed batch row only (batch size 1). document_ids keep attention inside a document; -1 marks
  padding. With flex attention eagle3's block masks need a multiple of 128 rows: padding (ids 0,
  features 0, document -1, loss_mask false) is added here and cut off the answer.
* Teacher forcing of eagle3: step k feeds row j with the id of row j + k (x_{p+1+k}), shifted over
  the whole packed row with zeros at its end: the last k rows of every document see another
  document's ids or zeros at step k, so leave those out of comparisons. Attention at step k sees
  step 0 of earlier rows (causal) and steps 1..k of its own row.

Answer, S steps (1 for peagle), R rows (T' for eagle3, sampled rows for peagle), Vd draft ids::

    fc            [R, H]      output of fc: the features after input_norm/fc_norm and projection
    prenorm       [S, R, H]   last layer's output, before ``norm``
    hidden        [S, R, H]   after ``norm``: what lm_head gets
    logits        [S, R, Vd]
    draft_tokens  [S, R]      argmax of the logits, draft vocabulary
    input_ids, position_ids, document_ids  [T']  the rows as they were fed at step 0
    anchor_pos, depth  [R]    peagle only: row anchor_pos + depth of the T' rows is computed
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
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

_DEFAULTS: dict[str, Any] = {
    "alignment": "raw",
    "ttt_steps": 1,
    "attention": "flex",
    "loss_fn": "kl_div",
    "step_decay": 1.0,
    "seed": 0,
    "num_depths": 8,
    "down_sample_ratio": 0.7,
    "down_sample_ratio_min": 0.2,
    "max_anchors": None,
}
_REQUIRED = ("draft", "target", "features")
_ATTENTION = {"flex": "simple_flex_attention", "eager": "eager", "sdpa": "sdpa"}
# Of the head's state_dict, copied from the target and never part of a checkpoint.
_NEVER_SAVED = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})
_FLEX_MULTIPLE = 128

Tensors = dict[str, "torch.Tensor"]


class RequestError(ValueError):
    """The request cannot be run; the message says what to change."""


def read_request(path: Path) -> dict[str, Any]:
    """Reads and checks a request, defaults filled in."""
    request = json.loads(path.read_text())
    if not isinstance(request, dict):
        raise RequestError(f"{path}: expected a JSON object, found {type(request).__name__}")
    unknown = sorted(set(request) - set(_DEFAULTS) - set(_REQUIRED))
    if unknown:
        known = ", ".join([*_REQUIRED, *_DEFAULTS])
        raise RequestError(f"{path}: unknown keys {unknown}; known keys are {known}")
    missing = [key for key in _REQUIRED if not request.get(key)]
    if missing:
        raise RequestError(f"{path}: {missing} missing; a request needs {_REQUIRED}")
    request = {**_DEFAULTS, **request}
    for key in ("target", "draft"):
        if not (Path(request[key]) / "config.json").is_file():
            raise RequestError(f"{key}: expected a folder with a config.json at {request[key]}")
    if not Path(request["features"]).is_file():
        raise RequestError(f"features: expected a safetensors file at {request['features']}")
    if request["alignment"] not in ("raw", "pairs"):
        raise RequestError(f"alignment: expected raw or pairs, found {request['alignment']!r}")
    if request["attention"] not in _ATTENTION:
        raise RequestError(
            f"attention: expected one of {sorted(_ATTENTION)}, found {request['attention']!r}"
        )
    if request["ttt_steps"] < 1:
        raise RequestError(f"ttt_steps: expected at least 1, found {request['ttt_steps']}")
    return request


def checkpoint_shapes(folder: Path) -> dict[str, list[int]]:
    """Name and shape of every tensor in the folder's safetensors files."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                shapes[name] = list(tensors.get_slice(name).get_shape())
    return shapes


def load_head(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Loads the head with the library's from_pretrained; returns it and a report."""
    import torch
    import transformers.modeling_utils as modeling_utils
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from transformers import PretrainedConfig

    draft = Path(request["draft"])
    config = SpeculatorModelConfig.from_pretrained(str(draft))
    config.speculators_config.verifier.name_or_path = str(request["target"])
    config.transformer_layer_config._attn_implementation = _ATTENTION[request["attention"]]

    seen: dict[str, Any] = {}
    original = modeling_utils.log_state_dict_report

    def record(*args: Any, **kwargs: Any) -> Any:
        info = kwargs["loading_info"]
        seen["missing"] = sorted(info.missing_keys)
        seen["unexpected"] = sorted(info.unexpected_keys)
        seen["mismatched"] = sorted(str(key) for key in info.mismatched_keys)
        seen["errors"] = [str(message) for message in info.error_msgs]
        return original(*args, **kwargs)

    # from_pretrained(output_loading_info=True) returns a pair, which the library cannot handle.
    modeling_utils.log_state_dict_report = record
    try:
        model = SpeculatorModel.from_pretrained(str(draft), config=config, dtype=torch.float32)
    finally:
        modeling_utils.log_state_dict_report = original
    model.eval()

    saved = checkpoint_shapes(draft)
    state = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    written = json.loads((draft / "config.json").read_text())
    # Generic transformers fields (id2label, return_dict, ...) are noise in a report about a head.
    generic = set(PretrainedConfig().to_dict()) | {"transformer_layer_config"}
    fields = set(type(config).model_fields)
    report = {
        "model_class": type(model).__name__,
        # What the library itself said while loading. It keeps quiet about some missing tensors
        # (embed_tokens, d2t, t2d, input_norm), so the comparison below is the one to trust.
        "loader": seen,
        "tensors": {
            "missing": sorted(set(state) - set(saved) - _NEVER_SAVED),
            "unexpected": sorted(set(saved) - set(state)),
            "mismatched": sorted(
                f"{name}: checkpoint {saved[name]}, head {state[name]}"
                for name in set(state) & set(saved)
                if saved[name] != state[name]
            ),
        },
        "config": {
            # Fields the library knows and the file leaves out, with the values it then used.
            "defaulted": json.loads(
                json.dumps(
                    {
                        name: getattr(config, name)
                        for name in sorted(fields - set(written) - generic)
                    },
                    default=str,
                )
            ),
            # Keys in the file that no field of the library's class reads.
            "undeclared": sorted(set(written) - fields - generic),
        },
    }
    return model, report


def document_slices(document_ids: torch.Tensor) -> list[slice]:
    """Start and end of every run of equal document ids."""
    import torch

    lengths = torch.unique_consecutive(document_ids, return_counts=True)[1].tolist()
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def make_rows(features: Tensors, alignment: str, hidden_size: int) -> Tensors:
    """The rows to feed: aligned pairs, positions and documents filled in, no batch dimension."""
    import torch
    from speculators.models.eagle3.data import shift_batch

    for name in ("hidden_states", "input_ids"):
        if name not in features:
            raise RequestError(f"features: expected a tensor {name}, found {sorted(features)}")
    length = features["input_ids"].shape[0]
    for name, tensor in features.items():
        if name not in ("anchor_pos", "depth") and tensor.shape[0] != length:
            raise RequestError(
                f"features: {name} has {tensor.shape[0]} rows, input_ids has {length}"
            )
    ids = features["input_ids"].long()
    documents = features.get("document_ids", torch.zeros_like(ids)).long()
    slices = document_slices(documents)
    first_position = 0 if alignment == "raw" else 1
    positions = features.get("position_ids")
    if positions is None:
        positions = torch.cat(
            [first_position + torch.arange(part.stop - part.start) for part in slices]
        )
    rows: Tensors = {
        "hidden_states": features["hidden_states"].float(),
        "input_ids": ids,
        "document_ids": documents,
        "position_ids": positions.long(),
        "loss_mask": features.get("loss_mask", torch.ones(length)).bool(),
        # Only the loss depends on it; zeros keep one code path (the caller drops the loss then).
        "verifier_last_hidden_states": features.get(
            "verifier_last_hidden_states", torch.zeros(length, hidden_size)
        ).float(),
    }
    if alignment == "pairs":
        return rows
    pieces = []
    for part in slices:
        piece = {name: tensor[part] for name, tensor in rows.items()}
        kept_documents = piece.pop("document_ids")[1:]
        piece["lengths"] = torch.tensor([part.stop - part.start])
        piece = shift_batch(piece)
        piece.pop("lengths")
        pieces.append({**piece, "document_ids": kept_documents})
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def pad_rows(rows: Tensors, multiple: int) -> Tensors:
    """Rows padded at the end to a multiple, padding marked by document -1."""
    import torch

    extra = -rows["input_ids"].shape[0] % multiple
    padded: Tensors = {}
    for name, tensor in rows.items():
        filler = tensor.new_full((extra, *tensor.shape[1:]), -1 if name == "document_ids" else 0)
        padded[name] = torch.cat([tensor, filler])
    return padded


def run(request: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Runs a checked request; returns the answer's tensors and the report."""
    start = time.perf_counter()
    import torch
    import transformers
    from safetensors.torch import load_file
    from speculators.losses import resolve_loss_config

    seconds_import = time.perf_counter() - start
    start = time.perf_counter()
    model, report = load_head(request)
    seconds_load = time.perf_counter() - start

    features = load_file(request["features"])
    rows = make_rows(features, request["alignment"], model.hidden_size)
    width = model.fc.in_features
    if rows["hidden_states"].shape[1] != width:
        raise RequestError(
            f"features: hidden_states has {rows['hidden_states'].shape[1]} columns, the head's fc "
            f"expects {width}"
        )
    count = rows["input_ids"].shape[0]
    parallel = report["model_class"] == "PEagleDraftModel"
    pad_to = _FLEX_MULTIPLE if request["attention"] == "flex" and not parallel else 1
    fed = {name: tensor.unsqueeze(0) for name, tensor in pad_rows(rows, pad_to).items()}
    with_loss = "verifier_last_hidden_states" in features

    taken: dict[str, list[torch.Tensor]] = {"fc": [], "prenorm": [], "hidden": [], "logits": []}

    def take_head(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        taken["hidden"].append(inputs[0][0].clone())
        taken["logits"].append(output[0].clone())

    hooks = [
        model.lm_head.register_forward_hook(take_head),
        model.norm.register_forward_hook(
            lambda _module, inputs, _output: taken["prenorm"].append(inputs[0][0].clone())
        ),
        model.fc.register_forward_hook(
            lambda _module, _inputs, output: taken["fc"].append(output[0].clone())
        ),
    ]
    options: dict[str, Any] = {"loss_config": resolve_loss_config(request["loss_fn"], "eager")}
    answer: Tensors = {}
    sampled: dict[str, torch.Tensor] = {}
    if parallel:
        for name in ("num_depths", "down_sample_ratio", "down_sample_ratio_min", "max_anchors"):
            options[name] = request[name]
        import speculators.models.peagle.core as peagle_core

        original = peagle_core.generate_cod_sample_indices

        def choose(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if "anchor_pos" in features:
                chosen = features["anchor_pos"].long(), features["depth"].long()
            else:
                torch.manual_seed(request["seed"])
                chosen = original(**kwargs)
            sampled["anchor_pos"], sampled["depth"] = chosen
            return chosen

        peagle_core.generate_cod_sample_indices = choose
    else:
        options["ttt_steps"] = request["ttt_steps"]
        options["ttt_step_loss_decay"] = request["step_decay"]
        if not with_loss:
            fed.pop("verifier_last_hidden_states")
    start = time.perf_counter()
    try:
        with torch.no_grad():
            result = model(**fed, **options)
    finally:
        for hook in hooks:
            hook.remove()
        if parallel:
            peagle_core.generate_cod_sample_indices = original
    seconds = time.perf_counter() - start

    keep = sampled["depth"].shape[0] if parallel else count
    answer["fc"] = taken["fc"][0][:keep]
    for name in ("prenorm", "hidden", "logits"):
        answer[name] = torch.stack([step[:keep] for step in taken[name]])
    answer["draft_tokens"] = answer["logits"].argmax(-1)
    for name in ("input_ids", "position_ids", "document_ids"):
        answer[name] = rows[name]
    answer.update(sampled)

    metrics = None
    if with_loss:
        _tokens, loss, raw_metrics = result
        metrics = {"loss": float(loss), **{key: float(raw_metrics[key]) for key in raw_metrics}}
    report = {
        "engine": "speculators",
        "engine_version": importlib.metadata.version("speculators"),
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        **report,
        "rows": count,
        "rows_padded": int(fed["input_ids"].shape[1]),
        "attention": request["attention"],
        "metrics": metrics,
        "seconds": round(seconds, 4),
        "seconds_import": round(seconds_import, 3),
        "seconds_load": round(seconds_load, 3),
    }
    return {name: tensor.contiguous() for name, tensor in answer.items()}, report


def main(arguments: list[str] | None = None) -> int:
    """Command line: pairs of request and answer paths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        help="JSON file with a request, safetensors file to write (and a .json beside), …",
    )
    paths = parser.parse_args(arguments).paths
    if len(paths) % 2:
        parser.error("expected an answer's path behind every request's")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        requests = [read_request(path) for path in paths[::2]]
        for request, answer in zip(requests, paths[1::2], strict=True):
            save_answer(*run(request), answer)
    except (RequestError, json.JSONDecodeError) as error:
        print(f"speculators_client: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("safetensors", "speculators", "torch", "transformers"):
            raise
        print(
            f"speculators_client: {error}; run this with the interpreter of the environment that "
            "eval/parity/setup_speculators.sh makes",
            file=sys.stderr,
        )
        return 3
    return 0


def save_answer(tensors: Tensors, report: dict[str, Any], answer: Path) -> None:
    """Writes an answer's two files."""
    from safetensors.torch import save_file

    answer.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(answer))
    answer.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
