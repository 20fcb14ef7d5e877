"""The registered attention function: it turns queries and keys on top of what the cache holds, then calls a stock
kernel. Positions of queries and keys, and the tables made from them once per forward, travel as one keyword argument.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import eager_mask, sdpa_mask

from . import adapters, biases, compat, compiled, context, lengths, positions, stacked, twin, two_part
from .context import Call, Context, Layer, Scheme
from .families import Family, Site, Slot, UnsupportedMethodError, live_modules
from .guard import NOT_IN_FORCE
from .journal import Journal
from .methods.base import AttentionMethod, LengthMethod, Method, Rope
from .methods.bias import BiasMethod
from .methods.on_top import OnTop
from .methods.position_map import PositionMap
from .rotary import Ropes
from .turning import Source
from .twin import Plan

logger = logging.getLogger(__name__)

# One name per stock implementation, since models ask for the mask by the name.
NAMES = {"sdpa": "hf_posenc", "eager": "hf_posenc_eager"}
_MASKS = {"sdpa": sdpa_mask, "eager": eager_mask}


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    hf_posenc: Context | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention implementations ``hf_posenc`` and ``hf_posenc_eager``.

    Args:
        query: (batch, heads, query, dim)
        key, value: (batch, key heads, key, dim), the keys as the cache holds them

    Returns:
        (batch, query, heads, value dim), and the weights where the stock implementation gives them.

    Raises:
        RuntimeError: the model was not patched, or positions did not arrive.
    """
    if twin.active.probe is not None:
        return twin.active.probe.attend(
            module, query, key, value, attention_mask, **kwargs, **({"hf_posenc": hf_posenc} if hf_posenc else {})
        )
    layer: Layer | None = vars(module).get("_hf_posenc")
    if layer is None:
        raise RuntimeError(NOT_IN_FORCE)
    scheme = layer.scheme
    stock = stock_attention(module, scheme.stock)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    length, slots = query.shape[2], key.shape[2]
    if attention_mask is None and causal and length > 1 and layer.scheme.stock == "sdpa":
        # A static cache shows its whole buffer; the queries of a first pass see its head.
        key, value = key[:, :, :length], value[:, :, :length]
    if layer.plan.source is None:
        mask = context.rows(scheme.stock, attention_mask, key.shape[2], 0, length, causal, query)
        return stock(module, query, key, value, mask, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in layer.plan.ignored}
    here = hf_posenc if hf_posenc is not None else scheme.here.context
    if here is None:
        raise RuntimeError("Positions did not reach attention: call the model itself, not one of its layers.")
    places = here.positions.of_keys(slots)[..., : key.shape[2]]
    call = Call(module, layer, here, query, key, value, places, attention_mask, causal, stock, kwargs)
    if isinstance(scheme.method, BiasMethod):
        return biases.attend(call)
    if isinstance(scheme.method, LengthMethod):
        return lengths.attend(call)
    if isinstance(scheme.method, OnTop):
        return stacked.attend(call)
    return compiled.attend(call) if torch.compiler.is_compiling() else two_part.attend(call)


def stock_attention(module: nn.Module, name: str) -> Callable:
    """The attention function that ``module`` would use under the implementation ``name``."""
    if name != "eager":
        return AttentionInterface()[name]
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedMethodError(f"{type(module).__name__} has no eager attention function to fall back on.")


