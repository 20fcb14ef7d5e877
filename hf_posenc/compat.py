"""One shim per line of transformers history, each with the version that makes it removable."""

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache


def given_cache(arguments: dict) -> Cache | None:
    """The cache among the arguments of a forward. Remove the old name when 5.40 is the oldest supported version."""
    cache = arguments.get("cache", arguments.get("past_key_values"))
    return of_self_attention(cache) if isinstance(cache, Cache) else None


def of_self_attention(cache: Cache) -> Cache:
    """The part of an encoder-decoder cache that grows with the text; other caches as they are."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def contiguous_axes(sections: list[int]) -> torch.Tensor:
    """The position axis of each pair, (pairs,), where Qwen2-VL merges the axes when it applies the rotation. Remove
    when its rotary module does so in the oldest supported version."""
    return torch.arange(len(sections)).repeat_interleave(torch.tensor(sections))
