"""What a model offers: where its rotation is and which configurations describe it. Measured, never listed by name."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .functional import rope_frequencies
from .journal import Journal
from .methods.base import Method, Rope

if TYPE_CHECKING:
    from .twin import Plan

_SCALED_TYPES = {"linear", "dynamic", "yarn", "llama3", "longrope", "hf_posenc"}
_SCALING_KEYS = {
    "type", "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "short_factor", "long_factor", "low_freq_factor", "high_freq_factor",
}  # fmt: skip
_WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}


class UnsupportedMethodError(ValueError):
    """A method and a model that do not fit; the text names both and what would fit."""


class Wrapper(nn.Module):
    """A module in place of another, ``inner``, whose attributes it shows."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("inner")
            if inner is None:
                raise
            return getattr(inner, name)


class Aside(nn.ModuleList):
    """Rotary modules that stand beside one of the model's own, for single layers."""


@dataclass
class Slot:
    """One set of frequencies in a rotary module: ``label`` is a layer type, or None where all layers share it."""

    label: str | None

    @property
    def buffer(self) -> str:
        return f"{self.label}_inv_freq" if self.label else "inv_freq"

    @property
    def scaling(self) -> str:
        return f"{self.label}_attention_scaling" if self.label else "attention_scaling"


@dataclass
class Site:
    """A rotary module where it hangs in the model."""

    parent: nn.Module
    name: str
    module: nn.Module

    @property
    def config(self) -> PreTrainedConfig:
        return self.module.config

    @property
    def slots(self) -> list[Slot]:
        buffers = [name for name, _ in self.module.named_buffers(recurse=False) if _holds_frequencies(name)]
        return [Slot(name.removesuffix("inv_freq").rstrip("_") or None) for name in buffers]

    def entry(self, slot: Slot) -> dict[str, Any]:
        """The part of ``config.rope_parameters`` that describes ``slot``."""
        parameters = self.config.rope_parameters
        return parameters[slot.label] if slot.label else parameters

    def rebuild(self, config: PreTrainedConfig) -> nn.Module:
        """A rotary module of the same class from another configuration, float32 on the same device."""
        module = type(self.module)(config=config)
        device = next(self.module.buffers()).device
        return module.to(device) if device.type != "meta" else module

    def plain(self) -> nn.Module:
        """The rotary module as it was trained, before any scaling."""
        config = unscaled_config(self.config)
        module = self.rebuild(config)
        if all(getattr(module, slot.buffer).shape == getattr(self.module, slot.buffer).shape for slot in self.slots):
            return module
        # Some classes get the width right only in a scaled type: scale by one.
        for slot in self.slots:
            entry = config.rope_parameters[slot.label] if slot.label else config.rope_parameters
            entry.update(rope_type="linear", factor=1.0)
        return self.rebuild(config)


class Native(ABC):
    """What tells a model without a rotation where its tokens are. Subclasses register in ``NATIVES``.

    Attributes:
        title: what a user would call it
        own: the methods that a model of this kind was trained with
        owners: the models whose forward is told positions; a scheme is kept on the first
    """

    title: ClassVar[str]
    own: ClassVar[tuple[type[Method], ...]] = ()
    owners: list[PreTrainedModel]

    @classmethod
    @abstractmethod
    def find(cls, root: PreTrainedModel) -> "Native | None":
        """That of the model ``root``; None where there is none of this kind."""

    @property
    @abstractmethod
    def trained_length(self) -> int:
        """Tokens the model was trained on."""

    @abstractmethod
    def plans(self, family: "Family") -> "list[Plan]":
        """How the attention modules of one of the owners would turn, if the model had a rotation."""

    @abstractmethod
    def silence(self, journal: Journal) -> None:
        """Take it away, so that tokens carry no position."""

    def check_use(self) -> None:  # noqa: B027 (most can be taken away)
        """Raises:
        UnsupportedMethodError: it cannot be taken away, since the model does more with it.
        """

    def knows(self, method: Method) -> bool:
        """Whether the model was trained with positions of this kind, and carries ``method`` out itself."""
        return False

    def adopt(self, method: Method, journal: Journal) -> bool:
        """Let the model carry out what it ``knows``; returns whether plain transformers can build the same."""
        raise NotImplementedError

    def settings(self, method: Method) -> dict[str, Any]:
        """What of the configuration ``method`` changes, as it is before; a reload without the scheme puts it back."""
        return {}

    def align(self, journal: Journal) -> None:  # noqa: B027 (most have nothing to align)
        """Bring modules in line with a configuration that was edited."""

    @property
    def advice(self) -> str:
        """What to do about texts beyond the trained length."""
        return "See hf_posenc.methods(model) for what can take its place."


