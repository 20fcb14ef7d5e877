"""Dual Chunk Attention: positions start again in every chunk (arXiv 2402.17463).

With chunks of S tokens, a local window of W and C = S + W:

    same chunk:      D
    the one before:  min(S + i mod S, C - 1) - j mod S
    farther:         C - 1 - j mod S

No distance exceeds C - 1, whatever the length. Neighbours across a border keep their distance for W tokens. Verified
against tests/reference.py.
"""

from dataclasses import dataclass

import torch

from ..registry import register
from .base import Rope, Traits, require_flag, require_integer
from .position_map import RUNS_INSIDE, Part, PositionMap


@register
@dataclass(frozen=True)
class DualChunk(PositionMap):
    """Dual Chunk Attention with ``chunk_size`` S and ``local_window`` W in tokens, S + W at most the trained L."""

    chunk_size: int
    local_window: int
    logn: bool = False

    name = "dca"
    traits = Traits(
        "query and key", keeps_stock_kernels=False, needs_training=False, reads_past_trained_length=True,
        translation_invariant=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_flag(self, "logn")
        require_integer(self, "chunk_size", at_least=1)
        require_integer(self, "local_window", at_least=1)

    @classmethod
    def suggest(cls, rope: Rope, target_length: int) -> tuple[float, "DualChunk", str] | None:
        length = rope.configured_length
        local = length // 4
        if not local:
            return None
        return (
            28,
            cls(length - local, local),
            f"Positions start again every {length - local} tokens, without training: no distance exceeds "
            f"{length - 1}, so no text is too long. Which of the far chunks a token stands in does "
            f"not show. {RUNS_INSIDE}",
        )

    def check(self, rope: Rope) -> None:
        if self.chunk_size + self.local_window > rope.configured_length:
            raise ValueError(
                f"chunk_size + local_window = {self.chunk_size + self.local_window} is a distance beyond the "
                f"{rope.configured_length} tokens the model was trained on: make one of them smaller."
            )

    def far(self, positions: torch.Tensor) -> torch.Tensor:
        return positions % self.chunk_size

    def parts(self) -> tuple[Part, ...]:
        size, end = self.chunk_size, self.chunk_size + self.local_window - 1
        return (
            Part(0, 1, self.far, block=size),
            Part(1, 2, lambda i: (size + i % size).clamp(max=end), block=size),
            Part(2, None, lambda i: torch.full_like(i, end), block=size),
        )
