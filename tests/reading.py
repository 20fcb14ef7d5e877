"""Ways to read a text, in pieces with a cache, in padded batches, greedily without a cache; and to look at it."""

import inspect

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def stepwise(model, ids: torch.Tensor, cuts: list[int], cache=None, mask=None) -> torch.Tensor:
    """Logits of a text read in pieces."""
    pieces, start = [], 0
    for count in cuts:
        stop = start + count
        more = {} if mask is None else {"attention_mask": mask[:, :stop]}
        out = model(ids[:, start:stop], use_cache=True, **{CACHE: cache}, **more)
        cache, start = out[CACHE], stop
        pieces.append(out.logits)
    return torch.cat(pieces, dim=1)


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (length,) as one batch, with its mask."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[index, place], mask[index, place] = row, 1
    return ids, mask


def greedy(model, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy decoding without any cache."""
    for _ in range(count):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids


class Unturned(nn.Module):
    """In place of a rotary module: the angle is zero everywhere."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        cos, sin = self.inner(*args, **kwargs)
        return torch.ones_like(cos), torch.zeros_like(sin)


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor holds."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return found
