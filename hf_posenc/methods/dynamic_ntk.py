"""Dynamic NTK: the NTK base grows with the text (emozilla 2023; appendix A of arXiv 2309.00071).

    n > L:  theta' = theta * (s n / L - (s - 1)) ** (d / (d - 2)),    n <= L: plain RoPE

n is the length up to the query, i + 1, so that one pass, chunks and single tokens agree; transformers' own ``dynamic``
takes the longest row of the last call and disagrees with itself. ``granularity`` rounds n up to a multiple, which
spares rotations of the keys: 1 is the formula, the default L / 32. Up to L tokens it costs nothing and changes
nothing; beyond, the cached keys are turned once per step and per block of ``granularity`` queries. Verified against
tests/reference.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..registry import register
from .base import LengthMethod, Rope, Traits, require_integer, require_number


@register
@dataclass(frozen=True)
class DynamicNTK(LengthMethod):
    """Dynamic NTK with growth ``factor`` s; ``granularity`` in tokens."""

    factor: float = 1.0
    granularity: int | None = None

    name = "dynamic_ntk"
    traits = Traits(
        "query and key", keeps_stock_kernels=False, needs_training=False, reads_past_trained_length=True,
        translation_invariant=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_number(self, "factor", at_least=1)
        require_granularity(self)

    def extended_length(self, rope: Rope) -> int | None:
        return int(rope.length * self.factor) if self.factor > 1 else None

    def group(self, lengths: torch.Tensor, rope: Rope) -> torch.Tensor:
        return round_up(lengths, rope, self.granularity)

    def turn(self, rope: Rope, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        growth = (self.factor * lengths.to(rope.frequencies) / rope.length - (self.factor - 1)).clamp(min=1)
        # theta' ** (-2k / d) is theta ** (-2k / d) times growth ** (-2k / (d - 2)).
        exponents = 2 * rope.pairs / (rope.dim - 2)
        return rope.frequencies * (growth[..., None] ** -exponents - 1), torch.ones_like(growth)


def require_granularity(method: Any) -> None:
    """Check ``granularity``; errors as for ``require_integer``."""
    if method.granularity is not None:
        require_integer(method, "granularity", at_least=1)


def round_up(lengths: torch.Tensor, rope: Rope, granularity: int | None) -> torch.Tensor:
    """Lengths beyond the trained one L rounded up to a multiple of ``granularity`` (default L / 32), others to L."""
    step = granularity or max(1, rope.length // 32)
    return torch.where(lengths > rope.length, (lengths + step - 1) // step * step, rope.length)
