"""T5's relative buckets: a trained bias on the scores, by bucket of distances and head (arXiv 1910.10683).

The first layer of each stack, encoder and decoder, makes the bias for all of its layers (umt5: every layer for itself)
by ``compute_bias``. Another method makes that a zero and acts inside self-attention; cross-attention has no positions
and is never touched. ``t5_bias`` leaves the work to the model and changes what its tables are read by.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from . import twin
from .families import NATIVES, Family, Native, UnsupportedMethodError
from .journal import Journal
from .methods.base import Method
from .methods.t5_bias import T5Bias, t5_buckets
from .twin import Plan

_LENGTHS = {"t5": 512, "umt5": 512, "switch_transformers": 512, "pop2piano": 512, "mt5": 1024}
"""Tokens that a family was trained on, where the configuration does not say."""
_REFUSED = {
    "longt5": "its encoder attends in blocks, outside of transformers' attention interface",
    "udop": "its encoder adds up biases of its own for places on a page",
}
_NUMBERS = ("relative_attention_num_buckets", "relative_attention_max_distance")
_REACH = 8
"""How many times the trained distance a new table looks: beyond, all distances share one trained bias."""


class Buckets(Native):
    """Relative buckets in one stack or in two."""

    title: ClassVar[str] = "relative buckets"
    own: ClassVar[tuple[type[Method], ...]] = (T5Bias,)

    def __init__(self, root: PreTrainedModel, owners: list[PreTrainedModel]):
        self.root, self.owners = root, owners

    @classmethod
    def find(cls, root: PreTrainedModel) -> "Buckets | None":
        kind = root.config.model_type
        if kind in _REFUSED:
            raise UnsupportedMethodError(f"{type(root).__name__} ({kind}) has relative buckets, but {_REFUSED[kind]}.")
        if kind not in _LENGTHS:
            return None
        modules = [module for module in root.modules() if isinstance(module, PreTrainedModel)]
        return cls(root, [module for module in modules if "block" in module._modules])

    @property
    def trained_length(self) -> int:
        config: Any = self.root.config
        return int(vars(config).get("n_positions") or _LENGTHS[config.model_type])

    @property
    def advice(self) -> str:
        return (
            "Buckets read texts of any length, with one bias for all that is far: measure, then try to stretch the "
            "trained table, as in 't5_bias:max_distance=256' or 't5_bias:interpolate=2'."
        )

    def plans(self, family: Family) -> list[Plan]:
        return [replace(plan, ignored=frozenset({"position_bias"})) for plan in twin.plan_unrotated(family)]

    def silence(self, journal: Journal) -> None:
        for module in self._attention():
            journal.set(module, "compute_bias", functools.partial(no_bias, module))

    def knows(self, method: Method) -> bool:
        return isinstance(method, self.own)

    def settings(self, method: Method) -> dict[str, Any]:
        config: Any = self.root.config
        if not isinstance(method, T5Bias) or method.num_buckets != config.relative_attention_num_buckets:
            return {}
        return {name: getattr(config, name) for name in _NUMBERS}

    def adopt(self, method: Method, journal: Journal) -> bool:
        """The trained tables, read by other buckets.

        With another number of buckets every stack gets new tables, ``resized`` from the trained ones; saved, they are
        the model's own, so that ``unpatch`` after a reload only forgets the scheme.
        """
        assert isinstance(method, T5Bias)
        for module in self._attention():
            numbers = (module.relative_attention_num_buckets, module.relative_attention_max_distance)
            if method.num_buckets != numbers[0]:
                table = module.relative_attention_bias
                if not isinstance(table, nn.Embedding):
                    raise UnsupportedMethodError(
                        f"{method} makes new tables, and those of this model are wrapped by {type(table).__name__}: "
                        "patch first, then add the adapter."
                    )
                journal.swap(module, "relative_attention_bias", _embedding(table, module.is_decoder, numbers, method))
            self._write(module, method, journal)
            if method.interpolate != 1:
                journal.set(module, "_relative_position_bucket", Divided(method, module.is_decoder))
        for config in {id(config): config for config in self._configs()}.values():
            self._write(config, method, journal)
        return method.interpolate == 1

    def align(self, journal: Journal) -> None:
        for module in self._attention():
            for name in _NUMBERS:
                journal.set(module, name, getattr(module.config, name))

    @staticmethod
    def _write(owner: Any, method: T5Bias, journal: Journal) -> None:
        for name, value in zip(_NUMBERS, (method.num_buckets, method.max_distance), strict=True):
            journal.set(owner, name, value)

    def _attention(self) -> list[Any]:
        return [module for owner in self.owners for module in _with_tables(owner)]

    def _configs(self) -> list[PreTrainedConfig]:
        return [self.root.config, *(owner.config for owner in self.owners)]


def _with_tables(stack: nn.Module) -> list[nn.Module]:
    """The attention modules of a stack that hold a table."""
    return [module for module in stack.modules() if "relative_attention_bias" in module._modules]


def no_bias(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In place of ``compute_bias``: a zero, (1, 1, 1, 1)."""
    return module.relative_attention_bias.weight.new_zeros(1, 1, 1, 1)


@dataclass(frozen=True)
class Divided:
    """In place of ``_relative_position_bucket``: buckets of distances that are divided first."""

    method: T5Bias
    causal: bool

    def __call__(self, relative_position: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Args: ``relative_position`` is j - i, (queries, keys) int64."""
        return t5_buckets(
            -relative_position, self.method.num_buckets, self.method.max_distance, self.causal, self.method.interpolate
        )


def _embedding(table: nn.Embedding, causal: bool, trained: tuple[int, int], method: T5Bias) -> nn.Embedding:
    sides = [table.weight.detach()] if causal else table.weight.detach().chunk(2)
    count, wanted = trained[0] // len(sides), method.num_buckets // len(sides)
    weight = torch.cat([resized(side, count, trained[1], wanted, method.max_distance) for side in sides])
    return nn.Embedding.from_pretrained(weight, freeze=not table.weight.requires_grad)


def resized(
    trained: torch.Tensor, num_buckets: int, max_distance: int, new_buckets: int, new_distance: int
) -> torch.Tensor:
    """A table of ``new_buckets`` for the distances of one side: every bucket takes the mean of the trained biases of
    the distances that it stands for, up to ``new_distance``. One that no whole distance falls into takes what the
    bucket before it has.

    Args:
        trained: (num_buckets, heads)
    """
    distances = torch.arange(min(new_distance, _REACH * max_distance) + 1)
    old = t5_buckets(distances, num_buckets, max_distance, causal=True)
    new = t5_buckets(distances, new_buckets, new_distance, causal=True)
    biases = trained.to("cpu", torch.float64)[old]
    counts = torch.bincount(new, minlength=new_buckets)
    sums = biases.new_zeros(new_buckets, biases.shape[1]).index_add_(0, new, biases)
    filled = torch.where(counts > 0, torch.arange(new_buckets), 0).cummax(0).values
    return (sums / counts[:, None].clamp(min=1))[filled].to(trained)


NATIVES.insert(0, Buckets)  # it knows its models; a table is looked for by its size
