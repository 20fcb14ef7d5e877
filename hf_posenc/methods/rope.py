"""RoPE on a model that has no rotation: queries and keys turn by their position (arXiv 2104.09864).

    pair k of a head turns by i * rope_theta ** (-2k / dim)

over the whole head, in the pairing of Llama. What the model had, a table or a bias, goes. Whatever stands on RoPE can
stand on this one: ``"rope+yarn:factor=4"``, ``"self_extend:group_size=4,window=512+rope"``. Keys are cached unturned
and all are turned at every call. Verified against tests/reference.py.
"""

from dataclasses import dataclass, replace

import torch

from ..functional import rope_frequencies
from ..registry import register
from .base import AttentionMethod, FrequencyMethod, Method, Rope, Traits, require_number
from .nope import NoPE
from .position_map import Part, PositionMap, Raw, Stack, itself


@register
@dataclass(frozen=True)
class RoPE(PositionMap):
    """RoPE with base ``rope_theta`` in place of learned positions, ALiBi or relative buckets."""

    rope_theta: float = 10000.0

    name = "rope"
    traits = Traits("query and key", keeps_stock_kernels=False, needs_training=True, reads_past_trained_length=False)
    logn = False

    @property
    def is_foreign(self) -> bool:
        return True

    def __post_init__(self) -> None:
        require_number(self, "rope_theta", above=1)

    def far(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def parts(self) -> tuple[Part, ...]:
        return (Part(0, None, itself),)

    def rotation(self, rope: Rope) -> Rope:
        """What a model would be like that was trained with this one."""
        return replace(rope, theta=self.rope_theta, frequencies=rope_frequencies(self.rope_theta, rope.head_dim))


@dataclass(frozen=True)
class Grounded(AttentionMethod):
    """A frequency method, a position map or both, over ``rope`` on a model that has no rotation of its own."""

    ground: RoPE
    inner: Method

    def __post_init__(self) -> None:
        if isinstance(self.inner, NoPE):
            raise ValueError("'rope' turns by position and 'nope' has none: give one.")
        top = self.inner.top if isinstance(self.inner, Stack) else self.inner
        if not isinstance(top, PositionMap) and not (isinstance(self.inner, FrequencyMethod) and self.inner.is_fixed):
            raise ValueError(
                f"'rope' puts keys into the cache unturned, and {self.inner} needs them turned, or turns them with "
                "the length of the text: give it a position map or a fixed factor, as in 'rope+yarn:factor=4'."
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.ground.name}+{self.inner.name}"

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return replace(self.inner.traits, keeps_stock_kernels=False, needs_training=True)

    @property
    def is_foreign(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"{self.ground}+{self.inner}"

    def fill(self, rope: Rope) -> "Grounded":
        return Grounded(self.ground, self.inner.fill(rope))

    def extended_length(self, rope: Rope) -> int | None:
        return self.inner.extended_length(rope)

    def capacity(self, rope: Rope) -> int | None:
        return self.inner.capacity(rope) if isinstance(self.inner, AttentionMethod) else None

    def check(self, rope: Rope) -> None:
        if isinstance(self.inner, AttentionMethod):
            self.inner.check(rope)


def inside(method: RoPE | Grounded, rope: Rope) -> tuple[Raw, torch.Tensor]:
    """What attention carries out, and the frequencies (dim / 2,) it turns by."""
    inner = method.inner if isinstance(method, Grounded) else method
    base = inner.base if isinstance(inner, Stack) else inner
    frequencies, factor = base.frequencies(rope) if isinstance(base, FrequencyMethod) else (rope.frequencies, 1.0)
    top = inner.top if isinstance(inner, Stack) else inner
    return Raw(top if isinstance(top, PositionMap) else RoPE(), factor), frequencies
