"""What acts on top of a rotation and leaves it alone: queries and keys that fade, values that turn, queries that grow,
keys out of sight."""

from typing import ClassVar

import torch

from .base import AttentionMethod, Rope


class OnTop(AttentionMethod):
    """A method beside the rotation, which stays what it was, as do cached keys and values.

    Attributes:
        effect: what it does, for sentences about it
        needs_rotation: whether it goes by the frequencies of the layer
        causal_only: whether it has no meaning for keys after a query
        turns_values: values turn back by their position, attention outputs forth by that of the query
        chunk: tokens, by position, to a chunk; a query sees keys of its own only. None: all
    """

    effect: ClassVar[str]
    needs_rotation: ClassVar[bool] = True
    causal_only: ClassVar[bool] = False
    turns_values: ClassVar[bool] = False
    chunk: int | None = None
    over_frequencies = True

    @property
    def is_foreign(self) -> bool:
        return True

    def query_scale(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Factor on queries at ``positions``, as those, float32; None without one."""
        return None

    @property
    def fastest(self) -> float:
        """The highest rate of ``fading``."""
        return 0.0

    def fading(self, rope: Rope) -> torch.Tensor | None:
        """Rate r of every pair, (dim / 2,) float64: its part of a score counts exp(-r (i - j)). None: all of it."""
        return None
