"""One shim per line of transformers history, each with the version that makes it removable."""

from transformers.cache_utils import Cache


def given_cache(arguments: dict) -> Cache | None:
    """The cache among the arguments of a forward. Remove the old name when 5.40 is the oldest supported version."""
    cache = arguments.get("cache", arguments.get("past_key_values"))
    return cache if isinstance(cache, Cache) else None
