"""NTK-by-parts: YaRN's ramp without its temperature (section 3.2 of arXiv 2309.00071).

    frequency_k * m_k + frequency_k / s * (1 - m_k),    m_k as in yarn.py

Written as transformers' ``yarn`` with an attention factor of 1. Costs nothing at run time. Verified against
tests/reference.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..registry import register
from .base import Extension, Rope, Traits
from .yarn import YaRN


@register
@dataclass(frozen=True)
class NTKByParts(Extension):
    """NTK-by-parts by ``factor``, or up to ``target_length`` tokens."""

    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True

    name = "ntk_by_parts"
    traits = Traits("query and key", keeps_stock_kernels=True, needs_training=False, reads_past_trained_length=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._yarn()

    def _yarn(self) -> YaRN:
        return YaRN(
            self.factor, self.target_length,
            beta_fast=self.beta_fast, beta_slow=self.beta_slow, truncate=self.truncate, attention_factor=1.0,
        )  # fmt: skip

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return self._yarn().rope_parameters(rope)

    def frequencies(self, rope: Rope) -> tuple[torch.Tensor, float]:
        return self._yarn().frequencies(rope)
