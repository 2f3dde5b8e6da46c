"""Import of other programs' heads: the same bits, and refusals where a file is ambiguous."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import draftlab
from draftlab import UserError
from draftlab.evaluate.decoding_config import NamedHead
from draftlab.evaluate.settings import EvalSettings
from draftlab.export.importing import import_head
from draftlab.heads.folder import load_config, new_head
from tests.helpers.export_toys import (
    BOUNDARIES,
    DFLASH,
    DFLASH2,
    DRAFT,
    DSPARK,
    EAGLE,
    HIDDEN,
    LAYERS,
    LLAMA3,
    MAX_LENGTH,
    PEAGLE,
    VOCAB,
    YARN,
    ExportHead,
    change_config,
    change_tensors,
    export,
    read_tensors,
)
from tests.helpers.monitors import RecordingMonitor

ImportHead = Callable[..., Path]


@pytest.fixture
def import_back(target: Path, tmp_path: Path) -> ImportHead:
    """Imports a folder for the target into `back`."""

    def read(folder: Path, **options: object) -> Path:
        return import_head(folder, tmp_path / "back", **({"target": str(target)} | options))

    return read


SHAPES = {
    "plain": {},
    "whole vocabulary": {"draft_vocab_size": VOCAB},
    "own embeddings": {"embeddings": "own"},
    "residual after the norm": {"norm_before_residual": True},
    "one norm before fc": {"norm_before_fc": True},
    "a norm for each boundary": {"fc_norm": True},
    "normed output": {"norm_output": True},
    "four boundaries, float32": {"boundaries": (0, 1, 3, 6), "dtype": torch.float32},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "norms of q and k": {"qk_norm": True},
    "three layers": {"num_layers": 3},
    "sliding": {"sliding_window": 12},
    "first generation": EAGLE,
    "parallel": PEAGLE,
    "parallel, norms of q and k": PEAGLE | {"qk_norm": True, "draft_vocab_size": VOCAB},
}
MIXED = ("sliding_attention", "full_attention")
for block in (DSPARK, DFLASH):
    SHAPES |= {
        f"{block['family']}, {name}": block | changes
        for name, changes in {
            "float32": {"dtype": torch.float32},
            "causal": {"is_causal": True},
            "reduced": {"draft_vocab_size": DRAFT},
            "sliding": {"sliding_window": 12},
            "mixed": {"sliding_window": 12, "layer_types": MIXED},
        }.items()
    }
SHAPES |= {
    "dflash2": DFLASH2 | {"sliding_window": 12},
    "dflash2, factors": DFLASH2 | {"logit_scale": 0.5, "logit_softcap": 20.0},
    "dflash2, embeddings": DFLASH2 | {"embedding_scale": 4.0, "selector_top_k": 6},
}


FIRST = "first generation"
FOUR, NORMS = "four boundaries, float32", "norms of q and k"
FACTORS = {"dflash2, factors", "dflash2, embeddings"}
PARALLEL = {shape for shape in SHAPES if shape.startswith("parallel")}
REFUSED = {
    "speculators": {FIRST, "dspark, causal", "dflash, causal"} | FACTORS,
    "vllm": set(),
    "sglang": {"own embeddings", "residual after the norm", FOUR, NORMS}
    | PARALLEL
    | {"dspark, reduced", "dflash, reduced", "dflash2, embeddings", "three layers"},
    "llamacpp": {"yarn", "a norm for each boundary", "normed output", FOUR, NORMS, FIRST}
    | PARALLEL
    # 6 candidates and their scores do not fit into 32 channels.
    | {"sliding", "three layers", "dflash2, embeddings", "dflash, reduced"},
}
"""Shapes that a program refuses (tests/export/test_native_exports.py)."""


@pytest.mark.parametrize(
    ("program", "shape"),
    [(p, shape) for p in REFUSED for shape in SHAPES if shape not in REFUSED[p]],
)
def test_import_of_an_export_gives_equal_bits(
    export_head: ExportHead, import_back: ImportHead, program: str, shape: str
) -> None:
    exported = export_head(program, k_trained=6, **SHAPES[shape])  # not the import's default
    back = import_back(exported.folder)
    stored, imported = (read_tensors(f) for f in (exported.head, back))
    assert stored.keys() == imported.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == imported[name].dtype
        assert torch.equal(tensor, imported[name]), name
    expected, actual = (
        load_config(f).model_dump(exclude={"provenance"}) for f in (exported.head, back)
    )
    assert actual == expected
    imported = load_config(back)
    files = {"config.json", "model.safetensors"}
    assert imported.provenance["imported"]["sha256"].keys() == files
    head = NamedHead("imported", new_head(imported))
    if "markov_rank" not in SHAPES[shape]:  # block heads draft all slots of their block
        assert head.ks(EvalSettings()) == (imported.provenance["imported"]["k"],) == (6,)
    assert head.ks(EvalSettings(k=2)) == (2,)
    assert (exported.head / "config.json").read_bytes() == (back / "config.json").read_bytes()


def test_a_split_checkpoint_is_read_whole(export_head: ExportHead, tmp_path: Path) -> None:
    exported = export_head()
    options = {"target_name": str(exported.target), "max_shard": "8KB"}
    export(exported.head, exported.target, exported.folder, **options)
    back = draftlab.import_head(exported.folder, tmp_path / "back")  # the export names its target
    assert_same_weights(exported.head, back)


def assert_same_weights(expected: Path, actual: Path) -> None:
    expected, actual = (folder / "model.safetensors" for folder in (expected, actual))
    assert actual.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    ("top", "nested", "read"),
    [
        ([1, 3, 5], [0, 2, 4], (1, 3, 5)),
        ([1, 3, 5], None, (1, 3, 5)),
        (None, None, (2, 3, 3)),  # every program's default, which repeats on six layers
        (None, [1, 3, 5], None),  # vLLM's older runner and SGLang disagree
        ([1, 3, 5], [1, 3, 5], None),
        (None, [2, 4, 6], (2, 4, 6)),  # six layers have no output 6
        ([5, 3, 1], None, (5, 3, 1)),
        ([1, 3, 7], None, (1, 3, 7)),
    ],
)
def test_ambiguous_boundaries_are_refused(
    export_head: ExportHead, import_back: ImportHead, top: list, nested: list, read: tuple
) -> None:
    inner = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": nested}
    folder = change_config(
        export_head("vllm").folder,
        eagle_aux_hidden_state_layer_ids=top,
        eagle_config=inner if nested else None,
    )
    if read and list(read) == sorted(set(read)) and read[-1] <= LAYERS:
        assert load_config(import_back(folder)).boundaries == read
        return
    with pytest.raises(UserError) as caught:
        import_back(folder)
    messages = ("differently", "--boundaries 1,3,5", "--boundaries 2,4,6", "doctor")
    for message in (str(list(read)),) if read else messages:
        assert message in str(caught.value)
    assert load_config(import_back(folder, boundaries=(2, 4, 6))).boundaries == (2, 4, 6)


def prefix_model(tensors: dict) -> None:
    for name in [n for n in tensors if n not in ("d2t", "t2d", "lm_head.weight")]:
        tensors[f"model.{name}"] = tensors.pop(name)


SPELLINGS: dict[str, Callable] = {
    "absolute ids": lambda t: t["d2t"].add_(torch.arange(len(t["d2t"]))),
    "int32 without t2d": lambda t: (t.pop("t2d"), t.update(d2t=t["d2t"].int())),
    "t2d as bytes": lambda t: t.update(t2d=t["t2d"].to(torch.uint8)),
    "prefix model": prefix_model,
    "derived tensors": lambda t: t.update(
        {
            "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "midlayer.self_attn.o_proj.bias": torch.zeros(HIDDEN),
        }
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_of_the_same_head_give_the_same_file(
    export_head: ExportHead, import_back: ImportHead, spelling: str
) -> None:
    monitor, exported = RecordingMonitor(), export_head("vllm")
    change_tensors(exported.folder, SPELLINGS[spelling])
    assert_same_weights(exported.head, import_back(exported.folder, monitor=monitor))
    ids = "import: d2t holds ids, which become offsets" in monitor.lines
    assert ids == (spelling == "absolute ids")
    assert any("files name; it counts as trained for as many (--k)" in x for x in monitor.lines)


def test_keys_that_change_nothing_can_be_ignored(
    export_head: ExportHead, import_back: ImportHead
) -> None:
    """SafeAILab's architecture is that of the first generation; its tensors show that it is not."""
    exported = export_head("vllm")
    keys = {"residual_scale": 0.5, "some_flag": False, "other": None}
    change_config(exported.folder, architectures=["LlamaForCausalLM"], **keys)
    back = import_back(exported.folder, ignore=frozenset({"residual_scale"}))
    assert (load_config(back).family, load_config(back).boundaries) == ("eagle3", BOUNDARIES)
    assert_same_weights(exported.head, back)


