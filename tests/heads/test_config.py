"""Configs that contradict themselves are refused."""

from __future__ import annotations

import pytest

from tests.helpers.head_toys import EAGLE, LLAMA4_ATTENTION, LLAMA4_HEAD, PEAGLE, make_config

INCOMPLETE = {name: value for name, value in LLAMA4_ATTENTION.items() if name != "attn_scale"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": 3}, "expected head schema 1, found 3"),
        ({"boundaries": (2, 2, 3)}, "sorted and unique"),
        ({"boundaries": (0, 2, 6)}, r"0\.\.5"),
        ({"boundaries": ()}, "boundaries"),
        ({"boundary_meaning": "output-of-layer"}, "boundary_meaning"),
        ({"draft_vocab_size": 51}, "exceeds vocab_size"),
        ({"num_key_value_heads": 4}, "multiple"),
        ({"norm_before_residual": None}, "norm_before_residual"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"mask_token_id": 7}, "EAGLE3 heads have no mask_token_id, found 7"),
        ({"llama4": LLAMA4_ATTENTION}, "heads have no llama4"),
        (PEAGLE | {"norm_output": True}, "feeds"),
        (PEAGLE | {"mask_token_id": 50}, "mask_token_id 50 lies outside the 50 rows"),
        (PEAGLE | {"mask_token_id": -1}, "mask_token_id -1 lies outside the 50 rows"),
        (PEAGLE | {"mask_token_id": None}, "mask_token_id"),
        (PEAGLE | {"embeddings": "target"}, "embeddings"),
        (PEAGLE | {"num_layers": 5}, "num_layers"),
        (PEAGLE | {"num_layers": 0}, "num_layers"),
        (EAGLE | {"boundaries": (4,)}, r"last state, boundaries \[5\], found \[4\]"),
        (EAGLE | {"target_hidden_size": 20}, r"as wide as its target \(20\).* found .* 24"),
        (EAGLE | {"draft_vocab_size": 21}, "all 50 tokens, found draft_vocab_size 21"),
        (EAGLE | {"norm_output": True, "qk_norm": True}, "EAGLE heads have no norm_output"),
        (EAGLE | {"mask_token_id": 7}, "EAGLE heads have no mask_token_id, found 7"),
        (EAGLE | {"llama4": LLAMA4_ATTENTION}, "heads have no llama4"),
        (LLAMA4_HEAD | {"llama4": None}, "llama4"),
        (LLAMA4_HEAD | {"num_layers": 3}, "one number for each of the head's 3 layers"),
        (LLAMA4_HEAD | {"qk_norm": True}, "heads have no qk_norm"),
        (
            LLAMA4_HEAD | {"llama4": LLAMA4_ATTENTION | {"no_rope_layers": (2, 1)}},
            "no_rope_layers",
        ),
        (LLAMA4_HEAD | {"llama4": INCOMPLETE}, "attn_scale"),
    ],
)
def test_contradictions_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**fields)


def test_the_config_knows_its_feature_width() -> None:
    assert make_config().feature_size == 4 * 20
