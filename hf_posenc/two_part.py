"""Attention of the position maps: near and far keys in one softmax, without a length x length matrix.

The cache holds every key rotated to one position (``PositionMap.held``). A query is turned once for each part of the
map, near keys are turned back to their own positions, and a block of queries then meets three kinds of keys in each
part: those all of its rows see, which a fused kernel takes without a mask, and two narrow fringes where rows differ.
Whatever cuts a text into runs of its own (padding, packed documents) only narrows which slots a row sees.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
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
    # Blocks count positions from 0 on.
    counted = context.once("counted", lambda: bool((positions.keys[..., :total] >= 0).all()))
    if counted and slots >= total and kernels_do(call, parts):
        groups = call.query.shape[1] // call.key.shape[1]
        found = context.once(
            (layer.plan.source, layer.plan.pairing, groups, call.value.shape[:2], call.value.device, call.value.dtype),
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
    if method.plain_until and int(positions.keys[..., : int(positions.total)].max()) >= method.plain_until:
        return False  # also where new tokens start again from 0 behind keys that are held far
    longest, (near, *farther) = int(places.max()), method.parts()
    scale = method.query_scale(places, source.rope)
    return not (
        any(longest // part.block >= part.first for part in farther)
        or (near.query(queries) != method.held(queries)).any()
        or (scale is not None and (scale != 1).any())
    )


def parts_of(call: Call) -> tuple[PositionMap, list[Part]]:
    """The method, and those of its parts that a layer with a sliding window can meet."""
    method, window = call.layer.scheme.method, call.layer.plan.sliding_window
    assert isinstance(method, PositionMap)
    parts = method.parts() if call.causal else method.both_ways()
    assert parts is not None
    return method, [part for part in parts if window is None or part.nearest < window]


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
class Reach:
    """Keys that a part sees and that are to be turned alike.

    Attributes:
        low, high: (batch, queries) int64 on the CPU: every query sees the slots low to high, high excluded
        start, stop: between the lowest and the highest of them
        shift: (axes, batch, stop - start) positions by which these keys turn, None where they stand right
    """

    low: torch.Tensor
    high: torch.Tensor
    start: int
    stop: int
    shift: torch.Tensor | None


@dataclass
class Share:
    """Keys side by side for the kernels: those of all slots as the cache holds them, or copies that were turned.

    Attributes:
        spans: the slots of the copies; empty for all slots as they stand
        key: the table that turns the copies
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    key: Table | None = None


