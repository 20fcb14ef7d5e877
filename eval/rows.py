"""Texts out of a `datasets` data set, named on one line: `dataset:NAME[:key=value,...]`.

    dataset:emozilla/pg19:split=test                    a data set of the hub, streamed
    dataset:json:data_files=books.jsonl,column=body     local files, by the builders json, csv, parquet, text, ...
    dataset:saved_folder:split=test                     a folder that `save_to_disk` wrote

Keys are `config`, `split` (needed where there are several), `column` (of the texts; by default `text`) and
`data_files` (one path or pattern). A document is named after the line and the number of its row, from 0.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "dataset:"
KEYS = ("config", "split", "column", "data_files")


@dataclass(frozen=True)
class Rows:
    """A column of a split of a data set; `source` is the line that named it."""

    source: str
    name: str
    config: str | None = None
    split: str | None = None
    column: str = "text"
    data_files: str | None = None


def parse(source: str) -> Rows:
    """Takes `dataset:NAME[:key=value,...]` apart.

    Raises:
        ValueError: another form, or an unknown key.
    """
    name, _, options = source.removeprefix(PREFIX).partition(":")
    pairs = [option.partition("=") for option in options.split(",") if options]
    wrong = [key for key, sign, value in pairs if key not in KEYS or not (sign and value)]
    if not name or wrong:
        raise ValueError(
            f"{source!r} should read {PREFIX}NAME[:key=value,...], with keys out of {', '.join(KEYS)}"
            + (f", not {', '.join(wrong)}" if wrong else "")
        )
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"reading {source} needs the package datasets: pip install datasets")
    return Rows(source, name, **{key: value for key, _, value in pairs})


def read(rows: Rows) -> Iterator[tuple[str, str]]:
    """Names and texts of the rows, in order, read no further than they are taken.

    Raises:
        ValueError: the data set cannot be loaded, or has no such split or column.
    """
    data = _load(rows)
    if isinstance(data, dict):
        if rows.split is None and len(data) > 1:
            raise ValueError(
                f"{rows.source} has the splits {', '.join(data)}: choose one, as in split={next(iter(data))}"
            )
        split = rows.split or next(iter(data))
        if split not in data:
            raise ValueError(f"{rows.source} has no split {split}; choose one of {', '.join(data)}")
        data = data[split]
    for number, row in enumerate(data):
        if not isinstance(row.get(rows.column), str):
            null = ", but null" if rows.column in row and row[rows.column] is None else ""
            raise ValueError(f"row {number} of {rows.source} has no text in column {rows.column!r}{null}; its "
                             f"columns: {', '.join(row)}. Give one of texts, as in column=NAME")  # fmt: skip
        yield f"{rows.source}#{number}", row[rows.column]


def _load(rows: Rows) -> Any:
    """The data set, or a dictionary of its splits."""
    import datasets

    folder = Path(rows.name)
    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            return datasets.load_from_disk(rows.name)
        return datasets.load_dataset(rows.name, rows.config, data_files=rows.data_files, streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {rows.source}: {error}") from error
