"""ALiBi as BLOOM has it: a tensor handed down to attention modules that pass through no attention interface.

BLOOM's attention asks that tensor for its scores, ``alibi.baddbmm(batch1=query, batch2=key, ...)``, and does the rest
itself: mask, softmax, dropout, values. So all that a method needs is to stand where the tensor stood. The cache holds
keys unturned, and scores with a bias come in float32: BLOOM's own, of absolute positions in the dtype of the model,
lose the resolution of long texts in bfloat16.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from . import biases, two_part
from .context import Call, Context, Layer
from .families import NATIVES, Family, Native, live_modules
from .journal import Journal
from .methods.alibi import ALiBi
from .methods.base import Method
from .methods.bias import BiasMethod
from .twin import Plan

_TRAINED_LENGTH = 2048
"""Tokens that every released BLOOM and BLOOMZ was trained on; not all of their configurations say so."""


class FusedALiBi(Native):
    """ALiBi that is added where queries and keys are multiplied.

    Attributes:
        attentions: the attention modules by their names in the owner
    """

    title: ClassVar[str] = "ALiBi"
    own: ClassVar[tuple[type[Method], ...]] = (ALiBi,)

    def __init__(self, owner: PreTrainedModel, attentions: dict[str, Any]):
        self.owners, self.attentions = [owner], attentions

    @classmethod
    def find(cls, root: PreTrainedModel) -> "FusedALiBi | None":
        if root.config.model_type != "bloom":
            return None
        owner = next(module for module in root.modules() if hasattr(module, "build_alibi_tensor"))
        found = {name: module for name, module in live_modules(owner).items() if hasattr(module, "inv_norm_factor")}
        return cls(owner, found)

    @property
    def trained_length(self) -> int:
        """``seq_length`` where the configuration has one."""
        return getattr(self.owners[0].config, "seq_length", None) or _TRAINED_LENGTH

    def plans(self, family: Family) -> list[Plan]:
        return [
            Plan(name, 0, stop=module.head_dim, heads=module.num_heads, width=module.head_dim)
            for name, module in self.attentions.items()
        ]

    def silence(self, journal: Journal) -> None:
        for module in self.attentions.values():
            journal.before_forward(module, replace_alibi)


def replace_alibi(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of an attention module: what is in force here in place of ALiBi, or nothing of the kind."""
    layer: Layer | None = vars(module).get("_hf_posenc")
    alibi = kwargs["alibi"]
    if layer is None:
        return args, {**kwargs, "alibi": alibi.new_zeros(1, 1, 1)}
    context = layer.scheme.here.context
    if context is None:
        raise RuntimeError("Positions did not reach attention: call the model itself, not one of its layers.")
    if not torch.compiler.is_compiling():
        # Where checkpointing calls this again, ``attention.take_from_rotation`` finds the forward that it was.
        alibi._hf_posenc = context
    return args, {**kwargs, "alibi": Scores(module, layer, context)}


class Scores:
    """In place of BLOOM's ALiBi tensor."""

    def __init__(self, module: nn.Module, layer: Layer, context: Context):
        self.module, self.layer, self.context = module, layer, context

    def baddbmm(self, batch1: torch.Tensor, batch2: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
        """Scores of the method in force, (batch * heads, queries, slots).

        Args:
            batch1: queries, (batch * heads, queries, dim)
            batch2: keys as the cache holds them, (batch * heads, dim, slots)
            beta: BLOOM's factor on its bias
            alpha: factor on the products
        """
        heads = self.layer.plan.heads
        query, key = (states.unflatten(0, (-1, heads)) for states in (batch1, batch2.transpose(1, 2)))
        places = self.context.positions.of_keys(key.shape[2])
        # Values, mask and softmax are BLOOM's own.
        call = Call(self.module, self.layer, self.context, query, key, key, places, None, True, products, {})
        method = self.layer.scheme.method
        return (_biased(call, method, alpha) if isinstance(method, BiasMethod) else _mapped(call, alpha)).flatten(0, 1)


def products(query: torch.Tensor, key: torch.Tensor, alpha: float) -> torch.Tensor:
    """Scaled products (batch, heads, queries, slots); the scale goes in before they are rounded, as BLOOM does it."""
    query, key = query.flatten(0, 1), key.flatten(0, 1)
    return torch.baddbmm(query.new_zeros(1, 1, 1), query, key.transpose(1, 2), beta=0, alpha=alpha)


def _biased(call: Call, method: BiasMethod, alpha: float) -> torch.Tensor:
    distance = biases.distances(call, 0, call.query.shape[2], call.key.shape[2])
    learned = getattr(call.module, "posenc", None)
    bias = method.bias(distance, call.query.shape[1], call.causal, learned)
    return products(call.query, call.key, alpha).view(*call.query.shape[:3], -1) + bias


def _mapped(call: Call, alpha: float) -> torch.Tensor:
    """Every key by the part of the map that its distance belongs to; later keys, which a mask hides, are near."""
    method, parts = two_part.parts_of(call)
    device = call.query.device
    shown = two_part.shown(parts, call.context.positions.queries.to(device), call.places.to(device))
    scores = torch.zeros(())
    for index, (query, key) in enumerate(two_part.compared(call, method, parts)):
        found = products(query, key, alpha).view(*query.shape[:3], -1)
        scores = torch.where(shown[index], found, scores) if index else found
    return scores


NATIVES.append(FusedALiBi)
