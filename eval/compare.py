"""Encodings compared on the same weights and the same questions: what each costs within the trained length, beside
what it gains beyond it.

Every task becomes a list of units: a prompt with its score, or a block of tokens with its mean loss. All encodings
have the same units, so they are compared unit by unit, with a paired bootstrap: what makes a question hard for all of
them does not blur their difference.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eval.results import Results
from eval.scores import blocks, effective_lengths, paired_bootstrap, wilson

BLOCK = 256  # tokens: neighbouring ones are easy or hard together, blocks of them hardly
FEWEST = 10  # units: of fewer, an interval is too narrow to call a difference sure
WITHIN, BEYOND = "within", "beyond"


@dataclass(frozen=True)
class Unit:
    """What is paired over encodings: a prompt, or a block of tokens.

    Attributes:
        key: tells it from the others of its measure.
        beyond: it needs more than the trained length.
        weight: tokens of a block; 1 for a prompt.
    """

    key: tuple[Any, ...]
    length: int
    beyond: bool
    value: float
    weight: int = 1


Units = Callable[[Results, str, int, int | None], list[Unit]]


@dataclass(frozen=True)
class Measure:
    """A number that a task yields, and how its samples become units.

    Attributes:
        units: of a folder under one encoding at one length, given the trained length or None.
        percent: values are shares of right answers; else nats per token.
        lower: less is better.
        nested: a longer length reads the same tokens again and more, so that only the longest one counts in sums.
    """

    task: str
    title: str
    units: Units
    percent: bool = False
    lower: bool = False
    nested: bool = False


@dataclass(frozen=True)
class Cell:
    """One encoding in one column: a length, or all that lies `within` or `beyond` the trained length.

    `interval` is of the value, 95 %. `difference` is to the first encoding, `low` and `high` its interval; None where
    there is nothing to compare, or too little to know.
    """

    posenc: str
    column: int | str
    value: float
    units: int
    interval: tuple[float | None, float | None] = (None, None)
    difference: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_sure(self) -> bool:
        """Whether the interval of the difference leaves out 0 and stands on enough units to mean it."""
        if self.low is None or self.high is None or self.units < FEWEST:
            return False
        return self.low > 0 or self.high < 0


def prompt_units(score: Callable[[dict[str, Any]], float], key: Sequence[str], **fields: Any) -> Units:
    """Units of samples that are one prompt each, scored in percent.

    Args:
        key: fields that tell prompts apart.
        fields: of the samples that count.
    """

    def units(results: Results, posenc: str, length: int, trained: int | None) -> list[Unit]:
        beyond = trained is not None and length > trained
        samples = results.select(posenc=posenc, length=length, **fields)
        return [Unit(tuple(sample[name] for name in key), length, beyond, score(sample)) for sample in samples]

    return units


def token_units(numbers: Callable[[dict[str, Any]], tuple[int, Sequence[float]]], key: Sequence[str]) -> Units:
    """Units of samples that hold one number per token.

    Args:
        numbers: of a sample: the position of its first number in what is read, and the numbers.
        key: fields that tell samples apart.
    """

    def units(results: Results, posenc: str, length: int, trained: int | None) -> list[Unit]:
        samples = results.select(posenc=posenc, length=length)
        named = ((tuple(sample[field] for field in key), *numbers(sample)) for sample in samples)
        return [unit for name, first, values in named for unit in block_units(name, length, first, values, trained)]

    return units


def block_units(key: tuple[Any, ...], length: int, first: int, values: Sequence[float],
                trained: int | None) -> list[Unit]:  # fmt: skip
    """Means of blocks of neighbouring tokens, none across the trained length; `first` is the first one's position."""
    inside = len(values) if trained is None else min(max(trained - first, 0), len(values))
    found = []
    for beyond, part in ((False, values[:inside]), (True, values[inside:])):
        means = blocks(part, min(BLOCK, len(part))) if len(part) else []
        for index, mean in enumerate(means):
            weight = len(part) // len(means) + (index < len(part) % len(means))
            found.append(Unit((*key, beyond, index), length, beyond, float(mean), weight))
    return found


