"""What an encoding costs: patched against unpatched in one run, in turn, as ratios of measurements of the same round.

- `prefill`: seconds of one forward over N tokens that fills a cache, with the logits of the last token only.
- `decode`: seconds of one token with N cached, the median over `STEPS` tokens.
- `train`: seconds of forward and backward over N tokens, with gradients of every parameter that takes one and without
  an optimizer step. The loss is the mean square of the last hidden states, plus that of the last token's logits: over
  all N, the logits would cost the most, and the same under every encoding.
- `memory`: bytes that the prefill needs at its peak beyond what was there before it, see `eval/memory.py`.

Every measurement patches anew and reads a few tokens first. So tables that a method makes for a length are part of
`prefill` and `memory`, as with the first text of that length; on a GPU, where a whole text is read first, of `memory`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eval import models

PARTS = ("prefill", "decode", "train", "memory")
STEPS = 16
WARM_UP = 64  # tokens, read first: what a library sets up once is not part of the cost
Measure = Callable[[str, int], dict[str, float]]  # an encoding and a length to the value of each part


@dataclass(frozen=True)
class Cost:
    """Cost of an encoding at one length.

    Attributes:
        posenc: full name of the method
        length: tokens read at once, or cached before the step
        part: one of `PARTS`
        values: of every round, in seconds or bytes
        unpatched: of the unpatched model in the same rounds
    """

    posenc: str
    length: int
    part: str
    values: list[float]
    unpatched: list[float]

    @property
    def ratios(self) -> list[float]:
        """Patched / unpatched of every round."""
        return [mine / stock for mine, stock in zip(self.values, self.unpatched, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Medians, and between which ratios the rounds lie."""
        return {
            "posenc": self.posenc, "length": self.length, "part": self.part,
            "unit": "bytes" if self.part == "memory" else "seconds", "value": statistics.median(self.values),
            "unpatched": statistics.median(self.unpatched), "ratio": statistics.median(self.ratios),
            "lowest": min(self.ratios), "highest": max(self.ratios), "rounds": len(self.values),
        }  # fmt: skip


def compare(measure: Measure, posencs: Sequence[str], length: int, rounds: int,
            tick: Callable[[], object] = lambda: None) -> list[Cost]:  # fmt: skip
    """Measures the unpatched model and every encoding once per round; every other round goes backwards.

    Args:
        measure: called with an encoding and `length`.
        tick: called after each measurement.
    """
    if length < 1 or rounds < 1:
        raise ValueError(f"length={length} and rounds={rounds} must be at least 1")
    slots = (models.NONE, *posencs)
    taken: list[list[dict[str, float]]] = [[] for _ in slots]
    for turn in range(rounds):
        for slot in range(len(slots))[:: -1 if turn % 2 else 1]:
            taken[slot].append(measure(slots[slot], length))
            tick()
    base, *rest = taken
    costs = []
    for part in base[0]:
        unpatched = [values[part] for values in base]
        for posenc, mine in zip(posencs, rest, strict=True):
            costs.append(Cost(posenc, length, part, [values[part] for values in mine], unpatched))
    return costs


def reading(model: nn.Module) -> Measure:
    """Measures `prefill` and `decode`."""

    @torch.no_grad()
    def measure(posenc: str, length: int) -> dict[str, float]:
        ids = random_ids(model, length + 1)
        with models.applied(model, posenc):
            warm_up(model, _before_timing(ids))
            start = _now(ids)
            output = prefill(model, ids[:, :-1])
            read, steps = _now(ids) - start, []
            for _ in range(STEPS):
                start = _now(ids)
                output = model(ids[:, -1:], use_cache=True, **{models.CACHE: output[models.CACHE]})
                steps.append(_now(ids) - start)
        return {"prefill": read, "decode": statistics.median(steps)}

    return measure


def training(model: nn.Module) -> Measure:
    """Measures `train`."""

    def measure(posenc: str, length: int) -> dict[str, float]:
        ids = random_ids(model, length)
        with models.applied(model, posenc), _train_mode(model):
            warm_up(model, _before_timing(ids))
            start = _now(ids)
            output = model(ids, use_cache=False, logits_to_keep=1, output_hidden_states=True)
            loss = sum(tensor.float().square().mean() for tensor in (output.hidden_states[-1], output.logits[:, -1]))
            loss.backward()
            return {"train": _now(ids) - start}

    return measure


def prefill(model: nn.Module, ids: torch.Tensor) -> Any:
    """One forward that fills a cache, with the logits of the last token."""
    return model(ids, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def warm_up(model: nn.Module, length: int = WARM_UP) -> None:
    """A forward whose cost does not count."""
    prefill(model, random_ids(model, length))


def random_ids(model: nn.Module, length: int) -> torch.Tensor:
    """Token ids `(1, length)` on the model's device, always the same."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    return ids.to(models.input_device(model))


@contextmanager
def _train_mode(model: nn.Module):
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of this model takes a gradient: leave `train` out of the parts")
    was = model.training
    model.train()
    try:
        yield
    finally:
        model.train(was)
        model.zero_grad(set_to_none=True)


def _before_timing(ids: torch.Tensor) -> int:
    return ids.shape[1] if ids.device.type == "cuda" else WARM_UP  # a GPU's kernels are chosen by length


def _now(ids: torch.Tensor) -> float:
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)
    return time.perf_counter()
