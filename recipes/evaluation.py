"""What training changed: perplexity and pass key of the model as it is, before and after, in one table.

Models with an encoder and a decoder are measured by the loss of hidden spans.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from eval import data
from eval.commands import console
from eval.models import encode
from eval.passkey import SCORING, build, passkey
from eval.perplexity import perplexity
from eval.retrieval import DEPTHS
from recipes.settings import Recipe
from recipes.spans import hide_spans, sentinels_of

FILE = "evaluation.json"
Row = dict[str, float]


def lengths_of(recipe: Recipe) -> list[int]:
    """Tokens at which a recipe is measured."""
    return sorted(recipe.evaluate_lengths or {*recipe.lengths, recipe.longest})


def held_out(recipe: Recipe, tokenizer: Any, spans: bool) -> torch.Tensor:
    """Tokens of the text to evaluate on, `(tokens,)`.

    Args:
        spans: whether hidden spans are to be filled, and no pass key found.

    Raises:
        ValueError: a length is longer than the text, or too short for a pass key.
    """
    ids = torch.tensor(encode(tokenizer, data.text(recipe.evaluate_text))[: recipe.evaluate_tokens])
    lengths = lengths_of(recipe)
    if len(ids) < lengths[-1]:
        raise ValueError(f"{recipe.evaluate_text} gives {len(ids)} tokens to evaluate on, fewer than {lengths[-1]}: "
                         "give evaluate_tokens, another evaluate_text, or evaluate_lengths")  # fmt: skip
    if recipe.passkey_trials and not spans:
        for length in lengths:
            try:
                build(tokenizer, length, 0.5)
            except ValueError as error:
                raise ValueError(f"{error}; or give evaluate_lengths, or passkey_trials: 0") from error
    return ids


def measure(model: nn.Module, tokenizer: Any, recipe: Recipe, ids: torch.Tensor) -> Row:
    """Figures by name, of a model as it is."""
    training, found = model.training, {}
    model.eval()
    for length in lengths_of(recipe):
        if model.config.is_encoder_decoder:
            found[f"loss of spans at {length:,}"] = _loss_of_spans(model, tokenizer, ids, length)
            continue
        found[f"perplexity at {length:,}"] = perplexity(model, [ids], window=length).perplexity
        if recipe.passkey_trials:
            found_keys = passkey(model, tokenizer, [length], depths=DEPTHS, trials=recipe.passkey_trials)
            answers = [one.correct[SCORING] for one in found_keys]
            found[f"pass keys of {len(answers)} at {length:,}"] = sum(answers)
    model.train(training)
    return found


@torch.no_grad()
def _loss_of_spans(model: nn.Module, tokenizer: Any, ids: torch.Tensor, length: int) -> float:
    """Mean over the labels, in nats."""
    marks, total, count = sentinels_of(tokenizer), 0.0, 0
    for number, part in enumerate(ids.split(length)):
        if len(part) < 2:
            continue
        row = hide_spans(part, marks, tokenizer.eos_token_id, random.Random(number))
        batch = {name: values[None].to(model.device) for name, values in row.items()}
        total += float(model(**batch).loss) * batch["labels"].numel()
        count += batch["labels"].numel()
    return total / count


class Measured:
    """Rows of one run, kept in its folder.

    Args:
        resumed: what the run measured before it stopped counts.
    """

    def __init__(self, folder: str, resumed: bool) -> None:
        self.path = Path(folder, FILE)
        self.rows: dict[str, Row] = json.loads(self.path.read_text()) if resumed and self.path.exists() else {}

    def add(self, name: str, row: Row) -> None:
        self.rows[name] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.rows, indent=2) + "\n")

    def show(self) -> None:
        """Prints the table: a figure per line, a row of ours per column."""
        table = Table("", *self.rows)
        for name in _names(list(self.rows.values())):
            table.add_row(name, *(_text(row.get(name)) for row in self.rows.values()))
        console.print(table)


def _names(rows: Sequence[Row]) -> list[str]:
    return sorted({name for row in rows for name in row}, key=[name for row in rows for name in row].index)


def _text(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"
