"""Position Interpolation: all positions squeezed into the trained range (Chen et al., arXiv 2306.15595).

    frequency_k / s

transformers calls it ``linear``. Costs nothing at run time. Bad without fine-tuning: even neighbours move closer
than any the model has seen. Verified against tests/reference.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..registry import register
from .base import Extension, Rope, Traits


@register
@dataclass(frozen=True)
class PI(Extension):
    """Position Interpolation by ``factor``, or up to ``target_length`` tokens."""

    name = "pi"
    traits = Traits("query and key", keeps_stock_kernels=True, needs_training=True, reads_past_trained_length=True)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        # "proportional" (Gemma 4) takes the same factor under its own name.
        rope_type = "linear" if rope.rope_type == "default" else rope.rope_type
        return {"rope_type": rope_type, "factor": self.scale(rope)}

    def frequencies(self, rope: Rope) -> tuple[torch.Tensor, float]:
        return rope.frequencies / self.scale(rope), 1.0
