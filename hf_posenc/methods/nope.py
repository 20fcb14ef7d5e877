"""NoPE: no positions at all; a causal model can tell them from the mask (arXiv 2305.19466).

Rotations become the identity, tables and biases vanish. Stock kernels stay. Verified against tests/reference.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..registry import register
from .base import FrequencyMethod, Rope, Traits


@register
@dataclass(frozen=True)
class NoPE(FrequencyMethod):
    """No positional encoding: frequencies of zero."""

    name = "nope"
    traits = Traits(
        "nothing", keeps_stock_kernels=True, needs_training=True, reads_past_trained_length=False, symmetric=True
    )

    @property
    def is_foreign(self) -> bool:
        return True

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {}

    def frequencies(self, rope: Rope) -> tuple[torch.Tensor, float]:
        return torch.zeros_like(rope.frequencies), 1.0
