"""Prompts that hide sentences in a long text, sized in tokens of the model's own tokenizer.

A prompt takes at least 0.97 · length, and never so much that the answer would not fit. Nothing is cut: sentences are
whole, and a length that cannot be met is an error. The text is noise, a few dull sentences over and over, or a real
one from its beginning, which ends at the end of a sentence and is never restarted: what is left then, less than its
next sentence, is filled with noise. Noise starts where seed and length say. So prompts of one length differ only from
their hidden sentences on, and what they have in common before can be read once for all of them.

No value is told before as many tokens as an answer may take: to echo the prompt is no answer.
"""

import functools
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from eval.models import encode

FILL = 0.97
FILLER = (
    "A boat went down the river and nobody was in a hurry.",
    "The old clock in the hall was slow again.",
    "Two dogs slept in the shade of the wall.",
    "It had rained in the morning, and the road was still wet.",
    "Someone had left a basket of apples by the door.",
    "The wind moved the curtains a little.",
    "Later the baker closed his shop and walked home.",
)
SHORT_FILLER = ("All was quiet.", "So.")
DRAWS = 1000
# Behind a mark and closing quotes, before no small letter, and not after a title or an initial; or at a blank line.
_END = re.compile(
    r"(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\b[A-Z])[.!?]+[\"'\u201d\u2019)\]]*\s+(?![a-z\s])|\n\s*\n"
)

Supply = Callable[[int], Sequence[str]]  # so many sentences, each with the white space behind it


@dataclass(frozen=True)
class Question:
    """What is hidden and asked for, without the text around it.

    Attributes:
        hidden: sentences and their depths, in ascending order: each stands at that end of a sentence which is nearest
            to this share of the text, 0 before all of it, 1 behind.
        ending: the question, up to where the answer goes on.
        references: the values that are asked for; the right answer lists them in this order.
        room: tokens that the answer may take.
    """

    head: str
    hidden: list[tuple[float, str]]
    ending: str
    references: list[str]
    room: int


@dataclass(frozen=True)
class Prompt:
    """A question in its text. `key_position` counts the tokens before the first value that is asked for.

    `key_ids` are the right answer, as tokens after the prompt; none where a tokenizer joins it with the question.
    """

    length: int
    depth: float
    trial: int
    references: list[str]
    key_position: int
    ids: list[int]
    key_ids: list[int]
    room: int


def hide(
    tokenizer: Any,
    question: Question,
    length: int,
    depth: float,
    trial: int,
    *,
    text: str | None = None,
    seed: int = 0,
) -> Prompt:
    """A prompt that leaves room for the answer in `length` tokens.

    Args:
        depth, trial: what the prompt is filed under.
        text: noise where it is None.

    Raises:
        ValueError: `length` is too short, the text too short for it, or a tokenizer that loses the values.
    """
    check_length(length, question.room)
    sentences = () if text is None else split(text)
    supplies = _supplies(sentences, random.Random(f"{seed} {length}").randrange(len(FILLER)))
    least = _spared(tokenizer, question, supplies[0])

    def compose(counts: Sequence[int]) -> str:
        pieces = [piece for supply, count in zip(supplies, counts, strict=False) for piece in supply(count)]
        places = _places(pieces, [depth for depth, _ in question.hidden], least)
        for told, (place, (_, sentence)) in enumerate(zip(places, question.hidden, strict=True)):
            pieces.insert(place + told, f"{sentence} ")
        return question.head + "".join(pieces).rstrip() + question.ending

    def tokens(counts: Sequence[int]) -> int:
        return len(encode(tokenizer, compose(counts)))

    if tokens([least]) > length - question.room:
        raise ValueError(f"length {length} is too short: the question takes {tokens([least])} tokens and its answer "
                         f"{question.room}, without any filler")  # fmt: skip
    prompt = compose(_fill(tokens, len(supplies), len(sentences), length, question.room))
    ids = encode(tokenizer, prompt)
    if any(reference not in tokenizer.decode(ids) for reference in question.references):
        raise ValueError("the values asked for do not survive this tokenizer, which has no tokens for their digits")
    position = len(encode(tokenizer, prompt[: prompt.index(question.references[0])]))
    answered = encode(tokenizer, f"{prompt} {', '.join(question.references)}")
    key_ids = answered[len(ids) :] if answered[: len(ids)] == ids else []
    return Prompt(length, depth, trial, question.references, position, ids, key_ids, question.room)


