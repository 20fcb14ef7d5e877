"""What a position map is, its parts, and how it stands over a frequency method."""

import functools
import logging
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .base import AttentionMethod, FrequencyMethod, Method, Rope, Traits

logger = logging.getLogger(__name__)
RUNS_INSIDE = (
    "It runs inside attention, at up to a quarter more time, and only this package can load it: to serve with another "
    "engine, take yarn."
)
"""What a suggestion of a position map says of its cost: SmolLM2-135M on two cores, texts of 8192 tokens."""


_ENDLESS = -(1 << 62)


@dataclass(frozen=True)
class Part:
    """The keys that a query sees at one kind of distance, of a position map.

    With block numbers b(x) = x // ``block`` of positions, a query at i sees those keys j at or before it for which
    ``first <= b(i) - b(j) < last``; blocks of one token make that plain distances.

    Attributes:
        query: from the positions of queries, int64 of any shape, to those at which these keys are compared with them
        plain_keys: whether the keys stand at their own positions here, or at those of ``PositionMap.far``
    """

    first: int
    last: int | None
    query: Callable[[torch.Tensor], torch.Tensor]
    plain_keys: bool = False
    block: int = 1

    @property
    def is_band(self) -> bool:
        """Whether the first key in sight moves on with every query, as the last one does."""
        return self.block == 1 and self.last is not None

    @property
    def nearest(self) -> int:
        """The smallest distance in tokens that belongs to it."""
        return max(0, (self.first - 1) * self.block + 1)


def itself(positions: torch.Tensor) -> torch.Tensor:
    """Positions as they are."""
    return positions


class PositionMap(AttentionMethod):
    """A method that moves tokens: near keys keep their distance, far ones come closer. Frequencies stay, those of the
    checkpoint's own scaling too, so the length it counts from is ``configured_length``.

    Every key has one far position for all queries, so the cache can hold it rotated there and only queries, and the
    near keys of the moment, are turned. Below ``plain_until`` the cache holds plain positions, so that a text that
    has no far part is read by stock attention, bit for bit.
    """

    logn: bool
    effect: ClassVar[str] = "moves far tokens closer"
    over_frequencies = True

    @property
    def plain_until(self) -> int:
        """Positions below this one are held plain: the reach of the near part."""
        return 0

    @abstractmethod
    def far(self, positions: torch.Tensor) -> torch.Tensor:
        """Far positions of keys at ``positions``, any shape, int64 or float64."""

    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """From near to far, every distance in exactly one."""

    def both_ways(self) -> tuple[Part, ...] | None:
        """The parts where attention sees later keys too, which stand as far behind a query as earlier ones before it;
        None where blocks of tokens are not alike both ways."""
        near, *farther = self.parts()
        if near.block != 1 or any(part.block != 1 for part in farther):
            return None
        if not farther:
            return (near,)
        assert near.last is not None
        mirrored = [
            replace(
                part,
                first=_ENDLESS if part.last is None else 1 - part.last,
                last=1 - part.first,
                query=functools.partial(_mirrored, self, part),
            )
            for part in farther
        ]
        return replace(near, first=1 - near.last), *farther, *mirrored

    def held(self, positions: torch.Tensor) -> torch.Tensor:
        """The position at which the cache holds a key."""
        if not self.plain_until:
            return self.far(positions)
        far = self.far(positions)
        return torch.where(positions < self.plain_until, positions.to(far.dtype), far)

    def query_scale(self, positions: torch.Tensor, rope: Rope) -> torch.Tensor | None:
        """Factor on queries at ``positions``, as those, float64; None without one. With ``logn`` the entropy of
        attention stays level: max(1, ln(i + 1) / ln L)."""
        if not self.logn:
            return None
        return ((positions.double() + 1).log() / math.log(rope.configured_length)).clamp(min=1)


def _mirrored(method: PositionMap, part: Part, positions: torch.Tensor) -> torch.Tensor:
    """Where queries stand for later keys of a part."""
    return 2 * method.far(positions) - part.query(positions)


@dataclass(frozen=True)
class Raw(PositionMap):
    """A position map over a cache that holds keys unturned, with the ``factor`` of its frequencies on cos and sin."""

    inner: PositionMap
    factor: float = 1.0

    logn = False

    def far(self, positions: torch.Tensor) -> torch.Tensor:
        return self.inner.far(positions)

    def parts(self) -> tuple[Part, ...]:
        return self.inner.parts()

    def held(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(positions)

    def query_scale(self, positions: torch.Tensor, rope: Rope) -> torch.Tensor | None:
        scale = self.inner.query_scale(positions, rope)
        if self.factor == 1.0:
            return scale
        return self.factor**2 * (torch.ones_like(positions, dtype=torch.float64) if scale is None else scale)


@dataclass(frozen=True)
class Stack(AttentionMethod):
    """A method inside attention that leaves the frequencies alone, such as a position map, over one that sets them;
    written ``"self_extend:...+yarn:factor=2"``."""

    top: AttentionMethod
    base: FrequencyMethod

    def __post_init__(self) -> None:
        if not self.base.is_fixed:
            raise ValueError(
                f"{self.top.name!r} needs the same frequencies for every query, and {self.base} changes them with the "
                "length of the text: give it a fixed factor (longrope: switch='long')."
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.top.name}+{self.base.name}"

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return replace(
            self.top.traits, needs_training=self.top.traits.needs_training or self.base.traits.needs_training
        )

    def __str__(self) -> str:
        return f"{self.top}+{self.base}"

    @property
    def is_foreign(self) -> bool:
        return self.top.is_foreign or self.base.is_foreign

    def fill(self, rope: Rope) -> "Stack":
        base = self.base.fill(rope)
        return Stack(self.top.fill(self._extended(rope)), base)  # type: ignore[arg-type]

    def extended_length(self, rope: Rope) -> int | None:
        return self.top.extended_length(self._extended(rope)) or self.base.extended_length(rope)

    def capacity(self, rope: Rope) -> int | None:
        return self.top.capacity(self._extended(rope))

    def check(self, rope: Rope) -> None:
        self.top.check(self._extended(rope))

    def _extended(self, rope: Rope) -> Rope:
        """The model as ``base`` leaves it."""
        return replace(rope, configured_length=self.base.extended_length(rope) or rope.length)


def warn_beyond(method: Method, rope: Rope, name: str = "window") -> None:
    """Say so where the near part, whose reach is the parameter ``name``, meets distances that were never trained."""
    reach = getattr(method, name)
    if reach >= rope.configured_length:
        logger.warning(
            "%s=%d of %r reaches distances beyond the %d tokens the model was trained on; up to there it changes "
            "nothing.", name, reach, method.name, rope.configured_length,
        )  # fmt: skip
