"""Dynamic YaRN: YaRN whose factor follows the text (section 3.4 of arXiv 2309.00071).

    s = max(1, n / L),    then as in yarn.py, temperature included

n is the length up to the query, i + 1, rounded up as in dynamic_ntk.py, where the cost is told. Verified against
tests/reference.py.
"""

from dataclasses import dataclass

import torch

from ..functional import yarn_attention_factor, yarn_keep, yarn_range
from ..registry import register
from .base import LengthMethod, Rope, Traits
from .dynamic_ntk import require_granularity, round_up
from .yarn import require_ramp


@register
@dataclass(frozen=True)
class DynamicYaRN(LengthMethod):
    """Dynamic YaRN; ``granularity`` in tokens."""

    beta_fast: float = 32
    beta_slow: float = 1
    granularity: int | None = None

    name = "dynamic_yarn"
    traits = Traits(
        "query and key", keeps_stock_kernels=False, needs_training=False, reads_past_trained_length=True,
        translation_invariant=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_ramp(self)
        require_granularity(self)

    def group(self, lengths: torch.Tensor, rope: Rope) -> torch.Tensor:
        return round_up(lengths, rope, self.granularity)

    def turn(self, rope: Rope, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keep = yarn_keep(rope.pairs, *yarn_range(rope.theta, rope.dim, rope.length, self.beta_fast, self.beta_slow))
        factors = (lengths.to(rope.frequencies) / rope.length).clamp(min=1)
        slowed = (1 - keep) * (1 / factors[..., None] - 1)
        return rope.frequencies * slowed, yarn_attention_factor(factors)
