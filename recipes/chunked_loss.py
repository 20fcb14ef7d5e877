"""The training loss without the whole `(batch, length, vocabulary)` tensor of logits, nor its gradient.

The body of the model runs once. Its head and the cross-entropy run per chunk of tokens under `torch.utils.checkpoint`,
so that logits of one chunk exist at a time, in the forward and in the backward pass. The head is the model's own
forward with a stand-in for its body, as in `eval.likelihood`: softcaps and scales of logits are never a copy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from eval.likelihood import LOGITS_PER_CHUNK, replaying, without_wrapper

IGNORED = -100
_NO_BODY = "shows no body before its head, so its loss cannot be computed in chunks"


@contextmanager
def chunked_loss(model: nn.Module, chunk: int | None = None) -> Iterator[None]:
    """For a while, a forward with `labels` returns their loss and no logits, whatever is wrapped around the model.

    Args:
        model: a causal language model or one with an encoder and a decoder; PEFT wrappers included.
        chunk: tokens of a row whose logits exist at once; by default what fits in 2²⁵ logits.

    Raises:
        ValueError: the model adds a loss of its experts, which would be left out, or shows no body before its head.
    """
    model = without_wrapper(model)
    name = _body_name(model)
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ValueError("output_router_logits adds a loss of the experts that chunks leave out: set it to false")
    whole = model.forward

    @wraps(whole.__func__)
    def forward(self: nn.Module, *arguments: Any, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        if labels is None:
            return whole(*arguments, **inputs)
        if arguments:
            raise ValueError("the chunked loss wants the inputs of the model by name")
        count = inputs.pop("num_items_in_batch", None)
        return CausalLMOutput(loss=_loss(self, name, whole, inputs, labels, count, chunk))

    model.forward = MethodType(forward, model)
    try:
        yield
    finally:
        del model.forward


def _loss(model: nn.Module, name: str, forward: Any, inputs: dict[str, Any], labels: torch.Tensor,
          count: torch.Tensor | int | None, chunk: int | None) -> torch.Tensor:  # fmt: skip
    """Sum of the losses of all labels over `count` or, without it, over their number: a scalar in float32."""
    replayed: dict[str, Any] = {}
    if model.config.is_encoder_decoder:
        targets = labels
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        inputs["encoder_outputs"] = model.get_encoder()(inputs["input_ids"], inputs.get("attention_mask"))
        replayed = {key: inputs[key] for key in ("encoder_outputs", "decoder_input_ids")}
    else:  # under context parallelism a process holds a part of the row, and its labels come shifted
        shifted = inputs.pop("shift_labels", None)
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED) if shifted is None else shifted
    output, vocabulary = _run_body(model, name, forward, inputs)
    batch, length = targets.shape
    chunk = chunk or max(1, LOGITS_PER_CHUNK // (batch * vocabulary))

    def part(start: int, stop: int) -> torch.Tensor:
        with replaying(model, output, name, forward, **replayed) as logits_at:
            logits = logits_at(start, stop).float()
        return cross_entropy(
            logits.flatten(0, 1), targets[:, start:stop].flatten().to(logits.device), ignore_index=IGNORED,
            reduction="sum",
        )  # fmt: skip

    total = torch.zeros((), device=output.last_hidden_state.device)
    for start in range(0, length, chunk):
        total = total + checkpoint(part, start, min(start + chunk, length), use_reentrant=False)
    count = (targets != IGNORED).sum() if count is None else count
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)


def _run_body(model: nn.Module, name: str, forward: Any, inputs: dict[str, Any]) -> tuple[Any, int]:
    """The output of the model's body, and the size of the vocabulary; the head sees one token of it."""
    captured: list[Any] = []

    def capture(body: nn.Module, arguments: Any, output: Any) -> Any:
        captured.append(output)
        return type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, :1]})

    hook = model.get_submodule(name).register_forward_hook(capture)
    try:
        logits = forward(**inputs, use_cache=False).logits
    finally:
        hook.remove()
    if len(captured) != 1:
        raise ValueError(f"{type(model).__name__} {_NO_BODY}")
    return captured[0], logits.shape[-1]


def _body_name(model: nn.Module) -> str:
    """Name of the module that a model's head stands on."""
    both, body = model.config.is_encoder_decoder, model.base_model
    if body is not model:
        inner = not both and hasattr(body, "decoder")  # OPT, BART's decoder alone
        return f"{model.base_model_prefix}.decoder" if inner else model.base_model_prefix
    if both and hasattr(model, "decoder"):
        return "decoder"
    raise ValueError(f"{type(model).__name__} {_NO_BODY}")
