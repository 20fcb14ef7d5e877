"""xPos: a rotation whose pairs fade with the distance, slow ones the least (arXiv 2212.10554).

    zeta_k = (2k / dim + gamma) / (1 + gamma)
    query_i pair k times zeta_k ** (i / scale_base),    key_j pair k times zeta_k ** (-j / scale_base)

on top of the model's own rotation, so that a score depends on i - j alone. It has no meaning for later keys, whose
scores would grow. Both factors commute with the rotation, and count from the middle of a block of queries, not from 0:
``zeta ** (-j / scale_base)`` itself leaves float16 after 4,500 tokens. Cached keys stay as they were; they are all
multiplied again at every step. Verified against tests/reference.py.
"""

import math
from dataclasses import dataclass

import torch

from ..registry import register
from .base import Rope, Traits, require_number
from .on_top import OnTop


@register
@dataclass(frozen=True)
class XPos(OnTop):
    """Scores that fade with the distance, pair by pair; over a frequency method too: ``"xpos+yarn:factor=2"``."""

    gamma: float = 0.4
    scale_base: float = 512

    name = "xpos"
    traits = Traits("query and key", keeps_stock_kernels=False, needs_training=True, reads_past_trained_length=True)
    effect = "lets scores fade with the distance"
    causal_only = True

    def __post_init__(self) -> None:
        require_number(self, "gamma", above=0)
        require_number(self, "scale_base", at_least=1)

    @property
    def fastest(self) -> float:
        return math.log((1 + self.gamma) / self.gamma) / self.scale_base

    def fading(self, rope: Rope) -> torch.Tensor | None:
        zeta = (2 * rope.pairs.double() / rope.dim + self.gamma) / (1 + self.gamma)
        return -zeta.log() / self.scale_base