def check_length(length: int, room: int) -> None:
    """Raises ValueError where no tokenizer could fill 0.97 · length and leave room for the answer."""
    if FILL * length > length - room:
        least = math.ceil(room / (1 - FILL))
        raise ValueError(f"length {length} is too short: the {room} tokens of an answer must be at most "
                         f"{1 - FILL:.0%} of it; take {least} at least")  # fmt: skip


def check_depth(depth: float) -> None:
    if not 0 <= depth <= 1:
        raise ValueError(f"depth {depth} must lie in [0, 1]: 0 is the start of the text, 1 its end")


@functools.lru_cache(maxsize=4)
def split(text: str) -> tuple[str, ...]:
    """Sentences of a text, each with the white space behind it: joined again, they are the text.

    Raises:
        ValueError: there is no text.
    """
    if not text.strip():
        raise ValueError("the text is empty: give one with sentences, or noise")
    ends = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(ends) if start < stop]
    return tuple(piece if piece[-1].isspace() else f"{piece} " for piece in pieces)


def draw_number(draw: random.Random, digits: int, text: str | None, taken: Sequence[str] = ()) -> str:
    """A number of so many digits, the first not 0, that the text does not contain, nor those that are taken.

    Raises:
        ValueError: no such number was found.
    """
    if digits < 1:
        raise ValueError(f"digits must be at least 1, got {digits}")
    for _ in range(DRAWS):
        number = str(draw.randrange(10 ** (digits - 1), 10**digits))
        if number not in taken and number not in (text or ""):
            return number
    raise ValueError(f"the text contains the numbers of {digits} digits already: take more digits or another text")


def _supplies(sentences: Sequence[str], begin: int) -> list[Supply]:
    """What fills a prompt, from coarse to fine: the text, if there is one, noise, and short sentences."""

    def noise(count: int) -> list[str]:
        return [f"{FILLER[(begin + index) % len(FILLER)]} " for index in range(count)]

    short = [functools.partial(_repeat, sentence) for sentence in SHORT_FILLER]
    return [*([lambda count: sentences[:count]] if sentences else []), noise, *short]


def _fill(tokens: Callable[[Sequence[int]], int], supplies: int, sentences: int, length: int, room: int) -> list[int]:
    """How much of each supply fits, one after the other; the first one is a text if it has any sentences."""
    counts: list[int] = []
    for index in range(supplies):
        limit = sentences if sentences and index == 0 else None
        counts.append(_most(lambda count: tokens([*counts, count]), length - room, limit))
        if counts[-1] == limit and tokens(counts) < FILL * length:
            raise ValueError(f"the text is too short for length {length}: with the question it fills "
                             f"{tokens(counts)} tokens; give a longer text or a shorter length")  # fmt: skip
    if tokens(counts) < FILL * length:
        raise ValueError(f"length {length} is too short: beside {room} tokens for the answer, whole sentences fill "
                         f"{tokens(counts)}, less than {FILL:.0%} of it; take a longer one")  # fmt: skip
    return counts


def _repeat(sentence: str, count: int) -> list[str]:
    return [f"{sentence} "] * count


def _places(pieces: Sequence[str], depths: Sequence[float], least: int) -> list[int]:
    """Before which sentence each depth is, counted in characters behind the first `least` sentences."""
    ends = [0, *accumulate(map(len, pieces))]
    least = min(least, len(pieces))
    places = []
    for depth in depths:
        target = ends[least] + depth * (ends[-1] - ends[least])
        places.append(min(range(least, len(ends)), key=lambda place: abs(ends[place] - target)))
    return places


def _spared(tokenizer: Any, question: Question, supply: Supply) -> int:
    """How many sentences stand before anything hidden, so that what is told begins behind an answer's room."""
    count = 0
    while len(encode(tokenizer, question.head + "".join(supply(count)))) < question.room:
        count += 1
        if len(supply(count)) < count:
            raise ValueError(f"the text is shorter than the {question.room} tokens of an answer: give a longer one")
    return count


def _most(size: Callable[[int], int], room: int, limit: int | None = None) -> int:
    """The largest count, up to a limit, whose size fits into `room`; `size(0)` does."""
    low, high = 0, 1
    while (limit is None or high <= limit) and size(high) <= room:
        low, high = high, 2 * high
    high = high if limit is None else min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= room else (low, middle)
    return low
