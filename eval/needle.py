"""Needle in a haystack: does a model find facts that were told once, somewhere in a real text?

The facts are ours and made up from the seed, name and number, so that no pretrained model knows them: `The number of
steps in the lighthouse of Vorandel is 48213.` They stand between sentences of the text. Of several, the first stands
at the depth that is asked for, and the others evenly between there and the end of the text, where depth 1 has all of
them. How prompts are sized is in `haystack.py`, how answers are graded in `grading.py`.

The idea is Greg Kamradt's (github.com/gkamradt/LLMTest_NeedleInAHaystack), the grading that of RULER (arXiv
2404.06654): the share of the values that stand in the answer. Facts, prompt and question are ours.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from eval.grading import SUBSTRING
from eval.haystack import Prompt, Question, check_depth, draw_number, hide
from eval.retrieval import DEPTHS, TRIALS, Answer, retrieve

SCORING = SUBSTRING
TEXT = "alice"
ALL, ONE = "all", "one"
ASKED = (ALL, ONE)
MOST = 1000  # needles: fewer than there are names
DIGITS = 5
EXTRA_TOKENS = 5  # of the answer, beside the values
BETWEEN_TOKENS = 2  # for the comma and the space between two values
HEAD = "A few facts that are found nowhere else stand somewhere in the text below. Keep them in mind.\n\n"
SUBJECTS = (
    "the number of steps in the lighthouse of {}",
    "the number of books in the library of {}",
    "the number of sheep on the island of {}",
    "the number of lamps in the harbour of {}",
    "the weight in pounds of the bell of {}",
    "the length in feet of the bridge of {}",
    "the price in crowns of the mill of {}",
    "the age in days of the oak of {}",
)
SYLLABLES = ("bra", "dor", "fen", "gul", "hes", "jor", "kel", "lim", "mor", "nav", "pru", "quo", "rin", "sul", "tev",
             "vor", "wex", "yar", "zan", "del")  # fmt: skip


def needle(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int],
    *,
    text: str,
    depths: Sequence[float] = DEPTHS,
    trials: int = TRIALS,
    needles: int = 1,
    ask: str = ALL,
    seed: int = 0,
    **asking: Any,
) -> Iterator[Answer]:
    """Asks for facts in one prompt after the other, greedily, with a model as it is: patch it before.

    Args:
        text: what the facts are hidden in.
        needles: facts per prompt.
        ask: `all` of them, in the order they are told, or `one`, the first, so that the others only mislead.
        asking: `log_probs`, `share` and `wanted`; they and all else as for `retrieval.retrieve`.
    """
    making = functools.partial(build, tokenizer, text=text, needles=needles, ask=ask, seed=seed)
    return retrieve(model, tokenizer, making, lengths, depths, trials, **asking)


def build(
    tokenizer: Any,
    length: int,
    depth: float,
    trial: int = 0,
    *,
    text: str,
    needles: int = 1,
    ask: str = ALL,
    seed: int = 0,
) -> Prompt:
    """A prompt that leaves room for the answer in `length` tokens.

    Raises:
        ValueError: `length` or the text is too short, a depth outside [0, 1], a wrong `needles` or `ask`, or a
            tokenizer that loses the values.
    """
    check_depth(depth)
    room = answer_tokens(needles, ask)
    facts = make_facts(random.Random(f"{seed} {length} {float(depth)} {trial}"), needles, text)
    depths = [depth + index * (1 - depth) / needles for index in range(needles)]
    hidden = [
        (place, f"{_capital(subject)} is {value}.") for place, (subject, value) in zip(depths, facts, strict=True)
    ]
    asked = facts if ask == ALL else facts[:1]
    subjects = [subject for subject, _ in asked]
    listed = " and ".join(filter(None, (", ".join(subjects[:-1]), subjects[-1])))
    ending = ("\n\nThat is the end of the text. Complete from it:\n"
              f"{_capital(listed)} {'is' if len(asked) == 1 else 'are, in this order,'}")  # fmt: skip
    question = Question(HEAD, hidden, ending, [value for _, value in asked], room)
    return hide(tokenizer, question, length, depth, trial, text=text, seed=seed)


def make_facts(draw: random.Random, count: int, text: str) -> list[tuple[str, str]]:
    """Made-up subjects and their values, all different; neither the names nor the values stand in the text."""
    facts: dict[str, str] = {}
    names: set[str] = set()
    order = draw.sample(SUBJECTS, len(SUBJECTS))
    while len(facts) < count:
        name = "".join(draw.sample(SYLLABLES, 3)).capitalize()
        if name not in names and name not in text:
            names.add(name)
            subject = order[len(facts) % len(order)].format(name)
            facts[subject] = draw_number(draw, DIGITS, text, list(facts.values()))
    return list(facts.items())


def answer_tokens(needles: int = 1, ask: str = ALL) -> int:
    """Tokens that are generated: room for the values, digit by digit, and a few around them.

    Raises:
        ValueError: no needles, too many, or an unknown `ask`.
    """
    if not 1 <= needles <= MOST:
        raise ValueError(f"needles must be 1 to {MOST}, got {needles}")
    if ask not in ASKED:
        raise ValueError(f"ask {ask!r} is unknown; choose one of {', '.join(ASKED)}")
    values = needles if ask == ALL else 1
    return values * (DIGITS + BETWEEN_TOKENS) - BETWEEN_TOKENS + EXTRA_TOKENS


def _capital(subject: str) -> str:
    return subject[0].upper() + subject[1:]
