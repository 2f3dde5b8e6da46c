"""The part of `speculators_client.py` for DSpark and DFlash heads; it must not import draftlab.

The features file has, in place of shifted rows, all T positions of one packed row and `anchors`
[A] int64, the positions p of the blocks' first tokens. They replace the library's random ones, and
p + block_size must be at most T: the library reads the tokens of whole blocks. The answer has, for
γ slots,

    hidden      [A, γ, H]   after ``norm``: the input of lm_head
    logits      [A, γ, Vd]  with the Markov bias by the token before each draft
    confidence  [A, γ]      DSpark only: logits of acceptance
"""

from __future__ import annotations

from typing import Any


def run_blocks(model: Any, features: dict[str, Any]) -> dict[str, Any]:
    """Run the library's forward on given anchors; return the answer's tensors."""
    import speculators.models.dflash.core as backbone
    import torch

    module = __import__(type(model).__module__, fromlist=["compute_metrics"])
    anchors, recorded = features["anchors"].long(), {}

    def metrics(logits: Any, targets: Any, *rest: Any, **_: Any) -> tuple[Any, dict[str, Any]]:
        recorded["logits"] = logits[0]
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
    length = len(features["input_ids"])
    try:
        with torch.no_grad():
            model(
                hidden_states=features["hidden_states"].double()[None],
                input_ids=features["input_ids"].long()[None],
                loss_mask=torch.ones(1, length, dtype=torch.int64),
                verifier_last_hidden_states=torch.zeros(
                    1, length, model.fc.weight.shape[0], dtype=torch.float64
                ),
                document_ids=features["document_ids"].long()[None],
                max_anchors=len(anchors),
            )
    finally:
        hook.remove()
        backbone.select_anchors, module.compute_metrics = originals
    return {
        name: values.unflatten(0, (len(anchors), model.block_size)).contiguous()
        for name, values in recorded.items()
    }
