"""Attention of the methods on top of a rotation, by blocks of queries where keys or masks are of each block's own."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .context import Call
from .families import Family, UnsupportedMethodError
from .functional import widen
from .methods.on_top import OnTop
from .turning import shift_table, turn
from .twin import Plan

_ROWS = 256
"""Queries of a block at most, and positions that they may span."""
_GROWTH = 2.0
"""Fading counts from the middle of a block, on both sides of which a factor grows up to the exponential of this."""


def check(family: Family, method: OnTop, plan: Plan, module: nn.Module) -> None:
    """Raises:
    UnsupportedMethodError: an attention module that a method cannot act on.
    """
    if fits(type(method), plan, module):
        return
    if method.causal_only:
        raise UnsupportedMethodError(
            f"{plan.name} of {family.title} sees later keys, whose scores {method} would let grow without limit: it "
            "is for causal models."
        )
    raise UnsupportedMethodError(
        f"{plan.name} of {family.title} turns the dimensions {plan.start} to {plan.stop} of a head, but its values "
        f"are only {plan.value_width} wide, so {method} has no pairs to turn there."
    )


def fits(method: type[OnTop], plan: Plan, module: nn.Module) -> bool:
    """Whether a method can act on an attention module."""
    if method.causal_only and not getattr(module, "is_causal", True):
        return False
    return not method.turns_values or plan.stop <= plan.value_width


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The stock function, on what the method makes of queries, keys, values and mask."""
    method, positions, plan = call.layer.scheme.method, call.context.positions, call.layer.plan
    assert isinstance(method, OnTop)
    scale = method.query_scale(positions.queries.amax(0).to(call.query.device))
    if scale is not None:
        query = call.query * scale[:, None, :, None]
        call = replace(call, query=query.to(call.query.dtype))
    if not method.turns_values:
        return _attend(call, method)
    back = shift_table(call.layer.source, plan, -call.places, call.value)
    output, weights = _attend(replace(call, value=turn(call.value, back, plan)), method)
    forth = shift_table(call.layer.source, plan, positions.queries, output)
    return turn(output.transpose(1, 2), forth, plan).transpose(1, 2), weights


def _attend(call: Call, method: OnTop) -> tuple[torch.Tensor, torch.Tensor | None]:
    fading = method.fading(call.layer.source.rope) if method.needs_rotation else None
    if fading is None and not _crosses(call, method.chunk):
        return call.run(call.query, call.key, call.value, call.rows(0, call.query.shape[2], call.key.shape[2]))
    reach = _ROWS if fading is None else max(1, min(_ROWS, int(2 * _GROWTH / method.fastest)))
    blocks = call.context.once(("blocks", reach), lambda: _blocks(call, reach))
    outputs: list[torch.Tensor] = []
    weights: list[Any] = []
    for begin, end in blocks:
        if torch.is_grad_enabled() and len(blocks) > 1:
            # Keys and masks of a block would wait for the backward pass, together length x length for every layer.
            output, weight = checkpoint(_block, call, begin, end, fading, method.chunk, use_reentrant=False)
        else:
            output, weight = _block(call, begin, end, fading, method.chunk)
        outputs.append(output)
        weights.append(weight)
    if len(outputs) == 1:
        return outputs[0], weights[0]
    return torch.cat(outputs, dim=1), None if weights[0] is None else torch.cat(weights, dim=2)


def _crosses(call: Call, chunk: int | None) -> bool:
    """Whether anything lies beyond the first chunk."""
    if chunk is None or torch.compiler.is_compiling():
        return chunk is not None
    return call.context.once(("crosses", chunk), lambda: int(call.context.positions.queries.max()) >= chunk)


def _blocks(call: Call, reach: int) -> list[tuple[int, int]]:
    """Cut the queries so that in no row a block spans more than ``reach`` positions."""
    length = call.query.shape[2]
    if length == 1 or torch.compiler.is_compiling():
        return [(start, min(start + reach, length)) for start in range(0, length, reach)]
    places, blocks, begin = call.context.positions.queries.amax(0).cpu(), [], 0
    while begin < length:
        here = places[:, begin : begin + reach]
        spans = (here.cummax(1).values - here.cummin(1).values).amax(0)
        end = begin + max(1, int((spans < reach).sum()))
        blocks.append((begin, end))
        begin = end
    return blocks


def _block(
    call: Call, begin: int, end: int, fading: torch.Tensor | None, chunk: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries begin to end, over the keys that they can see."""
    device, slots = call.query.device, call.key.shape[2]
    ahead = slots - call.query.shape[2]
    growing = isinstance(call.context.positions.total, int) and ahead >= 0
    trim = call.mask is None and call.causal and call.layer.scheme.stock == "sdpa" and growing
    start, stop = 0, ahead + end if trim else slots
    query, mask = call.query[:, :, begin:end], call.rows(begin, end, stop)
    queries = call.context.positions.queries.amax(0)[:, begin:end].to(device)
    places = call.places.amax(0).to(device)[:, :stop]
    if chunk is not None:
        shown = _shown(queries, places, chunk)
        if trim and not torch.compiler.is_compiling():
            start = call.context.once(("first", chunk, begin, stop), lambda: int(shown.any(1).any(0).int().argmax()))
        mask = _narrowed(mask, shown, call, ahead + begin, query.dtype)[..., start:]
        places = places[:, start:]
    key = call.key[:, :, start:stop]
    if fading is not None:
        # Both factors are close to 1 in the middle of the block, and those of later keys, which count nothing, end.
        middle = (queries.amax(1, keepdim=True) + queries.amin(1, keepdim=True)) // 2
        rates, last = fading.to(device, torch.float32), queries.amax(1, keepdim=True)
        query = _faded(query, queries - middle, rates, call)
        key = _faded(key, middle - torch.minimum(places, last), rates, call)
    return call.run(query, key, call.value[:, :, start:stop], mask)


def _faded(states: torch.Tensor, distance: torch.Tensor, rates: torch.Tensor, call: Call) -> torch.Tensor:
    """States (batch, heads, length, dim), whose pairs fade by ``rates`` (pairs,) over (batch, length) ``distance``."""
    plan = call.layer.plan
    factor = widen((-rates * distance[..., None]).exp(), plan.pairing)[:, None]
    faded = (states[..., plan.start : plan.stop] * factor).to(states.dtype)
    return torch.cat((states[..., : plan.start], faded, states[..., plan.stop :]), dim=-1)


def _shown(queries: torch.Tensor, places: torch.Tensor, chunk: int) -> torch.Tensor:
    """Whether keys at (batch, slots) ``places`` lie in the chunk of queries: (batch, queries, slots)."""
    return queries[:, :, None] // chunk == places[:, None] // chunk


def _narrowed(
    mask: torch.Tensor | None, shown: torch.Tensor, call: Call, first: int, dtype: torch.dtype
) -> torch.Tensor:
    """A mask that shows what is ``shown`` too, for queries from slot ``first`` on. Hidden keys are finitely far down,
    so that a row without any has weights."""
    lowest, hidden = torch.finfo(dtype).min, ~shown[:, None]
    if mask is None and call.causal and call.query.shape[2] > 1:
        slots = torch.arange(shown.shape[-1], device=shown.device)
        hidden = hidden | (slots > slots[first:][: shown.shape[1], None])
    elif mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        return mask.masked_fill(hidden, lowest).to(dtype)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, lowest)
