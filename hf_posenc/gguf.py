"""Models that transformers loaded from a GGUF file, made plain float models: to be saved, trained and exported.

``hf_posenc.from_pretrained(folder, gguf_file=...)`` gives a plain model at once; this is for one that is there.
"""

from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=nn.Module)


def to_plain(model: Model) -> Model:
    """Take the mark of a quantised checkpoint off a model whose weights are ordinary floats, in place.

    Raises:
        ValueError: the model does not come from a GGUF file, or its weights are still packed.
    """
    marked = [module for module in model.modules() if isinstance(module, PreTrainedModel) and _is_gguf(module)]
    if not marked:
        raise ValueError(f"{type(model).__name__} was not loaded from a GGUF file: it is as plain as it was saved.")
    packed = [
        name for name, weight in model.state_dict().items() if weight.dim() > 1 and not weight.is_floating_point()
    ]
    if packed:
        raise ValueError(
            f"{packed[0]} and {len(packed) - 1} other weights are still packed: load the file anew with "
            "hf_posenc.from_pretrained(folder, gguf_file=...), which unpacks them."
        )
    for module in marked:
        for name in ("is_quantized", "quantization_method", "hf_quantizer"):
            vars(module).pop(name, None)
        if hasattr(module.config, "quantization_config"):
            del module.config.quantization_config
    return model


def _is_gguf(module: PreTrainedModel) -> bool:
    return "gguf" in str(vars(module).get("quantization_method", "")).lower()
