"""A family that is defined and registered here goes through every stage of the package.

`docs/guide/add_a_family.md` explains this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftlab.engine.drafter import ChainDrafter
from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.export.layout import Layout
from draftlab.heads import family as registry
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import Family, families, get_family, register
from draftlab.heads.folder import load_config, load_head
from draftlab.heads.head import EMBEDDINGS, DecoderLayer, DraftHead
from draftlab.heads.layers import RMSNorm
from draftlab.train.initial_weights import fingerprint, start_from
from draftlab.train.objectives.objective import Objective
from draftlab.train.objectives.ttt import ttt_weights, unroll
from tests.helpers.head_toys import make_head
from tests.helpers.small_run import draftlab, new_workshop, ran


class SumConfig(HeadConfig):
    """draftlab.json of a sum head: what all heads have, and one field of its own."""

    embedding_scale: float = 1.0


class SumHead(DraftHead):
    """A chain whose layer reads norm(scale · embedding + hidden state), one hidden size wide."""

    config: SumConfig

    def __init__(self, config: SumConfig) -> None:
        layers = [DecoderLayer(config) for _ in range(config.num_layers)]
        super().__init__(config, layers, fc_width=config.feature_size)
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def layer_inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        total = self.input_norm(self.config.embedding_scale * embedding + hidden)
        return self.layer.input_layernorm(total), hidden


class SumFamily(Family):
    """Everything that the package needs to know about sum heads."""

    name = "sum"
    title = "sum"
    description = "sum draft head (a chain that adds the embedding to the hidden state)"
    max_layers = 2

    def config_class(self) -> type[HeadConfig]:
        return SumConfig

    def new_head(self, config: HeadConfig) -> DraftHead:
        return SumHead(config)

    def objective(self) -> Objective:
        return Objective(unroll, ttt_weights)

    def new_drafter(self, head: DraftHead, k: int, **options: Any) -> ChainDrafter:
        return ChainDrafter(head, k, **options)

    def config_fields(self, settings: Any, target: Any) -> dict[str, Any]:
        return {"embedding_scale": float(target.hidden_size) ** 0.5}

    def layouts(self) -> dict[str, Layout | str]:
        return {"vllm": "vLLM has no class that adds embeddings to hidden states"}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the family for one test."""
    families()  # those of the package come first
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    register(SumFamily())


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A recipe that is trained with the new family, without an export."""
    folder = new_workshop(tmp_path_factory.mktemp("sum"))
    recipe = folder / "small.yaml"
    text = recipe.read_text().replace("steps: 6", "steps: 40")
    recipe.write_text(text + "head: {family: sum, num_layers: 2}\nexport: {formats: []}\n")
    return folder


@pytest.fixture
def trained(workshop: Path) -> Path:
    """The workshop with a trained and evaluated head."""
    if not (workshop / "runs/small/eval/report.json").exists():
        for arguments in (["train", "small.yaml"], ["eval"]):
            ran(workshop, *arguments)
    return workshop


def test_it_is_trained_saved_and_loaded(trained: Path) -> None:
    folder = trained / "runs/small/head"
    config = load_config(folder)
    assert (config.family, config.num_layers) == ("sum", 2)
    assert config.options() == {"embedding_scale": 32**0.5}
    assert not (folder / "config.json").exists()  # no server loads it
    shared = {EMBEDDINGS: torch.zeros(config.vocab_size, config.hidden_size)}
    head = load_head(folder, target_tensors=shared, dtype=torch.float32, device="cpu")
    assert isinstance(head, SumHead)
    assert head.family is get_family("sum")
    lines = (trained / "runs/small/train/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"][0] for line in lines if "loss" in json.loads(line)]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_it_is_evaluated_by_real_speculative_decoding(trained: Path) -> None:
    report = Report.read(trained / "runs/small/eval/report.json")
    rows = [row for row in report.rows if row.drafts]
    assert {row.temperature for row in rows} == {0.0, 0.8}
    assert all(row.acceptance_length >= 1 for row in rows)


def test_the_doctor_examines_it(trained: Path) -> None:
    options = ("--target", "toy", "--prompts", "prompts.jsonl", "--k", "2", "--device", "cpu")
    result = draftlab(trained, "doctor", "runs/small/head", *options, "--json")
    diagnosis = json.loads(result.stdout)
    faults = [f["kind"] for f in diagnosis["findings"] if f["severity"] == "fault"]
    assert (faults, diagnosis["state"]) == (["weak"], "weak")  # it is hardly trained
    assert len(diagnosis["readings"]) > 3


def test_a_head_of_it_starts_from_another_whole() -> None:
    donor, head = (
        make_head(seed, family="sum", target_hidden_size=24, num_layers=2) for seed in (0, 1)
    )
    head.set_draft_vocabulary(donor.target_ids(torch.arange(21)))
    head.embed_tokens.weight.copy_(donor.embed_tokens.weight)  # the target's
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name != "embed_tokens.weight")
    line = start_from(head, donor, "head")
    assert "not copied" not in line
    assert fingerprint(head) == fingerprint(donor)


def test_its_export_is_refused_with_a_reason(trained: Path) -> None:
    result = ran(trained, "export", "--to", "vllm", code=2)
    assert "vLLM has no class that adds embeddings" in " ".join(result.output.split())
    result = draftlab(trained, "export", "--to", "sglang")
    assert "no layout has been written for them" in " ".join(result.output.split())


def test_settings_that_it_does_not_have_are_refused(workshop: Path) -> None:
    result = ran(workshop, "train", "small.yaml", "head.qk_norm=true", code=2)
    assert "sum heads have no qk_norm" in " ".join(result.output.split())
    result = draftlab(workshop, "train", "small.yaml", "head.num_layers=3")
    assert "at most 2 layers, found num_layers 3" in " ".join(result.output.split())


def test_names_belong_to_one_family() -> None:
    class Other(SumFamily):
        name = "eagle3"

    with pytest.raises(ValueError, match=r"eagle3.*belongs to Eagle3"):
        register(Other())
    with pytest.raises(UserError, match=r"out of eagle3, .*sum.*found 'medusa'"):
        get_family("medusa")


def test_a_package_whose_family_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "no_such_module:Family", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    monkeypatch.setattr(registry, "_loaded", False)
    for _ in range(2):  # a second look does not pass it by
        with pytest.raises(UserError, match="No module named") as caught:
            families()
        assert "entry point broken = no_such_module:Family" in str(caught.value.where)
