"""Run a model whose weights are on the meta device: values where positions go, noise where weights would act."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_MATERIALISED = 1 << 16  # numbers; smaller weights (norms, biases) become noise themselves


class Weightless(TorchDispatchMode):
    """A dispatch mode: what a large weight would give is noise of the right shape, the same in every row.

    Args:
        rows: size of the batch; any other dimension of this size, or a multiple of it, counts as rows too
    """

    def __init__(self, rows: int):
        super().__init__()
        self.rows = rows
        self.generator = torch.Generator().manual_seed(0)
        self.small: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(_off_meta, (args, kwargs or {}))
        if not _any_meta(args, kwargs):
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._materialise, (args, kwargs))
        meta = [leaf.is_meta for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(meta) or all(meta):  # all: a view of a weight
            return func(*args, **kwargs)
        args, kwargs = tree_map(_to_meta, (args, kwargs))
        return tree_map(self._same_rows, func(*args, **kwargs))

    def _materialise(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_meta and value.numel() <= _MATERIALISED):
            return value
        if id(value) not in self.small:
            self.small[id(value)] = (value, self._noise(value.shape, value.dtype))
        return self.small[id(value)][1]

    def _same_rows(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        outer = [1 if size % self.rows == 0 else size for size in value.shape[:-1]]
        shape = (*outer, *value.shape[-1:]) if value.shape[-1:] != (self.rows,) else (*outer, 1)
        return self._noise(shape, value.dtype).expand(value.shape).clone()

    def _noise(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not dtype.is_floating_point:  # an index, or a scale
            return torch.zeros(shape, dtype=dtype) if shape else torch.ones((), dtype=dtype)
        return (torch.rand(shape, generator=self.generator) + 0.5).to(dtype)


def _any_meta(args, kwargs) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs)))


def _off_meta(value: Any) -> Any:
    """Activations that ask for the device of a weight stay real."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value
