"""The record of every change made to a model: taken back last in first out, or made again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn


class _Absent(Enum):
    """Stands for an attribute that was not there; one object even after a copy or a pickle."""

    ABSENT = 0


@dataclass
class _Attribute:
    """An instance attribute of a module or config."""

    owner: Any
    name: str
    old: Any
    new: Any

    def apply(self) -> None:
        if self.new is _Absent.ABSENT:
            vars(self.owner).pop(self.name, None)
        else:
            setattr(self.owner, self.name, self.new)

    def revert(self) -> None:
        if self.old is _Absent.ABSENT:
            vars(self.owner).pop(self.name, None)
        else:
            setattr(self.owner, self.name, self.old)


@dataclass
class _Child:
    """A submodule; the one that is not in the tree follows the model to its device when it returns, and weights to its
    dtype."""

    owner: nn.Module
    name: str
    old: nn.Module
    new: nn.Module

    def apply(self) -> None:
        _swap_child(self.owner, self.name, self.new)

    def revert(self) -> None:
        # What stands there now: PEFT wraps it.
        self.new = self.owner.get_submodule(self.name)
        _swap_child(self.owner, self.name, self.old)


@dataclass
class _Buffer:
    """A buffer; the one that is not in the module follows it to its device when it returns."""

    owner: nn.Module
    name: str
    old: torch.Tensor
    new: torch.Tensor

    def apply(self) -> None:
        self.owner._buffers[self.name] = self.new.to(self.owner.get_buffer(self.name).device)

    def revert(self) -> None:
        self.owner._buffers[self.name] = self.old.to(self.owner.get_buffer(self.name).device)


@dataclass
class _Addition:
    """A submodule that was not there before."""

    owner: nn.Module
    name: str
    module: nn.Module

    def apply(self) -> None:
        self.owner.add_module(self.name, self.module)

    def revert(self) -> None:
        # What stands there now: PEFT wraps it.
        self.module = self.owner.get_submodule(self.name)
        del self.owner._modules[self.name]


@dataclass
class _Hook:
    """A hook, registered by the method ``register`` of its owner."""

    owner: nn.Module
    register: str
    function: Callable
    options: dict[str, Any]
    handle: Any = None

    def apply(self) -> None:
        self.handle = getattr(self.owner, self.register)(self.function, **self.options)

    def revert(self) -> None:
        self.handle.remove()


def _swap_child(owner: nn.Module, name: str, new: nn.Module) -> None:
    leaving = owner.get_submodule(name)
    weight = next(leaving.parameters(), None)
    if weight is not None and weight.device.type != "meta" and weight.is_floating_point():
        new.to(weight.device, weight.dtype)
    device = next((buffer.device for buffer in leaving.buffers()), None)
    if device is not None and device.type != "meta" and not any(buffer.is_meta for buffer in new.buffers()):
        new.to(device)
    new.train(leaving.training)
    owner._modules[name] = new


@dataclass
class Journal:
    """Changes to one model, in the order they were made."""

    entries: list[_Attribute | _Child | _Buffer | _Addition | _Hook] = field(default_factory=list)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or config."""
        name = getattr(owner, "attribute_map", {}).get(name, name)
        old = vars(owner).get(name, _Absent.ABSENT)
        self._do(_Attribute(owner, name, old, value))

    def forget(self, owner: Any, name: str) -> None:
        """Take an attribute away, if it is there."""
        self._do(_Attribute(owner, name, vars(owner).get(name, _Absent.ABSENT), _Absent.ABSENT))

    def swap(self, owner: nn.Module, name: str, module: nn.Module) -> None:
        """Replace the submodule ``name`` of ``owner``."""
        self._do(_Child(owner, name, owner.get_submodule(name), module))

    def buffer(self, owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
        """Replace the buffer ``name`` of ``owner``."""
        self._do(_Buffer(owner, name, owner.get_buffer(name), tensor))

    def add(self, owner: nn.Module, name: str, module: nn.Module) -> None:
        """Add a submodule."""
        self._do(_Addition(owner, name, module))

    def before_forward(self, owner: nn.Module, function: Callable) -> None:
        """Call a module-level ``function(module, args, kwargs)`` ahead of all other forward pre-hooks."""
        self._do(_Hook(owner, "register_forward_pre_hook", function, {"prepend": True, "with_kwargs": True}))

    def after_forward(self, owner: nn.Module, function: Callable, always: bool = False) -> None:
        """Call a module-level ``function(module, args, kwargs, output)`` behind all other forward hooks.

        Args:
            always: after a forward that failed, too
        """
        self._do(_Hook(owner, "register_forward_hook", function, {"with_kwargs": True, "always_call": always}))

    def before_state_dict(self, owner: nn.Module, function: Callable) -> None:
        """Call a module-level ``function(module, prefix, keep_vars)`` whenever the state dict is taken."""
        self._do(_Hook(owner, "register_state_dict_pre_hook", function, {}))

    def _do(self, entry: _Attribute | _Child | _Buffer | _Addition | _Hook) -> None:
        entry.apply()
        self.entries.append(entry)

    def revert(self) -> None:
        """Undo everything; ``replay`` makes it again."""
        for entry in reversed(self.entries):
            entry.revert()

    def replay(self) -> None:
        for entry in self.entries:
            entry.apply()

    def rollback(self, mark: int) -> None:
        """Undo and forget what came after ``mark``, a former ``len(journal.entries)``."""
        while len(self.entries) > mark:
            self.entries.pop().revert()
