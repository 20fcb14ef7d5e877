"""Encodings by layer. One rotary module serves all layers of a model; where a layer is to turn by another rotation, a
module with that one stands beside it, runs with it, and the layer takes its answer instead. What acts inside attention
is a scheme of the layer's own.
"""

import copy
import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from . import attention, rotary, twin
from .families import Family, Site, UnsupportedMethodError, live_modules, read_rope, unscaled_config
from .journal import Journal
from .methods.base import AttentionMethod, FrequencyMethod, LengthMethod, Method, Rope
from .methods.bias import BiasMethod
from .methods.layerwise import Layerwise
from .methods.nope import NoPE
from .methods.on_top import OnTop
from .methods.position_map import Stack
from .rotary import Ropes
from .turning import Source
from .twin import Plan

_NUMBERS = 1 << 10
"""More than a model has rotations."""


@dataclass
class _Group:
    """Layers with one method, and the rotations that they turn by."""

    method: Method | None
    plans: list[Plan] = field(default_factory=list)
    sources: dict[int, Source] = field(default_factory=dict)


def change(model: nn.Module, family: Family, method: Method, ropes: Ropes, journal: Journal) -> None:
    """Put a table of methods in force.

    Raises:
        UnsupportedMethodError: a layer that cannot have its method.
    """
    top = method.top if isinstance(method, Stack) else method
    base = method.base if isinstance(method, Stack) else None
    assert isinstance(top, Layerwise)
    plans, rest = twin.plan(family), base or top.rest
    groups = _grouped(family, top, base, rest, plans)
    rope = rotary.main_rope(family, ropes)
    before = copy.deepcopy(family.config)
    originals, whole = [_original(site, rope) for site in family.sites], _all_ropes(family, ropes, rope)
    rotary.prepare(family, rest, ropes, journal)
    changed, live = rotary.in_place(family), live_modules(family.owner)
    groups[0].sources = attention.rotations(changed, ropes)
    number = 0
    for group in groups[1:]:
        group.sources = attention.rotations(changed, whole)
        if _rotation(group.method) == _rotation(rest):
            continue
        turning = [plan for plan in group.plans if plan.source is not None]
        if not turning:
            continue
        aside = rotary.set_aside(family, number, originals)
        used = _used(family, whole, {plan.source for plan in turning})
        rotary.prepare(aside, group.method, used, Journal())
        group.sources = attention.rotations(rotary.in_place(aside), used)
        _align(family, group, before, used, journal)
        for plan in turning:
            journal.set(live[plan.name], "_hf_posenc_aside", number)
            journal.before_forward(live[plan.name], take_aside)
        number += 1
    parts = [part for place, group in enumerate(groups) if (part := _part(group, place, whole)) is not None]
    if parts:
        assert isinstance(method, AttentionMethod)
        attention.install_parts(changed, method, parts, plans, model, journal, method.capacity(rope))


def take_aside(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of an attention module: it turns by the rotation that stands aside for it."""
    number = vars(module)["_hf_posenc_aside"]
    return tuple(_aside(value, number) for value in args), {
        name: _aside(value, number) for name, value in kwargs.items()
    }


def _aside(value: Any, number: int) -> Any:
    part = value[0] if isinstance(value, tuple | list) and value else value
    found = getattr(part, "_hf_posenc_aside", None) if isinstance(part, torch.Tensor) else None
    return value if found is None else found[number]


def _grouped(
    family: Family, top: Layerwise, base: FrequencyMethod | None, rest: Method | None, plans: list[Plan]
) -> list[_Group]:
    """The layers by their method, those of the rest first."""
    groups: dict[Method | None, _Group] = {rest: _Group(rest)}
    owners: dict[str, Method | None] = {}
    for plan in plans:
        own = top.of_layer(_layer(family, plan), base)
        if own is not None and plan.source is None and _needs_rotation(own):
            raise UnsupportedMethodError(f"{plan.name} of {family.title} carries no rotation that {own} could change.")
        if own is None and plan.source is None and top.rest_rotates:
            raise UnsupportedMethodError(
                f"{plan.name} of {family.title} carries no rotation, which {top} wants there."
            )
        chosen = rest if own is None else own
        if _rotation(chosen) != _rotation(rest) and plan.source is not None and not plan.given:
            raise UnsupportedMethodError(
                f"{plan.name} of {family.title} looks its rotation up itself instead of being handed it, so it cannot "
                "have one of its own; methods for the whole model work on it."
            )
        owners[plan.name] = chosen
        if plan.donor is not None and owners.get(plan.donor) != chosen:
            raise UnsupportedMethodError(
                f"{plan.name} of {family.title} takes its keys from {plan.donor}: give both the same method."
            )
        groups.setdefault(chosen, _Group(chosen)).plans.append(plan)
    missing = [str(index) for index in top.named if index not in {_layer(family, plan) for plan in plans}]
    if missing:
        raise UnsupportedMethodError(
            f"Attention in {family.title} has the layers {sorted({_layer(family, plan) for plan in plans})}, counted "
            f"from 0: there is no {', '.join(missing)}."
        )
    if all(_is_idle(group.method, group.plans) for group in groups.values() if group.plans):
        raise UnsupportedMethodError(f"{top} would change no layer of {family.title}.")
    return list(groups.values())


def _is_idle(method: Method | None, plans: list[Plan]) -> bool:
    return method is None or (isinstance(method, NoPE) and all(plan.source is None for plan in plans))


def _needs_rotation(method: Method) -> bool:
    """Whether a method has no meaning in a layer that carries no rotation."""
    top = method.top if isinstance(method, Stack) else method
    if isinstance(top, OnTop):
        return top.needs_rotation
    return not isinstance(top, NoPE | BiasMethod) or bool(getattr(top, "keep_rope", False))


def _layer(family: Family, plan: Plan) -> int:
    """The number of the layer that an attention module is in."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", f".{plan.name}.")
    if not numbers:
        raise UnsupportedMethodError(f"{plan.name} of {family.title} does not say which layer it is in.")
    return int(numbers[0])


