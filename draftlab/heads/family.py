"""A family of draft heads as an object, and the registry of families.

Only `draftlab/families/` knows families by name; all other code uses the capabilities of `Family`.
A family from outside the package is registered with `register`, or by an entry point of the group
`draftlab.families`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from draftlab.errors import UserError

if TYPE_CHECKING:  # the rooms above this one
    from draftlab.engine.drafter import HeadDrafter
    from draftlab.export.foreign_config import ForeignConfig
    from draftlab.export.layout import Layout
    from draftlab.heads.config import HeadConfig
    from draftlab.heads.head import DraftHead
    from draftlab.progress import Monitor
    from draftlab.train.objectives.objective import Objective
    from draftlab.train.settings import HeadSettings

ENTRY_POINTS = "draftlab.families"


class Family(ABC):
    """Config, module, objective, drafter, layouts and capabilities of a family of draft heads.

    The methods import what they need when they are called, so that a family can be looked up
    without loading torch.

    Attributes:
        name: key in recipes (`head.family`) and in draftlab.json.
        config_type, head_type, drafter_type: its classes, as "module:name". A family may implement
            `config_class`, `new_head` and `new_drafter` instead.
        native_type, layouts_type: the functions for `native_config` and `layouts`, as
            "module:name"; empty: none.
        title: name of its heads in messages. description: a line for model cards and READMEs.
        drafting: "chain": one draft token a pass; "parallel": all draft tokens in one pass.
        max_layers: largest number of decoder layers.
        options: settings of `head:` that apply to its heads, beside their shape.
        intermediate_size_names: the target's config fields, the first that is set, with the width
            of a new head's feed-forward layer.
        reads_last_state: whether the only feature is the target's last state, so that the store
            needs no boundaries.
        uses_target_lm_head: whether the output is the target's last state, so that heads draft
            with its lm_head as it is.
        whole_vocabulary: whether heads always draft over the target's whole vocabulary.
        freezes_lm_head: whether lm_head is the target's (its rows of the draft vocabulary), and is
            not trained.
        has_mask_token: whether masked slots have a mask token.
        trains_mask: whether the mask token's embedding is trained, so that heads store embeddings
            of their own.
        starts_from: other families whose heads a new head can start from (`head.init`).
        architectures: names of its heads in other programs' config.json.
        speculators_type: its `speculators_model_type`; None: the library has none.
        norm_flag_must_be_named: whether programs disagree about the default of
            `norm_before_residual` in the speculators layout.
        vllm_method: `method` of vLLM's speculative config; empty: vLLM has none.
        vllm_options: further keys of that config.
        norms_residual: whether `norm_before_residual` is on by default: it raises acceptance.
        has_own_loss: whether `train.loss` has no effect on its heads.
        anchor_by_default: whether other programs' folders that do not say it are in the anchor
            layout of blocks.
        default_rope: whether servers know only the plain RoPE for its heads, without scaling.
        has_target_rope: whether heads have their target's RoPE as it is.
        rotates_pairs: whether RoPE rotates neighbouring pairs, as in Llama 4, and not halves.
    """

    name: ClassVar[str]
    config_type: ClassVar[str]
    head_type: ClassVar[str]
    drafter_type: ClassVar[str]
    native_type: ClassVar[str] = ""
    layouts_type: ClassVar[str] = ""
    title: ClassVar[str]
    description: ClassVar[str]
    drafting: ClassVar[Literal["chain", "parallel"]] = "chain"
    max_layers: ClassVar[int] = 4
    options: ClassVar[frozenset[str]] = frozenset()
    intermediate_size_names: ClassVar[tuple[str, ...]] = ("intermediate_size",)
    reads_last_state: ClassVar[bool] = False
    uses_target_lm_head: ClassVar[bool] = False
    whole_vocabulary: ClassVar[bool] = False
    freezes_lm_head: ClassVar[bool] = False
    has_mask_token: ClassVar[bool] = False
    trains_mask: ClassVar[bool] = False
    starts_from: ClassVar[frozenset[str]] = frozenset()
    architectures: ClassVar[tuple[str, ...]] = ()
    speculators_type: ClassVar[str | None] = None
    norm_flag_must_be_named: ClassVar[bool] = False
    vllm_method: ClassVar[str] = ""
    vllm_options: ClassVar[dict[str, Any]] = {}
    norms_residual: ClassVar[bool] = False
    has_own_loss: ClassVar[bool] = False
    anchor_by_default: ClassVar[bool] = False
    default_rope: ClassVar[bool] = False
    has_target_rope: ClassVar[bool] = False
    rotates_pairs: ClassVar[bool] = False

    def config_class(self) -> type[HeadConfig]:
        """Return the config class, the model of draftlab.json."""
        return resolve_name(self.config_type)

    def new_head(self, config: HeadConfig) -> DraftHead:
        """Return a head with uninitialised values."""
        return resolve_name(self.head_type)(config)

    @abstractmethod
    def objective(self) -> Objective:
        """Return the training objective of its heads."""

    def new_drafter(self, head: DraftHead, k: int, **options: Any) -> HeadDrafter:
        """Return a drafter of `k` tokens a step; `options` are those of `HeadDrafter`."""
        return resolve_name(self.drafter_type)(head, k, **options)

    def layouts(self) -> dict[str, Layout | str]:
        """Return the layout in each program's format, or the reason why there is none."""
        return resolve_name(self.layouts_type)(self) if self.layouts_type else {}

    def native_config(self, config: HeadConfig, dtype: str) -> dict[str, Any]:
        """Return the head folder's config.json for vLLM; empty: vLLM cannot load the folder."""
        return resolve_name(self.native_type)(config, dtype) if self.native_type else {}

    def check_settings(self, settings: HeadSettings) -> None:
        """Raise a ValueError if a setting of a new head contradicts the family or another one."""
        if unknown := sorted(settings.chosen_options() - self.options):
            raise ValueError(
                f"{self.title} heads have no {', '.join(unknown)}: leave the setting out, or "
                "choose another family"
            )

    def config_fields(self, settings: HeadSettings, target: Any) -> dict[str, Any]:
        """Return the config fields of a new head that only this family has; target: transformers'
        config of the target's text model.
        """
        fields = {name: getattr(settings, name) for name in self.options - {"mask_token"}}
        return {name: value for name, value in fields.items() if value is not None}

    def head_of_target(
        self, config: HeadConfig, folder: Path, monitor: Monitor, *, meta: bool = False
    ) -> DraftHead | None:
        """Return the head in the target's own checkpoint, for training to start from; None: it has
        none. Training says so if the family expects one.

        With `meta` only headers of the files are read, and the head is on the meta device. Raises a
        `UserError` if a tensor is missing, or has another shape or quantised values.
        """
        return None

    def as_exported(self, head: DraftHead, folder: Path) -> DraftHead:
        """Return a trained head rounded to what exports for a target in this folder can hold, so
        that it is measured as it is served."""
        return head

    def foreign_fields(self, config: ForeignConfig, layout: str) -> dict[str, Any]:
        """Return the config fields of an imported head that only this family has, from config.json
        in a layout, "speculators" or "native"; raise a ValueError if a key that it needs is
        missing, or has a value that its heads have not.
        """
        if config.slides:
            raise ValueError("layer_types: expected full_attention alone, found a sliding layer")
        return {}

    def reads(self, architecture: str, config: ForeignConfig, tensors: Collection[str]) -> bool:
        """Return whether another program's config.json describes a head of this family."""
        return architecture in self.architectures


