"""A rope type that only this package knows, so that no load drops a scheme which transformers has no keys for.

It stands in the configuration of a model under such a scheme. Without this package, transformers and vLLM stop when
they meet it, whatever attention implementation is asked for; with it, a model loads and its first forward stops.
"""

import logging
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from . import twin
from .families import Slot, is_global, is_nested

ROPE_TYPE = "hf_posenc"
NOT_IN_FORCE = (
    "This model was configured for hf_posenc but no scheme is in force on it. Load it with "
    "hf_posenc.from_pretrained(...), or call hf_posenc.restore(model)."
)


def guarded(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``rope_parameters`` of our type wherever a method acts."""
    if not is_nested(rope_parameters):
        return {**rope_parameters, "rope_type": ROPE_TYPE, "factor": 1.0}
    return {
        key: guarded(value) if isinstance(value, dict) and is_global(Slot(key)) else value
        for key, value in rope_parameters.items()
    }


class Unusable:
    """In place of the factor on cosines and sines: a forward that meets it stops."""

    def __rmul__(self, table: torch.Tensor) -> torch.Tensor:
        if twin.active.probe is None:
            raise RuntimeError(NOT_IN_FORCE)
        return table

    def __float__(self) -> float:
        return 1.0


def unrestored(config: PreTrainedConfig, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Unusable]:
    """Frequencies (dim / 2,) as transformers asks a rope type for them."""
    frequencies, _ = ROPE_INIT_FUNCTIONS["linear"](config, *args, **kwargs)
    return frequencies, Unusable()


def _is_news(message: logging.LogRecord) -> bool:
    return f"'rope_type'='{ROPE_TYPE}'" not in message.getMessage()


ROPE_INIT_FUNCTIONS[ROPE_TYPE] = unrestored
# transformers warns of every type that it cannot validate; ours is validated when the record is read.
logging.getLogger("transformers.modeling_rope_utils").addFilter(_is_news)
