"""Run llama.cpp's convert_hf_to_gguf.py on targets whose tokenizer hash it does not know.

    python gguf_wrapper.py path/to/convert_hf_to_gguf.py llama-bpe MODEL --outfile model.gguf …

The arguments after the name of the pre-tokenizer are the converter's. If the converter knows the
tokenizer, or the name is empty, nothing is changed. This file imports nothing of draftlab: it runs
in the converter's environment.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> None:
    """Run the command line."""
    if len(sys.argv) < 3:
        sys.exit((__doc__ or "").strip())
    script, name, *rest = sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *rest]
    converter = importlib.import_module(Path(script).stem)
    if name:
        try:
            module = importlib.import_module("conversion.base")
        except ModuleNotFoundError:  # older versions are a single file
            module = converter
        original = module.TextModel.get_vocab_base_pre

        def get_vocab_base_pre(self: object, tokenizer: object) -> str:
            try:
                return original(self, tokenizer)
            except NotImplementedError:
                return name

        module.TextModel.get_vocab_base_pre = get_vocab_base_pre
    converter.main()


if __name__ == "__main__":
    main()
