"""One file per method; importing the package registers them all."""

from .abf import ABF
from .alibi import ALiBi
from .base import FrequencyMethod, LengthMethod, Method, Rope, Traits
from .bias import BiasMethod
from .dca import DualChunk
from .dynamic_ntk import DynamicNTK
from .dynamic_yarn import DynamicYaRN
from .embedding import EmbeddingMethod
from .irope import IRoPE
from .layers import PerLayer
from .layerwise import Layerwise
from .leaky_rerope import LeakyReRoPE
from .learned import LearnedPositions
from .llama3 import Llama3
from .logn import LogN
from .longrope import LongRoPE
from .nope import NoPE
from .ntk import NTK
from .ntk_by_parts import NTKByParts
from .on_top import OnTop
from .partial_rope import PartialRoPE
from .pi import PI
from .position_map import PositionMap, Stack
from .rerope import ReRoPE
from .rope import Grounded, RoPE
from .self_extend import SelfExtend
from .sinusoidal import Sinusoidal
from .string import STRING
from .t5_bias import T5Bias
from .toeplitz import Toeplitz
from .vo_rope import VORoPE
from .xpos import XPos
from .yarn import YaRN

__all__ = [
    "ABF",
    "NTK",
    "PI",
    "STRING",
    "ALiBi",
    "BiasMethod",
    "DualChunk",
    "DynamicNTK",
    "DynamicYaRN",
    "EmbeddingMethod",
    "FrequencyMethod",
    "Grounded",
    "IRoPE",
    "Layerwise",
    "LeakyReRoPE",
    "LearnedPositions",
    "LengthMethod",
    "Llama3",
    "LogN",
    "LongRoPE",
    "Method",
    "NTKByParts",
    "NoPE",
    "OnTop",
    "PartialRoPE",
    "PerLayer",
    "PositionMap",
    "ReRoPE",
    "RoPE",
    "Rope",
    "SelfExtend",
    "Sinusoidal",
    "Stack",
    "T5Bias",
    "Toeplitz",
    "Traits",
    "VORoPE",
    "XPos",
    "YaRN",
]
