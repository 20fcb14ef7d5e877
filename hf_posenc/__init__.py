"""Change the positional encoding of a pretrained transformers model in place, in one call, and take it back."""

from .api import current, from_pretrained, methods, patch, patched, restore, unpatch
from .export import export
from .families import UnsupportedMethodError
from .inspection import inspect
from .methods import (
    ABF,
    NTK,
    PI,
    STRING,
    ALiBi,
    DualChunk,
    DynamicNTK,
    DynamicYaRN,
    LeakyReRoPE,
    LearnedPositions,
    Llama3,
    LogN,
    LongRoPE,
    NoPE,
    NTKByParts,
    PartialRoPE,
    ReRoPE,
    RoPE,
    SelfExtend,
    Sinusoidal,
    T5Bias,
    Toeplitz,
    YaRN,
)
from .planner import plan

__version__ = "0.1.0"

__all__ = [
    "ABF",
    "NTK",
    "PI",
    "STRING",
    "ALiBi",
    "DualChunk",
    "DynamicNTK",
    "DynamicYaRN",
    "LeakyReRoPE",
    "LearnedPositions",
    "Llama3",
    "LogN",
    "LongRoPE",
    "NTKByParts",
    "NoPE",
    "PartialRoPE",
    "ReRoPE",
    "RoPE",
    "SelfExtend",
    "Sinusoidal",
    "T5Bias",
    "Toeplitz",
    "UnsupportedMethodError",
    "YaRN",
    "current",
    "export",
    "from_pretrained",
    "inspect",
    "methods",
    "patch",
    "patched",
    "plan",
    "restore",
    "unpatch",
]