def before_forward(owner: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of the model that owns the rotation: hand the positions of this forward down to its attention."""
    scheme: Scheme = vars(owner)["_hf_posenc"]
    keep_implementation(owner)
    named = {**dict(zip(scheme.parameters, args, strict=False)), **kwargs}
    told = "position_ids" in named
    found = positions.read(named, scheme.holder)
    if found is None:
        return args, kwargs  # the model itself says what is missing
    _warn_beyond(scheme, found)
    if not told and "position_ids" not in scheme.parameters:
        named.pop("position_ids", None)  # put in where there is a mask
    if scheme.forwards:
        named["hf_posenc"] = Context(found)
    else:
        scheme.here.context = Context(found)
    return (), named


def _warn_beyond(scheme: Scheme, found: positions.Positions) -> None:
    """Say once where a text goes beyond what the method reaches."""
    if scheme.capacity is None or torch.compiler.is_compiling():
        return
    reached = int(found.queries.amax()) + 1
    if reached > scheme.capacity:
        logger.warning(
            "%s reads %d tokens; this text has %d, and beyond the capacity distances appear that were never trained.",
            scheme.method, scheme.capacity, reached,
        )  # fmt: skip
        scheme.capacity = None


def after_forward(owner: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Hook: a cache that the model made for itself learns the positions of what it holds."""
    scheme: Scheme = vars(owner)["_hf_posenc"]
    context = kwargs["hf_posenc"] if scheme.forwards else scheme.here.context
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    for value in values:
        if isinstance(value, Cache) and context is not None:
            context.positions.remember(compat.of_self_attention(value), scheme.holder)


def send_with_rotation(rotary: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Hook of a rotary module, where keyword arguments do not reach attention: its answer does, recomputed or not."""
    for part in output if isinstance(output, tuple) else (output,):
        part._hf_posenc = vars(rotary)["_hf_posenc"].here.context


def take_from_rotation(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-hook of such an attention module: the context of the forward, or of the recomputation, that this is."""
    for value in (*args, *kwargs.values()):
        part = value[0] if isinstance(value, tuple) and value else value
        if getattr(part, "_hf_posenc", None) is not None:
            vars(module)["_hf_posenc"].scheme.here.context = part._hf_posenc


def keep_implementation(owner: nn.Module) -> None:
    """A backend chosen after patching does the stock part; the scheme stays in charge."""
    scheme: Scheme = vars(owner)["_hf_posenc"]
    config: Any = owner.config
    chosen = config._attn_implementation
    if chosen in NAMES.values():
        return
    if chosen not in NAMES:
        raise UnsupportedMethodError(
            f"{scheme.method} runs inside attention on top of {' or '.join(NAMES)}, but the attention implementation "
            f"was set to {chosen!r}: call model.set_attn_implementation('sdpa'), or hf_posenc.unpatch(model) first."
        )
    for part in (scheme, *scheme.parts):
        part.stock = chosen
    config._attn_implementation_internal = NAMES[chosen]


def install(
    family: Family,
    method: Method,
    inside: AttentionMethod,
    sources: dict[int, Source],
    plans: list[Plan],
    wrapper: nn.Module,
    journal: Journal,
    capacity: int | None = None,
) -> None:
    """Put the attention function in charge of every layer that ``method`` changes.

    Args:
        inside: what attention carries out of it
        sources: rotations by the number that plans know them by; layers with another one, or none, stay as they are
        plans: from ``twin.plan``
        wrapper: the object that was given to ``patch``, which may hold the model inside
        capacity: tokens beyond which to warn
    """
    install_parts(family, method, [(inside, sources, plans)], plans, wrapper, journal, capacity)


Share = tuple[AttentionMethod, dict[int, Source], list[Plan]]
"""What attention carries out in some layers, and the rotations they turn by."""


def install_parts(
    family: Family,
    method: Method,
    parts: list[Share],
    plans: list[Plan],
    wrapper: nn.Module,
    journal: Journal,
    capacity: int | None,
) -> None:
    """``install`` with something of its own in every part of the layers; ``plans`` are those of all layers.

    Raises:
        UnsupportedMethodError: nothing would change, or this model cannot be changed inside attention.
    """
    owner, stock = family.owner, family.config._attn_implementation
    if stock not in NAMES:
        raise UnsupportedMethodError(
            f"{method} runs inside attention on top of {' or '.join(NAMES)}, but the attention implementation of "
            f"{family.title} is {stock!r}: call model.set_attn_implementation('sdpa') first."
        )
    for module in wrapper.modules():
        adapters.refuse_prefixes(module, method)
    live = live_modules(owner)
    if not any(plan.source in sources for _, sources, own in parts for plan in own):
        raise UnsupportedMethodError(f"{method} would change no layer of {family.title}.")
    parameters = list(inspect.signature(owner.forward).parameters)
    forwards = all("hf_posenc" in plan.keywords for plan in plans)
    holder = "" if isinstance(method, LengthMethod) else str(method)
    inside, sources, _ = parts[0]
    scheme = Scheme(inside, sources, stock, parameters, forwards, capacity, holder)
    scheme.parts = [replace(scheme, method=inside, sources=sources) for inside, sources, _ in parts[1:]]
    journal.set(owner, "_hf_posenc", scheme)
    layers = {plan.name: Layer(scheme, replace(plan, source=None)) for plan in plans}
    for part, (_, sources, own) in zip((scheme, *scheme.parts), parts, strict=True):
        layers |= {plan.name: Layer(part, plan) for plan in own if plan.source in sources}
    changed_configs = {id(owner.config): owner.config}
    for name, layer in layers.items():
        module, acting = live[name], layer.scheme.method
        journal.set(module, "_hf_posenc", layer)
        config = vars(module).get("config", owner.config)
        changed_configs[id(config)] = config
        if layer.plan.source is None:
            continue
        both_ways = not getattr(module, "is_causal", True)
        if both_ways and isinstance(acting, PositionMap) and acting.both_ways() is None:
            raise UnsupportedMethodError(
                f"{method} counts blocks of earlier tokens, and {name} of {family.title} looks at later ones too: "
                "take another position map."
            )
        if isinstance(acting, LengthMethod):
            lengths.check(family, layer)
        if isinstance(acting, OnTop):
            stacked.check(family, acting, layer.plan, module)
        if isinstance(acting, BiasMethod):
            add_parameters(module, acting, layer.plan, journal)
    for name, module in live.items():
        # What the probe did not reach, such as attention to images, shares the configuration: it stays stock.
        if id(vars(module).get("config")) in changed_configs and "_hf_posenc" not in vars(module):
            journal.set(module, "_hf_posenc", Layer(scheme, Plan(name, None)))
    for config in changed_configs.values():
        journal.set(config, "_attn_implementation_internal", NAMES[stock])
    journal.before_forward(owner, before_forward)
    journal.after_forward(owner, after_forward)
    if not scheme.forwards:
        for site in family.sites:
            journal.set(site.module, "_hf_posenc", scheme)
            journal.after_forward(site.module, send_with_rotation)
        for plan in plans:
            journal.before_forward(live[plan.name], take_from_rotation)


def add_parameters(module: nn.Module, method: BiasMethod, plan: Plan, journal: Journal) -> None:
    """Give an attention module what a bias learns, as its child ``posenc``."""
    learned = method.learned(plan.heads, getattr(module, "is_causal", True))
    if learned is not None:
        weight = next(module.parameters())
        journal.add(module, "posenc", learned.to(weight.device))


def rotations(family: Family, ropes: Ropes) -> dict[int, Source]:
    """The rotations that the rotary modules apply, by the number that plans know them by."""
    slots = [(index, slot.label) for index, site in enumerate(family.sites) for slot in site.slots]
    return {
        slots.index((index, slot.label)): Source(
            rope,
            getattr(family.sites[index].module, slot.buffer).to("cpu", torch.float64),
            _pair_axes(family.sites[index], slot, rope),
        )
        for index, entries in ropes.items()
        for slot, rope in entries
    }


def _pair_axes(site: Site, slot: Slot, rope: Rope) -> torch.Tensor | None:
    """Which of three position axes turns each pair, read from what the rotary module answers; None for one axis."""
    rotary = site.plain().to("cpu")
    setattr(rotary, slot.buffer, torch.ones(rope.dim // 2))
    label = {"layer_type": slot.label} if slot.label else {}
    try:
        # Axis a stands at position a + 1, so that every angle names its axis.
        axes = torch.arange(1, 4).view(3, 1, 1)
        cos, _ = rotary(torch.zeros(1, 1, 1), axes, **label)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    if cos.dim() == 4 and "mrope_section" in rope.parameters:
        return compat.contiguous_axes(rope.parameters["mrope_section"])
    if cos.dim() != 3 or cos.shape[0] != 1:
        return None
    scaling = getattr(rotary, slot.scaling, 1.0)
    angles = (cos[0, 0] / scaling).clamp(-1, 1).acos()
    half_layout = cos.shape[-1] == rope.dim and torch.equal(angles[: rope.dim // 2], angles[rope.dim // 2 :])
    pairs = angles[: rope.dim // 2] if half_layout or cos.shape[-1] == rope.dim // 2 else angles[0::2]
    return pairs.round().long() - 1


for _stock, _name in NAMES.items():
    AttentionInterface.register(_name, attention_forward)
    AttentionMaskInterface.register(_name, _MASKS[_stock])
