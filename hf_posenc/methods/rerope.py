"""ReRoPE: distances stop growing at a window (Su 2023, kexue.fm/archives/9708).

    min(D, w)

No text is too long. Positions beyond the window are all alike, so only content tells far tokens apart. Verified
against tests/reference.py.
"""

from dataclasses import dataclass

import torch

from ..registry import register
from .base import Rope, Traits, require_flag, require_integer
from .position_map import RUNS_INSIDE, Part, PositionMap, itself, warn_beyond


@register
@dataclass(frozen=True)
class ReRoPE(PositionMap):
    """ReRoPE with a ``window`` in tokens."""

    window: int
    logn: bool = False

    name = "rerope"
    traits = Traits("query and key", keeps_stock_kernels=False, needs_training=False, reads_past_trained_length=True)

    def __post_init__(self) -> None:
        require_flag(self, "logn")
        require_integer(self, "window", at_least=1)

    @classmethod
    def suggest(cls, rope: Rope, target_length: int) -> tuple[float, "ReRoPE", str] | None:
        length = rope.configured_length
        if length < 2:
            return None
        return (
            14,
            cls(length // 2),
            f"No distance exceeds {length // 2} tokens, without training: no text is too long, and those of up to "
            f"{length // 2} are read as before, bit for bit. Far tokens have no order. On SmolLM2-135M at twice its "
            f"trained length it lost less than yarn (2.289 nats, 2.316). {RUNS_INSIDE}",
        )

    def check(self, rope: Rope) -> None:
        warn_beyond(self, rope)

    @property
    def plain_until(self) -> int:
        return self.window

    def far(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(positions)

    def parts(self) -> tuple[Part, ...]:
        return (
            Part(0, self.window, itself, plain_keys=True),
            Part(self.window, None, lambda i: torch.full_like(i, self.window)),
        )
