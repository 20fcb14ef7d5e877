"""Attention of the position maps: near and far keys in one softmax, without a length x length matrix.

The cache holds every key rotated to one position (``PositionMap.held``). A query is turned once for each part of the
map, near keys are turned back to their own positions, and a block of queries then meets three kinds of keys in each
part: those all of its rows see, which a fused kernel takes without a mask, and two narrow fringes where rows differ.
Whatever cuts a text into runs of its own (padding, packed documents) only narrows which slots a row sees.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from . import kernels
from .context import Call
from .methods.position_map import Part, PositionMap
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
        groups = call.query.shape[1] // call.key.shape[1]
        found = context.once(
            (layer.plan.source, layer.plan.pairing, groups, call.value.device, call.value.dtype),
            lambda: layout(method, layer.source, layer.plan, positions, total, groups, call.value),
        )
        if _fits(call, found, total):
            # Under autocast values come narrower than what was just rotated; sdpa would cast too.
            query, key = call.query.to(call.value.dtype), call.key[:, :, :total].to(call.value.dtype)
            work = Work(found, layer.plan, scale_of(call))
            return blockwise(query, key, call.value[:, :, :total], work), None
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
class Share:
    """Keys that a part sees under one rotation.

    Attributes:
        low, high: (batch, queries) int64 on the CPU: every query sees the slots low to high, high excluded
        key: the table that turns the keys in slots ``start`` to ``stop``, None where they stand right
    """

    low: torch.Tensor
    high: torch.Tensor
    key: Table | None
    start: int
    stop: int


@dataclass
class Piece:
    """Keys of a share in slots start to stop, met by a block of queries under ``mask`` (see ``kernels.attend``)."""

    share: int
    start: int
    stop: int
    mask: kernels.Mask


@dataclass
class Block:
    """Queries begin to end, as one part compares them with its keys.

    Attributes:
        table: what turns them, None where they stand right
        scale: (batch, 1, end - begin, 1) factor on them, or None
    """

    begin: int
    end: int
    table: Table | None
    scale: torch.Tensor | None
    pieces: list[Piece]


@dataclass
class Layout:
    """How one forward is computed, for all layers of one source.

    Attributes:
        blocks: part by part, the near one first, which every query takes part in
        start: (batch, queries) the first slot of the run of each query
        scratch: memory for turned keys, by share and number of key heads
    """

    shares: list[Share]
    blocks: list[Block]
    start: torch.Tensor
    scratch: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


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


def layout(
    method: PositionMap,
    source: Source,
    plan: Plan,
    positions: Positions,
    slots: int,
    groups: int,
    like: torch.Tensor,
) -> Layout:
    """Cut the queries into blocks and their keys into pieces.

    Args:
        slots: number of keys in the cache
        groups: query heads to a key head
        like: a tensor of the device and dtype to compute in
    """
    queries, length = positions.queries.cpu(), positions.queries.shape[-1]
    start = runs(positions, slots)[:, slots - length :]
    scale = method.query_scale(queries.amax(0), source.rope)
    if scale is not None:
        scale = scale.to(like.device, torch.float32)[:, None, :, None]
    found = Layout([], [], start)
    masks: dict[tuple, torch.Tensor] = {}
    for part in method.parts():
        shift = part.query(queries) - method.held(queries)
        table = shift_table(source, plan, shift, like) if shift.any() else None
        mine = list(_shares(part, method, source, plan, positions, slots, start, like))
        numbers = range(len(found.shares), len(found.shares) + len(mine))
        found.shares += mine
        for begin, end in _cuts(mine, length, kernels.rows_per_block(like.device, groups, banded=part.is_band)):
            pieces = [
                Piece(number, first, last, _mask(share, begin, end, first, last, groups, like, masks))
                for number, share in zip(numbers, mine, strict=True)
                for first, last in _spans(share, begin, end)
            ]
            if pieces:
                rows = None if table is None else (table[0][:, :, begin:end], table[1][:, :, begin:end])
                found.blocks.append(Block(begin, end, rows, None if scale is None else scale[:, :, begin:end], pieces))
    return found


def _shares(part, method, source, plan, positions, slots, start, like) -> Iterator[Share]:
    """What the queries see of one part, apart by how the cache holds it."""
    places = positions.queries.cpu().amax(0)
    first = places - (torch.arange(slots - places.shape[1], slots) - start)  # position of the first slot of the run
    for least, most, plain in _held_ranges(method):
        low, high = _reach(part, places)
        low = start + (low.clamp(min=least) - first).clamp(min=0)
        high = start + (high.clamp(max=most) - first).clamp(min=0)
        seen = low < high
        if not seen.any():
            continue
        begin, end = int(low[seen].min()), int(high.max())
        key = None
        if plain is not None and plain != part.plain_keys:
            span = positions.keys[..., begin:end].cpu()
            shift = span - method.far(span)
            key = shift_table(source, plan, shift if part.plain_keys else -shift, like)
        yield Share(torch.minimum(low, high), high, key, begin, end)


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


def _cuts(shares: list[Share], length: int, rows: int) -> Iterator[tuple[int, int]]:
    """First and last query of every block."""
    jumps = torch.zeros(length, dtype=torch.bool)
    for share in shares:
        for edge in (share.low, share.high):
            step = edge[:, 1:] - edge[:, :-1]
            jumps[1:] |= ((step > 1) | (step < 0)).any(0)
        seen = share.low < share.high
        jumps[1:] |= (seen[:, 1:] != seen[:, :-1]).any(0)
    at = jumps.nonzero().flatten().tolist()
    borders = [0, *(at if len(at) <= length // _SPARSE + 1 else ()), length]
    for first, last in itertools.pairwise(borders):
        for begin in range(first, last, rows):
            yield begin, min(begin + rows, last)


def _spans(share: Share, begin: int, end: int) -> list[tuple[int, int]]:
    """The slots that a block sees, cut into those that all of its rows see and the fringes before and behind."""
    low, high = share.low[:, begin:end], share.high[:, begin:end]
    seen = low < high
    if not seen.any():
        return []
    # One key more than needed in the fringe behind lets its first row see something: it is square, and causal.
    first, last, inner, outer = int(low[seen].min()), int(high.max()), int(low.max()), int(high.min())
    outer -= outer < last
    spans = [(first, last)] if inner >= outer else [(first, inner), (inner, outer), (outer, last)]
    return [(start, stop) for start, stop in spans if start < stop]


def _mask(share: Share, begin: int, end: int, first: int, last: int, groups: int, like: torch.Tensor, masks: dict):
    low, high = share.low[:, begin:end] - first, share.high[:, begin:end] - first
    if low.max() <= 0 and high.min() >= last - first:
        return None
    rows = end - begin
    if (
        rows >= kernels.CAUSAL_ROWS
        and (low <= 0).all()
        and torch.equal(high, torch.arange(1, rows + 1).expand_as(high))
    ):
        return kernels.CAUSAL
    low, high = low.clamp(0, last - first), high.clamp(0, last - first)
    if (low == low[:1]).all() and (high == high[:1]).all():
        low, high = low[:1], high[:1]
    name = (last - first, low.numpy().tobytes(), high.numpy().tobytes())
    if name not in masks:
        slots = torch.arange(last - first)
        hidden = ((slots < low[..., None]) | (slots >= high[..., None])).repeat(1, groups, 1)[:, None].to(like.device)
        # Finite, so that a row without a key in this piece has a log-sum-exp.
        masks[name] = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
            hidden, torch.finfo(like.dtype).min / 2
        )
    return masks[name]


# --- the computation -------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """One layer's share in a forward: how its queries and keys turn, and the scale of its scores."""

    layout: Layout
    plan: Plan
    scale: float

    def keys(self, key: torch.Tensor, reuse: bool = False) -> list[tuple[torch.Tensor, int]]:
        """Per share its keys, turned, and the slot of the first of them.

        Args:
            reuse: overwrite those of the last layer, whose memory is warm
        """
        found = []
        for number, share in enumerate(self.layout.shares):
            if share.key is None:
                found.append((key, 0))
                continue
            span, name = key[:, :, share.start : share.stop], (number, key.shape[1])
            width = share.key[0].shape[-1]
            if reuse and name not in self.layout.scratch:
                self.layout.scratch[name] = torch.empty(*span.shape[:-1], width, dtype=key.dtype, device=key.device)
            out = self.layout.scratch[name] if reuse else None
            found.append((turn(span, share.key, self.plan, out=out), share.start))
        return found

    def queries(self, query: torch.Tensor, block: Block, heads: int) -> torch.Tensor:
        """A block of queries, (batch, key heads, groups * rows, dim)."""
        rows = query[:, :, block.begin : block.end]
        if block.scale is not None:
            rows = (rows * block.scale).to(query.dtype)
        return fold(rows if block.table is None else turn(rows, block.table, self.plan), heads)