NATIVES: list[type[Native]] = []


@dataclass
class Family:
    """A model seen by this package.

    Attributes:
        root: the outermost transformers model, whose config is saved
        owner: the model inside it that calls the rotary modules (``LlamaModel``, not ``LlamaForCausalLM``)
        sites: the rotary modules of its text decoder
        native: what it has instead of them
    """

    root: PreTrainedModel
    owner: PreTrainedModel
    sites: list[Site]
    native: Native | None = None

    def each(self) -> "list[Family]":
        """One family for every model in it that is told positions, such as encoder and decoder."""
        owners = self.native.owners if self.native else [self.owner]
        return [Family(self.root, owner, self.sites, self.native) for owner in owners]

    @property
    def config(self) -> PreTrainedConfig:
        """The text configuration."""
        return self.owner.config

    @property
    def title(self) -> str:
        return f"{type(self.root).__name__} ({self.config.model_type})"


def locate(model: nn.Module) -> Family:
    """Find the text decoder and its rotary modules, under any wrapper (PEFT, DDP).

    Raises:
        TypeError: no transformers model.
        UnsupportedMethodError: no rotary module that this package can rebuild.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"hf_posenc patches a loaded transformers model, got {type(model).__name__}.")
    root = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if root is None:
        raise TypeError(f"{type(model).__name__} holds no transformers model, so there is nothing to patch.")
    text_config = text_config_of(root.config)
    # The types: a model once patched through its inner model has a configuration of its own there.
    owners = [owner for owner, _ in _rotary_modules(root) if owner.config.model_type == text_config.model_type]
    owners.sort(key=lambda owner: owner.config is not text_config)
    if owners and getattr(text_config, "alibi", False):
        raise UnsupportedMethodError(
            f"{type(root).__name__} ({text_config.model_type}) has ALiBi, which its own attention adds; it leaves its "
            "rotary module unused."
        )
    if owners:
        return Family(root, owners[0], rotary_sites(owners[0]))
    for kind in NATIVES:
        native = kind.find(root)
        if native is not None:
            return Family(root, native.owners[0], [], native)
    raise UnsupportedMethodError(
        f"{type(root).__name__} ({root.config.model_type}) has no rotary module with frequencies in its text decoder, "
        "nor positions of a kind known here."
    )


def require_rotation(family: Family, what: str, grounded: bool) -> None:
    """Args:
        grounded: whether ``what`` can stand on ``rope``

    Raises:
        UnsupportedMethodError: the model has no rotation for ``what``.
    """
    if family.native is not None:
        advice = ": put one under it, as in 'rope+yarn:factor=4' or 'self_extend:group_size=4,window=512+rope'"
        raise UnsupportedMethodError(
            f"{family.title} has {family.native.title} and no rotation of its own, which {what} needs"
            f"{advice if grounded else ''}."
        )


def require_rotary(family: Family) -> None:
    """Raises:
    UnsupportedMethodError: there is no rotary module, whose frequencies could be looked at.
    """
    if family.native is not None:
        raise UnsupportedMethodError(
            f"{family.title} has {family.native.title} and no rotary module: there are no frequencies to look at. "
            f"{family.native.advice}"
        )


def rotary_sites(owner: PreTrainedModel) -> list[Site]:
    """The rotary modules that belong to ``owner`` itself, in a fixed order."""
    return [site for inner, site in _rotary_modules(owner) if inner is owner]


def text_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text decoder inside ``config``, which is often the same object."""
    if config.is_encoder_decoder:
        return config
    return config.get_text_config(decoder=True)


def _holds_frequencies(buffer: str) -> bool:
    return buffer.endswith("inv_freq") and "original" not in buffer


