"""The wheels that the embedded target's corpus is made of, pinned, fetched and checked.

The text is Python source from permissively licensed packages of the Python package index, each
pinned by version and sha256 in `corpus.json`. The standard library is left out: no requirement
can pin it, it would be whatever interpreter happens to run.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from email.parser import Parser
from pathlib import Path

PINS = Path(__file__).with_name("corpus.json")
PLATFORMS = ("2_28", "2_27", "2_24", "2_17")  # manylinux tags of the compiled wheels among the pins
PERMISSIVE = {
    "MIT",
    "MIT-0",
    "0BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "Apache-2.0",
    "ISC",
    "Zlib",
    "PSF-2.0",
    "CC0-1.0",
    "Unlicense",
    "BSL-1.0",
}
# Free-text licences and classifiers, most telling first; matched against the start of the text.
KNOWN = (
    (r"apache", "Apache-2.0"),
    (r"python software foundation|matplotlib", "PSF-2.0"),
    (r"mit\b", "MIT"),
    (r"bsd|new bsd", "BSD-3-Clause"),
    (r"isc\b", "ISC"),
)


@dataclass(frozen=True)
class Pin:
    """One wheel: what to fetch and under which licence (SPDX expression) it may be used."""

    package: str
    version: str
    licence: str
    file: str
    sha256: str


def licence_of(wheel: Path) -> str:
    """SPDX expression from a wheel's METADATA; ValueError unless every part is permissive."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        meta = Parser().parsestr(archive.read(name).decode("utf-8", "replace"))
    expression = meta.get("License-Expression")
    if expression:
        parts = re.split(r"\s+(?:AND|OR)\s+|[()]", expression)
        refused = {part for part in parts if part.strip()} - PERMISSIVE
        if refused:
            raise ValueError(f"{wheel.name}: licence {expression!r} has non-permissive {refused}")
        return str(expression)
    classifiers = [
        c.split("::")[-1].strip()
        for c in meta.get_all("Classifier", [])
        if c.startswith("License ::") and c.count("::") > 1
    ]
    # A free-text field may be a whole licence file; then only the classifiers can be trusted.
    for text in [*classifiers, (meta.get("License") or "").strip()[:60]]:
        if re.search(r"gpl|general public", text, re.I):
            raise ValueError(f"{wheel.name}: licence {text!r} is not permissive")
        for pattern, spdx in KNOWN:
            if re.match(rf"(license agreement for )?({pattern})", text.strip(), re.I):
                return spdx
    raise ValueError(f"{wheel.name}: no permissive licence found in {classifiers} / License field")


def pin_wheels(folder: Path) -> list[Pin]:
    """Pins for every wheel in `folder` (how `corpus.json` is renewed: download, then pin)."""
    pins = []
    for wheel in sorted(folder.glob("*.whl")):
        package, version = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        pins.append(Pin(package.replace("_", "-"), version, licence_of(wheel), wheel.name, digest))
    return pins


def read_pins(path: Path = PINS) -> list[Pin]:
    """The pinned wheels."""
    return [Pin(**row) for row in json.loads(path.read_text())]


def write_pins(pins: Iterable[Pin], path: Path = PINS) -> None:
    """Write `corpus.json`, one pin a line."""
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(pin)) for pin in pins) + "\n]\n")


def fetch(pins: list[Pin], folder: Path) -> None:
    """Download the pins missing from `folder` with pip, then verify every hash and licence."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [pin for pin in pins if not (folder / pin.file).exists()]
    if missing:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
            for pin in missing:
                print(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}", file=requirements)
            requirements.flush()
            tags = [f"--platform=manylinux_{tag}_x86_64" for tag in PLATFORMS]
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--no-deps",
                    "--require-hashes",
                    "--only-binary=:all:",
                    "--implementation=cp",
                    "--python-version=3.12",
                    *tags,
                    "--platform=manylinux2014_x86_64",
                    "-d",
                    str(folder),
                    "-r",
                    requirements.name,
                ],
                check=True,
            )
    for pin in pins:
        found = hashlib.sha256((folder / pin.file).read_bytes()).hexdigest()
        if found != pin.sha256:
            raise ValueError(f"{folder / pin.file}: sha256 {found}, expected {pin.sha256}")
        if licence_of(folder / pin.file) != pin.licence:
            raise ValueError(f"{pin.file}: the licence differs from corpus.json")
