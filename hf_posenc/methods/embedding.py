"""What an absolute encoding is: vectors by position, added to the token embeddings."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from .base import Method


class EmbeddingMethod(Method):
    """A method that adds to the token embeddings. Other positions go."""

    effect: ClassVar[str] = "adds to the token embeddings"

    @abstractmethod
    def vectors(self, positions: torch.Tensor, width: int, learned: Any) -> torch.Tensor:
        """What is added at ``positions``, (batch, length) int64: (batch, length, width) of any float type.

        Args:
            learned: the module that ``learned`` made, trained since or not; None without one
        """

    def learned(self, width: int) -> nn.Module | None:
        """The parameters, as they start; None for a method without any."""
        return None
