"""Runs llama.cpp's convert_hf_to_gguf.py on targets whose tokenizer it does not know by its hash.

    python gguf_wrapper.py path/to/convert_hf_to_gguf.py llama-bpe MODEL --outfile model.gguf …

Everything after the name of the pre-tokenizer is the converter's own; where it knows the tokenizer
itself, or the name is empty, nothing is changed. This file imports nothing of draftlab: it runs in
the converter's own environment.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> None:
    """Command line."""
    if len(sys.argv) < 3:
        sys.exit((__doc__ or "").strip())
    script, name, *rest = sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *rest]
    converter = importlib.import_module(Path(script).stem)
    if name:
        try:
            home = importlib.import_module("conversion.base")
        except ModuleNotFoundError:  # older trees keep all in one file
            home = converter
        known = home.TextModel.get_vocab_base_pre

        def get_vocab_base_pre(self: object, tokenizer: object) -> str:
            try:
                return known(self, tokenizer)
            except NotImplementedError:
                return name

        home.TextModel.get_vocab_base_pre = get_vocab_base_pre
    converter.main()


if __name__ == "__main__":
    main()
