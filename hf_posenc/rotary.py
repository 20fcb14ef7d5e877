"""Frequencies put in place: the rotary modules rebuilt from an edited configuration, or filled by our own formula."""

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from . import twin
from .families import Aside, Family, Site, Slot, UnsupportedMethodError, Wrapper, is_global, read_rope, rope_to_be
from .journal import Journal
from .methods.base import FrequencyMethod, LengthMethod, Method, Rope
from .methods.bias import BiasMethod
from .methods.nope import NoPE
from .methods.position_map import PositionMap, Stack


class PatchedRotary(Wrapper):
    """A family's own rotary module whose frequencies stay float32 when the model is cast.

    ``model.to(torch.bfloat16)`` rounds the frequencies of a bare rotary module, which moves far positions.

    Attributes:
        moves: the method that says at which position the cache holds a token; None: at its own
        labels: of the layer types whose tokens move
        aside: modules with the rotations of single layers; theirs come as a mark on the answer of this one, which
            finds its way to the layers, into recomputations too
    """

    def __init__(self, inner: nn.Module, scheme: str):
        super().__init__(inner)
        self.scheme = scheme
        self.moves: PositionMap | None = None
        self.labels: list[str | None] = []

    def forward(self, *args, **kwargs):
        output = self.turn(*args, **kwargs)
        if "aside" in self._modules:
            first: Any = output if isinstance(output, torch.Tensor) else output[0]
            first._hf_posenc_aside = [other(*args, **kwargs) for other in self.aside]
        return output

    def turn(self, *args, **kwargs):
        if self.moves is not None:
            bound = inspect.signature(self.inner.forward).bind(*args, **kwargs)
            if bound.arguments.get("layer_type") in self.labels:
                bound.arguments["position_ids"] = self.moves.held(bound.arguments["position_ids"])
            args, kwargs = bound.args, bound.kwargs
        return self.inner(*args, **kwargs)

    def _apply(self, fn, recurse=True):
        kept = {name: buffer for name, buffer in self.inner.named_buffers() if buffer.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self.inner.get_buffer(name)
            if moved.dtype != torch.float32:
                owner, _, leaf = name.rpartition(".")
                self.inner.get_submodule(owner)._buffers[leaf] = buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        return self.scheme


Ropes = dict[int, list[tuple[Slot, Rope]]]
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rope types of transformers whose frequencies change with the length of each call."""


def read_ropes(family: Family) -> Ropes:
    """The trained rotation of every global slot, by the index of its site."""
    ropes = {}
    for index, site in enumerate(family.sites):
        plain = site.plain()
        ropes[index] = [(slot, read_rope(site, slot, plain)) for slot in site.slots if is_global(slot)]
    return ropes


def main_rope(family: Family, ropes: Ropes) -> Rope:
    """The trained rotation that speaks for the model: that of its first global slot.

    Raises:
        UnsupportedMethodError: every layer is windowed and has frequencies of its own.
    """
    for slots in ropes.values():
        for _, rope in slots:
            return rope
    if family.native is not None:
        return rope_to_be(family)
    raise UnsupportedMethodError(
        f"The layers of {family.title} that rotate see only a window, and those that see the whole text carry no "
        "position: no distance grows with the text, so there is nothing to scale."
    )


def write_frequencies(family: Family, method: FrequencyMethod, ropes: Ropes, journal: Journal) -> bool:
    """Give every global slot the frequencies of ``method``, through transformers' own keys where it has them.

    Returns:
        Whether plain transformers builds the same from the edited configuration.

    Raises:
        UnsupportedMethodError: the method changes which dimensions turn, and this family does not know how.
    """
    mark = len(journal.entries)
    if _write_natively(family, method, ropes, journal):
        return True
    journal.rollback(mark)
    strip_scaling(family, journal)
    tables = {index: [(slot, *method.frequencies(rope)) for slot, rope in slots] for index, slots in ropes.items()}
    fill_frequencies(family, method, tables, journal)
    return False


def fill_frequencies(
    family: Family, method: Method, tables: dict[int, list[tuple[Slot, torch.Tensor, float]]], journal: Journal
) -> None:
    """Rebuild every rotary module and write frequencies and factors into it.

    Args:
        tables: per site (slot, frequencies (dim / 2,), factor on cos and sin)
    """
    for index, site in enumerate(family.sites):
        fresh = site.rebuild(site.config)
        for slot, frequencies, factor in tables.get(index, []):
            buffer = getattr(fresh, slot.buffer)
            if buffer.shape != frequencies.shape:
                raise UnsupportedMethodError(
                    f"{method} turns {2 * len(frequencies)} dimensions, but the rotary module of {family.title} "
                    f"always turns {2 * len(buffer)}."
                )
            if factor != 1.0 and not hasattr(fresh, slot.scaling):
                raise UnsupportedMethodError(f"{family.title} has no place for the attention factor of {method}.")
            buffer.copy_(frequencies)
            if hasattr(fresh, slot.scaling):
                setattr(fresh, slot.scaling, factor)
            if not _obeys(fresh, slot, frequencies, factor):
                raise UnsupportedMethodError(
                    f"The rotary module of {family.title} does not turn by the frequencies it holds, and transformers "
                    f"has no key for {method} on it."
                )
        _install(site, fresh, method, journal)


def keep_frequencies(family: Family, method: Method | None, ropes: Ropes, journal: Journal) -> None:
    """Put every rotary module under our care with the frequencies it has.

    Raises:
        UnsupportedMethodError: they change with the length of each call.
    """
    for index, site in enumerate(family.sites):
        for slot, _ in ropes.get(index, []):
            kind = site.entry(slot).get("rope_type", "default")
            if kind in LENGTH_DEPENDENT:
                if method is None:
                    raise UnsupportedMethodError(
                        f"The {kind!r} scaling of this checkpoint changes with the length of each call: give the "
                        "other layers a fixed one, as in default='yarn:factor=4' or 'irope+yarn:factor=4'."
                    )
                raise UnsupportedMethodError(
                    f"The {kind!r} scaling of this checkpoint changes with the length of each call: put {method.name} "
                    f"over a fixed one, such as '{method}+yarn:factor=4' or '+longrope:switch=long'."
                )
        _install(site, site.rebuild(site.config), method, journal)


def prepare(family: Family, method: Method | None, ropes: Ropes, journal: Journal) -> None:
    """Give every slot of ``ropes`` the rotation that a method wants in the cache, and lays its own on top of.

    Args:
        method: a frequency method that does not act in attention is written through transformers' keys where it can
            be; None leaves all slots their own
    """
    if isinstance(method, LengthMethod) and acts_in_attention(method, ropes):
        strip_scaling(family, journal)
        tables = {index: [(slot, *method.trained(rope)) for slot, rope in slots] for index, slots in ropes.items()}
        fill_frequencies(family, method, tables, journal)
        return
    base = method.base if isinstance(method, Stack) else method
    if isinstance(base, BiasMethod) and not base.keep_rope:
        base = NoPE()
    if isinstance(base, FrequencyMethod):
        write_frequencies(family, base, ropes, journal)
    else:
        keep_frequencies(family, method, ropes, journal)
    top = method.top if isinstance(method, Stack) else method
    if isinstance(top, PositionMap):
        move_positions(family, top, ropes)


def acts_in_attention(method: LengthMethod, ropes: Ropes) -> bool:
    """Whether attention turns for a method: as it says itself, or as rotary modules cannot say how many dimensions."""
    if method.acts_in_attention or not isinstance(method, FrequencyMethod):
        return True
    return any(len(method.frequencies(rope)[0]) != rope.dim // 2 for slots in ropes.values() for _, rope in slots)


def set_aside(family: Family, number: int, originals: list[PreTrainedConfig]) -> Family:
    """Rotary modules beside those that were just put in place of those of ``family``, to be filled for single layers.

    Args:
        number: of sets aside before this one
        originals: the configurations of the rotary modules as they were
    """
    sites = []
    for site, original in zip(family.sites, originals, strict=True):
        rotary: Any = site.parent.get_submodule(site.name)
        if number == 0:
            rotary.add_module("aside", Aside())
        # A configuration of its own: that of the model tells of its layers in general.
        fresh = site.rebuild(copy.deepcopy(original))
        rotary.aside.append(fresh)
        sites.append(Site(rotary.aside, str(number), fresh))
    return Family(family.root, family.owner, sites)


def in_place(family: Family) -> Family:
    """The same with the rotary modules that stand now where those of ``family`` stood."""
    placed: list[Any] = [site.parent.get_submodule(site.name) for site in family.sites]
    return Family(family.root, family.owner, [Site(rotary, "inner", rotary.inner) for rotary in placed])


def move_positions(family: Family, method: PositionMap, ropes: Ropes) -> None:
    """Let rotary modules that were just put in place of those of ``family`` rotate tokens to where the cache is to
    hold them.

    Raises:
        UnsupportedMethodError: a rotary module that is not given positions.
    """
    for index, site in enumerate(family.sites):
        if not ropes[index]:
            continue
        rotary = site.parent.get_submodule(site.name)
        assert isinstance(rotary, PatchedRotary)
        if not is_told_positions(site):
            raise UnsupportedMethodError(f"The rotary module of {family.title} is not told positions.")
        rotary.moves, rotary.labels = method, [slot.label for slot, _ in ropes[index]]


def is_told_positions(site: Site) -> bool:
    """Whether a rotary module gets the positions of tokens, which a position map changes on the way."""
    return "position_ids" in inspect.signature(site.module.forward).parameters


def strip_scaling(family: Family, journal: Journal) -> None:
    """Take any scaling out of the configurations, in force and recorded."""
    for config, parameters in trained_parameters(family):
        journal.set(config, "rope_parameters", parameters)


def _write_natively(family: Family, method: FrequencyMethod, ropes: Ropes, journal: Journal) -> bool:
    for config, parameters in trained_parameters(family):
        for index, site in enumerate(family.sites):
            if site.config is config:
                for slot, rope in ropes[index]:
                    entry = parameters[slot.label] if slot.label else parameters
                    entry.update(method.rope_parameters(rope))
        journal.set(config, "rope_parameters", parameters)
        if "partial_rotary_factor" in vars(config) and "partial_rotary_factor" in parameters:
            # transformers before 5.18 copies it back from here.
            journal.set(config, "partial_rotary_factor", parameters["partial_rotary_factor"])
        try:
            config.standardize_rope_params()
            config.validate_rope()
        except (ValueError, KeyError, TypeError):
            return False
    try:
        modules = [site.rebuild(site.config) for site in family.sites] if twin.describes(family) else []
    except (ValueError, KeyError, TypeError, RuntimeError):
        return False
    for index, (site, fresh) in enumerate(zip(family.sites, modules, strict=False)):
        if not all(_holds(fresh, slot, *method.frequencies(rope)) for slot, rope in ropes[index]):
            return False
        _install(site, fresh, method, journal)
    return bool(modules)


def configs(family: Family) -> list[PreTrainedConfig]:
    """The distinct configurations of the rotary modules; a family may keep one per theta."""
    return list({id(site.config): site.config for site in family.sites}.values())


def trained_parameters(family: Family) -> list[tuple[PreTrainedConfig, dict[str, Any]]]:
    """Every distinct configuration of the rotary modules with a copy of its rope parameters before any scaling."""
    plain: dict[int, tuple[PreTrainedConfig, dict[str, Any]]] = {}
    for site in family.sites:
        module: Any = site.plain()
        plain[id(site.config)] = (site.config, module.config.rope_parameters)
    return list(plain.values())


def _holds(rotary: nn.Module, slot: Slot, frequencies: torch.Tensor, factor: float) -> bool:
    built = getattr(rotary, slot.buffer)
    if built.device.type == "meta":
        return built.shape == frequencies.shape
    return (
        built.shape == frequencies.shape
        and torch.allclose(built.to("cpu", torch.float64), frequencies, rtol=1e-5, atol=1e-12)
        and abs(getattr(rotary, slot.scaling, 1.0) - factor) < 1e-6
    )


def _obeys(rotary: nn.Module, slot: Slot, frequencies: torch.Tensor, factor: float) -> bool:
    """Whether a rotary module answers with the cosines of ``frequencies`` at position 1, and nothing else."""
    device = getattr(rotary, slot.buffer).device
    if device.type == "meta":
        return True
    label = {"layer_type": slot.label} if slot.label else {}
    answer = None
    for shape in ((1, 1), (3, 1, 1)):  # one position axis, or the three of images and video
        try:
            answer = rotary(torch.zeros(1, 1, 1, device=device), torch.ones(shape, device=device).long(), **label)
            break
        except (RuntimeError, IndexError, ValueError):
            continue
    if answer is None:
        return False
    parts = [answer.real] if isinstance(answer, torch.Tensor) else list(answer)
    expected = (frequencies.cos() * factor).float()
    distances = [(part.flatten().float().cpu()[:, None] - expected).abs() for part in parts]
    # Every cosine that is expected is there, and no other.
    return any(bool(one.amin(0).max() < 1e-4 and one.amin(1).max() < 1e-4) for one in distances)


def _install(site: Site, fresh: nn.Module, method: Method | None, journal: Journal) -> None:
    journal.swap(site.parent, site.name, PatchedRotary(fresh, str(method or "as trained")))
