"""What RULER's synthetic tasks ask, with the length still open; `ruler.py` fills it.

Counts of needles, hops and words are NVIDIA's; all text is made up here, from words of our own and a draw.
"""

import functools
import itertools
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from eval.haystack import FILLER, SHORT_FILLER

DEPTHS = 40
HOPS = 4
COMMON = 10
REPEATS = (
    (30, 3),
    (10, 2),
    (5, 1),
    (3, 1),
    (2, 1),
)  # of common and of other words: the first that takes half the room
CWE_WORDS = 150_000  # tokens of length for which our words suffice at three repeats
FREQUENT = 3
FEWEST_SENTENCES = 3  # of a text; a longer prompt has them several times
ALPHA = 2.0
ZETA = 1.6449340668  # of ALPHA

# Four letters each, so that no pair of them contains another; no vowel first, so that "a" fits.
_ADJECTIVES = """
bare bold busy calm cold cool cosy dark dear deep dull fair fast fine firm fond free full glad gray hard high huge
keen kind late lazy lean lone long loud mild neat nice pale pink plum pure rare real rich ripe safe slow snug soft
sour sure tall tame thin tidy tiny true vast warm wary weak wide wild wise
"""
_NOUNS = """
bark barn bead beam bell bird boat bolt bone book boot bowl cake camp card cart cave clay coal coat coin cord cork
corn crab crow deer desk dice dish dock door dove drum dune dust fern fish flag foam fork frog gate gift goat gold
hare harp hawk herb hill hive hook horn jade kite knot lace lake lamp lane leaf lime lion loaf lock mask mast maze
milk mill mint moon moss moth nail nest note palm path pear pine pipe plow pond pool pump rail rain reed reef ring
road rock roof root rope rose sail salt sand seed shed ship shoe silk snow soap sock star stem tent tide toad tree
tube vase veil vine wall wave well wing wolf wood wool yard
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
FRAMES = (
    "The {0} {1} stood behind the {2}.",
    "Nobody had seen the {1} since the {2} was {0}.",
    "In the evening they carried a {0} {1} past the {2}.",
    "She asked whether the {1} was as {0} as the {2}.",
    "A {1} and a {2} were all that the {0} room held.",
    "When it grew {0}, the {1} was put beside the {2}.",
    "He sold his {0} {1} and bought a {2} instead.",
    "Between the {1} and the {2} there was a {0} path.",
)


Measure = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True)
class Draft:
    """A question whose length is still open.

    Attributes:
        text: of `counters` counts of filler, from coarse to fine; those left out are 0.
        least: the smallest first count that makes sense.
        most: the largest first count that there is filler for; None where filler has no end.
        depths: where needles or assignments stand among the sentences, 0 to 1.
    """

    text: Callable[[Sequence[int]], str]
    references: list[str]
    depths: list[float]
    least: int = 0
    counters: int = 1 + len(SHORT_FILLER)
    most: int | None = None


def _needles(
    draw: random.Random, prose: str | None, measure: Measure, room: int, *, haystack: str,
    kinds: tuple[str, str] = ("word", "number"), keys: int = 1, values: int = 1, queries: int = 1,
) -> Draft:  # fmt: skip
    """`values` values for each of `keys` keys, hidden in `haystack`; asked for the first `queries` keys.

    Args:
        haystack: `noise` (a few sentences over and over), `prose`, or `needles`: other keys with their values.
        kinds: what keys and values are: `word`, `number` or `uuid`.
    """
    names, numbers = (_supply(kind, draw) for kind in kinds)
    kind = kinds[1]

    def pairs() -> Iterator[tuple[str, str]]:
        for name in names:
            yield from ((name, next(numbers)) for _ in range(values))

    supply = pairs()
    told = list(itertools.islice(supply, keys * values))
    asked = list(dict.fromkeys(name for name, _ in told))[:queries]
    references = [value for _, value in told[: queries * values]]
    hidden, others = ((f"A magic {kind} for {name} is {value}." for name, value in some) for some in (told, supply))
    depths = [place / (DEPTHS - 1) for place in draw.sample(range(DEPTHS), len(told))]
    filler = {"noise": _noise(draw), "prose": _prose(prose, draw), "needles": others}[haystack]
    several, listed = len(references) > 1, " and ".join(filter(None, (", ".join(asked[:-1]), asked[-1])))
    return Draft(
        _hidden_in(
            filler,
            list(zip(depths, hidden, strict=True)),
            f"Magic {kind}s are hidden in the text below. Keep them in mind.\n\n",
            "\n\nThat was the text. Complete from it:\n"
            f"The magic {kind}{'s' if several else ''} for {listed} {'are' if several else 'is'}",
        ),
        references,
        depths,
    )


def _variables(draw: random.Random, prose: str | None, measure: Measure, room: int) -> Draft:
    """A value handed on from variable to variable, in noise; asked for all that have it."""
    names: list[str] = []
    while len(names) <= HOPS:
        names.append("".join(draw.choices(string.ascii_uppercase, k=5)))
        names = list(dict.fromkeys(names))
    value = str(draw.randrange(10_000, 100_000))
    depths = sorted(place / (DEPTHS - 1) for place in draw.sample(range(DEPTHS), len(names)))
    sources = [value, *(f"VAR {name}" for name in names)]
    hidden = [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=False)]
    return Draft(
        _hidden_in(
            _noise(draw),
            list(zip(depths, hidden, strict=True)),
            "Variables get values in the text below. Keep track of them.\n\n",
            f"\n\nThat was the text. Complete from it:\nThe {len(names)} variables that have the value {value} are",
        ),
        names,
        depths,
    )


def _common(draw: random.Random, prose: str | None, measure: Measure, room: int) -> Draft:
    """A numbered list in which ten words are ten times as frequent as all others, or as near as there is room."""
    words = [first + second for first, second in itertools.permutations(NOUNS, 2)]
    draw.shuffle(words)
    common = words[:COMMON]
    once = measure(" ".join(f"10. {word}" for word in common))
    often, seldom = next((repeats for repeats in REPEATS if 2 * repeats[0] * once <= room), REPEATS[-1])
    times = 1 + max(0, room) // CWE_WORDS
    order = draw.getrandbits(64)

    def text(counts: Sequence[int]) -> str:
        others = [words[COMMON + index // (seldom * times)] for index in range(counts[0])]
        mixed = common * (often * times) + others
        random.Random(order).shuffle(mixed)
        listed = " ".join(f"{index}. {word}" for index, word in enumerate(mixed, 1))
        return (f"Some words in the numbered list below are repeated often.\n\n{listed}\n\n"
                f"That was the list.\nThe {COMMON} most common words in it are")  # fmt: skip

    return Draft(text, common, [], least=1, counters=1)


def _frequent(draw: random.Random, prose: str | None, measure: Measure, room: int) -> Draft:
    """Coded words, the one of rank k as often as 1/k² says; rank 1 are dots, asked is for the three behind."""
    words = [*dict.fromkeys("".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(20 + room // 20))]
    order = draw.getrandbits(64)

    def numbers(count: int) -> list[int]:
        ranks = range(2, 2 + len(words))
        return [number for rank in ranks if (number := int(count / ZETA * rank**-ALPHA))]

    def text(counts: Sequence[int]) -> str:
        found = numbers(counts[0])
        mixed = [word for word, number in zip(words, found, strict=False) for _ in range(number)]
        mixed += ["..."] * (sum(counts) - len(mixed))
        random.Random(order).shuffle(mixed)
        return (f"The text below is in code. Its dots mean nothing.\n\n{' '.join(mixed)}\n\n"
                f"That was the text.\nThe {FREQUENT} most frequent words in it are")  # fmt: skip

    def told_apart(count: int) -> bool:
        found = [*numbers(count), 0]
        return len(found) > FREQUENT and all(a > b for a, b in itertools.pairwise(found[: FREQUENT + 1]))

    least = next(count for count in itertools.count(1) if told_apart(count))
    return Draft(text, words[:FREQUENT], [], least=least, counters=2)


TASKS: dict[str, Callable[[random.Random, str | None, Measure, int], Draft]] = {
    "niah_single_1": functools.partial(_needles, haystack="noise"),
    "niah_single_2": functools.partial(_needles, haystack="prose"),
    "niah_single_3": functools.partial(_needles, haystack="prose", kinds=("word", "uuid")),
    "niah_multikey_1": functools.partial(_needles, haystack="prose", keys=4),
    "niah_multikey_2": functools.partial(_needles, haystack="needles"),
    "niah_multikey_3": functools.partial(_needles, haystack="needles", kinds=("uuid", "uuid")),
    "niah_multivalue": functools.partial(_needles, haystack="prose", values=4),
    "niah_multiquery": functools.partial(_needles, haystack="prose", keys=4, queries=4),
    "vt": _variables,
    "cwe": _common,
    "fwe": _frequent,
}


def _hidden_in(
    filler: Iterator[str], hidden: list[tuple[float, str]], head: str, question: str
) -> Callable[[Sequence[int]], str]:
    """The text of a draft: so many sentences of filler, then short ones, with the hidden ones at their depths."""
    taken: list[str] = []

    def text(counts: Sequence[int]) -> str:
        taken.extend(itertools.islice(filler, max(0, counts[0] - len(taken))))
        sentences = taken[: counts[0]]
        for short, count in zip(SHORT_FILLER, counts[1:], strict=False):
            sentences += [short] * count
        size = len(sentences)
        for depth, sentence in sorted(hidden, reverse=True):
            sentences.insert(round(depth * size), sentence)
        return head + " ".join(sentences) + question

    return text


def _noise(draw: random.Random) -> Iterator[str]:
    begin = draw.randrange(len(FILLER))
    return itertools.cycle(FILLER[begin:] + FILLER[:begin])


def _prose(text: str | None, draw: random.Random) -> Iterator[str]:
    if text is None:
        while True:
            yield draw.choice(FRAMES).format(draw.choice(ADJECTIVES), *draw.sample(NOUNS, 2))
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    if len(sentences) < FEWEST_SENTENCES:
        raise ValueError(f"the text has {len(sentences)} sentences, too few to hide anything in: give a longer one")
    begin = draw.randrange(len(sentences))
    yield from itertools.cycle(sentences[begin:] + sentences[:begin])


def _supply(kind: str, draw: random.Random) -> Iterator[str]:
    """Distinct words (`calm-fern`), numbers of seven digits, or uuids, without end."""
    own = random.Random(draw.getrandbits(64))
    if kind == "word":
        pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
        own.shuffle(pairs)
        for last in ("", *(f"-{noun}" for noun in NOUNS)):
            yield from (pair + last for pair in pairs)
    seen: set[str] = set()
    while True:
        drawn = (
            str(own.randrange(10**6, 10**7))
            if kind == "number"
            else str(uuid.UUID(int=own.getrandbits(128), version=4))
        )
        if drawn not in seen:
            seen.add(drawn)
            yield drawn
