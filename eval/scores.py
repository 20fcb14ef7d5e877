"""What follows from counts and percentages: how sure a rate is, and up to which length a model is still good.

Published "effective lengths" follow different rules, which can differ much on the same numbers: so a rule
has a name, and every length is reported with its rule.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A length counts where its score reaches `threshold`, in percent.

    Args:
        of_base: the threshold is a percentage of the score at the base length, not of the questions.
        unbroken: every shorter length must reach it too.
    """

    threshold: float
    of_base: bool = False
    unbroken: bool = False


RULES = {
    "ruler_85.6": Rule(85.6),  # RULER (arXiv 2404.06654): what Llama-2-7b-chat scores at 4k
    "nolima_85": Rule(85, of_base=True),  # NoLiMa (arXiv 2502.05167)
    "pi_kmax_20": Rule(20, unbroken=True),  # position interpolation (arXiv 2306.15595), section 3.3
    "yarn_80": Rule(80),  # YaRN (arXiv 2309.00071), table 5
}


def effective_length(scores: Mapping[int, float], rule: str, base: int | None = None) -> int | None:
    """The longest of the measured lengths that is still good by a rule; None where none is.

    Args:
        scores: percentages, 0 to 100, by length.
        rule: one of `RULES`.
        base: the length whose score is the base of `nolima_85`; by default the shortest.

    Raises:
        ValueError: an unknown rule, no scores, a score that is no percentage, or a base that was not measured.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; choose one of {', '.join(RULES)}")
    if not scores or not all(0 <= score <= 100 for score in scores.values()):
        raise ValueError(f"scores {dict(scores)} should be percentages from 0 to 100, of at least one length")
    base = min(scores) if base is None else base
    if base not in scores:
        raise ValueError(f"the base length {base} was not measured; give one of {', '.join(map(str, sorted(scores)))}")
    found, known = None, RULES[rule]
    threshold = known.threshold / 100 * scores[base] if known.of_base else known.threshold
    for length in sorted(scores) if threshold else ():  # of a base of 0 nothing is left to keep
        if scores[length] >= threshold - 1e-9:  # rounding alone must not cost a length
            found = length
        elif known.unbroken:
            break
    return found


def effective_lengths(scores: Mapping[int, float]) -> dict[str, int | None]:
    """The effective length by every rule."""
    return {rule: effective_length(scores, rule) for rule in RULES}


def wilson(hits: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of a proportion (Wilson 1927), which stays honest at 0 and at 100 %; z = 1.96 gives 95 %.

    Raises:
        ValueError: more hits than trials, or no trials.
    """
    if not 0 <= hits <= trials or trials < 1:
        raise ValueError(f"{hits} hits of {trials} trials: give at least one trial, and no more hits than trials")
    centre = (hits + z * z / 2) / (trials + z * z)
    half = z / (trials + z * z) * math.sqrt(hits * (trials - hits) / trials + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)
