"""What training changed: loss within the trained length and beyond it, perplexity and pass keys, before and after.

Every text is read once, in one forward of the longest length, and the loss of each token kept. Rows are compared token
by token with the model before training under the same encoding, with the paired bootstrap of `eval.compare`.
Models with an encoder and a decoder are measured by the loss of hidden spans, at every length.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

from eval import data
from eval.commands import console
from eval.compare import WITHIN, Cell, Measure, Unit, block_units, compare
from eval.models import encode
from eval.passkey import SCORING, build, passkey
from eval.perplexity import perplexity
from eval.retrieval import DEPTHS
from recipes.settings import Recipe
from recipes.spans import hide_spans, sentinels_of

FILE = "evaluation.json"
BEFORE, AFTER = "before", "after"
SPANS_READ = 32768  # tokens of each text of which spans are hidden


@dataclass(frozen=True)
class Reading:
    """Losses in nats of the tokens of a text after its first, or of its hidden spans read in parts of `length`."""

    text: str
    length: int
    losses: list[float]


@dataclass(frozen=True)
class Row:
    """What a model was measured to be: its readings, and other figures by name."""

    readings: list[Reading]
    figures: dict[str, float | str] = field(default_factory=dict)


def lengths_of(recipe: Recipe) -> list[int]:
    """Tokens at which a recipe is measured."""
    return sorted(recipe.evaluate_lengths or {*recipe.lengths, recipe.longest})


def held_out(recipe: Recipe, tokenizer: Any, spans: bool) -> dict[str, torch.Tensor]:
    """Tokens of the texts to evaluate on, `(tokens,)` each.

    Args:
        spans: whether hidden spans are to be filled, and no pass key found.

    Raises:
        ValueError: a length is longer than a text, or too short for a pass key.
    """
    lengths = lengths_of(recipe)
    read = max(lengths[-1], SPANS_READ) if spans else lengths[-1]
    texts = {name: torch.tensor(encode(tokenizer, data.text(name))[:read]) for name in recipe.evaluate_texts}
    for name, ids in texts.items():
        if len(ids) < lengths[-1]:
            raise ValueError(f"{name} gives {len(ids)} tokens to evaluate on, fewer than {lengths[-1]}: give other "
                             "evaluate_texts, or evaluate_lengths")  # fmt: skip
    if recipe.passkey_trials and not spans:
        for length in lengths:
            try:
                build(tokenizer, length, 0.5)
            except ValueError as error:
                raise ValueError(f"{error}; or give evaluate_lengths, or passkey_trials: 0") from error
    return texts


def measure(model: nn.Module, tokenizer: Any, recipe: Recipe, texts: dict[str, torch.Tensor]) -> Row:
    """Measures a model as it is."""
    training, lengths = model.training, lengths_of(recipe)
    model.eval()
    if model.config.is_encoder_decoder:
        row = Row([Reading(name, length, _losses_of_spans(model, tokenizer, ids, length))
                   for name, ids in texts.items() for length in lengths])  # fmt: skip
    else:
        scores = perplexity(model, list(texts.values()), window=lengths[-1], mode="prefix").scores
        row = Row([Reading(name, lengths[-1], [round(loss, 5) for loss in score.losses.tolist()])
                   for name, score in zip(texts, scores, strict=True)])  # fmt: skip
        for length in lengths:
            part = [loss for reading in row.readings for loss in reading.losses[: length - 1]]
            row.figures[f"perplexity of {length:,}"] = math.exp(sum(part) / len(part))
        for length in lengths if recipe.passkey_trials else ():
            asked = list(passkey(model, tokenizer, [length], depths=DEPTHS, trials=recipe.passkey_trials))
            found = sum(answer.correct[SCORING] for answer in asked)
            row.figures[f"pass keys at {length:,}"] = f"{found} of {len(asked)}"
    model.train(training)
    return row


@torch.no_grad()
def _losses_of_spans(model: nn.Module, tokenizer: Any, ids: torch.Tensor, length: int) -> list[float]:
    marks, found = sentinels_of(tokenizer), []
    for number, part in enumerate(ids.split(length)):
        if len(part) < 2:
            continue
        row = hide_spans(part, marks, tokenizer.eos_token_id, random.Random(number))
        batch = {name: values[None].to(model.device) for name, values in row.items()}
        found += cross_entropy(model(**batch).logits[0].float(), batch["labels"][0], reduction="none").tolist()
    return [round(loss, 5) for loss in found]


class Measured:
    """Rows of one run, kept in its folder.

    Args:
        resumed: what the run measured before it stopped counts.
    """

    def __init__(self, folder: str, resumed: bool) -> None:
        self.path, self.rows = Path(folder, FILE), dict[str, Row]()
        if resumed and self.path.exists():
            try:
                content = json.loads(self.path.read_text())
            except ValueError:  # cut off: it is measured anew
                content = {}
            for name, row in content.items():
                self.rows[name] = Row([Reading(**reading) for reading in row["readings"]], row["figures"])

    def add(self, name: str, row: Row) -> None:
        self.rows[name] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({name: asdict(row) for name, row in self.rows.items()}) + "\n")
        unfinished.replace(self.path)

    def lines(self, trained: int | None, spans: bool) -> Iterator[list[str]]:
        """The table, its head first: a figure per line, a row of ours per column.

        Args:
            trained: tokens that the model was trained to, of a model whose texts are read at the longest length alone.
            spans: whether losses are of hidden spans.
        """
        names = list(self.rows)
        base = ([name for name in names if name not in (BEFORE, AFTER)] or names)[0]
        yield ["", *names]
        for column, cells in self._cells(base, trained, spans).items():
            yield [column, *(_with_difference(cells[name]) for name in names)]
        for figure in dict.fromkeys(figure for row in self.rows.values() for figure in row.figures):
            yield [figure, *(_text(row.figures.get(figure)) for row in self.rows.values())]

    def _cells(self, base: str, trained: int | None, spans: bool) -> dict[str, dict[str, Cell]]:
        names = [base, *(name for name in self.rows if name != base)]
        lengths = {reading.length for reading in self.rows[base].readings}
        columns: dict[str, dict[str, Cell]] = {}
        for cell in compare(_MEASURE, self.rows, names, lengths, None if spans else trained):
            if isinstance(cell.column, int) == spans:
                columns.setdefault(_title(cell.column, trained), {})[cell.posenc] = cell
        return columns

    def show(self, trained: int | None, spans: bool) -> None:
        """Prints the table."""
        head, *lines = self.lines(trained, spans)
        table = Table(box=SIMPLE_HEAD)
        for name in head:
            table.add_column(name, overflow="fold")
        for line in lines:
            table.add_row(*line)
        console.print(table)


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first line is its head."""
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest))


def _units(rows: Any, name: str, length: int, trained: int | None) -> list[Unit]:
    """Blocks of neighbouring tokens, for `compare`."""
    readings = [reading for reading in rows[name].readings if reading.length == length]
    return [unit for one in readings for unit in block_units((one.text,), length, 1, one.losses, trained)]


_MEASURE = Measure("recipe", "loss", _units, lower=True)


def _title(column: int | str, trained: int | None) -> str:
    if isinstance(column, int):
        return f"loss of spans at {column:,}"
    if trained is None:
        return "loss"
    return f"loss within the trained {trained:,}" if column == WITHIN else f"loss beyond {trained:,}"


def _with_difference(cell: Cell) -> str:
    if cell.difference is None:
        return f"{cell.value:.3f}"
    interval = "" if cell.low is None else f" ({cell.low:+.3f} … {cell.high:+.3f})"
    return f"{cell.value:.3f}, {cell.difference:+.3f}{interval}"


def _text(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.3f}"
