"""The parity drivers as modules: they are programs beside the package, not part of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parents[2] / "eval" / "parity")
if FOLDER not in sys.path:
    sys.path.append(FOLDER)

common = importlib.import_module("common")
vllm = importlib.import_module("parity_vllm")
transformers = importlib.import_module("parity_transformers")
speculators = importlib.import_module("parity_speculators")
llamacpp = importlib.import_module("parity_llamacpp")
random_heads = importlib.import_module("random_heads")
library = importlib.import_module("speculators_library")
