"""The identity of a store: its target and its format."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftlab.errors import UserError
from draftlab.files import same_fingerprint

if TYPE_CHECKING:
    from draftlab.target_model.metadata import TargetMetadata
    from draftlab.target_model.model import Target

StoreDtype = Literal["bfloat16", "float32", "fp8"]


@dataclass(frozen=True)
class StoreIdentity:
    """The target and the format of a store. A store is used where all but the name agree."""

    target_name: str
    target_fingerprint: str
    tokenizer_sha256: str
    template_sha256: str
    boundaries: tuple[int, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: StoreDtype

    @classmethod
    def of(
        cls,
        target: Target | TargetMetadata,
        *,
        tokenizer_sha256: str,
        template_sha256: str,
        boundaries: tuple[int, ...],
        dtype: StoreDtype,
    ) -> StoreIdentity:
        """Return the identity of a target's store; only the last component of a path is kept."""
        is_local = target.name.startswith(("/", ".", "~"))
        return cls(
            target.folder.resolve().name if is_local else target.name,
            target.fingerprint,
            tokenizer_sha256,
            template_sha256,
            tuple(boundaries),
            target.num_layers,
            target.hidden_size,
            target.vocab_size,
            dtype,
        )

    def tensor_shapes(self, records: int, tokens: int) -> dict[str, list[int]]:
        """Return the names and shapes of the tensors of a shard with so many records and tokens."""
        width = self.hidden_size
        per_token = {name: [tokens] for name in ("tokens", "spans", "logsumexp", "argmax")}
        scales = {"scales": [tokens, len(self.boundaries)]} if self.dtype == "fp8" else {}
        return {
            "features": [tokens, len(self.boundaries) * width],
            **scales,
            "last": [tokens, width],
            "offsets": [records + 1],
            **per_token,
        }

    @property
    def fp8_boundaries(self) -> int:
        """The number of boundaries whose features are stored in 8 bits."""
        return len(self.boundaries) if self.dtype == "fp8" else 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in a shard."""
        boundaries, width = len(self.boundaries), self.hidden_size
        state_bytes = {
            "bfloat16": 2 * (boundaries + 1) * width,
            "float32": 4 * (boundaries + 1) * width,
            "fp8": boundaries * (width + 4) + 2 * width,
        }
        return state_bytes[self.dtype] + 16

    def check(
        self,
        expected: StoreIdentity,
        where: Path,
        do: str = "name another store folder, or remove this one to record it again",
    ) -> None:
        """Check that the store with this identity is one of the expected identity.

        Args:
            do: what to do about another one.

        Raises:
            UserError: every field that differs, with both values.
        """
        actual_fields, expected_fields = asdict(self), asdict(expected)
        # The fingerprint decides whether it is the same target; folders may be renamed.
        differences = [
            f"{key}: expected {_as_text(expected_fields[key])}, found {_as_text(value)}"
            for key, value in actual_fields.items()
            if key != "target_name" and not same_fingerprint(value, expected_fields[key])
        ]
        if differences:
            raise UserError(
                f"this store was recorded from {self.target_name!r} and does not fit "
                f"{expected.target_name!r}:\n  " + "\n  ".join(differences),
                where=where,
                do=do,
            )


def _as_text(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)