def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, work: Work):
    """Attention of all queries over the keys in sight, block by block.

    Args:
        query: (batch, heads, queries, dim)
        key, value: (batch, key heads, slots, dim), the keys as the cache holds them

    Returns:
        (batch, queries, heads, dim), and the log-sum-exp (batch, key heads, groups, queries).
    """
    batch, heads, length, dim = query.shape
    groups, wide = heads // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    keys = work.keys(key, reuse=True)
    output = torch.empty(batch, length, heads, dim, dtype=wide, device=query.device)
    sums = torch.empty(batch, key.shape[1], groups, length, dtype=wide, device=query.device)
    covered = 0
    for (begin, end), blocks in itertools.groupby(work.layout.blocks, lambda block: (block.begin, block.end)):
        found = []
        for block in blocks:
            rows = work.queries(query, block, key.shape[1])
            for piece in block.pieces:
                turned, first = keys[piece.share]
                here = turned[:, :, piece.start - first : piece.stop - first]
                values = value[:, :, piece.start : piece.stop]
                found.append(kernels.attend(rows, here, values, work.scale, piece.mask, groups))
        if begin < covered:
            found.append(
                (fold(output[:, begin:end].transpose(1, 2), key.shape[1]), sums[..., begin:end].flatten(2, 3))
            )
        merged, total = merge(found)
        output[:, begin:end] = unfold(merged, groups).transpose(1, 2)
        sums[..., begin:end] = total.view(batch, key.shape[1], groups, -1)
        covered = max(covered, end)
    return output.to(query.dtype), sums


