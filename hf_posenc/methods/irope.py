"""iRoPE: no position in every so many layers, rotation in the others (Llama 4; the mixture is the
RNoPE of arXiv 2501.18795).

    layer l has no position iff (l + 1) % interval == 0: for interval 4 the layers 3, 7, 11 ...
    temperature: query_i of those layers times 1 + 0.1 ln(1 + floor((i + 1) / 8192))
    chunk: query_i of the rotating layers sees key_j iff floor(i / chunk) = floor(j / chunk)

``"irope:interval=4+yarn:factor=4"`` puts YaRN on the rotating layers. Without options all kernels are stock. Verified
against tests/reference.py.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..registry import register
from .base import FrequencyMethod, Method, Traits, require_flag, require_integer
from .layerwise import Layerwise
from .nope import NoPE
from .on_top import OnTop
from .position_map import Stack


@register
@dataclass(frozen=True)
class IRoPE(Layerwise):
    """NoPE on every ``interval``-th layer, the last of each run, RoPE elsewhere."""

    interval: int = 4
    temperature: bool = False
    chunk: int | None = None

    name = "irope"
    traits = Traits("query and key", keeps_stock_kernels=True, needs_training=True, reads_past_trained_length=False)
    effect: ClassVar[str] = "takes the rotation from some layers"
    rest_rotates = True
    over_frequencies = True

    @property
    def is_foreign(self) -> bool:
        return True

    def __post_init__(self) -> None:
        require_integer(self, "interval", at_least=1)
        require_flag(self, "temperature")
        if self.chunk is not None:
            require_integer(self, "chunk", at_least=1)

    def of_layer(self, index: int, base: FrequencyMethod | None) -> Method | None:
        if (index + 1) % self.interval == 0:
            return Stack(Temperature(), NoPE()) if self.temperature else NoPE()
        if self.chunk is None:
            return None
        return Stack(Chunked(self.chunk), base) if base else Chunked(self.chunk)


@dataclass(frozen=True)
class Temperature(OnTop):
    """The queries of layers without a position grow with the text."""

    name = "temperature"
    effect = "makes queries grow with the text"
    needs_rotation = False

    def query_scale(self, positions: torch.Tensor) -> torch.Tensor | None:
        return 1 + 0.1 * (1 + (positions + 1) // 8192).float().log()


@dataclass(frozen=True)
class Chunked(OnTop):
    """Queries see their own chunk of the text."""

    chunk: int | None

    name = "chunked"
    effect = "shows queries their own chunk"
    needs_rotation = False
