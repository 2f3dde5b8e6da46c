"""Images of prompts: which files are read, and that the target reads them as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import CONFIG_MAPPING, AutoProcessor, LlavaForConditionalGeneration

from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request
from draftlab.errors import UserError
from draftlab.formatting import count_text
from draftlab.heads.folder import new_head
from draftlab.progress import Monitor
from draftlab.store.sample_table import Sample, SampleTable
from draftlab.store.store import Store
from draftlab.target_model import image_files, images
from draftlab.target_model.image_files import ImageFile
from draftlab.target_model.images import FIRST, _is_plain, image_ids, no_images, token_ids
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.conversations import Conversation, iterate_conversations
from draftlab.text.prompts import load_prompts
from draftlab.text.settings import PromptSettings
from draftlab.text.suites import conversation_suite, load_suite, prompt_digest
from tests.helpers.gpu import on_devices
from tests.helpers.greedy_answers import outcomes, run
from tests.helpers.head_toys import make_config, randomise
from tests.helpers.llava import POSITIONS, asked, llava_folder, picture, write_lines
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import draftlab, new_workshop


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llava_folder(tmp_path / "vl")
    for seed in range(3):
        picture(tmp_path / f"pictures/{seed}.png", seed)
    return tmp_path


def write_prompts(folder: Path) -> Path:
    """Write prompts with an image, two or none."""
    turns = [{"role": "assistant", "content": "a cat"}, *asked("Where?")["messages"]]
    one = [asked("What is ", f"pictures/{n}.png", f" for {n}?", id=f"one-{n}") for n in range(3)]
    one[2]["messages"] += turns
    lines = [
        *one,
        asked("pictures/0.png", "pictures/1.png", "differ?", id="two"),
        asked("pictures/1.png", "pictures/0.png", "differ?", id="turned"),
        *(asked(f"def f{n}(use)", id=f"text-{n}") for n in range(5)),
    ]
    return write_lines(folder / "prompts.jsonl", lines)


def pixel_values(folder: Path, pictures: list[Path]) -> torch.Tensor:
    """Return what transformers' processor makes of pictures."""
    processor = AutoProcessor.from_pretrained(folder / "vl")
    opened = [Image.open(one).convert("RGB") for one in pictures]
    inputs = processor(text=["<image>" * len(opened)], images=opened, return_tensors="pt")
    return inputs["pixel_values"]


def test_a_run_records_the_states_of_transformers_own_forward_pass(folder: Path) -> None:
    new_workshop(folder)
    write_prompts(folder)
    words = ("target=vl", "record.boundaries=[1,2,3]", "record.dtype=float32")
    words += (
        "regenerate.temperatures=[0]",
        "train.row_tokens=256",
        "export.formats=[vllm]",
        "eval.max_prompts=10",
    )
    result = draftlab(folder, "run", "small.yaml", *words)
    assert result.exit_code == 0, result.output
    assert "of 10 prompts equal those of" in " ".join(result.output.split())
    place = folder / "runs/small"
    whole = LlavaForConditionalGeneration.from_pretrained(folder / "vl", dtype=torch.float32)
    store, answers = Store.open(place / "store"), iterate_conversations(place / "answers.jsonl")
    records = dict(zip(store.ids, store.views(range(len(store.ids))), strict=True))
    assert len(records) == 11  # the second answer of one conversation is a sample of its own
    for answer in answers:
        record = records[answer.id]
        ids = record.tokens.long()[None]
        count = int((ids == whole.config.image_token_id).sum())
        assert count == POSITIONS * len(answer.images)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if answer.images:
            paths = [image.folder / image.name for image in answer.images]
            inputs["pixel_values"] = pixel_values(folder, paths)
        with torch.inference_mode():
            states = whole(**inputs, output_hidden_states=True).hidden_states
        torch.testing.assert_close(
            record.features, torch.cat([states[b][0] for b in (1, 2, 3)], -1), atol=1e-5, rtol=1e-5
        )
        for one in answer.answers:
            with torch.inference_mode():
                inputs |= {"input_ids": torch.tensor([one.prompt_ids])}
                inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"])}
                written = whole.generate(**inputs, do_sample=False, max_new_tokens=24)
            assert written[0, len(one.prompt_ids) :].tolist() == list(one.token_ids)


