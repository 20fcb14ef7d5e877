"""Adjusted base frequency: a larger RoPE base, given outright (Xiong et al., arXiv 2309.16039).

    theta' ** (-2k / d)

Written as a plain ``rope_theta``. Costs nothing at run time. Verified against tests/reference.py.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..registry import register
from .base import FrequencyMethod, Rope, Traits, require_number


@register
@dataclass(frozen=True)
class ABF(FrequencyMethod):
    """The base ``rope_theta`` in place of the trained one. It says nothing about the context that results."""

    rope_theta: float

    name = "abf"
    traits = Traits("query and key", keeps_stock_kernels=True, needs_training=True, reads_past_trained_length=True)

    def __post_init__(self) -> None:
        require_number(self, "rope_theta", above=1)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": rope.rope_type, "rope_theta": float(self.rope_theta)}

    def frequencies(self, rope: Rope) -> tuple[torch.Tensor, float]:
        return rope.frequencies ** (math.log(self.rope_theta) / math.log(rope.theta)), 1.0
