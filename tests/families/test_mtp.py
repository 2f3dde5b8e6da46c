"""MTP layers: forward, start from the checkpoint, training, decoding, the written delta."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, modeling_layers

from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.errors import UserError
from draftlab.export.launch import launch_arguments
from draftlab.export.settings import ExportSettings
from draftlab.export.weight_files import DELTA, INDEX, ONLY_SHARD, WEIGHTS, delta_index
from draftlab.export.write import write_export
from draftlab.heads.family import get_family
from draftlab.heads.folder import empty_head, save_head
from draftlab.heads.mtp import MtpConfig, MtpHead
from draftlab.pipeline import training
from draftlab.plan.preflight import check_before_run, check_head
from draftlab.progress import Monitor
from draftlab.servers.vllm_process import PYTHON_VARIABLE
from draftlab.target_model.model import Target
from draftlab.text.draft_vocabulary import DraftVocabulary
from draftlab.train import initial_weights
from draftlab.train.batch.packing import pack
from draftlab.train.initial_weights import fingerprint, start_from
from draftlab.train.objectives.ttt import unroll
from tests.helpers.decoding import trained_head
from tests.helpers.dense_attention import dense_chain
from tests.helpers.engines import JOINT_VOCAB, joint_p_value
from tests.helpers.greedy_answers import answers, greedy_records, recording_drafter, requests
from tests.helpers.mtp_toys import (
    KINDS,
    PlainMtp,
    layer_tensors,
    mtp_folder,
    mtp_recipe,
    mtp_tensors,
    native_head,
)  # fmt: skip
from tests.helpers.small_run import RECIPE, draftlab, ran, write_prompts
from tests.helpers.zoo import load_on_cpu, zoo_config

TRUST = {"trust_remote_code": True}


EIGHT_BITS = ("deepseek_v3 fp8", "qwen3_5_moe_text fp8", "glm4_moe fp8")


@pytest.fixture(scope="module", params=(*KINDS, *EIGHT_BITS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    kind, place = request.param, tmp_path_factory.mktemp(request.param)
    # With these widths of the random weights greedy answers can be learned.
    width = 0.1 if kind == "mimo" else 0.3
    folder = mtp_folder(place / "target", kind, initializer_range=width)
    return load_on_cpu(folder, **TRUST)


def random_text(length: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 200, (length,), generator=generator)
    return tokens, torch.randn(length, width, generator=generator).double()


def plain_chain(
    plain: PlainMtp, tokens: Tensor, last: Tensor, start: int, num_steps: int = 4
) -> list[Tensor]:
    """Return the outputs of verified pairs up to `start`, then of the layer's own outputs."""
    states, outputs = plain.first_states(last[: start + 1]), []
    while len(outputs) < num_steps:
        outputs.append(plain.outputs(tokens[1 : len(states) + 1], states)[-1])
        states = torch.cat([states, outputs[-1][None]])
    return outputs


