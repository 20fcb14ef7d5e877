"""What an encoding costs: patched against unpatched in one run, interleaved, as medians of ratios."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eval import models


@dataclass(frozen=True)
class Cost:
    """Cost of an encoding at one length.

    Attributes:
        posenc: full name of the method
        length: tokens read at once, or cached before the step
        part: `prefill` (one forward over `length` tokens) or `decode` (one token with `length` cached)
        seconds: median for this encoding
        ratio: median over rounds of its time / the unpatched model's in the same round
        rounds: how many
    """

    posenc: str
    length: int
    part: str
    seconds: float
    ratio: float
    rounds: int


@torch.inference_mode()
def speed(model: nn.Module, posencs: Sequence[str], lengths: Sequence[int], rounds: int = 5, steps: int = 8):
    """Yields a `Cost` per encoding, length and part; the unpatched model is measured in every round.

    Args:
        model: a causal language model
        rounds: of which each measures every encoding once, in turn
        steps: decoded tokens per measurement
    """
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds={rounds} and steps={steps} must be at least 1")
    device = next(model.parameters()).device
    for length in lengths:
        ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, length + 1), device=device)
        times: dict[tuple[str, str], list[float]] = {}
        _measure(model, ids[:, : min(length, 256) + 1], 1)  # the first pass of a process is slow
        for _ in range(rounds):
            for name in (models.NONE, *posencs):
                with models.applied(model, name):
                    for part, seconds in _measure(model, ids, steps).items():
                        times.setdefault((name, part), []).append(seconds)
        for (name, part), taken in times.items():
            base = times[models.NONE, part]
            ratios = [mine / stock for mine, stock in zip(taken, base, strict=True)]
            yield Cost(name, length, part, statistics.median(taken), statistics.median(ratios), rounds)


def _measure(model: nn.Module, ids: torch.Tensor, steps: int) -> dict[str, float]:
    start = _now(ids.device)
    output: Any = model(ids[:, :-1], use_cache=True, logits_to_keep=1)
    read = _now(ids.device)
    cache = output.get("cache", output.get("past_key_values"))
    for _ in range(steps):
        output = (
            model(ids[:, -1:], past_key_values=cache) if "cache" not in output else model(ids[:, -1:], cache=cache)
        )
    return {"prefill": read - start, "decode": (_now(ids.device) - read) / steps}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
