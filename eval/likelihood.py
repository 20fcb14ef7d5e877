"""Negative log-likelihood of every token, without the whole `(batch, length, vocabulary)` tensor of logits.

The body of the model runs once. Then the model's own forward runs again per chunk with a stand-in for its body that
returns the hidden states already computed: so the output head and whatever the family does to its logits (softcap in
Gemma 2, scales in Cohere and Granite, multipliers in Falcon-H1) are the model's own code, never a copy of it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Cache
from transformers.utils import logging

from eval.models import CACHE, input_device

logger = logging.get_logger(__name__)

LOGITS_PER_CHUNK = 2**25  # 128 MiB in float32


@torch.no_grad()
def token_losses(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    first: int = 1,
    chunk: int | None = None,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Losses in nats of tokens `first` … length−1, each given all tokens before it.

    Args:
        model: a causal language model; PEFT wrappers included.
        input_ids: `(batch, length)`, on any device.
        attention_mask: `(batch, length)`, 0 at padding on either side. Losses of padding are meaningless.
        first: the first token that is scored, at least 1: token 0 has nothing before it.
        chunk: tokens whose logits exist at once; by default what fits in 2²⁵ logits.
        cache: an empty one, which then holds the tokens, so that the model can read on from there.

    Returns:
        `(batch, length − first)` in float32 on the model's device.
    """
    batch, length = input_ids.shape
    if not 1 <= first < length:
        raise ValueError(f"first={first} must lie between 1 and the last of {length} tokens")
    input_ids = input_ids.to(input_device(model))
    targets = input_ids[:, first:]
    model = without_wrapper(model)
    inputs = _inputs(model, input_ids, attention_mask, cache)
    hidden, last_logits = _run_body(model, inputs) if _takes(model, "logits_to_keep") else (None, None)
    if hidden is None:
        logger.warning_once(f"{type(model).__name__} shows no hidden states before its head: all logits at once")
        return _losses(model(**inputs).logits[:, first - length - 1 : -1], targets)
    chunk = chunk or max(1, LOGITS_PER_CHUNK // (batch * last_logits.shape[-1]))
    losses = []
    with replaying(model, hidden) as logits_at:
        tolerance = max(1e-3, 4 * torch.finfo(last_logits.dtype).eps)
        if not torch.allclose(logits_at(length - 1, length)[:, -1], last_logits, tolerance, tolerance, equal_nan=True):
            raise ValueError(
                f"{type(model).__name__} computes other logits from part of its hidden states than from all of them, "
                "so its loss cannot be computed in chunks"
            )
        for start in range(first - 1, length - 1, chunk):
            stop = min(start + chunk, length - 1)
            losses.append(_losses(logits_at(start, stop), targets[:, start - first + 1 : stop - first + 1]))
    return torch.cat(losses, dim=1)


@torch.no_grad()
def read_on(model: nn.Module, ids: Sequence[int], cache: Cache, keep: int = 1) -> torch.Tensor:
    """Reads tokens on top of a cache, which then holds them too.

    Args:
        keep: how many of the tokens, from the last, have their logits computed.

    Returns:
        logits `(keep, vocabulary)`, each row for what follows that token.
    """
    model = without_wrapper(model)
    row = torch.tensor([list(ids)], device=input_device(model))
    inputs = {"attention_mask": row.new_ones(1, cache.get_seq_length() + len(ids)), "use_cache": True, CACHE: cache}
    if _takes(model, "logits_to_keep"):
        inputs["logits_to_keep"] = keep
    return model(input_ids=row, **inputs).logits[0, -keep:]


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position of every token, `(batch, length)`: 0 at a row's first real token, wherever its padding lies."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def _losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.float().transpose(1, 2), targets.to(logits.device), reduction="none")


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside a PEFT wrapper: adapters live in its layers. Prompt tuning lives in the wrapper: it stays."""
    wrapped = hasattr(model, "get_base_model") and not hasattr(model, "prompt_encoder")
    return model.get_base_model() if wrapped else model


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def _inputs(model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None,
            cache: Cache | None) -> dict[str, Any]:  # fmt: skip
    inputs = {"input_ids": input_ids, "use_cache": cache is not None}
    if cache is not None:
        inputs[CACHE] = cache
    if attention_mask is not None and not bool(attention_mask.all()):
        inputs["attention_mask"] = attention_mask.to(input_ids.device)
        if _takes(model, "position_ids"):
            inputs["position_ids"] = positions(inputs["attention_mask"])
    return inputs


def _run_body(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """The output of the model's body (None if it cannot be captured) and the logits of the last token."""
    captured: list[Any] = []
    hook = model.base_model.register_forward_hook(lambda module, arguments, output: captured.append(output))
    try:
        logits = model(**inputs, logits_to_keep=1).logits[:, -1]
    finally:
        hook.remove()
    body = model.base_model
    usable = body is not model and len(captured) == 1 and "last_hidden_state" in captured[0]
    return (captured[0] if usable else None), logits


@contextmanager
def replaying(
    model: nn.Module, output: Any, name: str | None = None, forward: Callable[..., Any] | None = None, **inputs: Any
) -> Iterator[Any]:
    """Gives `logits_at(start, stop)`: the model's forward over `output`'s hidden states, its body left out.

    Args:
        output: what the body returned, with `last_hidden_state` `(batch, length, width)`.
        name: of the body among the model's modules; by default as transformers says.
        forward: runs in place of a call of the model.
        inputs: for the forward, in place of `(batch, stop − start)` token ids.
    """
    forward = forward or model
    parent, _, name = (name or model.base_model_prefix).rpartition(".")
    holder = model.get_submodule(parent)
    body = getattr(holder, name)
    stand_in = _StandIn(body)
    hidden = output.last_hidden_state

    def logits_at(start: int, stop: int) -> torch.Tensor:
        part = hidden[:, start:stop]
        stand_in.output = type(output)(**{**output, "last_hidden_state": part})
        placeholder = torch.zeros(part.shape[:2], dtype=torch.long, device=part.device)
        return forward(**{"input_ids": placeholder, **inputs}, use_cache=False).logits

    setattr(holder, name, stand_in)
    try:
        yield logits_at
    finally:
        setattr(holder, name, body)


class _StandIn(nn.Module):
    """Returns `output` whatever it is called with; everything else is the body's."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body
        self.__dict__["output"] = None

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["body"], name)
