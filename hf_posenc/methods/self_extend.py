"""Self-Extend: near tokens keep their distance, far ones share positions in groups (arXiv 2401.01325).

    D < w:   D
    D >= w:  i // G - j // G + w - w // G

The paper's rule, which groups absolute positions; the article that inspired it writes L + floor(s (i - j - L)).
Integer division everywhere, also where G does not divide w. Reads (L - w) G + w tokens before a distance beyond the
trained L appears (w mod G fewer, to be exact), without training and without harm to short texts. Verified against
tests/reference.py.
"""

import math
from dataclasses import dataclass, replace

import torch

from ..registry import register
from .base import Rope, Traits, require_flag, require_integer
from .position_map import RUNS_INSIDE, Part, PositionMap, itself, warn_beyond

MEASURED_GROUP = 4
_MEASURED = (
    "On SmolLM2-135M at twice its trained length it lost less than yarn (2.289 nats, 2.316), and as rerope did."
)
"""Of window 2048 and groups of 4, up to which groups count as small."""


@register
@dataclass(frozen=True)
class SelfExtend(PositionMap):
    """Self-Extend with groups of ``group_size`` tokens beyond ``window`` tokens.

    With ``target_length`` in tokens the model fills in what is missing: a window of a quarter of its trained length,
    and the smallest groups that reach the target.
    """

    group_size: int | None = None
    window: int | None = None
    logn: bool = False
    target_length: int | None = None

    name = "self_extend"
    traits = Traits(
        "query and key", keeps_stock_kernels=False, needs_training=False, reads_past_trained_length=True,
        translation_invariant=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_flag(self, "logn")
        for name in ("group_size", "window", "target_length"):
            if getattr(self, name) is not None:
                require_integer(self, name, at_least=1)
        if self.target_length is None and (self.group_size is None or self.window is None):
            raise ValueError("'self_extend' needs group_size and window, or target_length (tokens).")

    @classmethod
    def suggest(cls, rope: Rope, target_length: int) -> tuple[float, "SelfExtend", str] | None:
        length = rope.configured_length
        if length < 4:
            return None
        method = cls(target_length=target_length).fill(rope)
        size, window = method.group_size, method.window
        assert size is not None
        small = size <= MEASURED_GROUP
        return (
            12 if small else 16,
            method,
            f"Far tokens share positions in groups of {size}, without training: reads ({length} - {window}) x {size} "
            f"+ {window} = {method.extended_length(rope)} tokens, and texts of up to {window} as before, bit for bit. "
            f"{_MEASURED if small else f'Groups above {MEASURED_GROUP} blur the order of far tokens: not measured.'} "
            f"{RUNS_INSIDE}",
        )

    def fill(self, rope: Rope) -> "SelfExtend":
        if self.target_length is None:
            return self
        window = self.window or rope.configured_length // 4
        if window >= rope.configured_length:
            raise ValueError(
                f"window={window} leaves no far distance of the {rope.configured_length} trained: give a smaller one."
            )
        group = self.group_size or max(1, math.ceil((self.target_length - window) / (rope.configured_length - window)))
        filled = replace(self, window=window, group_size=group, target_length=None)
        if filled.extended_length(rope) < self.target_length:
            raise ValueError(
                f"{filled} reads {filled.extended_length(rope)} tokens, not target_length={self.target_length}: give "
                "larger groups or a smaller window, or leave them out."
            )
        return filled

    def extended_length(self, rope: Rope) -> int:
        assert self.window is not None and self.group_size is not None
        return max(rope.configured_length, (rope.configured_length - self.window) * self.group_size + self.window)

    def check(self, rope: Rope) -> None:
        warn_beyond(self, rope)

    @property
    def plain_until(self) -> int:
        assert self.window is not None
        return self.window if self.group_size != 1 else 0

    def far(self, positions: torch.Tensor) -> torch.Tensor:
        assert self.group_size is not None
        return positions // self.group_size

    def parts(self) -> tuple[Part, ...]:
        assert self.window is not None and self.group_size is not None
        if self.group_size == 1:
            return (Part(0, None, itself),)
        shift = self.window - self.window // self.group_size
        return (
            Part(0, self.window, itself, plain_keys=True),
            Part(self.window, None, lambda i: self.far(i) + shift),
        )
