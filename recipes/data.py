"""Texts as blocks of tokens, with nothing dropped: pieces of documents, and what keeps them apart.

How documents share blocks:
    `packed`  each is cut into pieces of at most a block; pieces shorter than one go together where they fit best
              (best-fit decreasing, arXiv 2404.10830). Positions start again with every piece, by which transformers
              and this package's methods keep them apart.
    `single`  a piece to a block, the rest padding.
    `joined`  one stream, cut; tokens see across documents, which end with EOS.

Padding stands on the right: masked, or (`packed`, `joined`) as a document of its own.
"""

import bisect
import glob
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Value
from datasets import Sequence as List
from datasets.exceptions import DatasetGenerationError
from torch import nn

from eval import data as texts
from eval.models import encode
from eval.rows import parse
from recipes.chunked_loss import IGNORED
from recipes.settings import Recipe, is_held_out

PASSAGE = 400  # characters by which a text is known again


@dataclass(frozen=True)
class Piece:
    """Tokens `start` … `stop`−1 of a document."""

    document: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def load_documents(recipe: Recipe, tokenizer: Any) -> Dataset:
    """Tokens of all documents, `input_ids` and their number `length`, each with the EOS of the tokenizer at its end.

    They lie in the cache of `datasets`, for other processes and runs, until a file changes; of a data set on the hub
    nobody looks whether it has.

    Raises:
        ValueError: no such source or column, a document that is evaluated on, or none with two tokens to learn from.
    """
    for source in recipe.data:
        texts.check_source(source, recipe.documents_per_source)
    held_out = [texts.text(name) for name in recipe.evaluate_texts] if recipe.evaluate else []
    given = {
        "sources": tuple(recipe.data), "count": recipe.documents_per_source, "tokenizer": tokenizer,
        "held_out": tuple(held_out), "state": (sys.version, *map(_state, recipe.data)),
    }  # fmt: skip
    columns = Features({"input_ids": List(Value("int32")), "length": Value("int64")})
    try:
        found = Dataset.from_generator(_tokenised, columns, gen_kwargs=given)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise ValueError(f"cannot read {', '.join(recipe.data)}: {error.__cause__ or error}") from error
    return found.with_format("torch")


def _tokenised(sources: Sequence[str], count: int | None, tokenizer: Any, held_out: Sequence[str],
               state: Any) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of `load_documents`; `state` is there to be part of the cache's key."""
    end, empty = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id], True
    for source in sources:
        for name, text in islice(texts.stream(source), count):
            if is_held_out(name) or _holds(text, held_out):
                raise ValueError(f"{name} is kept out of training, to be evaluated on: take it out of {source}")
            ids = encode(tokenizer, text) + end if text.strip() else []
            if len(ids) > 1:
                empty = False
                yield {"input_ids": ids, "length": len(ids)}
    if empty:
        raise ValueError(f"the data set is empty: {', '.join(sources)} has no text to learn from")


def _holds(text: str, held_out: Sequence[str]) -> bool:
    """Whether a passage from the middle of a text kept out stands in a text, whatever their white space."""
    found = " ".join(text.split())
    for kept in (" ".join(other.split()) for other in held_out):
        middle = len(kept) // 2
        if kept and kept[max(0, middle - PASSAGE // 2) : middle + PASSAGE // 2] in found:
            return True
    return False


def _state(source: str) -> tuple[Any, ...]:
    """What differs once a file of a source does."""
    spec = parse(source) if texts.is_dataset(source) else None
    places = [source] if spec is None else [spec.name, *glob.glob(spec.data_files or "", recursive=True)]
    files = [file for place in places for file in (Path(place), *Path(place).rglob("*")) if file.is_file()]
    return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files))


