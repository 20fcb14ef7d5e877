"""A comparison for people: Markdown, CSV, and one HTML page that needs nothing beside itself."""

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from eval.compare import BEYOND, WITHIN

Comparison = Mapping[str, Any]  # what `eval/commands/compare.py` writes as scores.json
GIB = 2**30


@dataclass(frozen=True)
class Entry:
    """What stands in a table: a text, under it a note; `mark` is better or worse, where that is sure."""

    text: str
    note: str = ""
    mark: str = ""
    code: bool = False


Rows = list[list[Entry]]


def to_markdown(comparison: Comparison) -> str:
    """Tables of damage and gain, of every measure by length, and of costs."""
    trained = _count(comparison["trained_length"])
    parts = [
        f"# {title(comparison).replace('|', ' ').replace('<', '&lt;')}",
        intro(comparison),
        "## Within the trained length and beyond it",
    ]
    parts.append(_markdown_table(summary(comparison)))
    for measure in comparison["measures"]:
        parts += [f"## {measure['title']}, by length", _markdown_table(by_length(measure, comparison))]
        if measure["effective_length"]:
            parts += ["Longest length that is still good, by rule:", _markdown_table(effective(measure))]
    if comparison["examples"]:
        parts += ["## Answers", _markdown_table(examples(comparison))]
    parts += ["## Cost", _markdown_table(costs(comparison))]
    base = comparison["posencs"][0]
    parts.append(f"Trained length: {trained} tokens. Differences are to `{base}`, with 95 % intervals of a paired "
                 "bootstrap; an asterisk marks those that leave out 0, of 10 units or more.")  # fmt: skip
    return "\n\n".join(parts) + "\n"


def to_csv(comparison: Comparison) -> str:
    """One line per encoding, measure and column."""
    out = io.StringIO()
    fields = ("posenc", "column", "value", "units", "difference", "low", "high", "sure")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("task", "title", "unit", "better", *fields, "value_low", "value_high"))
    for measure in comparison["measures"]:
        shared = [measure[name] for name in ("task", "title", "unit", "better")]
        for cell in measure["cells"]:
            writer.writerow([*shared, *(cell[name] for name in fields), *cell["interval"]])
    return out.getvalue()


