"""Pure tensor and number maths: frequencies, ramps, rotations. Nothing here knows a model."""

import math
from typing import Literal

import torch

Pairing = Literal["half", "interleaved"]


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest float the device has: position times frequency needs it past a few thousand tokens."""
    return torch.float32 if device.type == "mps" else torch.float64


def rope_frequencies(theta: float, dim: int) -> torch.Tensor:
    """Plain RoPE, ``theta ** (-2k / dim)`` in radians per token: (dim / 2,) float64. arXiv 2104.09864."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def ntk_theta(theta: float, dim: int, factor: float) -> float:
    """The base at which the slowest pair turns exactly ``factor`` times slower and the fastest as before."""
    if dim <= 2:
        raise ValueError(f"NTK scaling needs at least two rotated pairs, this model rotates {dim} dimensions.")
    return theta * factor ** (dim / (dim - 2))


def yarn_range(
    theta: float, dim: int, length: int, beta_fast: float = 32, beta_slow: float = 1, truncate: bool = True
) -> tuple[float, float]:
    """Pair indices between which YaRN's ramp runs: of pairs that turn ``beta_fast`` and ``beta_slow`` times."""

    def pair_of(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def yarn_keep(pairs: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Share of its own frequency that each pair keeps under YaRN, 1 for fast and 0 for slow ones, as ``pairs``."""
    return 1 - ((pairs - low) / (high - low)).clamp(0, 1)


def yarn_attention_factor(factor: torch.Tensor) -> torch.Tensor:
    """Factor on cos and sin, ``0.1 ln s + 1`` (arXiv 2309.00071, equation 22); logits gain its square."""
    return 0.1 * torch.log(factor.clamp(min=1)) + 1


def rotate(
    states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: Pairing, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotate every pair of the last dimension.

    Args:
        states: (batch, heads, length, dim)
        cos: (batch or 1, 1, length, dim), from ``widen``
        sin: (batch or 1, 1, length, dim / 2), one angle per pair
        pairing: "half" pairs dimension k with k + dim / 2, "interleaved" 2k with 2k + 1
        out: of the shape of ``states`` and the dtype of ``cos``, to be filled; contiguous

    Returns:
        (batch, heads, length, dim) in the dtype of ``states``; the products are taken in that of ``cos``.
    """
    wide, half = states.to(torch.promote_types(states.dtype, cos.dtype)), sin.shape[-1]
    first, second = (slice(half), slice(half, None)) if pairing == "half" else (slice(0, None, 2), slice(1, None, 2))
    rotated = torch.mul(wide, cos, out=out)
    rotated[..., first].addcmul_(wide[..., second], sin, value=-1)
    rotated[..., second].addcmul_(wide[..., first], sin)
    return rotated.to(states.dtype)


def widen(cos: torch.Tensor, pairing: Pairing) -> torch.Tensor:
    """One number per pair, (..., dim / 2), as one per dimension: (..., dim)."""
    return torch.cat((cos, cos), dim=-1) if pairing == "half" else cos.repeat_interleave(2, dim=-1)


def longrope_attention_factor(factor: float, length: int) -> float:
    """``sqrt(1 + ln s / ln L)`` (arXiv 2402.13753, section 3.2), 1 where nothing is extended."""
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
