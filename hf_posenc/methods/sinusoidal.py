"""The sinusoids of "Attention is all you need" (arXiv 1706.03762), added to the token embeddings.

    p(t)[2k] = sin(t * base ** (-2k / d)),    p(t)[2k + 1] = cos(t * base ** (-2k / d))

over the d dimensions of the embedding. A learned table, a bias or a rotation goes. Any length has its vectors;
attention keeps its stock kernels. Verified against tests/reference.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..registry import register
from .base import Traits, require_number
from .embedding import EmbeddingMethod


@register
@dataclass(frozen=True)
class Sinusoidal(EmbeddingMethod):
    """Fixed sines and cosines of every position in place of what the model had."""

    base: float = 10000.0

    name = "sinusoidal"
    traits = Traits(
        "embedding", keeps_stock_kernels=True, needs_training=True, reads_past_trained_length=True, relative=False,
        translation_invariant=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_number(self, "base", above=1)

    def vectors(self, positions: torch.Tensor, width: int, learned: Any) -> torch.Tensor:
        dimensions = torch.arange(width, device=positions.device)
        frequencies = self.base ** (-(dimensions // 2 * 2).double() / width)
        angles = positions[..., None].double() * frequencies
        return torch.where(dimensions % 2 == 0, angles.sin(), angles.cos()).float()