@on_devices
@pytest.mark.usefixtures("exact_float32")
def test_every_engine_reads_images(device: str, tmp_path: Path) -> None:
    folder, size = tmp_path, 256
    llava_folder(folder / "vl", hidden=size)
    for seed in range(3):
        picture(folder / f"pictures/{seed}.png", seed)
    settings = TargetSettings(path=str(folder / "vl"), device=device, dtype="float32")
    target, tokenizer = load_target(settings), load_tokenizer(settings)
    suite = load_suite(str(write_prompts(folder)), tokenizer, Monitor(), target=target)
    prompts = dict(suite.prompts)
    assert len(set(prompts.values())) == 10
    named = [i for i in prompts["two"] if i >= FIRST]
    turned = [i for i in prompts["turned"] if i >= FIRST]
    assert turned != named
    real = token_ids(target, torch.tensor(prompts["two"]))
    assert int((real == 289).sum()) == len(named) == 2 * POSITIONS
    images = next(reversed(target.images._images.values()))
    first = token_ids(target, torch.tensor(prompts["turned"])).tolist()
    assert image_ids(target, first, images) == prompts["turned"]
    within = prompts["turned"].index(turned[0]) + 2
    assert image_ids(target, first[:within], images, prompt=False) == prompts["turned"][:within]
    answered = image_ids(target, [*first, 289, 5], images, prompt=False)
    assert answered == (*prompts["turned"], 289, 5)
    with pytest.raises(UserError, match="expected 8 positions of images in a prompt, found 2"):
        image_ids(target, first[:within], images)
    key = (turned[0] - FIRST) >> 16
    target.images._images[key] = images[:1]
    with pytest.raises(UserError, match="expected images with another hash"):
        image_ids(target, first, images)
    config = make_config(
        boundaries=(1, 2, 3), target_num_layers=4, target_hidden_size=size, hidden_size=size,
        intermediate_size=size, num_attention_heads=4, head_dim=64, vocab_size=target.vocab_size,
    )  # fmt: skip
    head = new_head(config)
    randomise(head, 1, weights=0.06, norms=0.3)
    drafter = new_drafter(head.to(device).eval().requires_grad_(False), 3)
    requests = [Request(id_, ids, 12) for id_, ids in suite.prompts]
    same = {"batch": 3, "max_length": 128}
    found = [
        outcomes(run(engine, requests))
        for engine in (
            ReferenceEngine(target, drafter, **same),
            Engine(target, drafter, prefill_tokens=16, **same),
            Engine(target, drafter, cpu_prepacked=True, **same),
        )
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.png", "expected an image, found no such file"),
        ("../outside.png", "a path that leaves it"),
        ("link.png", "a path that leaves it"),
        ("/etc/hostname", "a path that leaves it"),
        ("pictures", "expected an image, found no such file"),
        ("loop.png", "expected an image, found Symlink loop"),
        ("a" * 300, "expected an image, found .*File name too long"),
        ("text.png", "expected a JPEG, PNG or WebP image, found another file"),
        ("cut.png", "expected a whole image"),
        ("large.png", "expected an image of at most 2,000 pixels, found more"),
        ("long.png", "expected an image of at most 9,000 bytes"),
    ],
)
def test_only_images_below_the_folder_are_read(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_files, "MAX_PIXELS", 2000)
    monkeypatch.setattr(image_files, "MAX_BYTES", 9000)
    folder = tmp_path / "data"
    whole = picture(folder / "pictures/a.png", 0)
    picture(folder / "large.png", 0, (50, 41))
    (tmp_path / "outside.png").write_bytes(whole.read_bytes())
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "text.png").write_text("GIF89a")
    (folder / "cut.png").write_bytes(whole.read_bytes()[:2000])
    (folder / "long.png").write_bytes(bytes(9001))
    content = [{"type": "image", "image": name}]
    lines = [{"messages": [{"role": "user", "content": content}]}]
    settings = PromptSettings(source=str(write_lines(folder / "p.jsonl", lines)))
    with pytest.raises(UserError, match=words) as caught:
        load_prompts(settings, Monitor(), no_images=str)
    assert caught.value.where == str(folder / name)


def test_what_is_not_read_is_dropped_and_counted(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 0)
    answer = {"role": "assistant", "content": "a cat"}
    url = {"type": "image", "image": "https://example.org/a.png"}
    later = {"messages": [*asked("hi")["messages"], answer, *asked("a.png")["messages"]]}
    lines = [
        asked("a.png", "What?"),
        {"messages": [{"role": "user", "content": [url]}]},
        later,
        {"image": "a.png", "conversations": [{"from": "human", "value": "See <image>\nWhat?"}]},
        {"images": ["a.png"], "question": "What is it?"},
        asked("a \ufdd0 in a text"),
        {
            "messages": [
                {**asked("a.png")["messages"][0], "role": "system"},
                *asked("hi")["messages"],
            ]
        },
    ]
    settings = PromptSettings(source=str(write_lines(tmp_path / "p.jsonl", lines)))
    monitor = RecordingMonitor()
    prompts = load_prompts(settings, monitor, no_images=str)
    texts = [one.messages[0]["content"] for one in prompts]
    assert texts == ["\ufdd0What?", "See \ufdd0\nWhat?", "\ufdd0What is it?"]
    for number, kind in ((2, "image"), (1, "later image"), (1, "U+FDD0")):
        assert f"dropped {count_text(number, 'conversation')} with {kind} p" in monitor.text
    path = tmp_path / "again.jsonl"
    path.write_text("".join(one.to_json() + "\n" for one in prompts))
    assert [one.to_json() for one in iterate_conversations(path)] == [
        one.to_json() for one in prompts
    ]
    with pytest.raises(UserError, match="expected text conversations"):
        load_prompts(PromptSettings(source=str(path)), Monitor())


