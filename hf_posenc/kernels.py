"""Attention over some of the keys with the log-sum-exp of its scores, and the backward that belongs to the whole.

Parts that cover different keys of one softmax merge by their log-sum-exps. Backward takes the output and log-sum-exp
of the whole softmax, which makes the gradient of every part exact. Queries are folded: all query heads of a key head
stand one after the other along the rows, so that no key is ever copied for its group.
"""

import math
from typing import Literal

import torch
from torch import nn

CAUSAL: Literal["causal"] = "causal"
Mask = torch.Tensor | Literal["causal"] | None
"""What a row sees: of as many keys as rows those up to its own, what numbers added to its scores leave, or all.

Numbers are (batch or 1, 1, rows, keys) in the dtype of the queries, finite even for a row that sees nothing, so that
its log-sum-exp is finite too.
"""
CAUSAL_ROWS = 512
"""Rows from which on a triangle is left to the kernel; below, one call under a mask beats one for each head."""
_SPLIT_KEYS = 512
"""Keys from which on a core is worth a set of its own."""
_EFFICIENT_ALIGNMENT = 32
"""Rows by which the log-sum-exp of the memory-efficient kernel is padded."""


def rows_per_block(device: torch.device, groups: int, banded: bool) -> int:
    """How many queries to take at once: enough to fill the device, few where each brings two fringes of its own.

    Args:
        groups: query heads to a key head
        banded: whether both edges of what is in sight move with the query
    """
    if device.type != "cpu":
        return 1024 if banded else 4096
    return max(64, 384 // groups) if banded else 512


def splits(value: torch.Tensor, keys: int) -> int:
    """Into how many sets to cut the ``keys`` that one query a row meets, so that every core has as much to do."""
    batch, heads = value.shape[:2]
    threads = torch.get_num_threads()
    if value.device.type != "cpu" or batch > 1 or keys < _SPLIT_KEYS * threads:
        return 1
    return threads // math.gcd(heads, threads)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: Mask, groups: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Attention of one part, or of the sets of keys that it is cut into.

    Args:
        query: (batch, heads, groups * rows, dim)
        key, value: (batch, heads, keys, dim)
        scale: factor on the products of queries and keys

    Returns:
        Output (batch, heads, groups * rows, dim) and log-sum-exp (batch, heads, groups * rows), float32 or wider.
    """
    if mask is CAUSAL:
        found = [_attend(rows, key, value, scale, None, True) for rows in query.chunk(groups, dim=2)]
        outputs, totals = zip(*found, strict=True)
        return [(torch.cat(outputs, dim=2), torch.cat(totals, dim=2))]
    count = splits(value, key.shape[2]) if query.shape[2] == groups and mask is None else 1
    if count > 1 and key.shape[2] % count == 0:
        # The sets stand where rows of a batch do, without a copy.
        keys, values = (states[0].unflatten(1, (count, -1)).transpose(0, 1) for states in (key, value))
        output, total = _attend(query.expand(count, -1, -1, -1), keys, values, scale, None, False)
        return list(zip(output.split(1), total.split(1), strict=True))
    return [_attend(query, key, value, scale, mask, False)]


def attend_backward(grad, query, key, value, output, logsumexp, scale: float, mask: Mask, groups: int):
    """Gradients of query, key and value through one part.

    Args:
        grad, output: (batch, heads, groups * rows, dim) of the whole softmax
        logsumexp: (batch, heads, groups * rows) of the whole softmax
    """
    if mask is CAUSAL:
        found = [
            _backward(one_grad, rows, key, value, one, total, scale, None, True)
            for one_grad, rows, one, total in zip(
                *(states.chunk(groups, dim=2) for states in (grad, query, output, logsumexp)), strict=True
            )
        ]
        queries, keys, values = zip(*found, strict=True)
        return torch.cat(queries, dim=2), sum(keys), sum(values)
    return _backward(grad, query, key, value, output, logsumexp, scale, mask, False)


def _attend(query, key, value, scale, mask, causal):
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
    if query.device.type == "cuda" and query.dtype != torch.float64:
        bias = _aligned(query, key, mask)
        output, total, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, causal, scale=scale
        )
        return output, total[..., : query.shape[2]]
    return plain(query, key, value, scale, mask, causal)


def _backward(grad, query, key, value, output, logsumexp, scale, mask, causal):
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, logsumexp, 0.0, causal, attn_mask=mask, scale=scale
        )
    if query.device.type == "cuda" and query.dtype != torch.float64:
        total = nn.functional.pad(logsumexp, (0, -logsumexp.shape[-1] % _EFFICIENT_ALIGNMENT), value=torch.inf)
        seed = torch.zeros((), dtype=torch.long, device=query.device)
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, _aligned(query, key, mask), output, total,
            seed, seed, 0.0, [True, True, True, False], causal, scale=scale,
        )[:3]  # fmt: skip
    return plain_backward(grad, query, key, value, output, logsumexp, scale, mask, causal)


def plain(query, key, value, scale: float, mask: torch.Tensor | None, causal: bool = False):
    """``attend`` in plain matrix products, for any device and dtype."""
    scores = _scores(query, key, scale, mask, causal)
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp[..., None]).exp().to(value.dtype) @ value, logsumexp


def plain_backward(grad, query, key, value, output, logsumexp, scale: float, mask, causal: bool = False):
    """``attend_backward`` in plain matrix products."""
    wide = logsumexp.dtype
    weights = (_scores(query, key, scale, mask, causal) - logsumexp[..., None]).exp()
    product = (grad.to(wide) * output.to(wide)).sum(-1, keepdim=True)
    inner = (weights * (grad.to(wide) @ value.to(wide).mT - product)).to(query.dtype) * scale
    return inner @ key, inner.mT @ query, weights.to(grad.dtype).mT @ grad


def _scores(query, key, scale: float, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    found = query.to(wide) @ key.to(wide).mT * scale
    if causal:
        found = found.masked_fill(torch.ones_like(found, dtype=torch.bool).triu(1), -torch.inf)
    return found if mask is None else found + mask.to(wide)


def _aligned(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as the memory-efficient kernel takes it: whole, with rows that start at aligned addresses."""
    if mask is None:
        return None
    spare = -mask.shape[-1] % 16
    aligned = nn.functional.pad(mask, (0, spare))[..., : mask.shape[-1]]
    return aligned.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
