"""EAGLE heads and every option of EAGLE3's against `PlainChain`."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.dense_attention import dense_pass
from tests.helpers.head_toys import EAGLE, make_head
from tests.helpers.plain_chain import PlainChain

KINDS: dict[str, dict] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "qk_norm": {"qk_norm": True},
    "one boundary": {"boundaries": (2,)},
    "all": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "qk_norm": True},
    "eagle": EAGLE,
    "eagle of 2 layers": EAGLE | {"num_layers": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_fed_back_steps_equal_a_plain_chain(kind: str) -> None:
    head, size, drafts = make_head(**KINDS[kind]), 6, 3
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (size + drafts,), generator=generator)
    features = torch.randn(size, head.config.feature_size, generator=generator, dtype=torch.float64)
    plain = PlainChain({n: t.double() for n, t in head.state_dict().items()}, head.config)
    caches, expected, logits = plain.empty, [], []
    for t in range(size + drafts):
        hidden = plain.project_features(features[t]) if t < size else expected[-1]
        out, row, caches = plain.step(int(tokens[t]), hidden, t, caches)
        expected.append(out)
        logits.append(row)
    hidden = head.project_features(features)
    for t in range(size, size + drafts + 1):
        out = dense_pass(head, tokens[:t], hidden)
        # float32 angles are the only rounding: everything else runs in float64 here.
        torch.testing.assert_close(out, torch.stack(expected[:t]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.logits(out), torch.stack(logits[:t]), rtol=1e-4, atol=2e-4)
        hidden = torch.cat([hidden, out[-1:]])
    assert torch.stack(logits).std() > 1
