"""Exports and imports of DSpark and DFlash heads: names, keys, refusals (servers §12)."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.export.importing import import_head
from draftlab.heads.folder import load_config
from tests.helpers.export_toys import (
    BOUNDARIES,
    DFLASH,
    DFLASH2,
    DSPARK,
    HIDDEN,
    MASK,
    VOCAB,
    ExportedHead,
    ExportHead,
    change_config,
    change_tensors,
    export,
    read_tensors,
)
from tests.helpers.monitors import RecordingMonitor

PROGRAMS = ("speculators", "vllm", "sglang", "llamacpp")
heads = pytest.mark.parametrize(
    "fields", [DSPARK, DFLASH, DFLASH2], ids=["dspark", "dflash", "dflash2"]
)


@heads
def test_one_native_folder_serves_three_programs(export_head: ExportHead, fields: dict) -> None:
    exported = [export_head(program, **fields) for program in PROGRAMS[1:]]
    config, tensors = exported[0].config, exported[0].tensors
    assert all(e.config == config for e in exported)
    assert all(e.tensors.keys() == tensors.keys() for e in exported)
    anchor = fields["sample_from_anchor"]
    k = load_config(exported[0].head).k_trained
    assert config["model_type"] == "qwen3"
    assert config["target_layer_ids"] == [b - 1 for b in BOUNDARIES]  # outputs of layers
    assert config["block_size"] == (k if anchor else k + 1)
    assert config["sample_from_anchor"] is anchor
    assert config["is_causal"] is config["use_sliding_window"] is False
    assert config["mask_token_id"] == MASK
    assert config["layer_types"] == ["full_attention"] * 2
    assert "draft_vocab_size" not in config
    whole = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    assert not whole & tensors.keys()
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < tensors.keys()
    assert list(tensors["layers.1.self_attn.k_norm.weight"].shape) == [8]
    if anchor:
        assert config["architectures"] == ["Qwen3DSparkModel"]
        assert (config["markov_rank"], config["markov_head_type"]) == (6, "vanilla")
        assert list(tensors["markov_head.markov_w1.weight"].shape) == [VOCAB, 6]
        assert list(tensors["markov_head.markov_w2.weight"].shape) == [VOCAB, 6]
        assert list(tensors["confidence_head.proj.weight"].shape) == [1, HIDDEN + 6]
    else:
        nested = {n: config[n] for n in ("mask_token_id", "target_layer_ids", "block_size")}
        nested["causal"], architecture = False, "DFlashDraftModel"
        if fields is DFLASH2:
            architecture = "DFlash2DraftModel"
            nested |= {n: fields[n] for n in ("conv_group_size", "selector_rank", "selector_top_k")}
            nested["conv_kernel_size"] = 2
            shapes = {
                n: list(x.shape) for n, x in tensors.items() if "conv" in n or "selector" in n
            }
            assert shapes == {
                **{
                    f"layers.{layer}.{part}_conv.{name}": shape
                    for layer in (0, 1)
                    for part in ("attention", "mlp")
                    for name, shape in (
                        ("base_kernel", [2, 2, HIDDEN]),
                        ("kernel_projection.weight", [2 * 2 * HIDDEN // 4, HIDDEN]),
                    )
                },
                "candidate_selector.predecessor_codebook": [VOCAB, 6],
                "candidate_selector.successor_codebook": [VOCAB, 6],
                "candidate_selector.hidden_projection.weight": [6, HIDDEN],
            }
        assert config["architectures"] == [architecture]
        assert config["dflash_config"] == nested


@heads
def test_launch_commands(export_head: ExportHead, fields: dict) -> None:
    method = fields["family"].removesuffix("2")  # programs tell DFlash2 by its architecture
    vllm, sglang, llamacpp = (export_head(p, k=3, **fields).launch_text for p in PROGRAMS[1:])
    (line,) = [x for x in vllm.splitlines() if x.startswith("vllm")]
    options = json.loads(shlex.split(line)[-1])
    assert (options["method"], options["num_speculative_tokens"]) == (method, 3)
    assert "parallel_drafting" not in options
    assert f"--speculative-algorithm {method.upper()} " in sglang
    assert f"--spec-type draft-{method} " in llamacpp
    assert "--spec-draft-n-max 3 " in llamacpp


@heads
def test_the_speculators_layout_counts_inputs_of_layers(
    export_head: ExportHead, fields: dict
) -> None:
    config = export_head("speculators", **fields).config
    assert config["speculators_model_type"] == fields["family"]
    assert config["aux_hidden_state_layer_ids"] == list(BOUNDARIES)
    assert config["sample_from_anchor"] is fields["sample_from_anchor"]
    assert config["sliding_window_non_causal"] is True
    layers = config["transformer_layer_config"]
    assert (layers["model_type"], layers["num_hidden_layers"]) == ("qwen3", 2)
    assert "rope_scaling" not in layers  # transformers 5 reads it as rope_parameters
    assert not {"dflash_config", "target_layer_ids"} & layers.keys()
    assert layers["is_causal"] is False  # vLLM's default for DSpark's sliding layers is true


def test_the_targets_own_tables_in_a_published_head_are_dropped(
    export_head: ExportHead, target: Path, tmp_path: Path
) -> None:
    """The authors' files have copies of embeddings and lm_head; a table that differs is refused."""
    exported = export_head("vllm", **DSPARK)
    tables = read_tensors(target)
    copies = {
        "embed_tokens.weight": tables["model.embed_tokens.weight"],
        "lm_head.weight": tables["lm_head.weight"],
    }
    folder = change_tensors(exported.folder, lambda tensors: tensors.update(copies))
    back = import_head(folder, tmp_path / "back", target=str(target), dtype="float32")
    assert not copies.keys() & read_tensors(back).keys()
    other = change_tensors(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from the target's"):
        import_head(other, tmp_path / "other", target=str(target), dtype="float32")


def assert_same_head(folder: Path, exported: ExportedHead) -> None:
    back, before = load_config(folder), load_config(exported.head)
    assert (back.family, back.options()) == (before.family, before.options())
    assert (back.k_trained, back.boundaries) == (before.k_trained, before.boundaries)


def test_published_folders_come_in(export_head: ExportHead, target: Path, tmp_path: Path) -> None:
    """Keys as DeepSpec and z-lab write them: causality, and DSpark's layout, are left out there."""
    missing = {"is_causal": None, "sample_from_anchor": None, "head_dim": None}
    deepspec = {"num_anchors": 512, "max_window_layers": 4, "use_cache": True} | missing
    exported = export_head("vllm", **DSPARK)
    folder = change_config(exported.folder, **deepspec)
    assert_same_head(import_head(folder, tmp_path / "dspark", target=str(target)), exported)
    shutil.rmtree(exported.folder)

    exported = export_head("vllm", **DFLASH)
    config = exported.config
    nested = {n: config["dflash_config"][n] for n in ("mask_token_id", "target_layer_ids")}
    zlab = missing | {"dflash_config": nested, "mask_token_id": None, "target_layer_ids": None}
    folder = change_config(exported.folder, auto_map={"AutoModel": "dflash.Draft"}, **zlab)
    assert_same_head(import_head(folder, tmp_path / "dflash", target=str(target)), exported)


def test_a_published_head_with_a_selector_comes_in(
    export_head: ExportHead, target: Path, tmp_path: Path
) -> None:
    """All keys of the block stand in dflash_config there, and none is a head without a selector."""
    exported = export_head("vllm", **DFLASH2, logit_scale=0.25, logit_softcap=20.0)
    top = ("mask_token_id", "target_layer_ids", "block_size", "sample_from_anchor")
    published = dict.fromkeys(top) | {"bos_token_id": 1, "initializer_range": 0.02}
    folder = change_config(exported.folder, **published)
    assert_same_head(import_head(folder, tmp_path / "back", target=str(target)), exported)
    nested = exported.config["dflash_config"] | {"selector_rank": None}
    with pytest.raises(UserError, match="selector_rank: missing in dflash_config"):
        import_head(
            change_config(folder, dflash_config=nested), tmp_path / "other", target=str(target)
        )


def test_what_programs_do_not_read_of_a_head_with_a_selector(export_head: ExportHead) -> None:
    for program, changes, message in (
        ("speculators", {"logit_scale": 0.5}, "factors of embeddings and logits: logit_scale 0.5"),
        ("sglang", {"embedding_scale": 4.0}, "this head's are multiplied by 4"),
        ("llamacpp", {"selector_top_k": 6}, "6 candidates do not fit into hidden_size 32"),
    ):
        with pytest.raises(UserError, match=message):
            export_head(program, **DFLASH2 | changes)


def test_a_missing_block_layout_is_said_or_asked_for(
    export_head: ExportHead, target: Path, tmp_path: Path
) -> None:
    monitor = RecordingMonitor()
    folder = change_config(export_head("vllm", **DSPARK).folder, sample_from_anchor=None)
    back = import_head(folder, tmp_path / "back", target=str(target), monitor=monitor)
    assert load_config(back).sample_from_anchor
    assert "sample_from_anchor is not in the config, read as true" in monitor.text
    folder = change_config(export_head("speculators", **DSPARK).folder, sample_from_anchor=None)
    with pytest.raises(UserError, match=r"sample_from_anchor is missing.*write true"):
        import_head(folder, tmp_path / "other", target=str(target))


def test_two_block_sizes_are_refused(export_head: ExportHead, target: Path, tmp_path: Path) -> None:
    folder = change_config(export_head("vllm", **DFLASH).folder, block_size=9)
    with pytest.raises(UserError, match=r"block_size: expected one value, found \[8, 9\]"):
        import_head(folder, tmp_path / "back", target=str(target))


@heads
def test_the_slots_of_a_block_are_its_drafts(
    export_head: ExportHead, target: Path, tmp_path: Path, fields: dict
) -> None:
    folder = export_head("vllm", **fields).folder
    with pytest.raises(UserError, match=r"expected 7 drafts, as many as .*found 3"):
        import_head(folder, tmp_path / "back", target=str(target), k=3)
    import_head(folder, tmp_path / "back", target=str(target), k=7)


def test_sliding_layers_of_the_speculators_library_are_causal_without_its_flag(
    export_head: ExportHead, target: Path, tmp_path: Path
) -> None:
    def as_the_library(export: ExportedHead) -> Path:
        layers = export.config["transformer_layer_config"]
        assert (layers["sliding_window"], layers.pop("is_causal")) == (12, False)
        changes = {"sliding_window_non_causal": False, "transformer_layer_config": layers}
        return change_config(export.folder, **changes)

    sliding = export_head("speculators", **DFLASH, sliding_window=12)
    folder = change_config(sliding.folder, sliding_window_non_causal=False)
    with pytest.raises(UserError, match="contradict each other"):
        import_head(folder, tmp_path / "back", target=str(target))
    folder = as_the_library(sliding)
    assert load_config(import_head(folder, tmp_path / "back", target=str(target))).is_causal
    types = ("full_attention", "sliding_attention")
    mixed = export_head("speculators", **DFLASH, sliding_window=12, layer_types=types)
    with pytest.raises(UserError, match="sliding layers of the block are causal"):
        import_head(as_the_library(mixed), tmp_path / "mixed", target=str(target))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sliding_window", None, "sliding_window is missing"),
        ("sliding_window", 4, "expected a sliding_window larger than the block"),
        ("layer_types", ["sliding_attention"], "expected layer_types of 2 layers"),
        ("markov_head_type", "rnn", "markov_head_type: expected 'vanilla'"),
        ("mask_token_id", VOCAB, "outside the"),
        ("block_size", None, "block_size: expected one value, found none"),
        ("target_layer_ids", [0, 2, 9], r"0\.\.6|10"),
    ],
)
def test_other_heads_are_refused(
    export_head: ExportHead, target: Path, tmp_path: Path, key: str, value: object, message: str
) -> None:
    window = {"sliding_window": 12} if key in ("sliding_window", "layer_types") else {}
    folder = change_config(export_head("vllm", **DSPARK | window).folder, **{key: value})
    with pytest.raises(UserError, match=message):
        import_head(folder, tmp_path / "back", target=str(target))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("config", "named"),
    [({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
     ({"model_type": "gemma2"}, "embeddings times"),
     ({"logits_scaling": 8.0}, "logits_scaling")],
)  # fmt: skip
def test_targets_that_scale_are_refused(
    make_head: Callable[..., Path], target: Path, tmp_path: Path, program: str,
    config: dict, named: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from draftlab.export import write

    plain = write._target_config
    monkeypatch.setattr(write, "_target_config", lambda *a: plain(*a) | config)
    with pytest.raises(UserError, match=named):
        export(make_head(**DSPARK), target, tmp_path / "out", program)


def test_more_drafts_than_slots_are_refused(export_head: ExportHead) -> None:
    with pytest.raises(UserError, match="all slots of the block"):
        export_head("vllm", k=8, **DSPARK)


def test_llamacpp_has_no_draft_vocabulary_for_dflash(export_head: ExportHead) -> None:
    """Its converter has no d2t there, as it has for DSpark."""
    reduced = {"draft_vocab_size": 16}
    export_head("llamacpp", **DSPARK | reduced)
    with pytest.raises(UserError, match=r"DFlash heads of .* whole .* drafts 16 of"):
        export_head("llamacpp", **DFLASH | reduced)
