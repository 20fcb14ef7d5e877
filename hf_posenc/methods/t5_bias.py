"""T5's relative bias: a learned number for every bucket of distances and head (arXiv 1910.10683).

A causal model has ``num_buckets`` buckets for what lies before, others half as many each way. The first half of a
side's buckets hold one distance each, the others grow logarithmically up to ``max_distance``; all beyond share the
last. ``interpolate`` divides distances first. On T5 itself the trained table stays and is read by other buckets.
Verified against tests/reference.py.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..registry import register
from .base import Traits, require_integer, require_number
from .bias import BiasMethod, Float32


@register
@dataclass(frozen=True)
class T5Bias(BiasMethod):
    """A learned bias per bucket and head in every layer. It starts at zero, on T5 as it was trained."""

    num_buckets: int = 32
    max_distance: int = 128
    interpolate: float = 1.0

    name = "t5_bias"
    traits = Traits(
        "score", keeps_stock_kernels=False, needs_training=True, reads_past_trained_length=True, learned=True
    )

    def __post_init__(self) -> None:
        require_integer(self, "num_buckets", at_least=4)
        require_integer(self, "max_distance", at_least=1)
        require_number(self, "interpolate", at_least=1)
        if self.num_buckets % 2 or self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                "num_buckets of 't5_bias' has to be even, and max_distance more than half of it; got "
                f"{self.num_buckets} and {self.max_distance}."
            )

    def bias(self, distance: torch.Tensor, heads: int, causal: bool, learned: Any) -> torch.Tensor:
        assert learned is not None
        buckets = t5_buckets(distance, self.num_buckets, self.max_distance, causal, self.interpolate)
        return learned.table.float()[:, buckets].transpose(0, 1)

    def learned(self, heads: int, causal: bool) -> nn.Module:
        return Buckets(heads, self.num_buckets)


class Buckets(Float32):
    """A number per head and bucket, (heads, buckets)."""

    def __init__(self, heads: int, count: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(heads, count))


def t5_buckets(
    distance: torch.Tensor, num_buckets: int, max_distance: int, causal: bool, interpolate: float = 1.0
) -> torch.Tensor:
    """Buckets of distances i - j of any shape, int64."""
    later = torch.zeros_like(distance)
    if causal:
        distance = distance.clamp(min=0)
    else:
        num_buckets //= 2
        later, distance = (distance < 0).long() * num_buckets, distance.abs()
    distance = (distance / interpolate).floor().long()
    exact = num_buckets // 2
    # In float32, as T5 does: at the borders between buckets rounding decides.
    grown = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact) * (num_buckets - exact)
    return later + torch.where(distance < exact, distance, (exact + grown.long()).clamp(max=num_buckets - 1))