def backward(grad, query, key, value, output, sums: torch.Tensor, work: Work):
    """Gradients of query, key and value; ``grad`` and ``output`` are (batch, queries, heads, dim)."""
    heads, groups, shares = key.shape[1], query.shape[1] // key.shape[1], work.layout.shares
    keys = work.keys(key)
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_query = torch.zeros(query.shape, dtype=wide, device=query.device)
    grad_key = torch.zeros(key.shape, dtype=wide, device=key.device)
    grad_value = torch.zeros(value.shape, dtype=wide, device=value.device)
    # Gradients of keys that a share turned wait to be turned back; the others are added up at once.
    grads = [
        grad_key if share.key is None else torch.zeros(turned.shape, dtype=wide, device=key.device)
        for share, (turned, _) in zip(shares, keys, strict=True)
    ]
    for block in work.layout.blocks:
        rows, total = work.queries(query, block, heads), sums[..., block.begin : block.end].flatten(2, 3)
        whole, whole_grad = (
            fold(states[:, block.begin : block.end].transpose(1, 2), heads) for states in (output, grad)
        )
        grad_rows = torch.zeros(rows.shape, dtype=wide, device=query.device)
        for piece in block.pieces:
            turned, first = keys[piece.share]
            here = slice(piece.start - first, piece.stop - first)
            values = value[:, :, piece.start : piece.stop]
            found = kernels.attend_backward(
                whole_grad, rows, turned[:, :, here], values, whole, total, work.scale, piece.mask, groups
            )
            grad_rows += found[0]
            grads[piece.share][:, :, here] += found[1]
            grad_value[:, :, piece.start : piece.stop] += found[2]
        grad_rows = unfold(grad_rows, groups)
        if block.table is not None:
            grad_rows = turn(grad_rows, block.table, work.plan, back=True)
        grad_query[:, :, block.begin : block.end] += grad_rows if block.scale is None else grad_rows * block.scale
    for share, found in zip(shares, grads, strict=True):
        if share.key is not None:
            grad_key[:, :, share.start : share.stop] += turn(found, share.key, work.plan, back=True)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def fold(states: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, heads * groups, rows, dim) as (batch, heads, groups * rows, dim): no key is copied for its group."""
    batch, _, _, dim = states.shape
    return states.reshape(batch, heads, -1, dim)


def unfold(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Back from ``fold``."""
    batch, heads, rows, dim = states.shape
    return states.reshape(batch, heads * groups, rows // groups, dim)


def merge(found: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax out of those over several sets of keys.

    Args:
        found: outputs (batch, heads, rows, dim) and log-sum-exps (batch, heads, rows)
    """
    if len(found) == 1:
        return found[0]
    sums = torch.stack([total for _, total in found])
    merged = torch.stack([output for output, _ in found]) * sums.softmax(0)[..., None]
    return merged.sum(0), sums.logsumexp(0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, work):
        output, sums = forward(query, key, value, work)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.work = work
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, output, sums = ctx.saved_tensors
        return *backward(grad, query, key, value, output, sums, ctx.work), None


def blockwise(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, work: Work) -> torch.Tensor:
    """``forward`` with gradients, for values of any width: (batch, queries, heads, value dim)."""
    width = value.shape[-1]
    query, key, value = of_one_width(query, key, value)
    if torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value)):
        output = _Attention.apply(query, key, value, work)
    else:
        output, _ = forward(query, key, value, work)
    return output[..., :width]


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

    def tables():
        shifts = [
            (part.query(queries) - method.held(queries), (keys if part.plain_keys else method.far(keys)) - held)
            for part in parts
        ]
        make = functools.partial(shift_table, layer.source, layer.plan, like=call.query)
        return [(make(shift=left), make(shift=right)) for left, right in shifts]

    name = (layer.plan.source, layer.plan.pairing, slots, len(parts), device, call.query.dtype)
    # In a graph, a name with the number of slots would ask for a new one at every token.
    made = tables() if torch.compiler.is_compiling() else call.context.once(name, tables)
    scale = method.query_scale(queries.amax(0), layer.source.rope)
    query = call.query if scale is None else (call.query * scale.float()[:, None, :, None]).to(call.query.dtype)
    turned = [(turn(query, left, layer.plan), turn(call.key, right, layer.plan)) for left, right in made]
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
