"""A table of learned vectors, one per position, added to the token embeddings (arXiv 1706.03762, GPT-2, BERT).

A model that has such a table keeps it, stretched from its L rows to N = ``max_positions``:

    new[t] = table[t (L - 1) / (N - 1)]

between rows by straight lines, ``interpolation="linear"``, or by cubic convolution with a = -0.75 and repeated border
rows (``"cubic"``); ``"copy"`` repeats the table, new[t] = table[t mod L]. With ``keep_head`` the first L rows stay as
they were trained and only later ones are taken from the stretched table. Plain transformers can load the result. Any
other model gets a new table that starts at zero. Stock kernels stay. Verified against tests/reference.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..registry import register
from .base import Rope, Traits, require_flag, require_integer
from .embedding import EmbeddingMethod

_INTERPOLATIONS = ("linear", "cubic", "copy")


@register
@dataclass(frozen=True)
class LearnedPositions(EmbeddingMethod):
    """A table of ``max_positions`` rows: the trained one stretched, or a new one of zeros."""

    max_positions: int
    interpolation: str = "linear"
    keep_head: bool = False

    name = "learned"
    traits = Traits(
        "embedding", keeps_stock_kernels=True, needs_training=True, reads_past_trained_length=True, relative=False,
        learned=True, translation_invariant=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_integer(self, "max_positions", at_least=1)
        require_flag(self, "keep_head")
        if self.interpolation not in _INTERPOLATIONS:
            raise ValueError(
                f"interpolation of 'learned' is one of {', '.join(_INTERPOLATIONS)}, got {self.interpolation!r}."
            )

    def extended_length(self, rope: Rope) -> int:
        return self.max_positions

    def vectors(self, positions: torch.Tensor, width: int, learned: Any) -> torch.Tensor:
        return learned(positions)

    def learned(self, width: int) -> nn.Module:
        return Table(self.max_positions, width)

    def stretch(self, table: torch.Tensor) -> torch.Tensor:
        """(max_positions, width) float64 from a trained (length, width); no shorter than that."""
        length, rows = table.shape[0], table.to(torch.float64)
        if self.interpolation == "copy":
            longer = rows[torch.arange(self.max_positions, device=rows.device) % length]
        else:
            # (width, 1, length): torch has a cubic only for images, here one pixel wide.
            lines = rows.T[:, None, :, None]
            mode = "bicubic" if self.interpolation == "cubic" else "bilinear"
            longer = nn.functional.interpolate(lines, (self.max_positions, 1), mode=mode, align_corners=True)
            longer = longer[:, 0, :, 0].T
        return torch.cat((rows, longer[length:])) if self.keep_head else longer

    def shrink(self, table: torch.Tensor, length: int) -> torch.Tensor:
        """(length, width) float64: the table that comes closest to ``table`` when it is stretched; the trained one,
        up to rounding, if ``table`` was not trained further."""
        weights = self.stretch(torch.eye(length, dtype=torch.float64))
        return torch.linalg.lstsq(weights, table.to("cpu", torch.float64)).solution


class Table(nn.Module):
    """One vector per position, (rows, width)."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        rows = self.weight.shape[0]
        if not torch.compiler.is_compiling() and int(positions.amax()) >= rows:
            raise ValueError(
                f"This text reaches position {int(positions.amax())}, and the table of learned positions has {rows} "
                "rows: patch with a larger max_positions."
            )
        return nn.functional.embedding(positions, self.weight)
