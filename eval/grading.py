"""How an answer is graded: three ways, each computed from what a sample keeps, each a share from 0 to 1.

    first_number    the first numbers of the answer, as many as were asked for, are the right ones; nothing is cut off
                    a longer number. For one number: the first run of digits is the number.
    substring       how many of the right values stand anywhere in the answer, as in RULER's `string_match_all`
    exact_tokens    the generated tokens start with those of the right answer, all of it or nothing

`substring` also counts a value inside a longer number, and lists of guesses; what limits it is the room of an answer.
`exact_tokens` depends on how a tokenizer cuts digits, and counts what follows the right answer for nothing.
"""

import re
from collections.abc import Sequence

FIRST_NUMBER, SUBSTRING, EXACT_TOKENS = "first_number", "substring", "exact_tokens"
SCORINGS = (FIRST_NUMBER, SUBSTRING, EXACT_TOKENS)


def grade(
    scoring: str,
    answer: str,
    references: Sequence[str],
    answer_ids: Sequence[int] = (),
    key_ids: Sequence[int] = (),
) -> float:
    """Share of an answer that is right.

    Args:
        answer: what was generated, without its prompt.
        references: the right values, as text, so that leading zeros count.
        answer_ids, key_ids: generated tokens and those of the right answer, for `exact_tokens`.

    Raises:
        ValueError: an unknown scoring, no references or an empty one, or `exact_tokens` without tokens.
    """
    check_scoring(scoring)
    if not references or not all(references):
        raise ValueError("there is nothing right to find: give references, none of them empty")
    if scoring == EXACT_TOKENS:
        if not key_ids:
            raise ValueError(f"{EXACT_TOKENS} needs the tokens of the answer and of the key: use {FIRST_NUMBER} or "
                             f"{SUBSTRING} where there is only text")  # fmt: skip
        return float(list(answer_ids[: len(key_ids)]) == list(key_ids))
    if scoring == FIRST_NUMBER:
        numbers = re.findall(r"\d+", answer)[: len(references)]
        found = [reference in numbers for reference in references]
    else:
        found = [reference.lower() in answer.lower() for reference in references]
    return sum(found) / len(found)


def grades(answer: str, references: Sequence[str], answer_ids: Sequence[int],
           key_ids: Sequence[int]) -> dict[str, float]:  # fmt: skip
    """The share by every scoring; without `exact_tokens` where the right answer has no tokens of its own."""
    possible = [scoring for scoring in SCORINGS if key_ids or scoring != EXACT_TOKENS]
    return {scoring: grade(scoring, answer, references, answer_ids, key_ids) for scoring in possible}


def check_scoring(scoring: str) -> None:
    if scoring not in SCORINGS:
        raise ValueError(f"scoring {scoring!r} is unknown; choose one of {', '.join(SCORINGS)}")