def compare(measure: Measure, results: Results, posencs: Sequence[str], lengths: Iterable[int],
            trained: int | None) -> list[Cell]:  # fmt: skip
    """Every encoding in every column, each against the first encoding.

    Args:
        results: of the measure's task; units that not all encodings have are left out.
    """
    lengths = sorted(lengths)
    found = {posenc: _units(measure, results, posenc, lengths, trained) for posenc in posencs}
    common = set.intersection(*(set(units) for units in found.values()))
    keys = [key for key in found[posencs[0]] if key in common]
    columns: dict[int | str, list[Any]] = {length: [] for length in lengths} | {WITHIN: [], BEYOND: []}
    for key in keys:
        unit = found[posencs[0]][key]
        columns[unit.length].append(key)
        if not measure.nested or unit.length == lengths[-1]:
            columns[BEYOND if unit.beyond else WITHIN].append(key)
    cells = []
    for column, keys in columns.items():
        base = [found[posencs[0]][key] for key in keys]
        for posenc in posencs if keys else ():
            mine = [found[posenc][key] for key in keys]
            cells.append(_cell(measure, posenc, column, mine, None if posenc == posencs[0] else base))
    return cells


def describe(measure: Measure, cells: Sequence[Cell]) -> dict[str, Any]:
    """What a report shows of a measure, as JSON; effective lengths for shares of right answers."""
    scores: dict[str, dict[int, float]] = {}
    for cell in cells:
        if measure.percent and isinstance(cell.column, int):
            scores.setdefault(cell.posenc, {})[cell.column] = cell.value
    effective = {posenc: effective_lengths(by_length) for posenc, by_length in scores.items()}
    return {
        "task": measure.task, "title": measure.title, "unit": "%" if measure.percent else "nats per token",
        "better": "lower" if measure.lower else "higher",
        "counted": "blocks of tokens" if measure.nested else "prompts",
        "cells": [{**asdict(c), "sure": c.is_sure} for c in cells],
        "effective_length": effective,
    }  # fmt: skip


def cost(results: Results, posenc: str, length: int) -> dict[str, Any]:
    """Seconds that a task took under an encoding at a length, and the peak of its memory in bytes."""
    samples = results.select(posenc=posenc, length=length)
    peaks = [sample["memory"] for sample in samples if sample.get("memory") is not None]
    return {
        "posenc": posenc, "length": length, "samples": len(samples),
        "seconds": round(sum(sample["seconds"] for sample in samples), 1), "memory": max(peaks, default=None),
    }  # fmt: skip


def _units(measure: Measure, results: Results, posenc: str, lengths: Sequence[int],
           trained: int | None) -> dict[Any, Unit]:  # fmt: skip
    units = [unit for length in lengths for unit in measure.units(results, posenc, length, trained)]
    return {(unit.length, unit.key): unit for unit in sorted(units, key=lambda unit: (unit.length, str(unit.key)))}


def _cell(measure: Measure, posenc: str, column: int | str, mine: list[Unit], base: list[Unit] | None) -> Cell:
    value, count, weights = _mean(mine), len(mine), [unit.weight for unit in mine]
    values = [unit.value for unit in mine]
    if not math.isfinite(value):
        return Cell(posenc, column, value, count)
    if measure.percent:
        low, high = wilson(min(sum(values) / 100, count), count)
        interval = round(100 * low, 1), round(100 * high, 1)
    else:
        _, low, high = paired_bootstrap(values, [0.0] * count, weights=weights)
        interval = (low, high)
    if base is None or not math.isfinite(_mean(base)):
        return Cell(posenc, column, value, count, interval)
    difference, low, high = paired_bootstrap(values, [unit.value for unit in base], weights=weights)
    return Cell(posenc, column, value, count, interval, difference, low, high)


def _mean(units: Sequence[Unit]) -> float:
    return sum(unit.weight * unit.value for unit in units) / sum(unit.weight for unit in units)
