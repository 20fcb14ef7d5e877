"""The registered attention function: it turns queries and keys on top of what the cache holds, then calls a stock
kernel. Positions of queries and keys, and the tables made from them once per forward, travel as one keyword argument.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import eager_mask, sdpa_mask

from . import adapters, compat, positions, twin
from .families import Family, Site, Slot, UnsupportedMethodError, live_modules
from .functional import rotate, wide_dtype
from .guard import NOT_IN_FORCE
from .journal import Journal
from .methods.base import LengthMethod, Rope
from .positions import Positions
from .rotary import Ropes
from .twin import Plan

# One name per stock implementation, since models ask for the mask by the name.
NAMES = {"sdpa": "hf_posenc", "eager": "hf_posenc_eager"}
_MASKS = {"sdpa": sdpa_mask, "eager": eager_mask}
_TABLE_BUDGET = 1 << 26  # numbers; beyond it key tables are made again in every layer


@dataclass
class Source:
    """One set of frequencies that layers share.

    Attributes:
        rope: the rotation the rotary module applies
        axes: (dim / 2,) the row of three-axis positions that turns each pair; None where positions have one axis
    """

    rope: Rope
    axes: torch.Tensor | None = None


@dataclass
class Scheme:
    """A method in force inside attention.

    Attributes:
        stock: the attention implementation that does the work, "sdpa" or "eager"
        parameters: names of the positional parameters of the owner's forward
        forwards: whether the owner hands keyword arguments down to its attention
        context: that of the last forward, kept only where it is not handed down; there it travels with the rotation
    """

    method: LengthMethod
    sources: dict[int, Source]
    stock: str
    parameters: list[str]
    forwards: bool
    context: "Context | None" = None


@dataclass
class Layer:
    """What an attention module needs to know: kept on the module as ``_hf_posenc``."""

    scheme: Scheme
    plan: Plan


@dataclass
class Segment:
    """Queries start to stop, all of which (by row) use one set of frequencies."""

    start: int
    stop: int
    frequencies: torch.Tensor | None  # (batch, pairs) still to turn; None: nothing
    factor: torch.Tensor | None  # (batch,)


@dataclass
class Context:
    """What one forward hands down to its attention: positions, and what is computed from them once for all layers."""

    positions: Positions
    segments: dict[int, list[Segment]] = field(default_factory=dict)
    tables: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


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
        mask = _rows(scheme.stock, attention_mask, key, 0, length, causal, length == 1)
        return stock(module, query, key, value, mask, **kwargs)
    context = hf_posenc if hf_posenc is not None else scheme.context
    if context is None:
        raise RuntimeError("Positions did not reach attention: call the model itself, not one of its layers.")
    places = context.positions.of_keys(slots)[..., : key.shape[2]]
    return _attend(module, layer, context, places, stock, query, key, value, attention_mask, causal, kwargs)


def _attend(module, layer: Layer, context: Context, places, stock, query, key, value, mask, causal: bool, kwargs):
    """One stock call per segment, queries and keys turned by what is left to turn.

    Args:
        places: positions of the keys, (axes, batch, key)
    """
    scheme, plan, length = layer.scheme, layer.plan, query.shape[2]
    assert plan.source is not None
    source = scheme.sources[plan.source]
    # Later keys than a query's own need no turning, unless a mask may show them or weights are wanted whole.
    ahead = key.shape[2] - length
    growing = isinstance(context.positions.total, int) and ahead >= 0
    trim = mask is None and causal and scheme.stock == "sdpa" and growing
    outputs, weights = [], []
    segments = _segments(scheme, context, plan.source)
    for index, segment in enumerate(segments):
        stop = ahead + segment.stop if trim else key.shape[2]
        queries, keys, values = query[:, :, segment.start : segment.stop], key[:, :, :stop], value[:, :, :stop]
        if segment.frequencies is not None:
            cos, sin = _table(
                context,
                (plan.source, index, "query"),
                source,
                segment,
                context.positions.queries[..., segment.start : segment.stop],
            )
            queries = _turn(queries, cos, sin, plan)
            name = (plan.source, index, key.shape[2], stop)
            cos, sin = _table(context, name, source, segment, places[..., :stop])
            keys = _turn(keys, cos, sin, plan)
        piece = _rows(scheme.stock, mask, keys, segment.start, segment.stop, causal, length == 1)
        output, weight = stock(module, queries, keys, values, piece, **kwargs)
        outputs.append(output)
        weights.append(weight)
    if len(outputs) == 1:
        return outputs[0], weights[0]
    whole = None if weights[0] is None else torch.cat(weights, dim=2)
    return torch.cat(outputs, dim=1), whole


def _segments(scheme: Scheme, context: Context, index: int) -> list[Segment]:
    """Cut the queries wherever any row changes its frequencies."""
    if index not in context.segments:
        rope = scheme.sources[index].rope
        lengths = context.positions.queries.amax(0) + 1  # (batch, query)
        groups = scheme.method.group(lengths, rope)
        cuts, turned = [0, lengths.shape[1]], [True]
        if lengths.shape[1] > 1 or not torch.compiler.is_compiling():
            here = groups.cpu()
            changes = (here[:, 1:] != here[:, :-1]).any(0).nonzero().flatten() + 1
            cuts = [0, *changes.tolist(), lengths.shape[1]]
            turned = [bool((here[:, start] > rope.length).any()) for start in cuts[:-1]]
        context.segments[index] = [
            _segment(scheme.method, rope, start, stop, groups[:, start] if turn else None)
            for start, stop, turn in zip(cuts[:-1], cuts[1:], turned, strict=True)
        ]
    return context.segments[index]


def _segment(method: LengthMethod, rope: Rope, start: int, stop: int, lengths: torch.Tensor | None) -> Segment:
    if lengths is None:
        return Segment(start, stop, None, None)
    local = rope.moved(lengths.device, wide_dtype(lengths.device))
    frequencies, factor = method.turn(local, lengths)
    # Rows still within the trained length turn by nothing.
    beyond = lengths > rope.length
    return Segment(start, stop, frequencies * beyond[:, None], torch.where(beyond, factor, 1.0))


def _table(context: Context, name: tuple, source: Source, segment: Segment, positions: torch.Tensor):
    """cos and sin (batch, 1, length, pairs) float32 of the angles still to turn at ``positions``."""
    if name in context.tables:
        return context.tables[name]
    assert segment.frequencies is not None and segment.factor is not None
    if source.axes is None or positions.shape[0] == 1:
        places = positions[0][..., None]  # (batch, length, 1)
    else:
        places = positions[source.axes.to(positions.device)].permute(1, 2, 0)
    angles = places.to(segment.frequencies.dtype) * segment.frequencies[:, None]
    factor = segment.factor[:, None, None]
    table = (angles.cos() * factor).float().unsqueeze(1), (angles.sin() * factor).float().unsqueeze(1)
    if sum(2 * cos.numel() for cos, _ in context.tables.values()) + 2 * angles.numel() <= _TABLE_BUDGET:
        context.tables[name] = table
    return table


def _turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Turn the planned dimensions of (batch, heads, length, dim), or the first of them if the table has fewer."""
    start, stop = plan.start, plan.start + 2 * cos.shape[-1]
    turned = rotate(states[..., start:stop], cos, plan.sign * sin, plan.pairing)
    if stop - start == states.shape[-1]:
        return turned
    return torch.cat((states[..., :start], turned, states[..., stop:]), dim=-1)