def to_html(comparison: Comparison, figures: Sequence[Mapping[str, Any]], manifest: str) -> str:
    """One self-contained page, in light and in dark.

    Args:
        figures: each with the title of its `measure`, a `caption`, and SVG as bytes, `light` and `dark`.
        manifest: shown at the end, folded.
    """
    environment = Environment(loader=PackageLoader("eval", "templates"), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    environment.filters["breakable"] = _breakable
    environment.filters["data"] = lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return environment.get_template("compare.html").render(
        title=title(comparison), intro=intro(comparison), comparison=comparison, summary=summary(comparison),
        measures=[(m, by_length(m, comparison), effective(m), [f for f in figures if f["measure"] == m["title"]])
                  for m in comparison["measures"]],
        costs=costs(comparison), examples=examples(comparison), manifest=manifest,
    )  # fmt: skip


def title(comparison: Comparison) -> str:
    count = len(comparison["posencs"])
    return f"{comparison['model']}: {count} positional encoding{'' if count == 1 else 's'}"


def intro(comparison: Comparison) -> str:
    """What was done, in a sentence or two."""
    tasks = ", ".join(dict.fromkeys(measure["task"] for measure in comparison["measures"]))
    lengths = ", ".join(_count(length) for length in comparison["lengths"])
    trained = comparison["trained_length"]
    known = "Its trained length is not known." if trained is None else f"It was trained to {_count(trained)} tokens."
    return (f"{known} Every encoding was put on the same weights ({comparison['dtype']}, {comparison['device']}) and "
            f"read the same texts: {tasks}, at {lengths} tokens.")  # fmt: skip


def summary(comparison: Comparison) -> Rows:
    """Two lines per measure, within the trained length and beyond it; one column per encoding."""
    trained = comparison["trained_length"]
    rows = [[Entry("measure"), *(Entry(posenc, code=True) for posenc in comparison["posencs"])]]
    for measure in comparison["measures"]:
        for column in _parts(measure):
            place = f"{'up to' if column == WITHIN else 'beyond'} {_count(trained)}" if trained else "all lengths"
            note = f"{measure['better']} is better, {_counted(measure, column)}"
            head = Entry(f"{measure['title']}, {place}", note)
            rows.append([head, *(_entry(measure, posenc, column) for posenc in comparison["posencs"])])
    return rows


def by_length(measure: Mapping[str, Any], comparison: Comparison) -> Rows:
    """One column per length."""
    trained, lengths = comparison["trained_length"], [c for c in _columns(measure) if isinstance(c, int)]
    marks = [_counted(measure, length) for length in lengths]
    for index, length in enumerate(lengths):
        if trained is not None and length > trained:
            marks[index] = f"{length / trained:.3g} times trained, {marks[index]}"
    head = [Entry("encoding"), *(Entry(_count(length), mark) for length, mark in zip(lengths, marks, strict=True))]
    return [head] + [
        [Entry(posenc, code=True), *(_entry(measure, posenc, length) for length in lengths)]
        for posenc in comparison["posencs"]
    ]


def effective(measure: Mapping[str, Any]) -> Rows:
    """One column per rule; a dash where no length is good."""
    lengths = measure["effective_length"]
    rules = list(next(iter(lengths.values()), {}))
    return [[Entry("encoding"), *map(Entry, rules)]] + [
        [Entry(posenc, code=True), *(Entry(_count(length)) for length in found.values())]
        for posenc, found in lengths.items()
    ]


def costs(comparison: Comparison) -> Rows:
    """Seconds and peak memory of every task, encoding and length."""
    rows = [[Entry(text) for text in ("task", "encoding", "tokens", "samples", "seconds", "memory at its peak")]]
    for found in comparison["costs"]:
        memory = "-" if found["memory"] is None else f"{found['memory'] / GIB:.2f} GiB"
        counts = _count(found["length"]), _count(found["samples"]), f"{found['seconds']:,.1f}", memory
        rows.append([Entry(found["task"]), Entry(found["posenc"], code=True), *map(Entry, counts)])
    return rows


def examples(comparison: Comparison) -> Rows:
    """What the model answered to the first prompt of every task, length and encoding."""
    rows = [[Entry(text) for text in ("task", "encoding", "tokens", "wanted", "answer")]]
    for found in comparison["examples"]:
        mark = "better" if found["score"] == 100 else "worse" if found["score"] == 0 else ""
        told = f"told {_count(found['told'])} tokens before" if found["told"] else ""
        rows.append([Entry(found["task"]), Entry(found["posenc"], code=True), Entry(_count(found["length"])),
                     Entry(_cut(found["wanted"]), told), Entry(_cut(found["answer"]), mark=mark)])  # fmt: skip
    return rows


def _entry(measure: Mapping[str, Any], posenc: str, column: int | str) -> Entry:
    cell = next((c for c in measure["cells"] if (c["posenc"], c["column"]) == (posenc, column)), None)
    if cell is None:
        return Entry("-")
    percent = measure["unit"] == "%"
    digits = 1 if percent else 3
    if cell["value"] is None:
        return Entry("not a number", mark="worse")
    text = f"{cell['value']:.{digits}f}{' %' if percent else ''}"
    if cell["difference"] is None:
        low, high = cell["interval"]
        return Entry(text, "" if low is None else f"{low:.{digits}f} to {high:.{digits}f}")
    if cell["difference"] == cell["low"] == cell["high"] == 0:
        return Entry(text, "the same everywhere")
    note = f"{cell['difference']:+.{digits}f}"
    if cell["low"] is not None:
        note += f" ({cell['low']:+.{digits}f} to {cell['high']:+.{digits}f})"
    better = (cell["difference"] < 0) == (measure["better"] == "lower")
    return Entry(text, note, ("better" if better else "worse") if cell["sure"] else "")


def _counted(measure: Mapping[str, Any], column: int | str) -> str:
    """How many units stand behind the cells of a column."""
    count = next(cell["units"] for cell in measure["cells"] if cell["column"] == column)
    return f"{count} {measure['counted']}" if count > 1 else f"1 {measure['counted'].replace('s', '', 1)}"


def _columns(measure: Mapping[str, Any]) -> list[int | str]:
    return list(dict.fromkeys(cell["column"] for cell in measure["cells"]))


def _parts(measure: Mapping[str, Any]) -> list[str]:
    return [column for column in (WITHIN, BEYOND) if column in _columns(measure)]


def _markdown_table(rows: Rows) -> str:
    def text(entry: Entry) -> str:
        shown = (f"`{entry.text}`" if entry.code else entry.text).replace("|", "\\|")
        return f"{shown}<br>{entry.note}{'*' if entry.mark else ''}" if entry.note else shown

    lines = ["| " + " | ".join(map(text, row)) + " |" for row in rows]
    rule = "|" + "|".join(["---", *["---:"] * (len(rows[0]) - 1)]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _breakable(text: str) -> Markup:
    """A method's name that may be broken behind its punctuation."""
    return Markup(re.sub(r"([:,+])", r"\1<wbr>", str(escape(text))))


def _cut(text: str, most: int = 80) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= most else f"{shown[:most]} …"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