def test_sglangs_names_of_later_norms_must_agree_with_vllms(
    export_head: ExportHead, import_back: ImportHead, tmp_path: Path
) -> None:
    exported, name = export_head("vllm", **PEAGLE), "layers.1.hidden_norm.weight"
    norm = exported.tensors["layers.1.input_layernorm.weight"]
    change_tensors(exported.folder, lambda tensors: tensors.update({name: norm.clone()}))
    assert_same_weights(exported.head, import_back(exported.folder))
    change_tensors(exported.folder, lambda tensors: tensors[name].add_(1))
    with pytest.raises(UserError, match=r"layers\.1\.hidden_norm\.weight.*differ"):
        import_head(exported.folder, tmp_path / "other", target=str(exported.target))


def test_copies_of_the_targets_tensors_are_recognised(
    export_head: ExportHead, import_back: ImportHead
) -> None:
    exported, monitor = export_head("vllm", draft_vocab_size=VOCAB), RecordingMonitor()
    parts = {name: tensor.bfloat16() for name, tensor in read_tensors(exported.target).items()}

    def copy(tensors: dict) -> None:
        tensors["embed_tokens.weight"] = parts["model.embed_tokens.weight"]
        del tensors["lm_head.weight"]

    back = import_back(change_tensors(exported.folder, copy), monitor=monitor)
    tensors = read_tensors(back)
    assert "embed_tokens.weight" not in tensors
    assert torch.equal(tensors["lm_head.weight"], parts["lm_head.weight"])
    assert any("lm_head is the target's" in line for line in monitor.lines)
    assert load_config(back).embeddings == "target"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_bias": True}, "attention_bias: expected False"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
        ({"rms_norm_eps": ...}, "rms_norm_eps: expected a value, found nothing"),
        ({"residual_scale": 0.5}, "residual_scale: unknown, 0.5(?s:.*)--ignore residual_scale"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"logit_scale": 0.25}, "logit_scale"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
        ({"vocab_size": 300}, "vocab_size 300, this one has 289"),
        ({"target_hidden_size": 64}, "target_hidden_size 64, this one has 32"),
        ({"num_hidden_layers": 5}, "at most 4 layers, found num_layers 5"),
        ({"rope_theta": 10000.0}, "rope_theta 20000.0 in rope_parameters against 10000.0"),
        ({"intermediate_size": 95}, r"mlp\.down_proj\.weight: expected shape \[32, 95\]"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 2e4, "factor": 2.0}},
            "rope_type 'longrope' is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 2e4, "factor": 2.0}},
            "lack the key 'original_max_position_embeddings'",
        ),
        (
            {"rope_parameters": YARN | {"attention_factor": 1.0}},
            "attention_factor 1.0 of its YaRN: programs differ",
        ),
        ({"rope_parameters": {"rope_theta": "1e4"}, "rope_theta": ...}, "'1e4' is no base"),
        (
            {"rope_parameters": {"rope_theta": 2e4, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor 0.25: heads of draftlab rotate all channels",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": [2]}},
            "cannot compute this head",
        ),
    ],
)
def test_a_config_that_might_mean_another_head_is_refused_by_key(
    export_head: ExportHead, import_back: ImportHead, tmp_path: Path, keys: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        import_back(change_config(export_head("vllm").folder, **keys))
    assert not (tmp_path / "back").exists()


def test_missing_keys_are_defaults_or_refused(
    export_head: ExportHead, import_back: ImportHead, tmp_path: Path
) -> None:
    monitor = RecordingMonitor()
    rope = {"rope_theta": ..., "rope_parameters": ..., "rope_scaling": ...}
    folder = change_config(export_head("vllm").folder, max_position_embeddings=64, **rope)
    (folder / "launch.md").unlink()
    with pytest.raises(UserError, match=r"its config names none(?s:.*)--target"):
        import_back(folder, target=None)
    config = load_config(import_back(folder, monitor=monitor))
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert (config.k_trained, config.default_k) == (7, 4)
    assert config.max_position_embeddings == MAX_LENGTH
    for choice in (
        "no RoPE base in the config, so 10000",
        "max_position_embeddings 64 becomes",
        "trained for 7 drafts",
        "[1, 3, 5], inputs of layers",
    ):
        assert choice in monitor.text


def test_a_missing_norm_flag_has_to_be_given(
    export_head: ExportHead, import_back: ImportHead
) -> None:
    folder = change_config(export_head().folder, norm_before_residual=...)
    with pytest.raises(UserError, match="the library's default is false, vLLM's is true"):
        import_back(folder)
    assert load_config(import_back(folder, norm_before_residual=True)).norm_before_residual is True


@pytest.mark.parametrize(
    ("names", "dtype", "found"),
    [({"norm.weight"}, torch.float32, "bfloat16, float32"), (None, torch.float64, "float64")],
)
def test_mixed_and_wide_dtypes_need_a_choice(
    export_head: ExportHead, import_back: ImportHead, names: set | None, dtype: torch.dtype,
    found: str,
) -> None:  # fmt: skip
    def widen(tensors: dict) -> None:
        floating = {n for n, t in tensors.items() if t.is_floating_point()}
        tensors.update({n: tensors[n].to(dtype) for n in names or floating})

    folder = change_tensors(export_head("vllm").folder, widen)
    with pytest.raises(UserError, match=rf"found {found}(?s:.*)--dtype"):
        import_back(folder)
    assert read_tensors(import_back(folder, dtype="float32"))["fc.weight"].dtype == torch.float32


def test_faulty_tensors_are_named(export_head: ExportHead, import_back: ImportHead) -> None:
    def spoil(tensors: dict) -> None:
        tensors["fc.weight"][0, 0] = float("nan")
        tensors["stranger"] = torch.ones(1, dtype=torch.bfloat16)
        del tensors["midlayer.hidden_norm.weight"]

    folder = change_tensors(export_head("vllm").folder, spoil)
    with pytest.raises(UserError) as caught:
        import_back(folder)
    for fault in ("fc.weight: not finite", "unknown stranger", "missing layers.0.hidden_norm"):
        assert fault in str(caught.value)
    change_tensors(folder, lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}))
    with pytest.raises(UserError, match=r"fc\.weight: expected floating .*found torch\.int8"):
        import_back(folder)


def test_unusable_sources_and_destinations_are_refused(
    export_head: ExportHead, import_back: ImportHead, tmp_path: Path
) -> None:
    exported = export_head("vllm")
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "thesis.tex").write_text("user")
    for place in (tmp_path / "user", tmp_path / "user" / "thesis.tex"):
        with pytest.raises(UserError, match=r"folder to write to, found (one with files|a file)"):
            import_head(exported.folder, place, target=str(exported.target))
    shutil.copytree(exported.folder, tmp_path / "lfs")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "lfs" / "model.safetensors").write_text(pointer)
    change_config(exported.folder, architectures=["GPT2"])
    for folder, message in (
        (tmp_path / "lfs", "found a git-lfs pointer"),
        (exported.head, "one of draftlab's own"),
        (tmp_path / "nowhere", r"another program's head, with config\.json, found none"),
        (tmp_path / "user", r"another program's head, with config\.json, found one without"),
        (tmp_path / "user" / "thesis.tex", r"another program's head, .* found a file"),
        (exported.folder, "draft head of an architecture out of"),
        (exported.target, r"expected a draft head, found no fc\.weight"),
    ):
        with pytest.raises(UserError, match=message):
            import_back(folder)
