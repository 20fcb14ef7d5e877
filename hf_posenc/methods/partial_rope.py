"""Partial RoPE: only the first dimensions of every head turn, the rest carry no position (GPT-J, 2021; GPT-NeoX,
arXiv 2204.06745).

    dim = head_dim * fraction, rounded down to even,    frequency_k = theta ** (-2k / dim)

Families that know ``partial_rotary_factor`` keep their stock kernels. On the others the rotary module turns by nothing
and the attention function rotates queries and all cached keys at every step. Verified against tests/reference.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..functional import rope_frequencies
from ..registry import register
from .base import FrequencyMethod, LengthMethod, Rope, Traits, require_number


@register
@dataclass(frozen=True)
class PartialRoPE(FrequencyMethod, LengthMethod):
    """Rotate the first ``fraction`` of each head's dimensions, 0 < fraction <= 1."""

    fraction: float

    name = "partial_rope"
    traits = Traits("query and key", keeps_stock_kernels=True, needs_training=True, reads_past_trained_length=False)

    @property
    def acts_in_attention(self) -> bool:
        return False

    def __post_init__(self) -> None:
        require_number(self, "fraction", above=0, at_most=1)

    def rotated(self, rope: Rope) -> int:
        """Number of dimensions that turn.

        Raises:
            ValueError: fewer than two.
        """
        dim = int(rope.head_dim * self.fraction) // 2 * 2
        if dim == 0:
            raise ValueError(
                f"fraction={self.fraction} of a {rope.head_dim}-wide head leaves no pair to rotate: give at least "
                f"{2 / rope.head_dim:g}."
            )
        return dim

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": rope.rope_type, "partial_rotary_factor": self.rotated(rope) / rope.head_dim}

    def frequencies(self, rope: Rope) -> tuple[torch.Tensor, float]:
        return rope_frequencies(rope.theta, self.rotated(rope)), 1.0

    def group(self, lengths: torch.Tensor, rope: Rope) -> torch.Tensor:
        return torch.full_like(lengths, rope.length + 1)

    def trained(self, rope: Rope) -> tuple[torch.Tensor, float]:
        return torch.zeros_like(rope.frequencies), 1.0

    def turn(self, rope: Rope, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = rope_frequencies(rope.theta, self.rotated(rope)).to(rope.frequencies)
        return frequencies.expand(*lengths.shape, -1), torch.ones_like(lengths, dtype=frequencies.dtype)