def test_a_placeholder_in_a_text_is_no_image(folder: Path) -> None:
    new_workshop(folder)
    lines = [asked("<image> or ", "pictures/0.png", id="bad"), asked("pictures/0.png", id="good")]
    write_lines(folder / "prompts.jsonl", [*lines, asked("hi", id="text")])
    result = draftlab(folder, "prepare", "small.yaml", "target=vl")
    assert result.exit_code == 0, result.output
    assert "expected '<image>' once for each image in a rendered prompt" in result.stderr
    kept = (folder / "runs/small/answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in kept] == ["good", "text"]


def test_a_rehearsal_reads_images(folder: Path) -> None:
    new_workshop(folder)
    write_prompts(folder)
    result = draftlab(folder, "run", "small.yaml", "--rehearse", "target=vl", "eval.max_prompts=4")
    assert result.exit_code == 0, result.output
    assert (folder / "runs/rehearsals/small/images").is_dir()


def test_a_text_target_is_given_no_image(folder: Path) -> None:
    new_workshop(folder)
    write_prompts(folder)
    result = draftlab(folder, "prepare", "small.yaml")
    assert result.exit_code == 0, result.output
    assert "dropped 5 conversations with image parts" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("internvl", ""),
        ("gemma3", "given more of images than embeddings"),
        ("qwen3_5", "given more of images than embeddings"),
        ("quantised", "is no model of images in 16 or 32 bits"),
        ("llama", "has no image token"),
    ],
)
def test_a_config_says_whether_images_are_read(
    kind: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "_processor", lambda folder: None)
    config = CONFIG_MAPPING["llava" if kind == "quantised" else kind]()
    if kind == "quantised":
        config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    assert reason in no_images(tmp_path)
    assert bool(reason) == bool(no_images(tmp_path))


def test_a_suite_without_a_target_has_no_images(folder: Path) -> None:
    tokenizer, monitor = load_tokenizer(TargetSettings(path=str(folder / "vl"))), RecordingMonitor()
    found = list(iterate_conversations(write_prompts(folder)))
    assert len(conversation_suite("own", found, tokenizer, monitor).prompts) == 5
    assert "own: dropped 5 prompts with images: no images are read here" in monitor.text
    with pytest.raises(UserError, match="expected prompts, found none without images"):
        conversation_suite("own", found[:3], tokenizer, monitor)


def test_a_run_goes_on_without_the_images_of_a_target_that_has_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_workshop(folder)
    write_prompts(folder)
    monkeypatch.setattr(images, "_TOKEN_KINDS", ("pixel_values",))
    result = draftlab(folder, "run", "small.yaml", "target=vl", "export.formats=[]")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert said.count("dropped 5 conversations with image parts: the decoder of a Llava") == 2
    monkeypatch.undo()
    monkeypatch.setattr(images, "_is_plain", lambda name, *_: name == "inputs_embeds")
    words = ("target=vl", "name=late", "prompts.max_prompts=7")
    result = draftlab(folder, "prepare", "small.yaml", *words)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "answers: dropped 5 prompts (first: one-0): expected images that are embeddings" in said


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("position_ids", torch.arange(4)[None], True),
        ("position_ids", torch.arange(4).expand(3, 1, 4), False),  # of Qwen's images
        ("position_ids", torch.tensor([[0, 1, 1, 2]]), False),
        ("attention_mask", torch.ones(1, 4), True),
        ("attention_mask", {"full_attention": None}, False),  # Gemma 3's, of both directions
        ("deepstack_visual_embeds", [torch.ones(1)], False),
        ("use_cache", False, True),
    ],
)
def test_a_decoder_is_given_nothing_but_embeddings(name: str, value: Any, plain: bool) -> None:
    assert _is_plain(name, value, torch.zeros(1, 4, dtype=torch.int64)) == plain


def test_a_photo_stands_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # as cameras that were held upright write it
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=exif)
    assert ImageFile(tmp_path, "a.jpg").open().size == (30, 40)


def test_other_images_are_other_samples_and_prompts(tmp_path: Path) -> None:
    one, other = ((ImageFile(tmp_path, picture(tmp_path / f"{n}.png", n).name),) for n in (0, 1))
    hashes = [SampleTable.of([Sample("a", [1], [0], images=i)]).sha256 for i in ((), one, other)]
    asks = [{"role": "user", "content": "?"}]
    digests = [prompt_digest(Conversation("a", asks, "", images=i)) for i in ((), one, other)]
    assert len({*hashes}) == len({*digests}) == 3


def test_a_copy_in_the_run_folder_has_the_bytes(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 0)
    copy = ImageFile(tmp_path, "a.png").copy_to(tmp_path / "run")
    assert copy.read() == path.read_bytes()
    assert copy.name == f"images/{copy.sha256}"