_registry: dict[str, Family] = {}
_loaded = False


def register(family: Family) -> Family:
    """Add a family to the registry; raise a ValueError if another family has its name."""
    other = _registry.get(family.name)
    if other is not None and type(other) is not type(family):
        raise ValueError(
            f"the family name {family.name!r} belongs to {type(other).__name__} already"
        )
    _registry[family.name] = family
    return family


def families() -> Iterable[Family]:
    """Return all registered families, those of the package first."""
    _load()
    return list(_registry.values())


def family_names() -> list[str]:
    """Return the names of all registered families."""
    return [family.name for family in families()]


def get_family(name: str) -> Family:
    """Return the family of a name; raise a `UserError` if none of this name is registered."""
    if name not in _registry:
        _load()
    if name not in _registry:
        raise UserError(
            f"expected a family of heads out of {', '.join(family_names())}, found {name!r}",
            where="head.family",
            do="install the package that registers it, or correct the name",
        )
    return _registry[name]


def _load() -> None:
    """Register the package's own families, then those of installed packages."""
    global _loaded
    if not _loaded:
        _loaded = True
        import_module("draftlab.families")
        for entry in entry_points(group=ENTRY_POINTS):
            try:
                register(entry.load()())
            except Exception as error:  # code of another package may raise anything
                _loaded = False
                package = entry.dist.name if entry.dist else "?"
                raise UserError(
                    f"expected a family of heads, found {type(error).__name__}: {error}",
                    where=f"the package {package}, entry point {entry.name} = {entry.value}",
                    do=f"repair the package, or remove it: pip uninstall {package}",
                ) from error
