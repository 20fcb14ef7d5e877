"""Attention over some of the keys with the log-sum-exp of its scores, and the backward that belongs to the whole.

Parts that cover different keys of one softmax merge by their log-sum-exps. Backward takes the output and log-sum-exp
of the whole softmax, which makes the gradient of every part exact.
"""

from dataclasses import dataclass

import torch
from torch import nn

ROWS = {"cpu": 256}
"""Queries per block, by device: small enough for the caches of a CPU, large enough to fill an accelerator."""
_ROWS = 2048
_EFFICIENT_ALIGNMENT = 32
"""Queries by which the log-sum-exp of the memory-efficient kernel is padded."""


@dataclass
class Scores:
    """What turns queries and keys into scores.

    Attributes:
        scale: factor on their product
        mask: (batch or 1, 1, rows, keys) added to it, in their dtype; a row that sees nothing holds finite numbers,
            so that its log-sum-exp is one too. None: every row sees every key.
    """

    scale: float
    mask: torch.Tensor | None


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores):
    """Attention of one part.

    Args:
        query: (batch, heads, rows, dim)
        key, value: (batch, heads, keys, dim)

    Returns:
        Output (batch, heads, rows, dim) and log-sum-exp (batch, heads, rows), float32 or wider.
    """
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=scores.mask, scale=scores.scale
        )
    if query.device.type == "cuda" and query.dtype != torch.float64:
        output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _expanded(query, key, scores.mask), True, 0.0, False, scale=scores.scale
        )
        return output, logsumexp[..., : query.shape[2]]
    return plain(query, key, value, scores)


def attend_backward(grad, query, key, value, output, logsumexp, scores: Scores):
    """Gradients of query, key and value through one part.

    Args:
        grad, output: (batch, heads, rows, dim) of the whole softmax
        logsumexp: (batch, heads, rows) of the whole softmax
    """
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, logsumexp, 0.0, False, attn_mask=scores.mask, scale=scores.scale
        )
    if query.device.type == "cuda" and query.dtype != torch.float64:
        spare = -logsumexp.shape[-1] % _EFFICIENT_ALIGNMENT
        seed = torch.zeros((), dtype=torch.long, device=query.device)
        bias = _expanded(query, key, scores.mask)
        found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, bias, output, nn.functional.pad(logsumexp, (0, spare), value=torch.inf),
            seed, seed, 0.0, [True, True, True, False], False, scale=scores.scale,
        )  # fmt: skip
        return found[:3]
    return plain_backward(grad, query, key, value, output, logsumexp, scores)


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores):
    """``attend`` in plain matrix products, for any device and dtype."""
    weights = _scores(query, key, scores)
    logsumexp = weights.logsumexp(-1)
    return (weights - logsumexp[..., None]).exp().to(value.dtype) @ value, logsumexp


def plain_backward(grad, query, key, value, output, logsumexp, scores: Scores):
    """``attend_backward`` in plain matrix products."""
    wide = logsumexp.dtype
    weights = (_scores(query, key, scores) - logsumexp[..., None]).exp()
    product = (grad.to(wide) * output.to(wide)).sum(-1, keepdim=True)
    inner = (weights * (grad.to(wide) @ value.to(wide).mT - product)).to(query.dtype) * scores.scale
    return inner @ key, inner.mT @ query, weights.to(grad.dtype).mT @ grad


def _scores(query: torch.Tensor, key: torch.Tensor, scores: Scores) -> torch.Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    found = query.to(wide) @ key.to(wide).mT * scores.scale
    return found if scores.mask is None else found + scores.mask.to(wide)


def _expanded(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as the memory-efficient kernel takes it: whole, with rows that start at aligned addresses."""
    if mask is None:
        return None
    spare = -mask.shape[-1] % 16
    aligned = nn.functional.pad(mask, (0, spare))[..., : mask.shape[-1]]
    return aligned.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def rows_per_block(device: torch.device) -> int:
    """How many queries to take at once."""
    return ROWS.get(device.type, _ROWS)
