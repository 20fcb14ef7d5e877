"""Llama 3.1's scaling: pairs with long waves interpolated, short ones kept, a ramp between (arXiv 2407.21783).

    turns_k = L * frequency_k / 2 pi,    m_k = clamp((turns_k - low) / (high - low), 0, 1)
    frequency_k * m_k + frequency_k / s * (1 - m_k)

Like YaRN's ramp, but linear in the number of turns and without a temperature. Costs nothing at run time. Verified
against tests/reference.py and transformers' own ``llama3``.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..registry import register
from .base import Extension, Rope, Traits, require_number


@register
@dataclass(frozen=True)
class Llama3(Extension):
    """Llama 3.1's scaling by ``factor``, or up to ``target_length`` tokens."""

    low_freq_factor: float = 1
    high_freq_factor: float = 4

    name = "llama3"
    traits = Traits("query and key", keeps_stock_kernels=True, needs_training=True, reads_past_trained_length=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self, "low_freq_factor", above=0)
        require_number(self, "high_freq_factor", above=self.low_freq_factor)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": self.scale(rope),
            "original_max_position_embeddings": rope.length,
            "low_freq_factor": float(self.low_freq_factor),
            "high_freq_factor": float(self.high_freq_factor),
        }

    def frequencies(self, rope: Rope) -> tuple[torch.Tensor, float]:
        turns = rope.length * rope.frequencies / (2 * math.pi)
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return rope.frequencies * keep + rope.frequencies / self.scale(rope) * (1 - keep), 1.0
