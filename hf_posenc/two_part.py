"""Attention of the position maps: near and far keys in one softmax, without a length x length matrix.

The cache holds every key rotated to one position (``PositionMap.held``). A query is turned once for each part of the
map, near keys are turned back to their own positions, and a block of queries then meets three kinds of keys in each
part: those all of its rows see, which a fused kernel takes without a mask, and two narrow fringes in which rows differ.
Whatever cuts a text into runs of its own (padding, packed documents) only narrows which slots a row sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from . import kernels
from .context import Call
from .kernels import Scores
from .methods.base import Part, PositionMap
from .positions import Positions
from .turning import Source, Table, shift_table, turn
from .twin import Plan

_SPARSE = 64
"""Blocks are cut where the keys in sight jump, unless that happens more often than every so many tokens."""
_DENSE_ROWS = 512
"""Queries that the dense path takes at once, where no weights are asked for."""


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a position map: stock where nothing is far, by blocks where kernels can, dense for the rest."""
    layer, context = call.layer, call.context
    method, parts = parts_of(call)
    positions, slots = context.positions, call.key.shape[2]
    if context.once((layer.plan.source, "plain"), lambda: is_plain(method, layer.source, positions)):
        return call.run(call.query, call.key, call.value, call.rows(0, call.query.shape[2], slots))
    total = int(positions.total)
    if slots >= total and kernels_do(call, parts):
        found = context.once(
            (layer.plan.source, "layout"), lambda: layout(method, layer.source, positions, total, call.query.device)
        )
        if _fits(call, found, total):
            work = Work(found, layer.plan, scale_of(call))
            return blockwise(call.query, call.key[:, :, :total], call.value[:, :, :total], work), None
    return dense(call, method, parts)


