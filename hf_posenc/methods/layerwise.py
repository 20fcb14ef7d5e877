"""What a method is that gives layers encodings of their own."""

from abc import abstractmethod
from typing import ClassVar

from .base import AttentionMethod, FrequencyMethod, Method


class Layerwise(AttentionMethod):
    """A table of methods by layer, counted from 0.

    Attributes:
        rest_rotates: whether every layer outside of the table must have a rotation
    """

    rest_rotates: ClassVar[bool] = False

    @property
    def rest(self) -> Method | None:
        """The method of all layers outside of the table; None for the model's own encoding."""
        return None

    @abstractmethod
    def of_layer(self, index: int, base: FrequencyMethod | None) -> Method | None:
        """The entry of a layer, over ``base`` where one stands under the whole; None if it has none."""

    @property
    def named(self) -> list[int]:
        """Layers that must be there."""
        return []
