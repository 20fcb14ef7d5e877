"""LongRoPE: every pair divided by a factor of its own, one list for short texts and one for long (arXiv 2402.13753).

    frequency_k / short_factor_k up to the original length, / long_factor_k beyond,
    cos and sin times sqrt(1 + ln s / ln L)

``switch`` says when the long list is used. "causal": for queries beyond the original length, whatever else is in the
batch or the cache, so that one pass, chunks and single tokens agree. "long": always, as serving engines do, with stock
kernels. "stock": transformers' own choice by the longest row of each call, with its keys; a cache that crosses the
original length then mixes both. Verified against tests/reference.py and transformers' own ``longrope``.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..functional import longrope_attention_factor
from ..registry import register
from .base import FrequencyMethod, LengthMethod, Rope, Traits, require_number


@register
@dataclass(frozen=True)
class LongRoPE(FrequencyMethod, LengthMethod):
    """LongRoPE with one positive factor per pair in each list; lists left out are those of the checkpoint.

    ``factor`` is new length / original length, by default as far as the checkpoint's own configuration says.
    """

    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    attention_factor: float | None = None
    switch: str = "causal"
    factor: float | None = None

    name = "longrope"
    traits = Traits(
        "query and key", keeps_stock_kernels=False, needs_training=True, reads_past_trained_length=True,
        translation_invariant=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.switch not in ("causal", "long", "stock"):
            raise ValueError(f"switch of 'longrope' is 'causal', 'long' or 'stock', got {self.switch!r}.")
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, _factors(name, values))
        if self.attention_factor is not None:
            require_number(self, "attention_factor", above=0)
        if self.factor is not None:
            require_number(self, "factor", at_least=1)

    @property
    def acts_in_attention(self) -> bool:
        return self.switch == "causal"

    @property
    def is_fixed(self) -> bool:
        return self.switch == "long"

    def fill(self, rope: Rope) -> "LongRoPE":
        lists: dict[str, Any] = {}
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name) or rope.parameters.get(name)
            if values is None:
                raise ValueError(f"'longrope' needs {name}, {rope.dim // 2} factors: this checkpoint brings none.")
            if len(values) != rope.dim // 2:
                raise ValueError(
                    f"{name} has {len(values)} factors, but this model rotates {rope.dim // 2} pairs: give one each."
                )
            lists[name] = tuple(float(value) for value in values)
        return replace(
            self,
            **lists,
            attention_factor=self.attention_factor or rope.parameters.get("attention_factor"),
            factor=self.factor or max(1.0, rope.parameters.get("factor") or rope.configured_length / rope.length),
        )

    def extended_length(self, rope: Rope) -> int:
        return int(rope.length * self.factor) if self.factor else rope.configured_length

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        assert self.short_factor and self.long_factor
        return {
            "rope_type": "longrope",
            "short_factor": list(self.long_factor if self.switch == "long" else self.short_factor),
            "long_factor": list(self.long_factor),
            "factor": self.factor,
            "attention_factor": self._temperature(rope),
            "original_max_position_embeddings": rope.length,
        }

    def frequencies(self, rope: Rope) -> tuple[torch.Tensor, float]:
        factors = self.long_factor if self.switch == "long" else self.short_factor
        return rope.frequencies / torch.tensor(factors, dtype=torch.float64), self._temperature(rope)

    def trained(self, rope: Rope) -> tuple[torch.Tensor, float]:
        return self.frequencies(rope)

    def group(self, lengths: torch.Tensor, rope: Rope) -> torch.Tensor:
        return torch.where(lengths > rope.length, rope.length + 1, rope.length)

    def turn(self, rope: Rope, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        short, long = (
            rope.frequencies / torch.tensor(factors, dtype=rope.frequencies.dtype, device=lengths.device)
            for factors in (self.short_factor, self.long_factor)
        )
        beyond = (lengths > rope.length)[..., None]
        return torch.where(beyond, long - short, 0.0), torch.ones_like(lengths, dtype=rope.frequencies.dtype)

    def _temperature(self, rope: Rope) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return longrope_attention_factor(self.factor or 1.0, rope.length)


def _factors(name: str, values: Any) -> tuple[float, ...]:
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} of 'longrope' is a list of positive numbers, one per rotated pair, got {values!r}.")
    numbers = tuple(values)
    if not all(isinstance(number, int | float) and number > 0 and number != float("inf") for number in numbers):
        raise ValueError(f"{name} of 'longrope' holds positive numbers only, got {list(numbers)}.")
    return numbers
