"""Attention of the methods whose frequencies grow with the text: keys are turned on by the difference to what the
cache holds, once per block of queries that share a length.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .context import Call, Context, Layer
from .families import Family, UnsupportedMethodError
from .functional import wide_dtype
from .methods.base import LengthMethod, Rope
from .turning import Table, table, turn

_TABLE_BUDGET = 1 << 26  # numbers; beyond it key tables are made again in every layer


@dataclass
class Segment:
    """Queries start to stop, all of which (by row) use one set of frequencies."""

    start: int
    stop: int
    frequencies: torch.Tensor | None  # (batch, pairs) still to turn; None: nothing
    factor: torch.Tensor | None  # (batch,)


def check(family: Family, layer: Layer) -> None:
    """Raises:
    UnsupportedMethodError: a method turns more dimensions than the heads of a layer have room for.
    """
    method, plan, rope = layer.scheme.method, layer.plan, layer.source.rope
    assert isinstance(method, LengthMethod)
    turned = 2 * method.turn(rope, torch.tensor([rope.length + 1]))[0].shape[-1]
    if plan.start + turned > plan.width:
        raise UnsupportedMethodError(
            f"The heads of {plan.name} of {family.title} have {plan.width - plan.start} dimensions to turn, {method} "
            f"turns {turned}."
        )


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One stock call per segment, queries and keys turned by what is left to turn."""
    scheme, plan, context, source = call.layer.scheme, call.layer.plan, call.context, call.layer.source
    # Later keys than a query's own need no turning, unless a mask may show them or weights are wanted whole.
    ahead = call.key.shape[2] - call.query.shape[2]
    growing = isinstance(context.positions.total, int) and ahead >= 0
    trim = call.mask is None and call.causal and scheme.stock == "sdpa" and growing
    assert isinstance(scheme.method, LengthMethod)
    method = scheme.method
    segments = context.once((plan.source, "segments"), lambda: _segments(method, source.rope, context))
    outputs: list[torch.Tensor] = []
    weights: list[Any] = []
    for index, segment in enumerate(segments):
        stop = ahead + segment.stop if trim else call.key.shape[2]
        queries, keys = call.query[:, :, segment.start : segment.stop], call.key[:, :, :stop]
        if segment.frequencies is not None:
            positions = context.positions.queries[..., segment.start : segment.stop]
            device = call.query.device
            queries = turn(queries, _table(context, (index, "query"), call.layer, segment, positions, device), plan)
            name = (index, call.key.shape[2], stop)
            keys = turn(keys, _table(context, name, call.layer, segment, call.places[..., :stop], device), plan)
        mask = call.rows(segment.start, segment.stop, stop)
        output, weight = call.run(queries, keys, call.value[:, :, :stop], mask)
        outputs.append(output)
        weights.append(weight)
    if len(outputs) == 1:
        return outputs[0], weights[0]
    whole = None if weights[0] is None else torch.cat(weights, dim=2)
    return torch.cat(outputs, dim=1), whole


def _segments(method: LengthMethod, rope: Rope, context: Context) -> list[Segment]:
    """Cut the queries wherever any row changes its frequencies."""
    lengths = context.positions.queries.amax(0) + 1  # (batch, query)
    groups = method.group(lengths, rope)
    cuts, turned = [0, lengths.shape[1]], [True]
    if lengths.shape[1] > 1 or not torch.compiler.is_compiling():
        here = groups.cpu()
        changes = (here[:, 1:] != here[:, :-1]).any(0).nonzero().flatten() + 1
        cuts = [0, *changes.tolist(), lengths.shape[1]]
        turned = [bool((here[:, start] > rope.length).any()) for start in cuts[:-1]]
    return [
        _segment(method, rope, start, stop, groups[:, start] if turn else None)
        for start, stop, turn in zip(cuts[:-1], cuts[1:], turned, strict=True)
    ]


def _segment(method: LengthMethod, rope: Rope, start: int, stop: int, lengths: torch.Tensor | None) -> Segment:
    if lengths is None:
        return Segment(start, stop, None, None)
    local = rope.moved(lengths.device, wide_dtype(lengths.device))
    frequencies, factor = method.turn(local, lengths)
    # Rows still within the trained length turn by nothing.
    beyond = lengths > rope.length
    return Segment(start, stop, frequencies * beyond[:, None], torch.where(beyond, factor, 1.0))


def _table(
    context: Context, name: tuple, layer: Layer, segment: Segment, positions: torch.Tensor, device: torch.device
) -> Table:
    """The angles still to turn at ``positions``, kept for the other layers while there is room."""
    plan, tables = layer.plan, context.once("tables", dict)
    name = (plan.source, plan.pairing, plan.sign, device, *name)
    if name in tables:
        return tables[name]
    assert segment.frequencies is not None and segment.factor is not None
    frequencies, factor = segment.frequencies[:, None].to(device), segment.factor[:, None, None].to(device)
    made = table(layer.source.places(positions).to(device), frequencies, plan, factor)
    if sum(2 * cos.numel() for cos, _ in tables.values()) + 2 * made[0].numel() <= _TABLE_BUDGET:
        tables[name] = made
    return made
