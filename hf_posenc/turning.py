"""What is left to turn: tables of cos and sin for the difference between two rotations, and their use on states."""

from dataclasses import dataclass

import torch

from .functional import rotate, wide_dtype, widen
from .methods.base import Rope
from .twin import Plan

Table = tuple[torch.Tensor, torch.Tensor]
"""cos (batch, 1, length, dimensions) and sin (batch, 1, length, pairs), as ``rotate`` takes them."""


@dataclass
class Source:
    """One set of frequencies that layers share.

    Attributes:
        rope: the rotation as it was trained
        frequencies: (dim / 2,) float64, those that the rotary module applies
        axes: (dim / 2,) the row of three-axis positions that turns each pair; None where positions have one axis
    """

    rope: Rope
    frequencies: torch.Tensor
    axes: torch.Tensor | None = None

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions (axes, batch, length) as every pair sees them: (batch, length, pairs or 1)."""
        if self.axes is None or positions.shape[0] == 1:
            return positions[0][..., None]
        return positions[self.axes.to(positions.device)].permute(1, 2, 0)


def table(
    places: torch.Tensor,
    frequencies: torch.Tensor,
    plan: Plan,
    factor: torch.Tensor | float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Table:
    """The table of the angles ``places`` times ``frequencies``, for layers that pair dimensions as ``plan`` says.

    Args:
        places: (batch, length, pairs or 1), from ``Source.places``
        frequencies: (pairs,) or (batch, 1, pairs), in a wide float
        factor: on cos and sin, a number or (batch, 1, 1)
    """
    angles = places.to(frequencies.dtype) * frequencies
    cos, sin = angles.cos() * factor, plan.sign * angles.sin() * factor
    return widen(cos, plan.pairing).to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def shift_table(source: Source, plan: Plan, shift: torch.Tensor, like: torch.Tensor) -> Table:
    """The table that moves states such as ``like`` by ``shift`` positions, (axes, batch, length).

    In their dtype, as the tables of a model itself are: their rounding is that of one more rotation.
    """
    frequencies = source.frequencies.to(like.device, wide_dtype(like.device))
    return table(source.places(shift.to(like.device)), frequencies, plan, dtype=like.dtype)


def turn(
    states: torch.Tensor, turning: Table, plan: Plan, back: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Turn the planned dimensions of (batch, heads, length, dim), or the first of them if the table has fewer.

    Args:
        back: turn the other way round, which is the gradient of the turn
        out: where to put the turned dimensions, contiguous
    """
    cos, sin = turning
    start, stop = plan.start, plan.start + cos.shape[-1]
    turned = rotate(states[..., start:stop], cos, -sin if back else sin, plan.pairing, out)
    if stop - start == states.shape[-1]:
        return turned
    return torch.cat((states[..., :start], turned, states[..., stop:]), dim=-1)
