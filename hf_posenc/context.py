"""What the attention of a patched model knows: the scheme in force, the layer it is, and the forward that runs."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .methods.base import AttentionMethod
from .positions import Positions
from .turning import Source
from .twin import Plan


@dataclass
class Context:
    """What one forward hands down to its attention: positions, and what is computed from them once for all layers."""

    positions: Positions
    shared: dict[Any, Any] = field(default_factory=dict)

    def once(self, name: Any, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns, the first time in this forward."""
        if name not in self.shared:
            self.shared[name] = compute()
        return self.shared[name]


class Here(threading.local):
    """The context of the forward that this thread runs."""

    context: Context | None = None

    def __reduce__(self):
        return Here, ()


@dataclass
class Scheme:
    """A method in force inside attention.

    Attributes:
        sources: what the rotary modules apply, by the number that plans know it by
        stock: the attention implementation that does the work, "sdpa" or "eager"
        parameters: names of the positional parameters of the owner's forward
        forwards: whether the owner hands keyword arguments down to its attention
        holder: the whole method by whose rule the cache holds keys; empty where they are turned as they were trained
        capacity: tokens beyond which distances appear that were never trained; None without such a limit
        here: the forward that runs, for modules that it is not handed down to; there it travels with the rotation
        parts: the schemes of layers that have one of their own
    """

    method: AttentionMethod
    sources: dict[int, Source]
    stock: str
    parameters: list[str]
    forwards: bool
    capacity: int | None = None
    holder: str = ""
    here: Here = field(default_factory=Here)
    parts: "list[Scheme]" = field(default_factory=list)


@dataclass
class Layer:
    """What an attention module needs to know: kept on the module as ``_hf_posenc``."""

    scheme: Scheme
    plan: Plan

    @property
    def source(self) -> Source:
        assert self.plan.source is not None
        return self.scheme.sources[self.plan.source]


@dataclass
class Call:
    """One call of an attention function.

    Attributes:
        query: (batch, heads, query, dim)
        key, value: (batch, key heads, slots, dim), the keys as the cache holds them
        places: positions of the keys, (axes, batch, slots)
        mask: (batch, 1 or heads, query or 1, slots), what the model made for the stock implementation
        causal: whether queries see only keys up to themselves where there is no mask
        stock: the stock attention function
        options: further keyword arguments for it
    """

    module: nn.Module
    layer: Layer
    context: Context
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    stock: Callable
    options: dict[str, Any]

    def run(self, query, key, value, mask) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stock function on other tensors."""
        return self.stock(self.module, query, key, value, mask, **self.options)

    def rows(self, start: int, stop: int, slots: int) -> torch.Tensor | None:
        """The mask for queries ``start`` to ``stop`` over the first ``slots`` keys; None where stock needs none."""
        return rows(self.layer.scheme.stock, self.mask, slots, start, stop, self.causal, self.query)


def rows(
    stock: str, mask, slots: int, start: int, stop: int, causal: bool, query: torch.Tensor
) -> torch.Tensor | None:
    """The rows ``start`` to ``stop`` of a mask, or None where the stock implementation needs none."""
    if mask is not None:
        return (mask if mask.shape[2] == 1 else mask[:, :, start:stop])[..., :slots]
    # Without a mask, sdpa takes the first query for the first key.
    own = query.shape[2] == 1 or (slots == stop and (start == 0 or stop - start == 1))
    if stock == "eager" or not causal or own:
        return None
    return (torch.arange(slots, device=query.device) <= torch.arange(start, stop, device=query.device)[:, None])[
        None, None
    ]