@pytest.mark.parametrize("start", [0, 4])
def test_passes_are_those_of_vllms_source(target: Target, start: int) -> None:
    head, plain = native_head(target).double(), PlainMtp(target.folder)
    tokens, last = random_text(10, target.hidden_size)
    for found, expected in zip(
        dense_chain(head, tokens, last, start), plain_chain(plain, tokens, last, start), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(head.logits(found), plain.logits(expected), rtol=1e-5, atol=1e-5)


def test_training_runs_the_passes_of_a_server(target: Target) -> None:
    head, plain = native_head(target), PlainMtp(target.folder)
    records = greedy_records(target, answers(target, 2, seed=5))
    batch, compared = pack([[record] for record in records], 112, 3), 0
    for k, (step, rows) in enumerate(zip(unroll(head, batch), batch.steps, strict=True)):
        where = rows.index.flatten()[rows.valid_rows].tolist()
        numbers = (rows.valid_rows // rows.index.shape[1]).tolist()
        for found, t, number in list(zip(step.output, where, numbers, strict=True))[::6]:
            record = records[number]
            expected = plain_chain(plain, torch.as_tensor(record.tokens), record.last, t, k + 1)[k]
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared > 10


def test_drafts_are_those_of_the_plain_passes_and_change_no_token(target: Target) -> None:
    head, plain, k = native_head(target).eval().requires_grad_(False), PlainMtp(target.folder), 3
    drafter, drafts = recording_drafter(head, k)
    for request in requests(2, seed=7, max_new_tokens=8):
        drafts.clear()
        (plainly,) = Engine(target, batch=1, max_length=64).generate([request])
        (found,) = Engine(target, drafter, batch=1, max_length=64).generate([request])
        assert found.token_ids == plainly.token_ids
        tokens = torch.tensor([*request.prompt_ids, *found.token_ids])
        last, at = target.states(tokens[None]).last[0], len(request.prompt_ids) - 1
        for draft, (_, accepted) in zip(drafts, found.steps, strict=False):
            read = tokens[: at + 2]
            for token in draft:
                output = plain_chain(plain, read, last, at, len(read) - at - 1)[-1]
                assert int(plain.logits(output).argmax()) == token
                read = torch.cat([read, torch.tensor([token])])
            at += accepted + 1


@pytest.mark.parametrize("draft_probs", [True, False])
def test_sampled_decoding_keeps_the_distribution(tmp_path: Path, draft_probs: bool) -> None:
    folder = mtp_folder(tmp_path / "target", "mimo", tokenizer=False, vocab_size=JOINT_VOCAB)
    target = load_on_cpu(folder, **TRUST)
    head = native_head(target, 2).eval().requires_grad_(False)
    assert joint_p_value(target, new_drafter(head, 2, draft_probs=draft_probs)) > 1e-3


def exported(target: Target, head: MtpHead, place: Path, dtype: torch.dtype) -> Path:
    save_head(place / "head", head, dtype)
    return write_export(
        place / "head",
        target.folder,
        place / "export",
        "vllm",
        target_name=str(target.folder),
        settings=ExportSettings(k=3),
    )


def whole_folder(export: Path) -> Path:
    """Run the commands of launch.md that join the export with its target."""
    for line in (export / "launch.md").read_text().split("```")[1].strip().splitlines()[:-1]:
        subprocess.run(line, shell=True, check=True)
    return export.with_name(f"{export.name}-whole")


def test_an_untrained_export_is_the_checkpoint_bit_for_bit(target: Target, tmp_path: Path) -> None:
    out = exported(target, native_head(target), tmp_path, torch.bfloat16)
    written, own = load_file(out / DELTA), layer_tensors(target.folder)
    assert written.keys() == own.keys()
    for name, tensor in own.items():
        is_plain = tensor.itemsize > 1 and "_scale" not in name
        tensor = tensor.bfloat16() if is_plain else tensor
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
    before = {p.name: p.read_bytes() for p in target.folder.iterdir()}
    with pytest.raises(UserError, match=r"expected a folder that joins .*export-whole"):
        launch_arguments(out, "vllm")
    files = json.loads((out / INDEX).read_text())["weight_map"]
    everything = load_file(target.folder / "model.safetensors")
    assert files == {n: DELTA if n in own else ONLY_SHARD for n in everything}
    whole = whole_folder(out)
    assert {p.name: p.read_bytes() for p in target.folder.iterdir()} == before
    assert whole_folder(out) == whole  # the commands can be repeated
    model, arguments = launch_arguments(out, "vllm", k=2)
    assert model == str(whole)
    assert json.loads(arguments[2]) == {"method": "mtp", "num_speculative_tokens": 2}
    with pytest.raises(UserError, match="expected a folder that joins this layer"):
        launch_arguments(out, "vllm", target=str(target.folder))
    changed, kept = {"config.json", INDEX, DELTA}, before.keys() - {WEIGHTS} | {ONLY_SHARD}
    assert {p.name for p in whole.iterdir()} == kept | changed
    assert all((whole / name).is_symlink() for name in kept - changed)
    # Transformers loads the joined folder as before; training goes on from it.
    joined = load_on_cpu(whole, **TRUST)
    tokens = torch.arange(3, 15)[None]
    assert torch.equal(joined.states(tokens).last, target.states(tokens).last)
    again, first = native_head(joined), native_head(target)
    assert all(torch.equal(t, first.tensors()[n]) for n, t in again.tensors().items())


@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="transformers has no MTP")
@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_transformers_reads_the_written_layer(kind: str, tmp_path: Path) -> None:
    target = load_on_cpu(mtp_folder(tmp_path / "target", kind))
    head = native_head(target)
    head.fc.weight.data.mul_(2)
    whole = whole_folder(exported(target, head, tmp_path, torch.float32))
    model = AutoModelForCausalLM.from_pretrained(whole)
    # It knows the layer by its number in published checkpoints.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\..*"]
    read = modeling_layers.MtpModel.from_pretrained(model).layers[0]
    assert torch.equal(read.eh_proj.weight, head.fc.weight)
    assert torch.equal(read.enorm.weight, head.embedding_norm.weight)


def test_training_starts_from_equal_values_again(target: Target) -> None:
    """A resumed training compares their fingerprint with its checkpoint's."""
    config, family = native_head(target).config, get_family("mtp")
    heads = [family.head_of_target(config, target.folder, Monitor()) for _ in range(2)]
    assert fingerprint(heads[0]) == fingerprint(heads[1])
    new = family.new_head(config)
    new.set_draft_vocabulary(torch.arange(config.vocab_size))
    start_from(new, heads[0], "target")
    started, own = new.state_dict(), heads[0].state_dict()
    assert all(torch.equal(started[n], own[n]) for n in own.keys() - new.shared_tensors())


def test_no_value_of_an_untrained_head_is_that_of_its_memory(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(config: MtpConfig) -> MtpHead:
        head = empty_head(config)
        for parameter in head.parameters():
            if parameter.ndim > 1:  # norms and biases are set as they are made
                parameter.data.fill_(float("nan"))
        return head

    monkeypatch.setattr(initial_weights, "empty_head", filled)
    config = native_head(target).config
    vocabulary = DraftVocabulary(torch.arange(config.vocab_size), None)
    head = initial_weights.untrained_head(config, target.parts, vocabulary, seed=0)
    assert [name for name, value in head.state_dict().items() if not value.isfinite().all()] == []


@pytest.mark.slow
def test_fine_tuning_raises_acceptance_and_is_written_back(target: Target, tmp_path: Path) -> None:
    asked = requests(8, seed=100, shortest=3)  # of those that it is trained on

    def acceptance(head: MtpHead) -> float:
        drafter = new_drafter(head.eval().requires_grad_(False), 3, draft_probs=False)
        counters = [
            g.counters for g in Engine(target, drafter, batch=8, max_length=64).generate(asked)
        ]
        return 1 + sum(c.accepted for c in counters) / sum(c.drafts for c in counters)

    before = acceptance(native_head(target))
    tuned = trained_head(target, native_head(target), 30)
    tuned = get_family("mtp").as_exported(tuned, target.folder)
    assert acceptance(tuned) > before + 0.05
    whole = whole_folder(exported(target, tuned, tmp_path, torch.float32))
    again = native_head(load_on_cpu(whole, **TRUST))
    assert all(torch.equal(t, tuned.tensors()[n]) for n, t in again.tensors().items())


def test_a_file_that_vllm_would_read_later_is_refused(tmp_path: Path) -> None:
    save_file(mtp_tensors("mimo"), tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match=r"sort before trained\.safetensors, found weights"):
        delta_index(tmp_path, ["x"])
    for file in ("../x.safetensors", ["x"]):  # of a stranger's index
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": file}}))
        with pytest.raises(UserError, match="expected names of safetensors files beside the index"):
            delta_index(tmp_path, ["x"])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "glm4_moe",
        {"num_nextn_predict_layers": 2},
        "num_nextn_predict_layers 2: servers draft with the first alone, one for each draft, or",
    ),
    ("deepseek_v3", {"num_nextn_predict_layers": 1, "attention_bias": True}, "attention_bias True"),
    ("deepseek_v3", {"num_nextn_predict_layers": 1, "index_topk": 8}, "index_topk 8"),
    (
        "deepseek_v3",
        {"num_nextn_predict_layers": 1, "qk_rope_head_dim": 5},
        "rope_size: expected a multiple of 2, found 5",
    ),
    (
        "glm4_moe",
        {
            "num_nextn_predict_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1.0e4,
                "factor": 8.0,
                "attention_factor": 2.0,
                "original_max_position_embeddings": 16,
            },
        },
        "'attention_factor': 2.0",
    ),
    ("llama", {}, "llama with layers of another kind"),
    ("qwen3_5_text", {}, "mtp_num_hidden_layers 0"),
    ("qwen3_5_text", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers 2"),
    ("qwen3_5_text", {"mtp_num_hidden_layers": 1, "hidden_act": "gelu"}, "hidden_act gelu"),
    (
        "qwen3_5_text",
        {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True},
        "mtp_use_dedicated_embeddings True",
    ),
]


