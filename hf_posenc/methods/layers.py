"""Any method on any layer: encodings mixed by layer (arXiv 2501.18795 compares mixtures of RoPE and NoPE).

    layers:layers={0:'nope',3:'yarn:factor=4'},default='pi:factor=2'

Layers count from 0. Each method acts as it would on a whole model as trained; a layer without an entry has
``default``, or the model's own encoding. Stock kernels stay in layers whose method has them. Verified against
tests/reference.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..registry import create, register
from .base import AttentionMethod, FrequencyMethod, Method, Rope, Traits
from .layerwise import Layerwise
from .rope import Grounded, RoPE


class Table(dict):
    """A dictionary that does not change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __setitem__(self, key, value):
        raise TypeError("A table of layers does not change: build another method.")

    def __reduce__(self):
        return Table, (dict(self),)


@register
@dataclass(frozen=True)
class PerLayer(Layerwise):
    """A method for every layer in ``layers``, {index: method}, and ``default`` for the others. Methods are strings or
    objects."""

    layers: Mapping[int, Method]
    default: Method | None = None

    name = "layers"
    traits = Traits("single layers", keeps_stock_kernels=False, needs_training=True, reads_past_trained_length=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping) or not self.layers:
            raise TypeError(f"layers of 'layers' is {{index: method}}, as in {{0:'nope'}}, got {self.layers!r}.")
        for index in self.layers:
            if isinstance(index, bool) or not isinstance(index, int) or index < 0:
                raise TypeError(f"layers of 'layers' counts layers from 0, got {index!r}.")
        table = Table(sorted((index, _entry(method)) for index, method in self.layers.items()))
        default = None if self.default is None else _entry(self.default)
        object.__setattr__(self, "layers", table)
        object.__setattr__(self, "default", default)
        object.__setattr__(
            self,
            "traits",
            replace(
                self.traits,
                keeps_stock_kernels=all(member.traits.keeps_stock_kernels for member in self.members),
                needs_training=any(member.traits.needs_training for member in self.members),
                learned=any(member.traits.learned for member in self.members),
            ),
        )

    @property
    def members(self) -> list[Method]:
        """Every method in it."""
        return [*([self.default] if self.default else []), *self.layers.values()]

    @property
    def is_foreign(self) -> bool:
        return any(member.is_foreign for member in self.members)

    @property
    def rest(self) -> Method | None:
        return self.default

    def of_layer(self, index: int, base: FrequencyMethod | None) -> Method | None:
        return self.layers.get(index)

    @property
    def named(self) -> list[int]:
        return list(self.layers)

    def fill(self, rope: Rope) -> "PerLayer":
        default = self.default and self.default.fill(rope)
        return PerLayer({index: method.fill(rope) for index, method in self.layers.items()}, default)

    def extended_length(self, rope: Rope) -> int | None:
        return self.default.extended_length(rope) if self.default else None

    def capacity(self, rope: Rope) -> int | None:
        reached = [member.capacity(rope) for member in self.members if isinstance(member, AttentionMethod)]
        return min((length for length in reached if length is not None), default=None)

    def check(self, rope: Rope) -> None:
        for member in self.members:
            if isinstance(member, AttentionMethod):
                member.check(rope)


def _entry(given: "Method | str") -> Method:
    method = create(given)
    if isinstance(method, Layerwise) or isinstance(getattr(method, "top", None), Layerwise):
        raise ValueError(f"{method} is a table of layers itself: write its layers out in one.")
    if not isinstance(method, FrequencyMethod | AttentionMethod) or isinstance(method, RoPE | Grounded):
        raise ValueError(f"{method} is for a whole model: a layer takes what changes its rotation or its scores.")
    if isinstance(method, FrequencyMethod) and not method.is_fixed and not method.acts_in_attention:
        raise ValueError(f"{method} chooses frequencies for a whole forward and all layers: it takes no single ones.")
    return method