class Blocks:
    """Rows of at most `length` tokens that hold every token of the documents once.

    Args:
        documents: from `load_documents`.
        layout: `packed`, `single` or `joined`.
    """

    def __init__(self, documents: Dataset, length: int, layout: str) -> None:
        self.documents, self.length, self.layout = documents, length, layout
        sizes = [int(size) for size in documents["length"]]
        self.rows = _stream(sizes, length) if layout == "joined" else _cut(sizes, length)
        if layout == "packed":
            self.rows = _pack([piece for row in self.rows for piece in row], length)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def whole(self) -> float:
        """Share of the tokens that stand in pieces as long as a block: only these teach the full length."""
        sizes = [len(piece) for row in self.rows for piece in row]
        return sum(size for size in sizes if size == self.length) / sum(sizes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """`input_ids`, `labels` and `position_ids`, each `(tokens,)`; a token with nothing before it is no label."""
        pieces = self.rows[index]
        ids = torch.cat([self.documents[one.document]["input_ids"][one.start : one.stop] for one in pieces])
        apart = [len(ids)] if self.layout == "joined" else [len(one) for one in pieces]
        positions = torch.cat([torch.arange(size) for size in apart])
        return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, IGNORED), "position_ids": positions}


def _cut(sizes: Sequence[int], length: int) -> list[list[Piece]]:
    """Pieces of a block, and the rest; a single token is no rest, as nothing before it would say what it should be."""
    rows = []
    for document, size in enumerate(sizes):
        ends = [*range(length, size, length), size]
        if len(ends) > 1 and size % length == 1 and length > 2:
            ends[-2] -= 1
        rows += [[Piece(document, start, stop)] for start, stop in pairwise([0, *ends])]
    return rows


def _stream(sizes: Sequence[int], length: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = [[]]
    room = length
    for document, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                rows.append([])
                room = length
            stop = min(start + room, size)
            rows[-1].append(Piece(document, start, stop))
            room -= stop - start
            start = stop
    return rows


def _pack(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Each piece, the longest first, into the row that it fills best."""
    rows: list[list[Piece]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    for piece in sorted(pieces, key=len, reverse=True):
        place = bisect.bisect_left(open_rows, (len(piece), -1))
        if place == len(open_rows):
            room, row = length, len(rows)
            rows.append([])
        else:
            room, row = open_rows.pop(place)
        rows[row].append(piece)
        if room > len(piece):
            bisect.insort(open_rows, (room - len(piece), row))
    return rows


def collate(rows: Sequence[dict[str, torch.Tensor]], pad_id: int, multiple: int = 1) -> dict[str, torch.Tensor]:
    """A batch `(rows, tokens)`, padded on the right to its longest row and a multiple of tokens.

    Rows with an `attention_mask` are padded with zeros in it; padding of others is one more document.
    """
    batch: dict[str, list[torch.Tensor]] = {name: [] for name in rows[0]}
    longest = {name: -(-max(len(row[name]) for row in rows) // multiple) * multiple for name in batch}
    fill = {"input_ids": pad_id, "labels": IGNORED, "attention_mask": 0}
    for row in rows:
        for name, values in row.items():
            missing = longest[name] - len(values)
            tail = torch.arange(missing) if name == "position_ids" else torch.full((missing,), fill[name])
            batch[name].append(torch.cat((values, tail)))
    return {name: torch.stack(values) for name, values in batch.items()}


@torch.no_grad()
def check_apart(model: nn.Module) -> None:
    """Measures that a document does not see the one before it in the same block.

    Raises:
        ValueError: it does.
    """
    device = next(model.parameters()).device
    first, second = torch.arange(3, 11, device=device)[None], torch.arange(11, 19, device=device)[None]
    both, training = torch.cat((first, second), dim=1), model.training
    model.eval()

    def logits(ids: torch.Tensor, positions: list[int]) -> torch.Tensor:
        places = torch.tensor([positions], device=device)
        return model(input_ids=ids, position_ids=places, use_cache=False).logits[:, -8:].float()

    alone = logits(second, [*range(8)])
    apart, across = logits(both, [*range(8), *range(8)]), logits(both, [*range(16)])
    model.train(training)
    seen, wanted = (apart - alone).abs().max(), (across - alone).abs().max()
    if seen > max(0.1 * float(wanted), 1e-4):
        raise ValueError(f"{type(model).__name__} does not keep packed documents apart by position_ids: give "
                         "documents: single, or joined if they may see each other")  # fmt: skip
