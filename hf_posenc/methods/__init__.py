"""One file per method; importing the package registers them all."""

from .abf import ABF
from .base import FrequencyMethod, LengthMethod, Method, Rope, Traits
from .dynamic_ntk import DynamicNTK
from .dynamic_yarn import DynamicYaRN
from .llama3 import Llama3
from .longrope import LongRoPE
from .ntk import NTK
from .ntk_by_parts import NTKByParts
from .partial_rope import PartialRoPE
from .pi import PI
from .yarn import YaRN

__all__ = [
    "ABF",
    "NTK",
    "PI",
    "DynamicNTK",
    "DynamicYaRN",
    "FrequencyMethod",
    "LengthMethod",
    "Llama3",
    "LongRoPE",
    "Method",
    "NTKByParts",
    "PartialRoPE",
    "Rope",
    "Traits",
    "YaRN",
]
