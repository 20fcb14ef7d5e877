"""NTK-aware scaling: a larger base, so that fast pairs keep their speed and the slowest is interpolated in full.

    theta' = theta * s ** (d / (d - 2)),    frequency_k = theta' ** (-2k / d)

First described by bloc97 in 2023; section 3.1 of the YaRN paper (arXiv 2309.00071). d is the number of rotated
dimensions. Written as a plain ``rope_theta``. Costs nothing at run time. Verified against tests/reference.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..functional import ntk_theta
from ..registry import register
from .abf import ABF
from .base import Extension, Rope, Traits


@register
@dataclass(frozen=True)
class NTK(Extension):
    """NTK-aware scaling by ``factor``, or up to ``target_length`` tokens."""

    name = "ntk"
    traits = Traits("query and key", keeps_stock_kernels=True, needs_training=False, reads_past_trained_length=True)

    def _base(self, rope: Rope) -> ABF:
        return ABF(ntk_theta(rope.theta, rope.dim, self.scale(rope)))

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return self._base(rope).rope_parameters(rope)

    def frequencies(self, rope: Rope) -> tuple[torch.Tensor, float]:
        return self._base(rope).frequencies(rope)
