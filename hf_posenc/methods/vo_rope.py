"""RoPE on values and outputs too, "RoPER" (VO-RoPE in kexue.fm/archives/10862; RoPE itself: arXiv 2104.09864).

    output_i = R(i) sum_j a_ij R(-j) value_j

with the frequencies and the pairing of queries and keys, which keep their own rotation: what a query gets from a value
depends on i - j. The cache holds values as they are; all of them turn at every step. Verified against
tests/reference.py.
"""

from dataclasses import dataclass

from ..registry import register
from .base import Traits
from .on_top import OnTop


@register
@dataclass(frozen=True)
class VORoPE(OnTop):
    """Values turn back by their position and outputs forth by that of the query."""

    name = "vo_rope"
    traits = Traits("value", keeps_stock_kernels=False, needs_training=True, reads_past_trained_length=False)
    effect = "turns values by their distance"
    turns_values = True
