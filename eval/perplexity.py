"""Perplexity at a context length: exp(Σ NLL / scored tokens), every token scored once, all tokens weighted alike.

Modes:
    `sliding`  (Press et al., arXiv 2012.15832): a window of `window` tokens moves by `stride`; in each window only
               the tokens that no earlier window has scored count, so each has at least window − stride before it
               (with stride = window, the first token of a window has nothing before it and is not scored).
    `prefix`   one forward over the first `window` tokens of each document (what YaRN's published curves are).

The first token of a document, BOS or not, is read and never scored. Averaging the means of windows instead, as several
published scripts do, weighs the tokens of a short window more and gives another number.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from eval.likelihood import token_losses

MODES = ("sliding", "prefix")


@dataclass(frozen=True)
class Window:
    """Tokens `start` … `end`−1 of a document are read, tokens `first` … `end`−1 are scored."""

    document: int
    start: int
    end: int
    first: int


@dataclass(frozen=True)
class Score:
    """Losses in nats, `(end − first,)` in float32 on the CPU, of the scored tokens of a window."""

    window: Window
    losses: torch.Tensor


@dataclass(frozen=True)
class Band:
    """Mean loss of the scored tokens at positions `low` … `high`−1 of their windows; None where there are none."""

    low: int
    high: int
    tokens: int
    loss: float | None


@dataclass(frozen=True)
class Perplexity:
    """All scores of one model at one context length."""

    scores: list[Score]

    @property
    def scored(self) -> int:
        return sum(len(score.losses) for score in self.scores)

    @property
    def loss(self) -> float:
        """Mean loss of a token, in nats."""
        return sum(float(score.losses.double().sum()) for score in self.scores) / self.scored

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def by_position(self, edges: Sequence[int]) -> list[Band]:
        """Loss by how much context a token had: bands of positions in the window, between neighbouring edges."""
        position = torch.cat([torch.arange(s.window.first, s.window.end) - s.window.start for s in self.scores])
        return [Band(*band) for band in averages(position, torch.cat([score.losses for score in self.scores]), edges)]


def averages(
    places: torch.Tensor, values: torch.Tensor, edges: Sequence[int]
) -> Iterator[tuple[int, int, int, float | None]]:
    """Low and high of every band between neighbouring edges, how many places lie in it, and their values' mean."""
    for low, high in itertools.pairwise(edges):
        inside = values[(places >= low) & (places < high)].double()
        yield low, high, len(inside), float(inside.mean()) if len(inside) else None


def perplexity(
    model: nn.Module,
    ids: torch.Tensor | Sequence[Sequence[int]],
    *,
    attention_mask: torch.Tensor | None = None,
    window: int | None = None,
    stride: int | None = None,
    mode: str = "sliding",
    batch_size: int = 1,
    padding_side: str = "right",
) -> Perplexity:
    """Scores documents with a model as it is: patch it before.

    Args:
        model: a causal language model.
        ids: one document `(length,)`, several `(documents, length)`, or a list of documents of any lengths.
        attention_mask: `(documents, length)`, 0 where `ids` is padding, which is taken out.
        window: tokens that a token can look back over, itself included; by default the longest document.
        stride: tokens that a sliding window moves; by default half the window.
        mode: one of `MODES`.
        batch_size: windows per forward. Changes neither what is scored nor, beyond rounding, the result.
        padding_side: where the shorter windows of a batch are padded, `left` or `right`.
    """
    documents = as_documents(ids, attention_mask)
    lengths = [len(document) for document in documents]
    window = window or max(lengths)
    windows = plan(lengths, window, stride, mode)
    return Perplexity(list(score(model, documents, windows, batch_size, padding_side)))


def as_documents(
    ids: torch.Tensor | Sequence[Sequence[int]], attention_mask: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """One-dimensional tensors of token ids, without padding."""
    if isinstance(ids, torch.Tensor):
        rows = list(ids.reshape(-1, ids.shape[-1]))
    else:
        rows = [torch.as_tensor(document) for document in ids]
    if attention_mask is not None:
        masks = attention_mask.reshape(-1, attention_mask.shape[-1]).bool()
        rows = [row[mask] for row, mask in zip(rows, masks, strict=True)]
    if any(row.dim() != 1 or len(row) < 2 for row in rows):
        raise ValueError("every document must be a row of at least 2 token ids: one to read and one to score")
    return rows


def plan(lengths: Sequence[int], window: int, stride: int | None = None, mode: str = "sliding") -> list[Window]:
    """The windows over documents of these lengths.

    Raises:
        ValueError: a stride that would skip tokens, or, in `prefix` mode, a document shorter than the window.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; choose one of {', '.join(MODES)}")
    if window < 2:
        raise ValueError(f"a window of {window} tokens scores nothing; it needs at least 2")
    if mode == "prefix":
        if min(lengths) < window:
            raise ValueError(
                f"a document has {min(lengths)} tokens, fewer than the length {window}; take a longer one"
            )
        return [Window(document, 0, window, 1) for document in range(len(lengths))]
    stride = window // 2 if stride is None else stride
    if not 1 <= stride <= window:
        raise ValueError(f"stride {stride} must lie between 1 and the window, {window}: else tokens are never scored")
    return [found for document, length in enumerate(lengths) for found in _slide(document, length, window, stride)]


def _slide(document: int, length: int, window: int, stride: int) -> Iterator[Window]:
    scored = 0
    for start in range(0, length, stride):
        end = min(start + window, length)
        first = max(scored, start + 1)
        if first < end:
            yield Window(document, start, end, first)
        scored = end
        if end == length:
            return


def score(
    model: nn.Module,
    documents: Sequence[torch.Tensor],
    windows: Sequence[Window],
    batch_size: int = 1,
    padding_side: str = "right",
) -> Iterator[Score]:
    """Scores windows of documents, each as soon as its forward is done."""
    if batch_size < 1 or padding_side not in ("left", "right"):
        raise ValueError(f"batch_size {batch_size} must be at least 1, padding_side {padding_side!r} left or right")
    for index in range(0, len(windows), batch_size):
        batch = windows[index : index + batch_size]
        rows = [documents[window.document][window.start : window.end] for window in batch]
        longest = max(len(row) for row in rows)
        offsets = [longest - len(row) if padding_side == "left" else 0 for row in rows]
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for line, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
            ids[line, offset : offset + len(row)] = row
            mask[line, offset : offset + len(row)] = 1
        firsts = [window.first - window.start + offset for window, offset in zip(batch, offsets, strict=True)]
        losses = token_losses(model, ids, mask, first=min(firsts)).cpu()
        for line, (window, first) in enumerate(zip(batch, firsts, strict=True)):
            begin = first - min(firsts)
            yield Score(window, losses[line, begin : begin + window.end - window.first])
