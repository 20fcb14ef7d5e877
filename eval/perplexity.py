"""Perplexity at a context length: exp(Σ NLL / scored tokens), every token scored at most once, all weighted alike.

`eval.windows` says in which modes, and what is done about BOS, which is read and never scored. Bits per byte, which
also compares models of different tokenizers, is Σ NLL / ln 2 / UTF-8 bytes of the scored text.

Two published figures are something else, and are here only to compare with those publications:
    `yarn`      averages the means of windows instead (also the recipe in transformers' documentation), which weighs
                the tokens of a window that scores few of them more.
    `longlora`  averages the loss over the whole of every window, tokens near its start included, though they were
                scored before. Its documents are one text. (It takes 2.71828 for e: within 0.001 % of exp.)
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from eval.likelihood import token_losses
from eval.windows import TAIL, Window, plan


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
    """All scores of one model at one context length; `published` is one of `eval.windows.PUBLISHED`, or None."""

    scores: list[Score]
    published: str | None = None

    @property
    def scored(self) -> int:
        """Tokens."""
        return sum(len(score.losses) for score in self.scores)

    @property
    def nats(self) -> float:
        """Losses of all scored tokens together."""
        return sum(float(score.losses.double().sum()) for score in self.scores)

    @property
    def loss(self) -> float:
        """Mean loss of a token, in nats; in what YaRN published, the mean of the windows' means."""
        if self.published == "yarn":
            return sum(float(score.losses.double().mean()) for score in self.scores) / len(self.scores)
        return self.nats / self.scored

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def bits_per_byte(self, size: int) -> float:
        """Bits that the scored text takes per byte of it, whatever the weighting of `loss`.

        Args:
            size: UTF-8 bytes that the scored tokens stand for (`eval.documents.byte_counts`).
        """
        return self.nats / math.log(2) / size

    def by_position(self, edges: Sequence[int]) -> list[Band]:
        """Loss by how much context a token had: bands of positions in the window, between neighbouring edges."""
        position = torch.cat([torch.arange(len(score.losses)) + score.window.position for score in self.scores])
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
    tail: int = TAIL,
    sample: int | None = None,
    bos: int | None = None,
    published: str | None = None,
    batch_size: int = 1,
    padding_side: str = "right",
) -> Perplexity:
    """Scores documents with a model as it is: patch it before.

    Args:
        model: a causal language model.
        ids: one document `(length,)`, several `(documents, length)`, or a list of documents of any lengths, each with
            its BOS if it is to have one (for `longlora`, which reads all as one, only the first).
        attention_mask: `(documents, length)`, 0 where `ids` is padding, which is taken out.
        window: tokens that a token can look back over, itself included; by default the longest document.
        stride, mode, tail, sample, published: as `eval.windows.plan` has them.
        bos: read before every window; a document must start with it.
        batch_size: windows per forward. Changes neither what is scored nor, beyond rounding, the result.
        padding_side: where the shorter windows of a batch are padded, `left` or `right`.
    """
    documents = as_documents(ids, attention_mask)
    if published == "longlora":
        documents = [torch.cat(documents)]
    if bos is not None and any(document[0] != bos for document in documents):
        raise ValueError(f"with bos={bos} every document must start with that token, as its first window does")
    lengths = [len(document) for document in documents]
    window = window or max(lengths)
    windows = plan(lengths, window, stride, mode, tail=tail, sample=sample, bos=bos, published=published)
    return Perplexity(list(score(model, documents, windows, batch_size, padding_side)), published)


def as_documents(
    ids: torch.Tensor | Sequence[Sequence[int]], attention_mask: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """One-dimensional tensors of token ids, without padding."""
    if isinstance(ids, torch.Tensor):
        rows = list(ids[None] if ids.dim() == 1 else ids)
    else:
        rows = [torch.as_tensor(document) for document in ids]
    if not rows or any(row.is_floating_point() for row in rows):
        raise ValueError("ids must be token ids, of one document or of several")
    if attention_mask is not None:
        masks = attention_mask.reshape(-1, attention_mask.shape[-1]).bool()
        rows = [row[mask] for row, mask in zip(rows, masks, strict=True)]
    if any(row.dim() != 1 or len(row) < 2 for row in rows):
        raise ValueError("every document must be a row of at least 2 token ids: one to read and one to score")
    return rows


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
        rows = [_read(documents[window.document], window) for window in batch]
        longest = max(len(row) for row in rows)
        offsets = [longest - len(row) if padding_side == "left" else 0 for row in rows]
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for line, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
            ids[line, offset : offset + len(row)] = row
            mask[line, offset : offset + len(row)] = 1
        firsts = [window.position + offset for window, offset in zip(batch, offsets, strict=True)]
        losses = token_losses(model, ids, mask, first=min(firsts)).cpu()
        for line, (window, first) in enumerate(zip(batch, firsts, strict=True)):
            begin = first - min(firsts)
            yield Score(window, losses[line, begin : begin + window.end - window.first])


def _read(document: torch.Tensor, window: Window) -> torch.Tensor:
    row = document[window.start : window.end]
    return row if window.bos is None else torch.cat([row.new_tensor([window.bos]), row])