def _rotary_modules(owner: PreTrainedModel, module: nn.Module | None = None) -> Iterator[tuple[PreTrainedModel, Site]]:
    """Every rotary module below ``module`` in the order of the model, with the innermost transformers model around."""
    parent = owner if module is None else module
    for name, child in parent.named_children():
        if any(_holds_frequencies(buffer) for buffer, _ in child.named_buffers(recurse=False)):
            if isinstance(getattr(child, "config", None), PreTrainedConfig):
                yield owner, Site(parent, name, child)
        elif not isinstance(child, Aside):
            yield from _rotary_modules(child if isinstance(child, PreTrainedModel) else owner, child)


def is_nested(rope_parameters: dict[str, Any]) -> bool:
    """Whether ``rope_parameters`` holds one dictionary per layer type."""
    return any(isinstance(value, dict) for value in rope_parameters.values())


def is_global(slot: Slot) -> bool:
    """Whether a slot serves layers that see the whole text. Windowed layers with frequencies of their own never meet
    a distance beyond their window, so no method touches those."""
    return not (slot.label and ("sliding" in slot.label or "chunked" in slot.label))


def unscaled(entry: dict[str, Any]) -> dict[str, Any]:
    """A ``rope_parameters`` entry without the scaling it may carry; theta, sections and unknown keys stay."""
    kept = {key: value for key, value in entry.items() if key not in _SCALING_KEYS}
    if kept.get("rope_type", "default") in _SCALED_TYPES:
        kept["rope_type"] = "default"
    return kept


def original_length(config: PreTrainedConfig, entry: dict[str, Any]) -> int:
    """Tokens the model was trained on before any extension that its configuration knows of.

    A checkpoint with a linear factor and no word on its original length is taken as transformers, DeepSeek and Gemma 3
    write it: ``max_position_embeddings`` is the length after the extension. Some old checkpoints mean the one before.
    """
    for length in (
        entry.get("original_max_position_embeddings"),
        getattr(config, "original_max_position_embeddings", None),
    ):
        if length:
            return int(length)
    if entry.get("rope_type") == "linear":
        return int(config.max_position_embeddings / entry["factor"])
    return int(config.max_position_embeddings)


def with_rope(config: PreTrainedConfig, rope_parameters: dict[str, Any]) -> PreTrainedConfig:
    """A shallow copy of ``config`` with other rope parameters."""
    changed = copy.copy(config)
    changed.rope_parameters = rope_parameters
    return changed


def unscaled_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A shallow copy of ``config`` whose rotation carries no scaling."""
    parameters = config.rope_parameters
    if is_nested(parameters):
        plain = {key: unscaled(value) if isinstance(value, dict) else value for key, value in parameters.items()}
    else:
        plain = unscaled(parameters)
    return with_rope(config, copy.deepcopy(plain))


def read_rope(site: Site, slot: Slot, plain: nn.Module) -> Rope:
    """What ``slot`` was trained with.

    Args:
        plain: ``site.plain()``
    """
    config, entry = site.config, site.entry(slot)
    if not getattr(config, "max_position_embeddings", None):
        raise UnsupportedMethodError(f"The configuration of {config.model_type} does not say how long it was trained.")
    return Rope(
        frequencies=getattr(plain, slot.buffer).to("cpu", torch.float64),
        theta=float(entry["rope_theta"]),
        length=original_length(config, entry),
        configured_length=int(config.max_position_embeddings),
        head_dim=_head_dim(config, slot),
        rope_type=unscaled(entry).get("rope_type", "default"),
        parameters=entry,
    )


def rope_to_be(family: Family) -> Rope:
    """The rotation that a model without one could have: plain RoPE over its whole heads."""
    assert family.native is not None
    width, length = _head_dim(family.config), family.native.trained_length
    return Rope(rope_frequencies(10000.0, width), 10000.0, length, length, width, "default", {})


def _head_dim(config: PreTrainedConfig, slot: Slot | None = None) -> int:
    if getattr(config, "is_heterogeneous", False) and slot is not None and slot.label:
        config = config.per_layer_config[slot.label]
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def core_of(module: Any) -> Any:
    """A module without what PEFT puts around it."""
    while True:
        inner = vars(module).get("_modules", {}) if isinstance(module, nn.Module) else {}
        wrapped = inner.get("original_module", inner.get("base_layer"))
        if wrapped is None:
            return module
        module = wrapped


def live_modules(owner: nn.Module) -> dict[str, nn.Module]:
    """Modules by the names a fresh model would give them, whatever wraps them now."""
    return {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): module
        for name, module in owner.named_modules()
    }
