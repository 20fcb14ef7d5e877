"""STRING: well-trained near positions overwrite far ones (arXiv 2410.18745).

    D < S:   D
    D >= S:  D - S + W

Made for models that read far less than they were trained for: distances from S on are shifted down into what was
trained most, W keeps the nearest of them apart from the neighbourhood. Verified against tests/reference.py.
"""

from dataclasses import dataclass

import torch

from ..registry import register
from .base import Rope, Traits, require_flag, require_integer
from .position_map import RUNS_INSIDE, Part, PositionMap, itself, warn_beyond


@register
@dataclass(frozen=True)
class STRING(PositionMap):
    """STRING with ``shift`` S and local ``window`` W in tokens, W at most S."""

    shift: int
    window: int = 128
    logn: bool = False

    name = "string"
    traits = Traits("query and key", keeps_stock_kernels=False, needs_training=False, reads_past_trained_length=True)

    def __post_init__(self) -> None:
        require_flag(self, "logn")
        require_integer(self, "shift", at_least=1)
        require_integer(self, "window", at_least=0)
        if self.window > self.shift:
            raise ValueError(f"window={self.window} of 'string' is at most its shift, {self.shift}.")

    @classmethod
    def suggest(cls, rope: Rope, target_length: int) -> tuple[float, "STRING", str] | None:
        length = rope.configured_length
        window = min(cls.window, length // 16)
        shift = max(length // 3, target_length - length + window)
        if window < 1 or shift > length // 2:
            return None  # most of the trained distances would be met twice
        method = cls(shift, window)
        return (
            45,
            method,
            f"Distances from {shift} on start again at {window}, without training: reads "
            f"{method.extended_length(rope)} tokens. Made for texts within the trained length, and two tokens "
            f"may seem equally far. {RUNS_INSIDE}",
        )

    def extended_length(self, rope: Rope) -> int:
        near_is_trained = self.shift <= rope.configured_length
        return rope.configured_length + (self.shift - self.window if near_is_trained else 0)

    def check(self, rope: Rope) -> None:
        warn_beyond(self, rope, "shift")

    def far(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def parts(self) -> tuple[Part, ...]:
        if self.window == self.shift:
            return (Part(0, None, itself),)
        return (
            Part(0, self.shift, itself),
            Part(self.shift, None, lambda i: i - self.shift + self.window),
        )