def _rotation(method: Method | None) -> Method | None:
    """What a method does to the rotation, as the method that does only this; None leaves it as trained."""
    if isinstance(method, Stack) and isinstance(method.top, OnTop):
        return method.base
    if isinstance(method, BiasMethod):
        return None if method.keep_rope else NoPE()
    return None if isinstance(method, OnTop) else method


def _align(family: Family, group: _Group, before: PreTrainedConfig, used: Ropes, journal: Journal) -> None:
    """Bring numbers that attention modules derive from a scaling to those of the scaling that is theirs now."""
    base = group.method.base if isinstance(group.method, Stack) else group.method
    if not isinstance(base, FrequencyMethod) or isinstance(base, NoPE | LengthMethod):
        return
    scaled = unscaled_config(before)
    for slot, rope in (entry for entries in used.values() for entry in entries):
        entry = scaled.rope_parameters[slot.label] if slot.label else scaled.rope_parameters
        entry.update(base.rope_parameters(rope))
    live, names = live_modules(family.owner), {plan.name for plan in group.plans}
    for name, key, value in twin.derived(family, before, scaled):
        if name in names and key in vars(live[name]):
            journal.set(live[name], key, value)


def _original(site: Site, main: Rope) -> PreTrainedConfig:
    """The configuration of a rotary module as it came, whatever length the model is given now."""
    config = copy.deepcopy(site.config)
    config.max_position_embeddings = main.configured_length
    return config


def _all_ropes(family: Family, ropes: Ropes, main: Rope) -> Ropes:
    """The trained rotation of every slot, windowed ones too: a layer that is named is meant."""
    read = {(index, slot.label): rope for index, entries in ropes.items() for slot, rope in entries}
    return {
        index: [
            (slot, read.get((index, slot.label)) or _windowed(read_rope(site, slot, site.plain()), main))
            for slot in site.slots
        ]
        for index, site in enumerate(family.sites)
    }


def _windowed(rope: Rope, main: Rope) -> Rope:
    return replace(rope, length=main.length, configured_length=main.configured_length)


def _used(family: Family, ropes: Ropes, sources: set[int | None]) -> Ropes:
    """The slots that plans know by the numbers ``sources``."""
    slots = [(index, slot.label) for index, site in enumerate(family.sites) for slot in site.slots]
    return {
        index: [(slot, rope) for slot, rope in entries if slots.index((index, slot.label)) in sources]
        for index, entries in ropes.items()
    }


def _part(group: _Group, place: int, ropes: Ropes) -> attention.Share | None:
    """What attention does in a group of layers, with numbers of its own for their rotations: what one forward shares
    between layers goes by them."""
    top = group.method.top if isinstance(group.method, Stack) else group.method
    if not isinstance(top, AttentionMethod):
        return None
    if isinstance(top, LengthMethod) and not rotary.acts_in_attention(top, ropes):
        return None
    first, some = _NUMBERS * place, min(group.sources)
    plans = [
        replace(plan, source=first + (some if plan.source is None else plan.source))
        for plan in group.plans
        if plan.source in group.sources or (plan.source is None and place > 0)
    ]
    return top, {first + source: found for source, found in group.sources.items()}, plans