def is_plain(method: PositionMap, source: Source, positions: Positions) -> bool:
    """Whether every query of a forward sees all keys at their own distance: stock attention does that."""
    queries = positions.queries.cpu()
    places = queries.amax(0)
    longest, (near, *farther) = int(places.max()), method.parts()
    scale = method.query_scale(places, source.rope)
    return not (
        any(longest // part.block >= part.first for part in farther)
        or (method.plain_until and longest >= method.plain_until)
        or (near.query(queries) != method.held(queries)).any()
        or (scale is not None and (scale != 1).any())
    )


def parts_of(call: Call) -> tuple[PositionMap, list[Part]]:
    """The method, and those of its parts that a layer with a sliding window can meet."""
    method, window = call.layer.scheme.method, call.layer.plan.sliding_window
    assert isinstance(method, PositionMap)
    return method, [part for part in method.parts() if window is None or part.nearest < window]


def scale_of(call: Call) -> float:
    """The factor on scores."""
    scale = call.options.get("scaling")
    return call.query.shape[-1] ** -0.5 if scale is None else scale


def kernels_do(call: Call, parts: list[Part]) -> bool:
    """Whether there is something to merge, and kernels compute all that the stock function is asked for."""
    options = call.options
    if len(parts) == 1 or call.layer.plan.sliding_window is not None:
        return False
    extras = any(options.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    return call.layer.scheme.stock == "sdpa" and call.causal and not extras and not options.get("dropout")


def _fits(call: Call, found: "Layout", total: int) -> bool:
    """Whether the keys that the mask shows are those of runs."""
    # The context lives as long as the masks of its forward.
    padding = call.context.positions.padding
    return call.context.once(
        (id(call.mask), "shown"), lambda: (shows_runs(call.mask, found.start, total, padding), call.mask)
    )[0]


def shows_runs(mask: torch.Tensor | None, first: torch.Tensor, total: int, padding: torch.Tensor | None) -> bool:
    """Whether a mask shows every query the keys of its run up to itself; queries that are padding do not count.

    Args:
        first: (batch, queries) the first slot of the run of each query
        total: slots in use, the last of which are the queries
    """
    if mask is None:
        return not first.any()
    length = first.shape[1]
    if mask.dtype != torch.bool or mask.shape[2] != length:
        return False
    slots = torch.arange(total, device=mask.device)
    own, start = slots[total - length :], first.to(mask.device)
    for begin in range(0, length, _DENSE_ROWS):
        rows = slice(begin, begin + _DENSE_ROWS)
        expected = (slots >= start[:, rows, None]) & (slots <= own[rows, None])
        differs = (mask[:, :, rows, :total] != expected[:, None]) | mask[:, :, rows, total:].any(-1, keepdim=True)
        if padding is not None and padding.shape[1] >= total:
            seen = padding[:, total - length : total][:, rows].to(mask.device).bool()
            differs = differs & seen[:, None, :, None]
        if differs.any():
            return False
    return True


@dataclass
class Piece:
    """Keys in slots start to stop, seen by a block of queries; ``hidden`` (batch or 1, rows, keys) says by which not."""

    start: int
    stop: int
    hidden: torch.Tensor | None


@dataclass
class Share:
    """Keys that a part sees under one rotation.

    Attributes:
        low, high: (batch, queries) int64 on the CPU: every query sees the slots low to high, high excluded
        query: the table that turns queries for this part, None where they stand right
        key: the table that turns the keys in slots ``start`` to ``stop``, None where they stand right
    """

    low: torch.Tensor
    high: torch.Tensor
    query: Table | None
    key: Table | None
    start: int
    stop: int


@dataclass
class Layout:
    """How one forward is computed, for all layers of one source.

    Attributes:
        scale: (batch, 1, queries, 1) factor on queries, or None
        blocks: first and last query of each block
        pieces: per block and share
        start: (batch, queries) the first slot of the run of each query
    """

    shares: list[Share]
    scale: torch.Tensor | None
    blocks: list[tuple[int, int]]
    start: torch.Tensor
    pieces: list[list[list[Piece]]] = field(default_factory=list)
    masks: dict[tuple, torch.Tensor] = field(default_factory=dict)


# --- which keys a query sees, and where ------------------------------------------------------------------------------


def runs(positions: Positions, slots: int) -> torch.Tensor:
    """The first slot of the run of consecutive positions that every slot belongs to, (batch, slots) on the CPU."""
    places = positions.keys[..., :slots].amax(0).cpu()
    breaks = places[:, 1:] != places[:, :-1] + 1
    if positions.padding is not None and positions.padding.shape[1] >= slots:
        seen = positions.padding[:, :slots].bool().cpu()
        breaks = breaks | (seen[:, 1:] != seen[:, :-1])
    starts = torch.zeros_like(places)
    starts[:, 1:] = torch.where(breaks, torch.arange(1, slots), 0)
    return starts.cummax(1).values


def layout(method: PositionMap, source: Source, positions: Positions, slots: int, device: torch.device) -> Layout:
    """Cut the queries into blocks and their keys into pieces.

    Args:
        slots: number of keys in the cache
    """
    queries = positions.queries.cpu()
    places, length = queries.amax(0), queries.shape[-1]
    start = runs(positions, slots)[:, slots - length :]
    first = places - (torch.arange(slots - length, slots) - start)  # position of the first slot of the run
    keys = positions.keys[..., :slots].cpu()
    shares = []
    for part in method.parts():
        shift = part.query(queries) - method.held(queries)
        query = shift_table(source, shift, device) if shift.any() else None
        for low, high, plain in _held_ranges(method):
            lowest, highest = _reach(part, places)
            lowest = start + (lowest.clamp(min=low) - first).clamp(min=0)
            highest = start + (highest.clamp(max=high) - first).clamp(min=0)
            lowest = torch.minimum(lowest, highest)
            if not (lowest < highest).any():
                continue
            seen = lowest < highest
            begin, end = int(lowest[seen].min()), int(highest.max())
            key = None
            if plain is not None and plain != part.plain_keys:
                span = keys[..., begin:end]
                shift = span - method.far(span)
                key = shift_table(source, shift if part.plain_keys else -shift, device)
            shares.append(Share(lowest, highest, query, key, begin, end))
    scale = method.query_scale(places, source.rope)
    if scale is not None:
        scale = scale.to(device, torch.float32)[:, None, :, None] if (scale != 1).any() else None
    found = Layout(shares, scale, list(_blocks(shares, length, kernels.rows_per_block(device))), start)
    masks: dict[tuple, torch.Tensor] = {}
    for begin, end in found.blocks:
        found.pieces.append([list(_pieces(share, begin, end, device, masks)) for share in shares])
    return found


def _held_ranges(method: PositionMap) -> list[tuple[int, int, bool | None]]:
    """Ranges of positions, and whether keys there are held plain; None where plain and far need no telling apart."""
    endless = torch.iinfo(torch.int64).max // 2
    if not method.plain_until:
        return [(0, endless, None)]
    return [(0, method.plain_until, True), (method.plain_until, endless, False)]


def _reach(part: Part, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the first key that queries at ``places`` see in a part, and of the first that they do not."""
    block = places // part.block
    lowest = torch.zeros_like(places) if part.last is None else ((block - part.last + 1) * part.block).clamp(min=0)
    return lowest, torch.minimum((block - part.first + 1) * part.block, places + 1).clamp(min=0)


def _blocks(shares: list[Share], length: int, rows: int) -> Iterator[tuple[int, int]]:
    cuts = torch.zeros(length, dtype=torch.bool)
    for share in shares:
        for edge in (share.low, share.high):
            step = edge[:, 1:] - edge[:, :-1]
            cuts[1:] |= ((step > 1) | (step < 0)).any(0)
    at = cuts.nonzero().flatten().tolist()
    borders = [0, *(at if len(at) <= length // _SPARSE + 1 else ()), length]
    for first, last in zip(borders[:-1], borders[1:], strict=True):
        for start in range(first, last, rows):
            yield start, min(start + rows, last)


def _pieces(share: Share, begin: int, end: int, device: torch.device, masks: dict) -> Iterator[Piece]:
    low, high = share.low[:, begin:end], share.high[:, begin:end]
    seen = low < high
    if not seen.any():
        return
    outer, inner = (int(low[seen].min()), int(high.max())), (int(low.max()), int(high.min()))
    if inner[0] >= inner[1]:
        spans = [outer]
    else:
        spans = [(outer[0], inner[0]), inner, (inner[1], outer[1])]
    for start, stop in spans:
        if start < stop:
            whole = (start, stop) == inner
            yield Piece(
                start, stop, None if whole else _hidden(low - start, high - start, stop - start, device, masks)
            )


def _hidden(low: torch.Tensor, high: torch.Tensor, width: int, device: torch.device, masks: dict) -> torch.Tensor:
    low, high = low.clamp(0, width), high.clamp(0, width)
    if (low == low[:1]).all() and (high == high[:1]).all():
        low, high = low[:1], high[:1]
    name = (width, low.numpy().tobytes(), high.numpy().tobytes())
    if name not in masks:
        slots = torch.arange(width)
        masks[name] = ((slots < low[..., None]) | (slots >= high[..., None])).to(device)
    return masks[name]


# --- the computation -------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """One layer's share in a forward: how its queries and keys turn, and the scale of its scores."""

    layout: Layout
    plan: Plan
    scale: float

    def keys(self, key: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """Per share the keys turned for it, and the slot of the first of them."""
        return [
            (key, 0)
            if share.key is None
            else (turn(key[:, :, share.start : share.stop], share.key, self.plan), share.start)
            for share in self.layout.shares
        ]

    def queries(self, query: torch.Tensor, begin: int, end: int, heads: int) -> dict[int, torch.Tensor]:
        """A block of queries as each part compares them, by the identity of its table: (batch, key heads, rows, dim)."""
        found = {}
        for share in self.layout.shares:
            if id(share.query) not in found:
                block = query[:, :, begin:end]
                if share.query is not None:
                    block = turn(block, cut(share.query, begin, end), self.plan)
                if self.layout.scale is not None:
                    block = (block * self.layout.scale[:, :, begin:end]).to(query.dtype)
                found[id(share.query)] = fold(block, heads)
        return found

    def scores(self, piece: Piece, groups: int, dtype: torch.dtype) -> Scores:
        """The scale and the mask of a piece, whose rows stand once for every query head of a group."""
        if piece.hidden is None:
            return Scores(self.scale, None)
        name, masks = (id(piece.hidden), groups, dtype), self.layout.masks
        if name not in masks:
            # Finite, so that a row without a key in this piece has a log-sum-exp.
            mask = torch.zeros(piece.hidden.shape, dtype=dtype, device=piece.hidden.device)
            masks[name] = mask.masked_fill_(piece.hidden, torch.finfo(dtype).min / 2).repeat(1, groups, 1)[:, None]
        return Scores(self.scale, masks[name])


def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, work: Work):
    """Attention of all queries over the keys in sight, block by block.

    Args:
        query: (batch, heads, queries, dim)
        key, value: (batch, key heads, slots, dim), the keys as the cache holds them

    Returns:
        (batch, queries, heads, dim), and the log-sum-exp (batch, key heads, queries * heads / key heads) of each block.
    """
    batch, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    keys = work.keys(key)
    output, sums = query.new_empty(batch, length, heads, dim), []
    for (begin, end), pieces in zip(work.layout.blocks, work.layout.pieces, strict=True):
        queries = work.queries(query, begin, end, key.shape[1])
        found = [
            kernels.attend(
                queries[id(share.query)],
                turned[:, :, piece.start - first : piece.stop - first],
                value[:, :, piece.start : piece.stop],
                work.scores(piece, groups, query.dtype),
            )
            for share, (turned, first), mine in zip(work.layout.shares, keys, pieces, strict=True)
            for piece in mine
        ]
        block, total = merge(found)
        output[:, begin:end] = unfold(block, groups).transpose(1, 2)
        sums.append(total)
    return output, sums


def backward(grad, query, key, value, output, sums: list[torch.Tensor], work: Work):
    """Gradients of query, key and value; ``grad`` and ``output`` are (batch, queries, heads, dim)."""
    groups = query.shape[1] // key.shape[1]
    keys = work.keys(key)
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_query = torch.zeros(query.shape, dtype=wide, device=query.device)
    grad_value = torch.zeros(value.shape, dtype=wide, device=value.device)
    # Keys that no share turns have one gradient, turned ones another.
    grads = [torch.zeros(turned.shape, dtype=wide, device=key.device) for turned, _ in keys]
    for (begin, end), pieces, total in zip(work.layout.blocks, work.layout.pieces, sums, strict=True):
        queries = work.queries(query, begin, end, key.shape[1])
        grad_block = fold(grad[:, begin:end].transpose(1, 2), key.shape[1])
        block = fold(output[:, begin:end].transpose(1, 2), key.shape[1])
        for share, (turned, first), mine, grad_key in zip(work.layout.shares, keys, pieces, grads, strict=True):
            for piece in mine:
                here, there = slice(piece.start, piece.stop), slice(piece.start - first, piece.stop - first)
                left, middle, right = kernels.attend_backward(
                    grad_block,
                    queries[id(share.query)],
                    turned[:, :, there],
                    value[:, :, here],
                    block,
                    total,
                    work.scores(piece, groups, query.dtype),
                )
                left = unfold(left, groups).to(wide)
                if work.layout.scale is not None:
                    left = left * work.layout.scale[:, :, begin:end]
                if share.query is not None:
                    left = turn(left, cut(share.query, begin, end), work.plan, back=True)
                grad_query[:, :, begin:end] += left
                grad_key[:, :, there] += middle
                grad_value[:, :, here] += right
    total_key = torch.zeros(key.shape, dtype=wide, device=key.device)
    for share, grad_key in zip(work.layout.shares, grads, strict=True):
        if share.key is None:
            total_key += grad_key
        else:
            total_key[:, :, share.start : share.stop] += turn(grad_key, share.key, work.plan, back=True)
    return grad_query.to(query.dtype), total_key.to(key.dtype), grad_value.to(value.dtype)


def cut(table: Table, begin: int, end: int) -> Table:
    """A table of some of the positions."""
    return table[0][:, :, begin:end], table[1][:, :, begin:end]


def fold(states: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, heads * groups, rows, dim) as (batch, heads, groups * rows, dim): no key is copied for its group."""
    return states.unflatten(1, (heads, -1)).flatten(2, 3)


def unfold(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Back from ``fold``."""
    return states.unflatten(2, (groups, -1)).flatten(1, 2)


def merge(found: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax out of those over several sets of keys.

    Args:
        found: outputs (batch, heads, rows, dim) and log-sum-exps (batch, heads, rows)
    """
    if len(found) == 1:
        return found[0]
    sums = torch.stack([total for _, total in found])
    total = sums.logsumexp(0)
    weights = (sums - total).exp_()[..., None]
    merged = found[0][0] * weights[0]
    for (output, _), weight in zip(found[1:], weights[1:], strict=True):
        merged = merged + output * weight
    return merged.to(found[0][0].dtype), total


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, work):
        output, sums = forward(query, key, value, work)
        ctx.save_for_backward(query, key, value, output, *sums)
        ctx.work = work
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, output, *sums = ctx.saved_tensors
        return *backward(grad, query, key, value, output, sums, ctx.work), None


def blockwise(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, work: Work) -> torch.Tensor:
    """``forward`` with gradients, for values of any width: (batch, queries, heads, value dim)."""
    return _Attention.apply(*of_one_width(query, key, value), work)[..., : value.shape[-1]]


def of_one_width(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same with zeros behind where keys and values differ in width, as in latent attention: kernels want one."""
    spare = key.shape[-1] - value.shape[-1]
    if spare > 0:
        return query, key, torch.nn.functional.pad(value, (0, spare))
    if spare < 0:
        return *(torch.nn.functional.pad(states, (0, -spare)) for states in (query, key)), value
    return query, key, value


# --- the dense path --------------------------------------------------------------------------------------------------


def dense(call: Call, method: PositionMap, parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The stock function itself, on keys that stand once for every part: for what no kernel of ours takes.

    Parts lie side by side in the head dimension, so that a query in one part meets the keys of that part alone, and
    the mask shows every key in one of them. Softcaps, sinks, dropout, weights and any mask stay what the family does.
    """
    layer, positions, device = call.layer, call.context.positions, call.query.device
    queries, keys = positions.queries.to(device), call.places.to(device)
    held, length, slots = method.held(keys), call.query.shape[2], call.key.shape[2]
    tables = call.context.once((layer.plan.source, slots, len(parts)), lambda: [
        (
            shift_table(layer.source, part.query(queries) - method.held(queries), device),
            shift_table(layer.source, (keys if part.plain_keys else method.far(keys)) - held, device),
        )
        for part in parts
    ])  # fmt: skip
    scale = method.query_scale(queries.amax(0), layer.source.rope)
    query = call.query if scale is None else (call.query * scale.float()[:, None, :, None]).to(call.query.dtype)
    turned = [(turn(query, left, layer.plan), turn(call.key, right, layer.plan)) for left, right in tables]
    if len(parts) == 1:
        return call.run(*turned[0], call.value, call.rows(0, length, slots))
    blank = torch.zeros_like(call.key)
    key = torch.cat([
        torch.cat([keys if index == place else blank for place in range(len(parts))], dim=-1)
        for index, (_, keys) in enumerate(turned)
    ], dim=2)  # fmt: skip
    query, value = torch.cat([left for left, _ in turned], dim=-1), call.value.repeat(1, 1, len(parts), 1)
    options = {**call.options, "scaling": scale_of(call)}
    whole = options.get("output_attentions") or layer.scheme.stock == "eager"
    rows = length if whole else _DENSE_ROWS
    outputs, weights = [], []
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        mask = _by_part(call, parts, queries[..., begin:end], keys, call.rows(begin, end, slots), begin)
        output, weight = call.stock(call.module, query[:, :, begin:end], key, value, mask, **options)
        outputs.append(output)
        weights.append(None if weight is None else weight.unflatten(-1, (len(parts), slots)).sum(-2))
    return torch.cat(outputs, dim=1), weights[0]


def _by_part(call: Call, parts: list[Part], queries, keys, mask: torch.Tensor | None, begin: int) -> torch.Tensor:
    """A mask over the keys of all parts, that shows each key in the part of its distance."""
    i, j = queries.amax(0)[:, None, :, None], keys.amax(0)[:, None, None, :]
    shown = []
    for part in parts:
        distance = i // part.block - j // part.block
        # Later keys, where a mask shows them, are near.
        seen = torch.ones_like(distance, dtype=torch.bool) if part.first == 0 else distance >= part.first
        shown.append(seen if part.last is None else seen & (distance < part.last))
    if mask is None and call.causal and call.query.shape[2] > 1:
        slots = torch.arange(keys.shape[-1], device=keys.device)
        mask = (slots <= slots[keys.shape[-1] - call.query.shape[2] + begin :][: queries.shape[-1], None])[None, None]
    if mask is None:
        mask = torch.ones_like(shown[0])
    if mask.dtype == torch.bool:
        return torch.cat([mask & seen for seen in shown], dim=-1)
    return torch.cat([mask.masked_fill(~seen, torch.finfo(mask.dtype).min) for seen in shown], dim=-1)
