"""The two-part attention as one operator, which ``torch.compile`` calls without looking inside: how a forward is cut
into blocks depends on its positions, and a graph of thousands of blocks would take minutes to build.
"""

import threading
from dataclasses import dataclass

import torch

from . import two_part
from .context import Call
from .methods.base import Rope
from .methods.position_map import PositionMap, Raw
from .positions import Positions
from .registry import parse
from .turning import Source
from .twin import Plan


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``two_part.attend`` in a graph: the operator without a mask or for one token, the dense path for the rest."""
    method, parts = two_part.parts_of(call)
    unnamed = isinstance(method, Raw)  # the operator is told its method by name
    if unnamed or not two_part.kernels_do(call, parts) or (call.mask is not None and call.query.shape[2] > 1):
        return two_part.dense(call, method, parts)
    plan, source, positions = call.layer.plan, call.layer.source, call.context.positions
    total = positions.total if isinstance(positions.total, torch.Tensor) else None
    query, key = call.query.to(call.value.dtype), call.key.to(call.value.dtype)
    query, key, value = two_part.of_one_width(query, key, call.value)
    found = mapped(
        query, key, value, positions.queries, call.places, total, call.mask, source.frequencies, source.axes,
        str(method), source.rope.configured_length, plan.start, plan.stop, plan.pairing, plan.sign,
        two_part.scale_of(call),
    )  # fmt: skip
    return found[0][..., : call.value.shape[-1]], None


@dataclass
class _Call:
    """What a layout was made from."""

    name: tuple
    tensors: tuple[torch.Tensor, ...]
    layout: two_part.Layout


class _Last(threading.local):
    """The last call of a thread: the layers of a forward share its layout."""

    call: _Call | None = None


_last = _Last()


def _work(
    queries: torch.Tensor,
    keys: torch.Tensor,
    total: torch.Tensor | None,
    mask: torch.Tensor | None,
    frequencies: torch.Tensor,
    axes: torch.Tensor | None,
    method: str,
    length: int,
    start: int,
    stop: int,
    pairing: str,
    sign: int,
    scale: float,
    groups: int,
    value: torch.Tensor,
) -> tuple[two_part.Work, int]:
    plan = Plan("", 0, start, stop, pairing, sign)  # type: ignore[arg-type]
    slots = keys.shape[-1] if total is None else int(total)
    name = (method, length, slots, groups, pairing, sign, value.device, value.dtype, value.shape[:2], mask is None)
    padding = None if mask is None else mask[:, 0, -1]
    tensors = (queries, keys, frequencies) if padding is None else (queries, keys, frequencies, padding)
    last = _last.call
    if last is not None and last.name == name and all(map(_same, last.tensors, tensors)):
        found = last.layout
    else:
        rope = Rope(frequencies, 0.0, length, length, 0, "default", {})
        chosen = parse(method)
        assert isinstance(chosen, PositionMap)
        positions = Positions(queries, keys, slots, padding)
        found = two_part.layout(chosen, Source(rope, frequencies, axes), plan, positions, slots, groups, value)
        if not two_part.shows_runs(mask, found.start, slots, None):
            raise RuntimeError(
                "The positions of this compiled forward have gaps that its mask does not follow: run it uncompiled."
            )
        _last.call = _Call(name, tuple(tensor.clone() for tensor in tensors), found)
    return two_part.Work(found, plan, scale), slots


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.device == other.device and torch.equal(one, other)


@torch.library.custom_op("hf_posenc::mapped", mutates_args=())
def mapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    total: torch.Tensor | None,
    mask: torch.Tensor | None,
    frequencies: torch.Tensor,
    axes: torch.Tensor | None,
    method: str,
    length: int,
    start: int,
    stop: int,
    pairing: str,
    sign: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``two_part.forward``."""
    work, slots = _work(
        queries, keys, total, mask, frequencies, axes, method, length, start, stop, pairing, sign, scale,
        query.shape[1] // key.shape[1], value,
    )  # fmt: skip
    return two_part.forward(query, key[:, :, :slots], value[:, :, :slots], work)


@mapped.register_fake
def _(query, key, value, *args):
    batch, heads, length, dim = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    sums = query.new_empty(batch, key.shape[1], heads // key.shape[1], length, dtype=wide)
    return query.new_empty(batch, length, heads, dim), sums


@torch.library.custom_op("hf_posenc::mapped_backward", mutates_args=())
def mapped_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    total: torch.Tensor | None,
    mask: torch.Tensor | None,
    frequencies: torch.Tensor,
    axes: torch.Tensor | None,
    method: str,
    length: int,
    start: int,
    stop: int,
    pairing: str,
    sign: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``two_part.backward``."""
    work, slots = _work(
        queries, keys, total, mask, frequencies, axes, method, length, start, stop, pairing, sign, scale,
        query.shape[1] // key.shape[1], value,
    )  # fmt: skip
    found = two_part.backward(grad, query, key[:, :, :slots], value[:, :, :slots], output, sums, work)
    spare = key.shape[2] - slots
    return found[0], *(torch.nn.functional.pad(part, (0, 0, 0, spare)) for part in found[1:])


@mapped_backward.register_fake
def _(grad, query, key, value, *args):
    # Contiguous whatever the strides of these: compiled code relies on them.
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:9])
    ctx.numbers = inputs[9:]


def _backward(ctx, grad, _):
    query, key, value, output, sums, *rest = ctx.saved_tensors
    found = mapped_backward(grad, query, key, value, output, sums, *rest, *ctx.numbers)
    return *found, *[None] * 13


mapped.register_autograd(_backward, setup_context=_remember)
