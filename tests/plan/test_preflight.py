"""What cannot succeed is refused at the start, by the run and by its plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers

from draftlab.export.layout import Export
from draftlab.export.refusals import serving_warnings
from tests.helpers.multimodal_zoo import random_folder
from tests.helpers.small_run import draftlab, new_workshop, ran
from tests.helpers.zoo import zoo_folder_with_tokenizer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.mark.parametrize("verb", ["run", "run --plan"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("train.wandb=project", "train.wandb is set, and wandb is not installed"),
        ("train.tensorboard=true", "where: train.tensorboard"),
        ("train.device=cuda:99", "expected device 'cuda:99', found"),
        ("target.device=foo", "where: target.device"),
        ("record.window=4", "window: expected a size such as 200GB, found 4 bytes"),
        ("head.family=peagle head.mask_token=nonsense", "where: head.mask_token"),
        ("head.num_attention_heads=5", "5 attention heads are not a multiple of 2 key-value heads"),
        ("head.family=eagle9", "head.family: expected 'eagle3' or"),
        ("head.init=nowhere", "where: nowhere"),
        ("draft_vocab.size=99999999", "where: draft_vocab.size"),
        ("record.boundaries=[3,1]", "expected sorted unique boundaries"),
        ("export.gguf=true", "llamacpp"),
        ("export.gguf=true export.formats=[llamacpp]", "expected llama.cpp's convert_hf_to_gguf"),
        ("export.k=999999", "where: export.k"),
        (
            "train.precision=fp8 head.intermediate_size=100",
            "sizes that are multiples of 16, found [100, ",
        ),
        ("prompts.source=no.jsonl", "where: no.jsonl"),
        ("target.adapter=toy", "expected a LoRA adapter, a folder with adapter_config.json"),
        ("eval.suite=no.jsonl", "where: no.jsonl"),
        ("eval.suite=small.yaml", "expected a JSON object in UTF-8 on each line"),
        *((f"name={name}", "draftlab uses") for name in ("latest", "rehearsals", "eval-x")),
        (f"name={'x' * 300}", "expected a name of at most 250 letters, found one of 300"),
    ],
    ids=lambda value: value[:40],
)
def test_what_cannot_succeed_is_refused(
    verb: str, settings: str, message: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftlab.train.metrics.find_spec", lambda name: None)
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    name, *options = verb.split()
    result = ran(shared, name, "small.yaml", *settings.split(), *options, code=2)
    assert message in result.output
    assert not (shared / "runs").exists()


CHATML_WITHOUT_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)

THOUGHT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "easy"},
]


def _without_template(target: Path) -> None:
    edit_json(target / "tokenizer_config.json", chat_template=...)
    (target / "chat_template.jinja").unlink(missing_ok=True)


def _with_template(source: str) -> Callable[[Path], None]:
    def damage(target: Path) -> None:
        _without_template(target)
        (target / "chat_template.jinja").write_text(source)

    return damage


def _without_stop_token(target: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        edit_json(target / name, eos_token_id=...)
    edit_json(target / "tokenizer_config.json", eos_token=...)


def edit_json(path: Path, **values: object) -> None:
    """Set keys of a JSON file; `...` removes a key. Nothing happens without the file."""
    if path.exists():
        fields = json.loads(path.read_text()) | values
        path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))


def _write_prompts(line: str) -> Callable[[Path], None]:
    return lambda target: write_text(target.parent / "prompts.jsonl", line)


def write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("damage", "settings", "message"),
    [
        (_without_template, "", "expected a target with a chat template"),
        (_with_template(CHATML_WITHOUT_PROMPT), "", "prompt ends before '<|im_start|>assistant"),
        (_with_template("{% for m in messages %}"), "", "the target's chat template"),
        (_without_stop_token, "", "expected an eos_token_id"),
        (None, "record.url=foo://bucket/x", "foo:// URLs cannot be opened"),
        (None, "record.url=http://host/x", "a URL that can be written, found http://"),
        (None, "record.url=memory://x", "whose files outlive this process, found memory://"),
        (None, "head.family=eagle export.formats=llamacpp", "export.formats"),
        (_write_prompts("{"), "", "expected a JSON object in UTF-8"),
        (_write_prompts(json.dumps({"messages": []})), "", "prompts.jsonl:1"),
        (
            _write_prompts(json.dumps({"messages": THOUGHT})),
            "regenerate.enabled=false",
            "1 of 1 given answers that were tried are not the target's: the chat template does not",
        ),
    ],
    ids=lambda value: str(getattr(value, "__name__", value))[:40],
)
def test_the_plan_and_the_run_refuse_with_the_same_words(
    damage: Callable[[Path], None] | None, settings: str, message: str, workshop: Path
) -> None:
    if damage is not None:
        damage(workshop / "toy")
    refusals = []
    for options in ((), ("--plan",)):
        result = ran(workshop, "run", "small.yaml", *settings.split(), *options, code=2)
        refusals.append(result.stderr[result.stderr.index("error: ") :])
    assert refusals[0] == refusals[1]
    assert message in refusals[0]
    assert not (workshop / "runs").exists()


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("minimax", {"num_local_experts": 4}, "MiniMaxModel could not be tested with"),
        ("jetmoe", {"num_local_experts": 4, "kv_channels": 8}, "that pages of keys do not serve"),
        ("phi", {}, "an lm_head without bias"),
        (
            "gemma3n_text",
            {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4},
            "layers of Gemma3nTextModel pass on several streams",
        ),
    ],
)
def test_a_target_that_the_engine_cannot_decode_is_refused_before_anything_runs(
    kind: str, fields: dict[str, object], message: str, workshop: Path
) -> None:
    zoo_folder_with_tokenizer(workshop / kind, kind, **fields)
    for words in (("run",), ("run", "--plan"), ("prepare", "--plan")):
        result = ran(workshop, words[0], "small.yaml", f"target={kind}", *words[1:], code=2)
        assert message in " ".join(result.stderr.split())
        assert f"where: {kind}" in result.stderr
    assert not (workshop / "runs").exists()


def test_layers_that_read_images_are_no_decoder_of_text(workshop: Path) -> None:
    random_folder(workshop / "vision", "mllama")
    result = ran(workshop, "run", "small.yaml", "target=vision", "--plan", code=2)
    assert "these layers of MllamaTextModel do not run for text alone" in flat(result.output)


def _run_on(target: Path) -> None:
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        edit_json(target / name, eos_token_id=..., eos_token="<|end_of_text|>")


def _with_another_class(target: Path) -> None:
    """Let a tokenizer split words in two, and name a class that does not (as OLMo 2's did)."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    halves = pre_tokenizers.Split(Regex(r"\p{L}{1,2}|[^\p{L}]"), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([halves, bytes_of])
    tokenizer.save(str(target / "tokenizer.json"))
    edit_json(target / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_run_on, "ends answers with '<|eot_id|>', which is no stop token"),
        (_with_another_class, "reads its tokenizer as GPT2Tokenizer, which gives other tokens"),
    ],
)
def test_a_tokenizer_that_serves_otherwise_than_it_was_trained_is_warned_of(
    damage: Callable[[Path], None], message: str, workshop: Path
) -> None:
    plan = ("run", "small.yaml", "--plan")
    assert "warning: target" not in draftlab(workshop, *plan).output
    damage(workshop / "toy")
    result = ran(workshop, *plan)
    assert message in flat(result.output)


