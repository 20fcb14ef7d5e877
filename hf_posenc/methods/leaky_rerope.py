"""Leaky ReRoPE: beyond a window distances grow more slowly (Su 2023, kexue.fm/archives/9731).

    D < w:   D
    D >= w:  w + s (D - w)

Reads w + (L - w) / s tokens before a distance beyond the trained L appears. Verified against tests/reference.py.
"""

import math
from dataclasses import dataclass

import torch

from ..registry import register
from .base import Rope, Traits, require_flag, require_integer, require_number
from .position_map import RUNS_INSIDE, Part, PositionMap, itself, warn_beyond


@register
@dataclass(frozen=True)
class LeakyReRoPE(PositionMap):
    """Leaky ReRoPE with a ``window`` in tokens and a ``scale`` s between 0 and 1 for what lies beyond."""

    window: int
    scale: float
    logn: bool = False

    name = "leaky_rerope"
    traits = Traits("query and key", keeps_stock_kernels=False, needs_training=False, reads_past_trained_length=True)

    def __post_init__(self) -> None:
        require_flag(self, "logn")
        require_integer(self, "window", at_least=1)
        require_number(self, "scale", above=0)
        if self.scale >= 1:
            raise ValueError(f"scale of 'leaky_rerope' is below 1, got {self.scale!r}; 1 would be plain RoPE.")

    @classmethod
    def suggest(cls, rope: Rope, target_length: int) -> tuple[float, "LeakyReRoPE", str] | None:
        length, window = rope.configured_length, rope.configured_length // 2
        if length < 2:
            return None
        scale = (length - window) / (target_length - window)
        places = 10 ** (2 - math.floor(math.log10(scale)))
        method = cls(window, math.floor(scale * places) / places)
        return (
            26,
            method,
            f"Distances beyond {window} tokens grow {method.scale:g} times as fast, without training: reads "
            f"{method.extended_length(rope)} tokens and keeps the order of far tokens, at fractions of a position, "
            f"which were never trained. {RUNS_INSIDE}",
        )

    def extended_length(self, rope: Rope) -> int:
        return max(rope.configured_length, self.window + int((rope.configured_length - self.window) / self.scale))

    def check(self, rope: Rope) -> None:
        warn_beyond(self, rope)

    @property
    def plain_until(self) -> int:
        return self.window

    def far(self, positions: torch.Tensor) -> torch.Tensor:
        return self.scale * positions.double()

    def parts(self) -> tuple[Part, ...]:
        return (
            Part(0, self.window, itself, plain_keys=True),
            Part(self.window, None, lambda i: self.scale * i.double() + self.window * (1 - self.scale)),
        )
