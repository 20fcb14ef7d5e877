"""Where queries and keys stand: true positions of every token, whatever cache, padding or packing there is.

Positions of cached keys are kept on the cache object and cut to its length first, so that gaps, crops and padding on
either side stay exact. They move with its rows.
"""

import inspect
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from . import compat


@dataclass
class Positions:
    """Positions of one forward, (axes, batch, length) int64; images and video have three axes, text one.

    ``keys`` are those of all slots of the cache up to now; ``total`` is their number, a tensor for static caches.
    ``padding`` is the 2-D mask of the forward, (batch, slots), zero where a slot holds no token.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    total: int | torch.Tensor
    padding: torch.Tensor | None = None

    def of_keys(self, length: int) -> torch.Tensor:
        """Positions of the last ``length`` slots, or of a static buffer of that size: (axes, batch, length)."""
        capacity = self.keys.shape[-1]
        if isinstance(self.total, int):
            first = max(self.total - length, 0)
            if first + length <= capacity:
                return self.keys[..., first : first + length]
            slots = torch.arange(first, first + length, device=self.keys.device)
        else:
            start = (self.total.to(self.keys.device) - length).clamp(min=0)
            slots = torch.arange(length, device=self.keys.device) + start
        return self.keys[..., slots.clamp(max=capacity - 1)]

    def remember(self, cache: Cache, holder: str) -> None:
        """Leave the positions of all slots on the cache for the next forward, and by whom its keys were turned."""
        cache._hf_posenc_positions, cache._hf_posenc_holder = self.keys, holder
        for name in _MOVES:
            if name not in vars(cache):
                setattr(cache, name, Following(cache, name))


# What the methods of a cache that move its rows do to positions, (axes, batch, slots).
_MOVES = {
    "reorder_cache": lambda positions, rows: positions.index_select(1, rows.to(positions.device)),
    "batch_select_indices": lambda positions, rows: positions[:, rows],
    "batch_repeat_interleave": lambda positions, repeats: positions.repeat_interleave(repeats, dim=1),
}


class Following:
    """A method of one cache whose rows it moves, and their positions with them.

    It holds the cache weakly: in a circle, keys and values would stay in memory until the garbage collector comes.
    """

    def __init__(self, cache: Cache, name: str):
        self.cache, self.name = weakref.ref(cache), name

    def __call__(self, rows: Any) -> None:
        cache: Any = self.cache()
        getattr(type(cache), self.name)(cache, rows)
        cache._hf_posenc_positions = _MOVES[self.name](cache._hf_posenc_positions, rows)

    def __reduce__(self):
        # A copy of the cache gets one of its own.
        return Following, (self.cache(), self.name)


def read(arguments: dict[str, Any], holder: str = "") -> Positions | None:
    """Positions of the forward with these arguments; None if it brings no tokens.

    A 2-D mask without ``position_ids`` gets them: a row's first real token stands at 0, wherever its padding lies.

    Args:
        holder: the method that turns keys before they are cached; empty where they are turned as they were trained

    Raises:
        RuntimeError: the cache was filled under another one.
    """
    tokens = arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments.get("inputs_embeds")
    if tokens is None:
        return None
    cache = compat.given_cache(arguments)
    past = cache.get_seq_length() if cache is not None else 0
    if cache is not None and getattr(cache, "_hf_posenc_holder", "") != holder:
        _refuse_if_filled(past, holder)
    mask = arguments.get("attention_mask")
    if not (isinstance(mask, torch.Tensor) and mask.dim() == 2) and _outer.mask is not None:
        mask = _outer.mask
    if arguments.get("position_ids") is None and isinstance(mask, torch.Tensor) and mask.dim() == 2:
        arguments["position_ids"] = _counted(mask, past, tokens.shape[1])
    new = _new_positions(arguments.get("position_ids"), tokens, past)
    padding = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    keys, total = _all_positions(cache, new, past)
    positions = Positions(new, keys, total, padding)
    if cache is not None:
        positions.remember(cache, holder)
    return positions


class _Outer(threading.local):
    """The 2-D mask that a model around the text decoder was given: models of images and text hand down others."""

    mask: torch.Tensor | None = None


_outer = _Outer()


def note_mask(root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of a model around the text decoder, which may count positions without regard to padding itself."""
    parameters = inspect.signature(root.forward).parameters
    named = {**dict(zip(parameters, args, strict=False)), **kwargs}
    mask = named.get("attention_mask")
    _outer.mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    tokens = named.get("input_ids") if named.get("input_ids") is not None else named.get("inputs_embeds")
    one_axis = vars(root)["_hf_posenc_one_axis"] and "position_ids" in parameters
    if one_axis and tokens is not None and _outer.mask is not None and named.get("position_ids") is None:
        cache = compat.given_cache(named)
        past = cache.get_seq_length() if cache is not None else 0
        named["position_ids"] = _counted(_outer.mask, past, tokens.shape[1])
    return (), named