def test_a_plan_needs_no_weights_and_latent_attention_no_biases(tmp_path: Path) -> None:
    folder = mtp_folder(tmp_path / "target", "deepseek_v3")
    config = native_head(load_on_cpu(folder)).config
    fields = config.model_fields_set
    with pytest.raises(ValueError, match="without qkv_bias and qk_norm"):
        MtpConfig(**{name: getattr(config, name) for name in fields} | {"qkv_bias": True})
    (folder / "model.safetensors").unlink()
    check_before_run(mtp_recipe(folder), {"head"}, plan=True)
    with pytest.raises(UserError, match="expected safetensors weights"):
        check_before_run(mtp_recipe(folder), {"head"})


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED)
def test_other_layers_are_refused_by_the_plan(
    kind: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = zoo_config(kind, **fields)
    with pytest.raises(UserError, match=message):
        check_head(mtp_recipe(tmp_path), config)


def test_quantised_and_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = mtp_folder(tmp_path / "target", "qwen3_5_text")
    target, file = load_on_cpu(folder), folder / "model.safetensors"
    config = native_head(target).config
    get_family("mtp").head_of_target(config, folder, Monitor(), meta=True)
    tensors = load_file(file)
    save_file(tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)}, file)
    missing = r"mtp.fc.weight: expected factors in mtp.fc.weight_scale_inv or _scale, found none"
    with pytest.raises(UserError, match=missing):
        native_head(target)
    with pytest.raises(UserError, match=missing):
        get_family("mtp").head_of_target(config, folder, Monitor(), meta=True)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(32, 64, dtype=torch.int8)}, file)
    with pytest.raises(UserError, match=r"mtp.fc.weight: expected \[32, 64\] floating numbers"):
        native_head(target)
    save_file({n: t for n, t in tensors.items() if n != "mtp.fc.weight"}, file)
    with pytest.raises(UserError, match=r"expected one tensor named mtp\.fc\.weight"):
        native_head(target)


