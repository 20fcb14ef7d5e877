"""One file per method; importing the package registers them all."""

from .abf import ABF
from .base import FrequencyMethod, LengthMethod, Method, Rope, Traits
from .dca import DualChunk
from .dynamic_ntk import DynamicNTK
from .dynamic_yarn import DynamicYaRN
from .leaky_rerope import LeakyReRoPE
from .llama3 import Llama3
from .logn import LogN
from .longrope import LongRoPE
from .ntk import NTK
from .ntk_by_parts import NTKByParts
from .partial_rope import PartialRoPE
from .pi import PI
from .position_map import PositionMap, Stack
from .rerope import ReRoPE
from .self_extend import SelfExtend
from .string import STRING
from .yarn import YaRN

__all__ = [
    "ABF",
    "NTK",
    "PI",
    "STRING",
    "DualChunk",
    "DynamicNTK",
    "DynamicYaRN",
    "FrequencyMethod",
    "LeakyReRoPE",
    "LengthMethod",
    "Llama3",
    "LogN",
    "LongRoPE",
    "Method",
    "NTKByParts",
    "PartialRoPE",
    "PositionMap",
    "ReRoPE",
    "Rope",
    "SelfExtend",
    "Stack",
    "Traits",
    "YaRN",
]