def stock_attention(module: nn.Module, name: str) -> Callable:
    """The attention function that ``module`` would use under the implementation ``name``."""
    if name != "eager":
        return AttentionInterface()[name]
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedMethodError(f"{type(module).__name__} has no eager attention function to fall back on.")


def _rows(stock: str, mask, key, start: int, stop: int, causal: bool, decoding: bool) -> torch.Tensor | None:
    """The rows ``start`` to ``stop`` of a mask, or None where the stock implementation needs none."""
    length = key.shape[2]
    if mask is not None:
        return (mask if mask.shape[2] == 1 else mask[:, :, start:stop])[..., :length]
    # Without a mask, sdpa takes the first query for the first key.
    own = decoding or (length == stop and (start == 0 or stop - start == 1))
    if stock == "eager" or not causal or own:
        return None
    slots = torch.arange(length, device=key.device)
    return (slots <= torch.arange(start, stop, device=key.device)[:, None])[None, None]


def before_forward(owner: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of the model that owns the rotation: hand the positions of this forward down to its attention."""
    scheme: Scheme = vars(owner)["_hf_posenc"]
    keep_implementation(owner)
    named = {**dict(zip(scheme.parameters, args, strict=False)), **kwargs}
    found = positions.read(named)
    if found is None:
        return args, kwargs  # the model itself says what is missing
    if scheme.forwards:
        named["hf_posenc"] = Context(found)
    else:
        scheme.context = Context(found)
    return (), named


def after_forward(owner: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Hook: a cache that the model made for itself learns the positions of what it holds."""
    scheme: Scheme = vars(owner)["_hf_posenc"]
    context = kwargs.get("hf_posenc", scheme.context)
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    for value in values:
        if isinstance(value, Cache) and context is not None:
            context.positions.remember(value)


def send_with_rotation(rotary: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Hook of a rotary module, where keyword arguments do not reach attention: its answer does, recomputed or not."""
    for part in output if isinstance(output, tuple) else (output,):
        part._hf_posenc = vars(rotary)["_hf_posenc"].context


def take_from_rotation(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-hook of such an attention module: the context of the forward, or of the recomputation, that this is."""
    for value in (*args, *kwargs.values()):
        part = value[0] if isinstance(value, tuple) and value else value
        if getattr(part, "_hf_posenc", None) is not None:
            vars(module)["_hf_posenc"].scheme.context = part._hf_posenc


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
    scheme.stock = chosen
    config._attn_implementation_internal = NAMES[chosen]


def install(
    family: Family, method: LengthMethod, ropes: Ropes, plans: list[Plan], wrapper: nn.Module, journal: Journal
) -> None:
    """Put the attention function in charge of every layer whose frequencies ``method`` changes.

    Args:
        plans: from ``twin.plan``
        wrapper: the object that was given to ``patch``, which may hold the model inside

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
    slots = [(index, slot.label) for index, site in enumerate(family.sites) for slot in site.slots]
    sources = {
        slots.index((index, slot.label)): Source(rope, _pair_axes(family.sites[index], slot, rope))
        for index, entries in ropes.items()
        for slot, rope in entries
    }
    live = live_modules(owner)
    if not any(plan.source in sources for plan in plans):
        raise UnsupportedMethodError(f"{method} would change no layer of {family.title}.")
    parameters = list(inspect.signature(owner.forward).parameters)
    scheme = Scheme(method, sources, stock, parameters, all("hf_posenc" in plan.keywords for plan in plans))
    journal.set(owner, "_hf_posenc", scheme)
    changed_configs = {id(owner.config): owner.config}
    for plan in plans:
        module = live[plan.name]
        journal.set(
            module, "_hf_posenc", Layer(scheme, plan if plan.source in sources else replace(plan, source=None))
        )
        changed_configs[id(module.config)] = module.config
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
