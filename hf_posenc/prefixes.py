"""PEFT's prefix tuning and cartridges: learned keys that enter the cache as if the rotation had been applied to them, so
that methods inside attention, which turn what is cached, would turn them wrongly.

PEFT keeps these adapters on its wrapper and leaves no mark on the model inside. They are therefore refused twice: when a
wrapped model is patched, and when a patched model is wrapped.
"""

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .families import UnsupportedMethodError
from .methods.base import Method


def refuse(wrapper: nn.Module, method: Method) -> None:
    """Raises:
    UnsupportedMethodError: ``wrapper`` puts learned keys into the cache of the model inside.
    """
    if str(vars(wrapper).get("peft_type", "")).endswith(("PREFIX_TUNING", "CARTRIDGE")):
        raise UnsupportedMethodError(
            f"{method} turns cached keys, and prefix tuning puts learned keys into the cache as if they were already "
            "turned: use a frequency method, or another kind of adapter."
        )


def refuse_around(wrapper: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Hook of torch, called whenever a module becomes part of another."""
    if inner is not None and "peft_type" in vars(wrapper):
        for module in inner.modules():
            if "_hf_posenc_patch" in vars(module) and "_hf_posenc" in vars(module):
                refuse(wrapper, vars(module)["_hf_posenc_patch"].method)


register_module_module_registration_hook(refuse_around)
