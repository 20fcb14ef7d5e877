"""ALiBi: attention with linear biases (arXiv 2108.12409).

    bias = -m_h |i - j|,   m_h = 2 ** (-8 h / n) for heads h = 1 ... n

for n a power of two; otherwise the slopes of the next lower power of two, then every second one of the next higher.
One slope per query head. ``interpolate`` divides the slopes, which is position interpolation for ALiBi: distances of
a text that is so many times longer get the biases of the trained ones. Later keys, where a model sees them, count by
their distance too. Verified against tests/reference.py.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..registry import register
from .base import Traits, require_flag, require_number
from .bias import BiasMethod, Float32


@register
@dataclass(frozen=True)
class ALiBi(BiasMethod):
    """A bias that falls linearly with the distance, instead of the rotation or, with ``keep_rope``, on top of it.

    ``learned_slopes`` makes the slopes of every layer parameters, which start as those of the paper.
    """

    interpolate: float = 1.0
    learned_slopes: bool = False
    keep_rope: bool = False

    name = "alibi"
    traits = Traits(
        "score", keeps_stock_kernels=False, needs_training=True, reads_past_trained_length=True, symmetric=True,
        monotone=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_number(self, "interpolate", at_least=1)
        require_flag(self, "learned_slopes")
        require_flag(self, "keep_rope")

    def bias(self, distance: torch.Tensor, heads: int, causal: bool, learned: Any) -> torch.Tensor:
        slopes = alibi_slopes(heads).to(distance.device) if learned is None else learned.slopes.float()
        return -(slopes / self.interpolate)[:, None, None] * distance.abs().float()[:, None]

    def learned(self, heads: int, causal: bool) -> nn.Module | None:
        return Slopes(heads) if self.learned_slopes else None


class Slopes(Float32):
    """One slope per query head, (heads,)."""

    def __init__(self, heads: int):
        super().__init__()
        self.slopes = nn.Parameter(alibi_slopes(heads))


def alibi_slopes(heads: int) -> torch.Tensor:
    """(heads,) float32, the steepest first among those of a power of two."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    slopes += [2 ** (-4 * head / power) for head in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes)
