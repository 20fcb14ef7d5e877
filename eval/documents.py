"""Tokenized documents, and how many bytes of the text each of their tokens stands for.

A character that is split over several tokens counts with the last of them: the bytes of a run of tokens are those of
the characters that the run completes, and the bytes of all tokens are exactly the text's.
A tokenizer that trims blanks off its offsets does not say which of two tokens a blank is: it may count with the next.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eval import data, models

CONTEXT = 8  # tokens that are decoded before one, more than the bytes of a character


@dataclass(frozen=True)
class Document:
    """Token ids `(length,)` and their UTF-8 bytes `(length,)`: 0 for a BOS, None if the tokenizer loses the text."""

    ids: torch.Tensor
    sizes: torch.Tensor | None

    def __getitem__(self, part: slice) -> "Document":
        return Document(self.ids[part], None if self.sizes is None else self.sizes[part])


@dataclass
class Corpus:
    """Documents by name; `skipped` counts the rows of data sets that were too short, `repeated` names equal texts."""

    documents: dict[str, Document] = field(default_factory=dict)
    skipped: int = 0
    repeated: list[str] = field(default_factory=list)


def gather(
    tokenizer: Any,
    sources: Sequence[str],
    length: int,
    *,
    count: int | None = None,
    tokens: int | None = None,
    whole: bool = False,
    start: bool = True,
) -> Corpus:
    """Tokenizes what `--text` names; a text that comes twice is taken once.

    Args:
        sources: as `eval.data.documents` takes them.
        length: tokens that a document should have. Shorter rows of data sets are skipped.
        count: at most how many documents of each source; a data set needs it and must have that many.
        tokens: how much of each document is kept, from its start; by default all.
        whole: every document must have the length; by default the longest of them.
        start: documents have a BOS where the tokenizer puts one.

    Raises:
        ValueError: a source that cannot be read, or documents that are too few or too short.
    """
    corpus, seen = Corpus(), set[str]()
    for source in dict.fromkeys(sources):
        data.check_source(source, count)
        taken = 0
        for name, text in data.stream(source):
            if text in seen:
                corpus.repeated.append(name)
                continue
            document = read(tokenizer, text, start)[:tokens]
            if data.is_dataset(source) and len(document.ids) < length:
                corpus.skipped += 1
                continue
            seen.add(text)
            corpus.documents[name] = document
            taken += 1
            if taken == count:
                break
        if data.is_dataset(source) and taken < (count or 0):
            raise ValueError(
                f"{source} has {taken} documents of {length} tokens, not {count}: ask for fewer or shorter"
            )
    _check(corpus, length, whole)
    return corpus


def join(documents: Sequence[Document], bos: bool) -> Document:
    """One document of several; `bos` says that each starts with one: only the first is kept, since none is scored."""
    parts = [documents[0], *(document[int(bos) :] for document in documents[1:])]
    sizes = [part.sizes for part in parts if part.sizes is not None]
    return Document(torch.cat([part.ids for part in parts]), torch.cat(sizes) if len(sizes) == len(parts) else None)


def read(tokenizer: Any, text: str, start: bool = True) -> Document:
    """A whole text; `start` gives it a BOS where this tokenizer puts one."""
    ids = models.encode(tokenizer, text, start=start)
    special = int(start and models.bos_of(tokenizer) is not None)
    sizes = byte_counts(tokenizer, text, ids[special:])
    return Document(
        torch.tensor(ids, dtype=torch.long),
        None if sizes is None else torch.tensor([0] * special + sizes, dtype=torch.long),
    )


def byte_counts(tokenizer: Any, text: str, ids: Sequence[int]) -> list[int] | None:
    """UTF-8 bytes of the text that each of its tokens stands for.

    Taken from the offsets of a fast tokenizer, else by decoding; None where that does not give the text back.

    Args:
        ids: the text's tokens, without special ones.
    """
    if not tokenizer.is_fast:
        return _count_decoded(tokenizer, text, ids)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).offset_mapping
    ends = [
        0
    ]  # characters complete after each token: those before the next token's, when that is in the middle of one
    for (_, end), (following, _) in itertools.pairwise(offsets):
        ends.append(max(ends[-1], min(end, following)))
    ends = [*ends, len(text)] if offsets else ends
    return [len(text[begin:end].encode()) for begin, end in itertools.pairwise(ends)]


def _count_decoded(tokenizer: Any, text: str, ids: Sequence[int]) -> list[int] | None:
    """By what each token adds to the text of the `CONTEXT` tokens before it."""

    def size(part: Sequence[int]) -> int:
        found = tokenizer.decode(part, clean_up_tokenization_spaces=False)
        return len(found.rstrip("\ufffd").encode())  # the mark of a character that is not complete

    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
        return None
    places = [(max(0, index - CONTEXT), index) for index in range(len(ids))]
    sizes = [size(ids[begin : index + 1]) - size(ids[begin:index]) for begin, index in places]
    return sizes if sum(sizes) == len(text.encode()) else None


def _check(corpus: Corpus, length: int, whole: bool) -> None:
    sizes = {name: len(document.ids) for name, document in corpus.documents.items()}
    if not sizes:
        raise ValueError("there is no document: name a --text")
    worst = min(sizes, key=sizes.__getitem__) if whole else max(sizes, key=sizes.__getitem__)
    if sizes[worst] < length:
        raise ValueError(
            f"{length} tokens are asked for, but {sizes[worst]} of {worst} are there: give a shorter length, a longer "
            "text, or more --tokens"
        )
    for name, size in sizes.items():
        if size < 2:
            raise ValueError(f"{name} has {size} tokens: there is nothing to score")
