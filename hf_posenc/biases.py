"""Attention with a bias on the scores, by blocks of queries: a length x length bias never stands for a whole layer."""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .context import Call
from .methods.bias import BiasMethod

_BUDGET = 1 << 22
"""Numbers of a bias at a time: more of them leave the cache of a CPU."""


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The stock function on blocks of queries, each with its bias in its mask."""
    length, slots = call.query.shape[2], call.key.shape[2]
    rows = min(length, max(1, _BUDGET // (call.query.shape[1] * slots * call.query.shape[0])))
    if call.options.get("output_attentions") or rows == length:
        return _block(call, 0, length)
    outputs: list[torch.Tensor] = []
    weights: list[Any] = []
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        if torch.is_grad_enabled():
            # Masks would wait for the backward pass, together a length x length one for every layer.
            output, weight = checkpoint(_block, call, begin, end, use_reentrant=False)
        else:
            output, weight = _block(call, begin, end)
        outputs.append(output)
        weights.append(weight)
    # Families whose eager function always gives weights get those of every block, side by side.
    whole = None if weights[0] is None or len({weight.shape[-1] for weight in weights}) > 1 else torch.cat(weights, 2)
    return torch.cat(outputs, dim=1), whole


def _block(call: Call, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries begin to end, over the keys that they can see."""
    query, slots = call.query[:, :, begin:end], call.key.shape[2]
    ahead = slots - call.query.shape[2]
    growing = isinstance(call.context.positions.total, int) and ahead >= 0
    whole = end == call.query.shape[2] or call.mask is not None or not call.causal or not growing
    stop = slots if whole else ahead + end
    mask = bias_mask(call, begin, end, stop)
    return call.run(query, call.key[:, :, :stop], call.value[:, :, :stop], mask)


def bias_mask(call: Call, begin: int, end: int, stop: int) -> torch.Tensor:
    """What queries begin to end add to their scores with the first ``stop`` keys: (batch or 1, heads, queries, keys)
    in the dtype of the queries, with keys that are not to be seen as far down as that goes."""
    method, dtype = call.layer.scheme.method, call.query.dtype
    assert isinstance(method, BiasMethod)
    wide = torch.promote_types(dtype, torch.float32)
    bias = method.bias(
        distances(call, begin, end, stop), call.query.shape[1], call.causal, getattr(call.module, "posenc", None)
    )
    lowest, mask = max(torch.finfo(dtype).min, torch.finfo(bias.dtype).min), call.rows(begin, end, stop)
    if mask is None and call.causal and call.query.shape[2] > 1:
        slots = torch.arange(stop, device=bias.device)
        own = slots[call.key.shape[2] - call.query.shape[2] + begin :][: end - begin]
        mask = (slots <= own[:, None])[None, None]
    bias = bias.to(wide)
    if mask is not None and mask.shape[0] > bias.shape[0]:
        bias = bias.repeat(mask.shape[0], 1, 1, 1)
    # In the memory where it stands: a pass over it costs as much as the scores themselves.
    bias.clamp_(min=lowest / 2)
    if mask is not None and mask.dtype == torch.bool:
        bias.masked_fill_(~mask, lowest)
    elif mask is not None:
        bias.add_(mask).clamp_(min=lowest)
    return bias.to(dtype)


def distances(call: Call, begin: int, end: int, stop: int) -> torch.Tensor:
    """i - j for queries begin to end and the first ``stop`` keys, (batch or 1, queries, keys)."""
    queries = call.context.positions.queries.amax(0).to(call.query.device)
    keys = call.places.amax(0).to(call.query.device)
    if queries.shape[0] > 1 and not torch.compiler.is_compiling():
        # Rows that are only shifted against each other share one bias; hidden slots do not count.
        shared = call.context.once(("shared", keys.shape[1]), lambda: _shifted(call, queries, keys))
        if shared is not None:
            row = slice(shared, shared + 1)
            queries, keys = queries[row], keys[row]
    return queries[:, begin:end, None] - keys[:, None, :stop]


def _shifted(call: Call, queries: torch.Tensor, keys: torch.Tensor) -> int | None:
    """A row whose distances hold for all rows wherever they have a token, or None."""
    if bool((queries[:, -1:] - keys == queries[:1, -1:] - keys[:1]).all()):
        return 0
    padding = call.context.positions.padding
    if padding is None or padding.shape[1] != keys.shape[1]:
        return None
    full = int(padding.sum(1).argmax())
    same = queries[:, -1:] - keys == queries[full, -1:] - keys[full]
    tokens = padding.to(keys.device).bool()
    return full if bool((same | ~tokens).all() and tokens[full].all()) else None
