"""A tiny random LLaVA with its processor, and pictures for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from tests.helpers.toys import LLAMA3_TEMPLATE, toy_config, toy_tokenizer

IMAGE, POSITIONS = "<image>", 4
_PARTS = (
    "(message['content'] if message['content'] is string else parts(message['content'])) | trim"
)
TEMPLATE = (
    "{%- macro parts(content) %}{%- for part in content %}"
    "{{- '<image>' if part['type'] == 'image' else part['text'] }}{%- endfor %}{%- endmacro %}\n"
    + LLAMA3_TEMPLATE.replace("message['content'] | trim", _PARTS)
)


def llava_folder(path: Path, *, layers: int = 4, hidden: int = 32) -> Path:
    """Save a float32 LLaVA whose images, of 28 x 28 pixels, take `POSITIONS` positions."""
    tokenizer = toy_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=28, patch_size=14, projection_dim=16, initializer_range=0.2,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision,
        text_config=toy_config(layers=layers, hidden=hidden, vocab=len(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=POSITIONS,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(config).float()
        for weight in model.model.multi_modal_projector.parameters():
            torch.nn.init.normal_(weight, std=0.2)  # so that images change answers
    stops = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|end_of_text|>"])
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[1])
    model.save_pretrained(path)
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
    LlavaProcessor(
        image_processor, tokenizer, patch_size=14, vision_feature_select_strategy="default",
        image_token=IMAGE, num_additional_image_tokens=1, chat_template=TEMPLATE,
    ).save_pretrained(path)  # fmt: skip
    return path


def picture(path: Path, seed: int, size: tuple[int, int] = (40, 30)) -> Path:
    """Write a random picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def asked(*parts: str, **fields: Any) -> dict[str, Any]:
    """Return a line of a user's turn; parts that end in .png are images."""
    content = [
        {"type": "image", "image": part}
        if part.endswith(".png")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": content}], **fields}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """Write lines of JSON."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
