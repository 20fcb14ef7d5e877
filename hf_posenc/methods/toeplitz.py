"""A learned bias for every distance and head: the scalar form of relative position representations.

    bias = b_h[clip(i - j, -(max_distance - 1), max_distance - 1)]

Relative position representations (arXiv 1803.02155) learn vectors for clipped distances; a number per head is what
Swin and others keep of them. All distances beyond the table share its last entry. Verified against tests/reference.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..registry import register
from .alibi import alibi_slopes
from .base import Traits, require_integer
from .bias import BiasMethod, Float32


@register
@dataclass(frozen=True)
class Toeplitz(BiasMethod):
    """A table of ``max_distance`` distances (each way, in a model that sees later keys) per head and layer.

    It starts from ALiBi (``init="alibi"``) or at zero (``init="zero"``).
    """

    max_distance: int
    init: str = "alibi"

    name = "toeplitz"
    traits = Traits(
        "score", keeps_stock_kernels=False, needs_training=True, reads_past_trained_length=False, learned=True
    )

    def __post_init__(self) -> None:
        require_integer(self, "max_distance", at_least=1)
        if self.init not in ("alibi", "zero"):
            raise ValueError(f"init of 'toeplitz' is 'alibi' or 'zero', got {self.init!r}.")

    def bias(self, distance: torch.Tensor, heads: int, causal: bool, learned: Any) -> torch.Tensor:
        assert learned is not None
        last = self.max_distance - 1
        places = distance.clamp(0, last) if causal else distance.clamp(-last, last) + last
        return learned.table.float()[:, places].transpose(0, 1)

    def learned(self, heads: int, causal: bool) -> nn.Module:
        return Distances(heads, self.max_distance, causal, self.init == "alibi")


class Distances(Float32):
    """A number per head and distance: (heads, distances), from 0 on in a causal model, else from the most negative."""

    def __init__(self, heads: int, count: int, causal: bool, sloped: bool):
        super().__init__()
        distances = torch.arange(0 if causal else 1 - count, count)
        start = -alibi_slopes(heads)[:, None] * distances.abs()
        self.table = nn.Parameter(start if sloped else torch.zeros_like(start))