Q_A = "model.layers.4.self_attn.q_a_proj.weight"
HOSTILE: list[tuple[dict[str, Tensor], str, bool]] = [
    ({f"{Q_A}_scale_inv": torch.ones(1, 1)}, r"factors for each \(16, 16\) of \[16, 32\]", True),
    ({f"{Q_A}_scale_inv": torch.ones(1, 2, dtype=torch.uint8)}, "of torch.uint8", True),
    ({Q_A: torch.zeros(16, 32)}, r"float8 \(E4M3\) beside factors, found torch.float32", True),
    ({f"{Q_A}_scale_inv": torch.tensor([[1.0, torch.nan]])}, "expected positive factors", False),
    ({f"{Q_A}_scale_inv": torch.tensor([[1.0, 0.0]])}, "expected positive factors", False),
    ({Q_A: torch.full((16, 32), torch.nan).to(torch.float8_e4m3fn)}, "found NaN", False),
]


def test_hostile_factors_are_refused_by_name(tmp_path: Path) -> None:
    folder = mtp_folder(tmp_path / "target", "deepseek_v3 fp8")
    target, file = load_on_cpu(folder), folder / "model.safetensors"
    config, tensors = native_head(target).config, load_file(file)
    for changes, message, in_header in HOSTILE:
        save_file(tensors | changes, file)
        for meta in (False, True)[: 1 + in_header]:
            with pytest.raises(UserError, match=f"{Q_A}: expected .*") as error:
                get_family("mtp").head_of_target(config, folder, Monitor(), meta=meta)
            assert re.search(message, error.value.what)
    fields = json.loads((folder / "config.json").read_text())
    for size in ([0, 16], ["a"], "16"):
        fields["quantization_config"]["weight_block_size"] = size
        (folder / "config.json").write_text(json.dumps(fields))
        with pytest.raises(UserError, match="expected the rows and columns of a block"):
            get_family("mtp").head_of_target(config, folder, Monitor())


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_a_trained_head_is_saved_as_its_export_stores_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_on_cpu(mtp_folder(tmp_path / "target", kind))
    trained, first = native_head(target), native_head(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in trained.state_dict().keys() - trained.shared_tensors():
            if "layers.0" in name and trained.state_dict()[name].ndim > 1:
                one = trained.state_dict()[name]
                one.mul_(1 + 3 * torch.rand(one.shape, generator=generator) ** 8)
    monkeypatch.setattr(training, "window_recording", lambda *_: nullcontext())
    monkeypatch.setattr(training, "_train", lambda *_: trained)
    recipe = mtp_recipe(target.folder)
    recording = SimpleNamespace(recipe=recipe, monitor=Monitor(), open_store=lambda: None)
    rank = SimpleNamespace(is_main=True)
    training.train_and_save(recording, tmp_path / "head", rank, new_pool=None)
    settings, name = ExportSettings(k=3), str(target.folder)
    places = tmp_path / "head", target.folder, tmp_path / "export"
    write_export(*places, "vllm", target_name=name, settings=settings)
    served = native_head(load_on_cpu(whole_folder(tmp_path / "export")))
    saved, before = load_file(tmp_path / "head/model.safetensors"), first.state_dict()
    assert all(torch.equal(served.state_dict()[n].bfloat16(), t) for n, t in saved.items())
    assert any(not torch.equal(before[n].bfloat16(), t) for n, t in saved.items())


def test_a_run_that_changes_nothing_ends_with_the_checkpoints_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mtp_folder(tmp_path / "toy", "qwen3_5_text fp8")
    own = layer_tensors(tmp_path / "toy")
    write_prompts(tmp_path / "prompts.jsonl", [f"def f{i}(use): the user {i}" for i in range(12)])
    text = RECIPE.replace("draft_vocab: {size: 128}\n", "head: {family: mtp}\n")
    text = text.replace("steps: 6", "steps: 1\n  learning_rate: 1.0e-12")
    (tmp_path / "small.yaml").write_text(text + "export: {formats: [vllm]}\n")
    result = ran(tmp_path, "run", "small.yaml")
    output = " ".join(result.output.split())
    assert "MTP layer: 15 tensors of the target's checkpoint, 7 of them in float8" in output
    assert "tokens of 100.0% of 3 prompts equal" in output
    export = tmp_path / "runs/small/export/vllm"
    assert '{"method": "mtp", "num_speculative_tokens": 2}' in (export / "launch.md").read_text()
    written = load_file(export / DELTA)
    assert written.keys() == own.keys()
    assert all(torch.equal(written[name].float(), tensor.float()) for name, tensor in own.items())
    command = ("push", "small", "org/name", "--to", "vllm", "--dry-run", "--out", "pushed")
    assert draftlab(tmp_path, *command).exit_code == 0
    launch = (tmp_path / "pushed/launch.md").read_text()
    assert "mkdir -p org/name-whole" in launch
    assert "`hf download org/name --local-dir org/name`" in launch
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    for command in (
        ("run", "small.yaml", "eval.engine=vllm", "name=other"),
        ("eval", "--run", "small", "--engine", "vllm"),
    ):
        refused = draftlab(tmp_path, *command)
        assert "expected heads whose folders vLLM loads, found one of mtp" in refused.output
    refused = draftlab(tmp_path, "train", "small.yaml", "head.head_dim=16")
    assert "MTP layers have their checkpoint's shape: leave head_dim out" in refused.output
