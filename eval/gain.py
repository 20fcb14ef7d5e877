"""What far context is worth to a model: the loss of a token given near tokens only, minus its loss given all of them.

Near: windows of `near + stride` tokens move by `stride`, and in each the last `stride` tokens are scored. So a scored
token sees at least the `near` tokens before it, and at most near + stride − 1. Scored are the tokens from `near +
stride` on, which all have more before them. A BOS that a tokenizer puts before documents can stand before windows too
(`head`): models that rest attention on it do badly without, which would pass for a gain.

LongPPL (arXiv 2410.23771): exp(mean loss) over key tokens only, those for which an evaluator needs far context: its
loss falls by more than 2 nats from near to full context, to less than 2. Published with near 4096 and stride 1024.
It favours the evaluator and its encoding: what that predicts badly is never a key token.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from eval.perplexity import Score, Window, as_documents, averages, score

DROP, LOSS = 2.0, 2.0  # nats: by how much, and below what, the loss of a key token falls
Averages = list[tuple[int, int, int, float | None]]  # low, high − 1 is the last, tokens, their mean gain in nats


@dataclass(frozen=True)
class Reading:
    """A document's losses with near and with full context.

    Attributes:
        ids: `(length,)`, the tokens read.
        near: losses in nats of the last tokens, `(length − first,)` in float32 on the CPU.
        full: those of the same tokens given all before them.
    """

    ids: torch.Tensor
    near: torch.Tensor
    full: torch.Tensor

    @property
    def first(self) -> int:
        return len(self.ids) - len(self.full)

    @property
    def gains(self) -> torch.Tensor:
        """Nats that far context is worth, of every scored token."""
        return self.near - self.full

    @property
    def keys(self) -> torch.Tensor:
        """Whether each scored token is a key token of LongPPL, this model being the evaluator."""
        return (self.gains > DROP) & (self.full < LOSS)


@dataclass(frozen=True)
class Gain:
    """All readings of one model at one length."""

    readings: list[Reading]

    @property
    def gains(self) -> torch.Tensor:
        return torch.cat([reading.gains for reading in self.readings]).double()

    @property
    def positions(self) -> torch.Tensor:
        """How many tokens of its document lie before each scored token."""
        return torch.cat([torch.arange(reading.first, len(reading.ids)) for reading in self.readings])

    @property
    def mean(self) -> float:
        return float(self.gains.mean())

    @property
    def loss(self) -> float:
        """Mean loss with full context, in nats."""
        return float(torch.cat([reading.full for reading in self.readings]).double().mean())

    def share(self, nats: float = DROP) -> float:
        """Of the scored tokens, the part that gains more than that."""
        return float((self.gains > nats).double().mean())

    def by_position(self, edges: Sequence[int]) -> Averages:
        """Mean gain in bands of positions."""
        return list(averages(self.positions, self.gains, edges))

    def by_distance(self, edges: Sequence[int]) -> Averages:
        """Mean gain in bands of how far back the same token last occurred in its document; 0 if it did not."""
        places = torch.cat([_distances(reading.ids)[reading.first :] for reading in self.readings])
        return list(averages(places, self.gains, edges))

    def long_perplexity(self, keys: Sequence[torch.Tensor]) -> float | None:
        """LongPPL of this model; None where there are no key tokens.

        Args:
            keys: of each reading, which of its scored tokens are key tokens: an evaluator's `keys`.
        """
        losses = [reading.full[mask] for reading, mask in zip(self.readings, keys, strict=True)]
        found = torch.cat(losses).double()
        return math.exp(found.mean()) if len(found) else None


def gain(
    model: nn.Module,
    ids: torch.Tensor | Sequence[Sequence[int]],
    *,
    length: int | None = None,
    near: int = 1024,
    stride: int | None = None,
    head: int = 0,
    batch_size: int = 1,
) -> Gain:
    """Reads documents in full and in windows with a model as it is: patch it before.

    Args:
        ids: one document `(length,)`, several `(documents, length)`, or a list of documents.
        length: how many tokens of each document are read; by default all.
        near: how many tokens before it a token sees at least where it does not see all.
        stride: how many tokens a window scores; by default a quarter of `near`. One forward per stride.
        head: tokens from the start of the document that stand before every window, in addition: 1 for a BOS.
        batch_size: windows per forward.

    Raises:
        ValueError: a document shorter than the length, or a length that leaves nothing to score.
    """
    readings = []
    for document in as_documents(ids):
        read = len(document) if length is None else length
        if read > len(document):
            raise ValueError(f"a document has {len(document)} tokens, fewer than the length {read}; take a longer one")
        windows = near_windows(read, near, stride)
        losses = [scored.losses for scored in near_losses(model, document, windows, head, batch_size)]
        full = full_losses(model, document, read, windows[0].first)
        readings.append(Reading(document[:read].cpu(), torch.cat(losses), full))
    return Gain(readings)


def near_windows(length: int, near: int, stride: int | None = None) -> list[Window]:
    """The windows that score tokens `near + stride` … `length`−1 of a document.

    Raises:
        ValueError: values out of range, or a length that leaves nothing to score.
    """
    stride = default_stride(near) if stride is None else stride
    if near < 1 or stride < 1:
        raise ValueError(f"near={near} and stride={stride} must be at least 1")
    if length <= near + stride:
        raise ValueError(f"length {length} has no tokens with more before them than near + stride = {near + stride}: "
                         f"give a longer length, or less near")  # fmt: skip
    starts = range(stride, length - near, stride)
    return [Window(0, start, min(start + near + stride, length), start + near) for start in starts]


def default_stride(near: int) -> int:
    return max(1, near // 4)


def near_losses(
    model: nn.Module, document: torch.Tensor, windows: Sequence[Window], head: int = 0, batch_size: int = 1
) -> Iterator[Score]:
    """Scores windows, each with the document's first `head` tokens before it."""
    rows = [torch.cat([document[:head], document[window.start : window.end]]) for window in windows]
    places = [
        Window(index, 0, len(row), head + window.first - window.start)
        for index, (row, window) in enumerate(zip(rows, windows, strict=True))
    ]
    for window, scored in zip(windows, score(model, rows, places, batch_size), strict=True):
        yield Score(window, scored.losses)


def full_losses(model: nn.Module, document: torch.Tensor, length: int, first: int) -> torch.Tensor:
    """Losses of tokens `first` … `length`−1 given all before them, `(length − first,)` in float32 on the CPU."""
    (scored,) = score(model, [document], [Window(0, 0, length, first)])
    return scored.losses


def _distances(ids: torch.Tensor) -> torch.Tensor:
    """How many tokens back each token last occurred, `(length,)`; 0 where it is new."""
    last: dict[int, int] = {}
    found = []
    for position, token in enumerate(ids.tolist()):
        found.append(position - last.get(token, position))
        last[token] = position
    return torch.tensor(found)