@dataclass
class Piece:
    """Keys of a share, met by a block of queries.

    Attributes:
        start, stop: places in the share
        mask: see ``kernels.attend``
    """

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
        shares: the first is that of all slots as they stand
        blocks: part by part, the near one first, which every query takes part in
        start: (batch, queries) the first slot of the run of each query
        scratch: memory for the copies, by share, use and shape
    """

    shares: list[Share]
    blocks: list[Block]
    start: torch.Tensor
    scratch: dict[tuple, torch.Tensor] = field(default_factory=dict)


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
    value: torch.Tensor,
) -> Layout:
    """Cut the queries into blocks and their keys into pieces.

    Args:
        slots: number of keys in the cache
        groups: query heads to a key head
        value: the values of a layer, for their shape, device and dtype
    """
    queries, length = positions.queries.cpu(), positions.queries.shape[-1]
    start = runs(positions, slots)[:, slots - length :]
    scale = method.query_scale(queries.amax(0), source.rope)
    if scale is not None:
        scale = scale.to(value.device, torch.float32)[:, None, :, None]
    cutter = _Cutter(method, source, plan, queries, groups, value, scale, Layout([Share()], [], start))
    reaches = [(part, list(_reaches(part, method, positions, slots, start))) for part in method.parts()]
    return cutter.one_query(reaches) if length == 1 else cutter.blocks(reaches)


@dataclass
class _Cutter:
    """Makes a layout out of what every part reaches."""

    method: PositionMap
    source: Source
    plan: Plan
    queries: torch.Tensor
    groups: int
    value: torch.Tensor
    scale: torch.Tensor | None
    found: Layout
    masks: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def table(self, shift: torch.Tensor) -> Table | None:
        return shift_table(self.source, self.plan, shift, self.value) if shift.any() else None

    def share(self, spans: list[tuple[int, int]], shift: torch.Tensor) -> int:
        """Keys turned by (axes, batch, length) ``shift``; the number of their share."""
        self.found.shares.append(Share(spans, shift_table(self.source, self.plan, shift, self.value)))
        return len(self.found.shares) - 1

    def block(self, begin: int, end: int, table: Table | None, pieces: list[Piece]) -> None:
        if pieces:
            rows = None if table is None else (table[0][:, :, begin:end], table[1][:, :, begin:end])
            scale = None if self.scale is None else self.scale[:, :, begin:end]
            self.found.blocks.append(Block(begin, end, rows, scale, pieces))

    def blocks(self, reaches: list[tuple[Part, list[Reach]]]) -> Layout:
        """Many queries: blocks of them, part by part."""
        length, held = self.queries.shape[-1], self.method.held(self.queries)
        for part, mine in reaches:
            table = self.table(part.query(self.queries) - held)
            shares = [
                (reach, 0, 0)
                if reach.shift is None
                else (reach, self.share([(reach.start, reach.stop)], reach.shift), reach.start)
                for reach in mine
            ]
            most = kernels.rows_per_block(self.value.device, self.groups, banded=part.is_band)
            for begin, end in _cuts(mine, length, most):
                pieces = [
                    Piece(number, first - shown, last - shown, self.mask(reach, begin, end, first, last))
                    for reach, number, shown in shares
                    for first, last in _spans(reach, begin, end)
                ]
                self.block(begin, end, table, pieces)
        return self.found

    def one_query(self, reaches: list[tuple[Part, list[Reach]]]) -> Layout:
        """One query a row, where every call counts: whatever is to be turned lies side by side, turned so far that
        all of it meets the query where the last part sees it from."""
        held, frame = self.method.held(self.queries), reaches[-1][0].query(self.queries)
        copied: list[tuple[Reach, int, int, torch.Tensor]] = []
        for part, mine in reaches:
            seen_from, standing = part.query(self.queries), []
            for reach in mine:
                stop = reach.stop
                if reach.shift is None:
                    stop -= (reach.stop - reach.start) % kernels.splits(self.value, reach.stop - reach.start)
                    standing.append(Piece(0, reach.start, stop, self.mask(reach, 0, 1, reach.start, stop)))
                    if stop < reach.stop:
                        copied.append((reach, stop, reach.stop, (frame - seen_from).expand(-1, -1, reach.stop - stop)))
                else:
                    copied.append((reach, reach.start, stop, reach.shift + (frame - seen_from)))
            if part is not reaches[-1][0]:
                self.block(0, 1, self.table(seen_from - held), standing)
        if copied:
            masks = [self.mask(reach, 0, 1, first, last) for reach, first, last, _ in copied]
            number = self.share(
                [(first, last) for _, first, last, _ in copied], torch.cat([shift for *_, shift in copied], dim=-1)
            )
            standing.append(
                Piece(
                    number,
                    0,
                    sum(last - first for _, first, last, _ in copied),
                    self.joined(masks, [last - first for _, first, last, _ in copied]),
                )
            )
        self.block(0, 1, self.table(frame - held), standing)
        return self.found

    def mask(self, reach: Reach, begin: int, end: int, first: int, last: int) -> kernels.Mask:
        """What of the slots first to last a block of queries sees of a reach."""
        low, high = reach.low[:, begin:end] - first, reach.high[:, begin:end] - first
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
        if name not in self.masks:
            slots = torch.arange(last - first)
            hidden = ((slots < low[..., None]) | (slots >= high[..., None])).repeat(1, self.groups, 1)[:, None]
            # Finite, so that a row without a key in this piece has a log-sum-exp.
            self.masks[name] = self.nothing(hidden.shape).masked_fill_(
                hidden.to(self.value.device), torch.finfo(self.value.dtype).min / 2
            )
        return self.masks[name]

    def joined(self, masks: list[kernels.Mask], widths: list[int]) -> kernels.Mask:
        """One mask for keys side by side, each of which has its own or none."""
        batch = max((len(mask) for mask in masks if isinstance(mask, torch.Tensor)), default=0)
        if not batch:
            return None
        return torch.cat([
            mask.expand(batch, -1, -1, -1) if isinstance(mask, torch.Tensor)
            else self.nothing((batch, 1, self.groups, width))
            for mask, width in zip(masks, widths, strict=True)
        ], dim=-1)  # fmt: skip

    def nothing(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.value.dtype, device=self.value.device)


def _reaches(part, method, positions, slots, start) -> Iterator[Reach]:
    """What the queries see of one part, apart by how the cache holds it."""
    places = positions.queries.cpu().amax(0)
    first = places - (torch.arange(slots - places.shape[1], slots) - start)  # position of the first slot of the run
    for least, most in _held_ranges(method):
        low, high = _sight(part, places)
        low = start + (low.clamp(min=least) - first).clamp(min=0)
        high = start + (high.clamp(max=most) - first).clamp(min=0)
        seen = low < high
        if not seen.any():
            continue
        begin, end = int(low[seen].min()), int(high.max())
        span = positions.keys[..., begin:end].cpu()
        shift = (span if part.plain_keys else method.far(span)) - method.held(span)
        yield Reach(torch.minimum(low, high), high, begin, end, shift if shift.any() else None)


def _held_ranges(method: PositionMap) -> list[tuple[int, int]]:
    """Ranges of positions where keys are held alike, plain or far."""
    endless = torch.iinfo(torch.int64).max // 2
    if not method.plain_until:
        return [(0, endless)]
    return [(0, method.plain_until), (method.plain_until, endless)]


def _sight(part: Part, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the first key that queries at ``places`` see in a part, and of the first that they do not."""
    block = places // part.block
    lowest = torch.zeros_like(places) if part.last is None else ((block - part.last + 1) * part.block).clamp(min=0)
    return lowest, torch.minimum((block - part.first + 1) * part.block, places + 1).clamp(min=0)


