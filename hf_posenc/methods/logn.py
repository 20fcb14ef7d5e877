"""Log-n scaling: queries grow with the text, so that attention stays as sharp as it was (Su 2021).

kexue.fm/archives/8823:

    query_i * max(1, ln(i + 1) / ln L)

Plain RoPE otherwise; up to L tokens nothing changes. Every position map takes it as an option. Verified against
tests/reference.py.
"""

from dataclasses import dataclass

import torch

from ..registry import register
from .base import Traits
from .position_map import Part, PositionMap, itself


@register
@dataclass(frozen=True)
class LogN(PositionMap):
    """Log-n scaling of queries on plain RoPE, or over a frequency method: ``"logn+yarn:factor=2"``."""

    name = "logn"
    traits = Traits(
        "query", keeps_stock_kernels=False, needs_training=False, reads_past_trained_length=False,
        translation_invariant=False,
    )  # fmt: skip
    logn = True
    effect = "makes queries grow with the text"

    def far(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def parts(self) -> tuple[Part, ...]:
        return (Part(0, None, itself),)