def test_a_processors_chat_template_is_the_targets(workshop: Path) -> None:
    file = workshop / "toy/chat_template.jinja"
    write_text(file.with_suffix(".json"), json.dumps({"chat_template": file.read_text()}))
    file.unlink()
    assert draftlab(workshop, "run", "small.yaml", "--plan").exit_code == 0


def test_a_tokenizer_of_the_checkpoints_own_code_is_refused_by_the_plan(workshop: Path) -> None:
    """As Kimi's, without a tokenizer.json."""
    (workshop / "toy/tokenizer.json").unlink()
    own = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    edit_json(workshop / "toy/tokenizer_config.json", auto_map=own, tokenizer_class="OwnTokenizer")
    write_text(workshop / "toy/tokenization_own.py", "raise SystemExit")
    result = ran(workshop, "run", "small.yaml", "--plan", code=2)
    assert "the target's tokenizer needs code that the checkpoint ships" in flat(result.output)


def flat(text: str) -> str:
    """Return a text on one line."""
    return " ".join(text.split())


def test_an_architecture_without_a_small_model_is_tested_after_loading(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise ValueError("expected 7 heads")

    monkeypatch.setattr("draftlab.target_model.stand_in.stand_in_config", refuse)
    result = ran(shared, "run", "small.yaml", "--plan")
    output = " ".join(result.output.split())
    assert "only once the weights are loaded" in output
    assert "no small model of it (ValueError: expected 7 heads)" in output


def test_a_template_that_ends_prompts_as_its_answers_begin_needs_no_generation_prompt(
    workshop: Path,
) -> None:
    _with_template(LLAMA2)(workshop / "toy")
    assert draftlab(workshop, "run", "small.yaml", "--plan").exit_code == 0


@pytest.mark.parametrize(
    ("family", "program", "kind", "warned"),
    [
        ("eagle3", "vllm", "gemma3_text", True),
        ("dspark", "vllm", "gemma3_text", True),
        ("eagle3", "vllm", "qwen2_vl", True),
        ("eagle3", "sglang", "gemma3_text", False),
        ("eagle", "vllm", "gemma3_text", False),
    ],
)
def test_targets_that_vllm_cannot_draft_for_are_named(
    family: str, program: str, kind: str, warned: bool
) -> None:
    head: Any = SimpleNamespace(family=family)
    for config in ({"model_type": kind}, {"text_config": {"model_type": kind}}):
        export = Export(head, config, "target", 3, torch.float32)
        assert ("has no SupportsEagle3" in " ".join(serving_warnings(program, export))) is warned


@pytest.mark.parametrize("verb", ["run", "run --plan"])
def test_a_device_without_products_in_fp8_is_refused(
    verb: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on newer devices")

    monkeypatch.setattr("draftlab.train.fast.choose_forward.linear", refuse)
    name, *options = verb.split()
    result = ran(shared, name, "small.yaml", "train.precision=fp8", *options, code=2)
    assert "expects a GPU that multiplies e4m3 numbers" in result.output
    assert "only supported on newer devices" in result.output
    assert not (shared / "runs").exists()
    assert draftlab(shared, name, "small.yaml", "--plan").exit_code == 0


def test_a_plan_without_its_files_is_printed_whole(shared: Path) -> None:
    settings = ("prompts.source=no.jsonl", "prompts.max_prompts=9", "eval.suite=none.jsonl")
    result = ran(shared, "run", "small.yaml", *settings, "--plan", code=2)
    assert "answers  would run; it needs no.jsonl, which is not there yet" in result.output
    assert "eval     would run; it needs none.jsonl, which is not there yet" in result.output
    assert "  total " in result.output
    assert draftlab(shared, "prepare", "small.yaml", settings[-1], "--plan").exit_code == 0


def test_rows_that_are_too_short_stop_a_run_before_it_records(workshop: Path) -> None:
    result = ran(workshop, "train", "small.yaml", "train.row_tokens=16", code=2)
    assert "expected records of at most train.row_tokens = 16 tokens, found one of" in result.output
    assert (workshop / "runs/small/answers.jsonl").exists()
    assert not list((workshop / "runs/small").glob("store/*"))
    # The store is for any rows, and a head of longer rows can follow.
    assert draftlab(workshop, "record", "small.yaml", "train.row_tokens=16").exit_code == 0
    assert draftlab(workshop, "train", "small.yaml").exit_code == 0


def test_a_folder_in_place_of_the_link_stops_no_run(workshop: Path) -> None:
    (workshop / "runs/latest").mkdir(parents=True)
    result = ran(workshop, "prepare", "small.yaml")
    assert "runs/latest is not a link and stays" in result.output
    assert {path.name for path in (workshop / "runs").iterdir()} == {"latest", "small"}