def _cuts(reaches: list[Reach], length: int, rows: int) -> Iterator[tuple[int, int]]:
    """First and last query of every block."""
    jumps = torch.zeros(length, dtype=torch.bool)
    for reach in reaches:
        for edge in (reach.low, reach.high):
            step = edge[:, 1:] - edge[:, :-1]
            jumps[1:] |= ((step > 1) | (step < 0)).any(0)
        seen = reach.low < reach.high
        jumps[1:] |= (seen[:, 1:] != seen[:, :-1]).any(0)
    at = jumps.nonzero().flatten().tolist()
    borders = [0, *(at if len(at) <= length // _SPARSE + 1 else ()), length]
    for first, last in itertools.pairwise(borders):
        for begin in range(first, last, rows):
            yield begin, min(begin + rows, last)


def _spans(reach: Reach, begin: int, end: int) -> list[tuple[int, int]]:
    """The slots that a block sees, cut into those that all of its rows see and the fringes before and behind."""
    low, high = reach.low[:, begin:end], reach.high[:, begin:end]
    seen = low < high
    if not seen.any():
        return []
    # One key more than needed in the fringe behind lets its first row see something: it is square, and causal.
    first, last, inner, outer = int(low[seen].min()), int(high.max()), int(low.max()), int(high.min())
    outer -= outer < last
    spans = [(first, last)] if inner >= outer else [(first, inner), (inner, outer), (outer, last)]
    return [(start, stop) for start, stop in spans if start < stop]


# --- the computation -------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """One layer's share in a forward: how its queries and keys turn, and the scale of its scores."""

    layout: Layout
    plan: Plan
    scale: float

    def shares(
        self, key: torch.Tensor, value: torch.Tensor, reuse: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every share.

        Args:
            reuse: overwrite the copies of the last layer, whose memory is warm
        """
        found = []
        for number, share in enumerate(self.layout.shares):
            if share.key is None:
                found.append((key, value))
                continue
            keys, values = (
                _of_spans(states, share.spans, self._scratch(reuse, number, name, states, share, states.shape[-1]))
                for name, states in (("key", key), ("value", value))
            )
            out = self._scratch(reuse, number, "turned", key, share, share.key[0].shape[-1])
            found.append((turn(keys, share.key, self.plan, out=out), values))
        return found

    def _scratch(self, reuse: bool, number: int, use: str, states: torch.Tensor, share: Share, width: int):
        """Memory for copies of ``states``, None where it must be new."""
        if not reuse or (use != "turned" and len(share.spans) == 1):
            return None
        shape = (*states.shape[:2], sum(stop - start for start, stop in share.spans), width)
        name = (number, use, shape)
        if name not in self.layout.scratch:
            self.layout.scratch[name] = states.new_empty(shape)
        return self.layout.scratch[name]

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
    shares = work.shares(key, value, reuse=True)

    def attended(blocks: Iterable[Block]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for block in blocks:
            rows = work.queries(query, block, key.shape[1])
            for piece in block.pieces:
                keys, values = (states[:, :, piece.start : piece.stop] for states in shares[piece.share])
                found += kernels.attend(rows, keys, values, work.scale, piece.mask, groups)
        return found

    if length == 1:
        merged, total = merge(attended(work.layout.blocks))
        return unfold(merged, groups).transpose(1, 2).to(query.dtype), total[..., None]
    output = torch.empty(batch, length, heads, dim, dtype=wide, device=query.device)
    sums = torch.empty(batch, key.shape[1], groups, length, dtype=wide, device=query.device)
    covered = 0
    for (begin, end), blocks in itertools.groupby(work.layout.blocks, lambda block: (block.begin, block.end)):
        found = attended(blocks)
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
    heads, groups, shares = key.shape[1], query.shape[1] // key.shape[1], work.shares(key, value)
    grad_query, grad_key, grad_value = (
        torch.zeros(states.shape, dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
        for states in (query, key, value)
    )
    # Gradients of copies wait to be turned back; the others are added up at once.
    grads = [
        (grad_key, grad_value) if share.key is None else tuple(map(grad_key.new_zeros, (keys.shape, values.shape)))
        for share, (keys, values) in zip(work.layout.shares, shares, strict=True)
    ]
    for block in work.layout.blocks:
        rows, total = work.queries(query, block, heads), sums[..., block.begin : block.end].flatten(2, 3)
        whole, whole_grad = (
            fold(states[:, block.begin : block.end].transpose(1, 2), heads) for states in (output, grad)
        )
        grad_rows = torch.zeros(rows.shape, dtype=grad_query.dtype, device=query.device)
        for piece in block.pieces:
            here = slice(piece.start, piece.stop)
            keys, values = (states[:, :, here] for states in shares[piece.share])
            found = kernels.attend_backward(
                whole_grad, rows, keys, values, whole, total, work.scale, piece.mask, groups
            )
            grad_rows += found[0]
            for states, part in zip(grads[piece.share], found[1:], strict=True):
                states[:, :, here] += part
        grad_rows = unfold(grad_rows, groups)
        if block.table is not None:
            grad_rows = turn(grad_rows, block.table, work.plan, back=True)
        grad_query[:, :, block.begin : block.end] += grad_rows if block.scale is None else grad_rows * block.scale
    for share, (of_keys, of_values) in zip(work.layout.shares, grads, strict=True):
        if share.key is not None:
            _add_to_spans(grad_key, turn(of_keys, share.key, work.plan, back=True), share.spans)
            _add_to_spans(grad_value, of_values, share.spans)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _of_spans(states: torch.Tensor, spans: list[tuple[int, int]], out: torch.Tensor | None = None) -> torch.Tensor:
    found = [states[:, :, start:stop] for start, stop in spans]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2, out=out)


def _add_to_spans(states: torch.Tensor, found: torch.Tensor, spans: list[tuple[int, int]]) -> None:
    for (start, stop), part in zip(spans, found.split([stop - start for start, stop in spans], dim=2), strict=True):
        states[:, :, start:stop] += part


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
    length, slots = call.query.shape[2], call.key.shape[2]
    queries, keys = call.context.positions.queries.to(call.query.device), call.places.to(call.query.device)
    turned = compared(call, method, parts)
    if len(parts) == 1:
        return call.run(*turned[0], call.value, call.rows(0, length, slots))
    blank = torch.zeros_like(call.key)
    key = torch.cat([
        torch.cat([keys if index == place else blank for place in range(len(parts))], dim=-1)
        for index, (_, keys) in enumerate(turned)
    ], dim=2)  # fmt: skip
    query, value = torch.cat([left for left, _ in turned], dim=-1), call.value.repeat(1, 1, len(parts), 1)
    options = {**call.options, "scaling": scale_of(call)}
    whole = options.get("output_attentions") or call.layer.scheme.stock == "eager"
    rows = length if whole else _DENSE_ROWS
    outputs, weights = [], []
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        mask = _by_part(call, parts, queries[..., begin:end], keys, call.rows(begin, end, slots), begin)
        output, weight = call.stock(call.module, query[:, :, begin:end], key, value, mask, **options)
        outputs.append(output)
        weights.append(None if weight is None else weight.unflatten(-1, (len(parts), slots)).sum(-2))
    return torch.cat(outputs, dim=1), weights[0]


def compared(call: Call, method: PositionMap, parts: list[Part]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries and keys as every part compares them, turned and scaled."""
    layer, device = call.layer, call.query.device
    queries, keys = call.context.positions.queries.to(device), call.places.to(device)
    held = method.held(keys)

    def tables():
        shifts = [
            (part.query(queries) - method.held(queries), (keys if part.plain_keys else method.far(keys)) - held)
            for part in parts
        ]
        make = functools.partial(shift_table, layer.source, layer.plan, like=call.query)
        return [(make(shift=left), make(shift=right)) for left, right in shifts]

    name = (layer.plan.source, layer.plan.pairing, call.key.shape[2], len(parts), device, call.query.dtype)
    # In a graph, a name with the number of slots would ask for a new one at every token.
    made = tables() if torch.compiler.is_compiling() else call.context.once(name, tables)
    scale = method.query_scale(queries.amax(0), layer.source.rope)
    query = call.query if scale is None else (call.query * scale.float()[:, None, :, None]).to(call.query.dtype)
    return [(turn(query, left, layer.plan), turn(call.key, right, layer.plan)) for left, right in made]


def shown(parts: list[Part], queries: torch.Tensor, keys: torch.Tensor) -> list[torch.Tensor]:
    """Which keys every query meets in each part, (batch, 1, queries, keys), from their positions (axes, batch, n)."""
    i, j = queries.amax(0)[:, None, :, None], keys.amax(0)[:, None, None, :]
    found = []
    for part in parts:
        distance = i // part.block - j // part.block
        # Later keys, where a mask shows them, are near.
        seen = torch.ones_like(distance, dtype=torch.bool) if part.first == 0 else distance >= part.first
        found.append(seen if part.last is None else seen & (distance < part.last))
    return found


def _by_part(call: Call, parts: list[Part], queries, keys, mask: torch.Tensor | None, begin: int) -> torch.Tensor:
    """A mask over the keys of all parts, that shows each key in the part of its distance."""
    seen = shown(parts, queries, keys)
    if mask is None and call.causal and call.query.shape[2] > 1:
        slots = torch.arange(keys.shape[-1], device=keys.device)
        mask = (slots <= slots[keys.shape[-1] - call.query.shape[2] + begin :][: queries.shape[-1], None])[None, None]
    if mask is None:
        mask = torch.ones_like(seen[0])
    if mask.dtype == torch.bool and call.layer.scheme.stock == "eager":
        # Eager functions add what they are given.
        mask = torch.zeros(mask.shape, dtype=call.query.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(call.query.dtype).min
        )
    if mask.dtype == torch.bool:
        return torch.cat([mask & part for part in seen], dim=-1)
    return torch.cat([mask.masked_fill(~part, torch.finfo(mask.dtype).min) for part in seen], dim=-1)
