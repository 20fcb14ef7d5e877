"""What a bias is: a term on the scores by distance and head, in place of a rotation or on top of it."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from .base import AttentionMethod


class Float32(nn.Module):
    """A module whose parameters stay float32 when the model is cast: biases need it at far distances."""

    def _apply(self, fn, recurse=True):
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            found = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(moved, recurse)


class BiasMethod(AttentionMethod):
    """A method that adds to the scores. Other positions go, unless ``keep_rope`` is set.

    Biases are computed from relative distances, in float32: absolute positions have no resolution in bfloat16.
    """

    keep_rope: bool = False
    effect: ClassVar[str] = "adds a bias to the scores"

    @property
    def is_foreign(self) -> bool:
        return True

    @abstractmethod
    def bias(self, distance: torch.Tensor, heads: int, causal: bool, learned: Any) -> torch.Tensor:
        """The term on the scores, float32 (batch or 1, heads, queries, keys), in memory of its own.

        Args:
            distance: i - j, (batch or 1, queries, keys) int64; negative where a key comes later
            heads: query heads
            causal: whether later keys are hidden
            learned: the module that ``learned`` made for this layer, trained since or not; None without one
        """

    def learned(self, heads: int, causal: bool) -> nn.Module | None:
        """The parameters of one layer, as they start; None for a method without any."""
        return None