def forget_mask(root: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Hook of the same, also after a forward that failed."""
    _outer.mask = None


def _counted(mask: torch.Tensor, past: int | torch.Tensor, length: int) -> torch.Tensor:
    """Positions of ``length`` new tokens behind ``past`` slots, by a 2-D mask of these slots, and perhaps more."""
    places = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if isinstance(past, int):
        start = min(past, mask.shape[1] - length)
        return places[:, start : start + length]
    slots = torch.arange(length, device=mask.device) + past.to(mask.device)
    return places[:, slots.clamp(max=mask.shape[1] - 1)]


def _refuse_if_filled(past: int | torch.Tensor, holder: str) -> None:
    if torch.compiler.is_compiling() or not past:
        return
    raise RuntimeError(
        "This cache was filled under another encoding: its keys are not where "
        f"{holder or 'the scheme in force'} looks for them. Read the text again with a fresh cache."
    )


def _new_positions(position_ids: torch.Tensor | None, given: torch.Tensor, past: int | torch.Tensor) -> torch.Tensor:
    """Positions of the new tokens, (axes, batch, length)."""
    batch, length = given.shape[:2]
    if position_ids is None:
        positions = (torch.arange(length, device=given.device) + past).view(1, 1, length)
    elif position_ids.dim() == 3:
        # (3 or 4, batch, length): a fourth row, put first, holds plain text positions.
        positions = position_ids[-3:] if position_ids.shape[0] == 4 else position_ids
    else:
        positions = position_ids.view(1, -1, length)
    return positions.to(given.device, torch.int64).expand(-1, batch, -1)


def _all_positions(
    cache: Cache | None, new: torch.Tensor, past: int | torch.Tensor
) -> tuple[torch.Tensor, int | torch.Tensor]:
    """Positions of every slot up to now, (axes, batch, slots), and the number of slots in use."""
    total = past + new.shape[-1]
    stored = _stored(cache, new)
    if isinstance(past, int):
        if stored is None or stored.shape[-1] < past:
            # A cache filled elsewhere: count back from the first new token.
            stored = new[..., :1] - (past - torch.arange(past, device=new.device))
        positions = torch.cat((stored[..., :past], new), dim=-1) if past else new
        spare = _capacity(cache) - positions.shape[-1]
        # A static cache will hand out its whole buffer and count in tensors from now on.
        return (nn.functional.pad(positions, (0, spare)) if spare > 0 else positions), total
    if stored is None:
        slots = torch.arange(_capacity(cache), device=new.device)
        stored = new[..., :1] - (past.to(new.device) - slots)
    slots = torch.arange(new.shape[-1], device=new.device) + past.to(new.device)
    return stored.index_copy(-1, slots, new), total


def _capacity(cache: Cache | None) -> int:
    """Slots of the longest buffer of a static cache; 0 where layers grow."""
    return max([0, *(getattr(layer, "max_cache_len", 0) for layer in getattr(cache, "layers", ()))])


def _stored(cache: Cache | None, new: torch.Tensor) -> torch.Tensor | None:
    """Positions kept on the cache, brought to the batch of this forward."""
    stored = getattr(cache, "_hf_posenc_positions", None)
    if stored is None or stored.shape[0] != new.shape[0]:
        return None
    batch, wanted = stored.shape[1], new.shape[1]
    if batch == wanted:
        return stored
    return stored.repeat_interleave(wanted // batch, dim=1) if wanted % batch == 0 else None
