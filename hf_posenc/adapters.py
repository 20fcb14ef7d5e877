"""PEFT's wrappers around a patched model. Most adapters leave a mark on the model inside; prompt learning (prompt and
prefix tuning, cartridges) keeps everything on the wrapper, which is therefore met when it takes the model in.
"""

import logging

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from . import persistence
from .families import UnsupportedMethodError
from .methods.base import Method

logger = logging.getLogger(__name__)


def refuse_prefixes(wrapper: nn.Module, method: Method | str) -> None:
    """Raises:
    UnsupportedMethodError: ``wrapper`` puts learned keys into the cache, which a method inside attention would turn.
    """
    if str(vars(wrapper).get("peft_type", "")).endswith(("PREFIX_TUNING", "CARTRIDGE")):
        raise UnsupportedMethodError(
            f"{method} turns cached keys, and prefix tuning puts learned keys into the cache as if they were already "
            "turned: use a frequency method, or another kind of adapter."
        )


def freeze_learned(model: nn.Module, method: Method) -> None:
    """Where PEFT wraps a model already, what a method learns stays as it starts: no adapter would save it.

    Raises:
        UnsupportedMethodError: an adapter means to save it, but was made before it was there.
    """
    configs = [config for module in model.modules() for config in persistence.adapters_of(module)]
    learned = [
        child for module in model.modules() for name, child in module.named_children() if name == persistence.LEARNED
    ]
    if not configs or not learned:
        return
    if any(persistence.LEARNED in (getattr(config, "modules_to_save", None) or ()) for config in configs):
        raise UnsupportedMethodError(
            f"{method} learns what modules_to_save names, but PEFT wrapped the model before it was there: patch the "
            "model first, then wrap it."
        )
    for module in learned:
        module.requires_grad_(False)
    logger.warning(
        "%s stays as it starts, since PEFT wraps the model already: to train it, patch first and wrap with "
        "modules_to_save=['posenc'].", method,
    )  # fmt: skip


def meet(wrapper: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Hook of torch, called whenever a module becomes part of another."""
    if "peft_type" not in vars(wrapper) or inner is None:
        return
    for module in inner.modules():
        patch = vars(module).get("_hf_posenc_patch")
        if patch is not None:
            if "_hf_posenc" in vars(module):
                refuse_prefixes(wrapper, patch.method)
            wrapper.register_state_dict_pre_hook(keep_scheme)


def keep_scheme(wrapper: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Pre-hook of ``state_dict``, which PEFT takes before it saves."""
    root = next(module for module in wrapper.modules() if isinstance(module, PreTrainedModel))
    persistence.watch(wrapper, root)


register_module_module_registration_hook(meet)
