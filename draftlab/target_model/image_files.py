"""Files of images that prompts name: which are read, and what stands for them in a text."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.errors import UserError
from draftlab.files import atomic_path

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "\ufdd0"
"""Placeholder of an image in a message's text. Unicode keeps this code point for internal use."""
FORMATS = ("JPEG", "PNG", "WEBP")
MAX_BYTES, MAX_PIXELS = 2**26, 2**26
_HELP = "give a JPEG, PNG or WebP file in or below the folder of the prompts' file"


@dataclass(frozen=True)
class ImageFile:
    """An image of a prompt, by the name that a file of conversations has for it, in or below the
    `folder` of this file.
    """

    folder: Path
    name: str

    @property
    def path(self) -> Path:
        """Return where the file is."""
        return self.folder / self.name

    def read(self) -> bytes:
        """Return the bytes of the file; raise a `UserError` if it cannot be read, is larger than
        `MAX_BYTES`, or outside of the folder.
        """
        try:
            path, folder = self.path.resolve(), self.folder.resolve()
            if not path.is_relative_to(folder):
                raise self._error(f"an image below {folder}", "a path that leaves it")
            if not path.is_file():
                raise self._error("an image", "no such file")
            if (size := path.stat().st_size) > MAX_BYTES:
                raise self._error(f"an image of at most {MAX_BYTES:,} bytes", f"{size:,}")
            return path.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:  # such as a loop of links
            raise self._error("an image", str(error)) from None

    @cached_property
    def sha256(self) -> str:
        """The hex SHA-256 of the file."""
        return hashlib.sha256(self.read()).hexdigest()

    def open(self) -> Image:
        """Return the image in RGB; raise a `UserError` if it is none, or has too many pixels."""
        from PIL import Image, ImageOps, UnidentifiedImageError

        content = BytesIO(self.read())
        try:
            with Image.open(content, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                return ImageOps.exif_transpose(image).convert("RGB")
        except UnidentifiedImageError:
            raise self._error("a JPEG, PNG or WebP image", "another file") from None
        except Image.DecompressionBombError:
            raise self._error(f"an image of at most {MAX_PIXELS:,} pixels", "more") from None
        except Exception as error:  # Pillow has many for what is damaged
            raise self._error("a whole image", str(error)) from None

    def copy_to(self, folder: Path) -> ImageFile:
        """Copy the file to `images/` of a run folder under its hash; return the copy."""
        copy = ImageFile(folder, f"images/{self.sha256}")
        if not copy.path.exists():
            with atomic_path(copy.path) as temporary:
                temporary.write_bytes(self.read())
        return copy

    def _error(self, expected: str, found: str) -> UserError:
        return UserError(f"expected {expected}, found {found}", where=self.path, do=_HELP)


Images = tuple[ImageFile, ...]


def content_parts(text: str) -> list[dict[str, str]]:
    """Return a message's text as the parts that chat templates read: texts and images."""
    pieces = [piece for piece in re.split(f"({MARK})", text) if piece]
    return [{"type": "image"} if one == MARK else {"type": "text", "text": one} for one in pieces]
