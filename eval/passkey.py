"""Passkey retrieval: does a model find a number that was told once, somewhere in a long and dull text?

The number has a fixed count of digits, the first not 0. It follows from seed, length, depth and trial alone, so all
methods read the same; how prompts are sized is in `haystack.py`, how answers are graded in `grading.py`.
The idea is from landmark attention (arXiv 2305.16300); prompt and scoring are ours, sizes and depths are exact.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from eval.grading import FIRST_NUMBER
from eval.haystack import Prompt, Question, check_depth, draw_number, hide
from eval.retrieval import DEPTHS, TRIALS, Answer, retrieve

SCORING = FIRST_NUMBER
EXTRA_TOKENS = 5  # of the answer, beside the digits
HEAD = "Somewhere in the notes below a pass key is written down. Find the pass key and keep it in mind.\n\n"
KEY = "The pass key is {key}. Keep it in mind: {key} is the pass key."
QUESTION = "\n\nThat is the end of the notes. What was the pass key?\nThe pass key is"


def passkey(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int],
    *,
    depths: Sequence[float] = DEPTHS,
    trials: int = TRIALS,
    digits: int = 5,
    seed: int = 0,
    text: str | None = None,
    **asking: Any,
) -> Iterator[Answer]:
    """Asks for a key in one prompt after the other, greedily, with a model as it is: patch it before.

    Args:
        text: what the key is hidden in; noise where it is None.
        asking: `log_probs`, `share` and `wanted`; they and all else as for `retrieval.retrieve`.
    """
    making = functools.partial(build, tokenizer, digits=digits, seed=seed, text=text)
    return retrieve(model, tokenizer, making, lengths, depths, trials, **asking)


def build(
    tokenizer: Any,
    length: int,
    depth: float,
    trial: int = 0,
    *,
    digits: int = 5,
    seed: int = 0,
    text: str | None = None,
) -> Prompt:
    """A prompt that leaves room for the answer in `length` tokens.

    Raises:
        ValueError: `length` or the text is too short, a depth outside [0, 1], or a tokenizer that loses the key.
    """
    check_depth(depth)
    key = draw_number(random.Random(f"{seed} {length} {float(depth)} {trial}"), digits, text)
    hidden = [(depth, KEY.format(key=key))]
    question = Question(HEAD, hidden, QUESTION, [key], answer_tokens(digits))
    return hide(tokenizer, question, length, depth, trial, text=text, seed=seed)


def answer_tokens(digits: int) -> int:
    """Tokens that are generated: room for the digits, one by one, and a few around them."""
    return digits + EXTRA_TOKENS
