"""`python -m eval compare`."""

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from eval import data, models, page, report
from eval.commands import (
    Check,
    Device,
    DType,
    Lengths,
    ModelName,
    PosEncs,
    Root,
    console,
    file_manifest,
    identity,
    tasks,
)
from eval.compare import compare, cost, describe
from eval.manifest import hardware
from eval.results import Results, without_nan

MOST_ANSWERS = 24  # that a terminal shows
COLOURS = {"better": "green", "worse": "red", "": "none"}


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = (models.NONE, "pi:factor=2", "yarn:factor=2", "dynamic_ntk"),
    task: Annotated[
        list[str], typer.Option("--tasks", help=f"Of {', '.join(tasks.TASKS)}; ruler is all of RULER's.")
    ] = ("perplexity,passkey",),
    lengths: Lengths = ("4096,12288",),
    text: Annotated[
        str, typer.Option(help="File or offline text that is read, and that needles are hidden in.")
    ] = "alice",
    trials: Annotated[
        int, typer.Option(help="Prompts per length and task, of passkey and needle per depth.", min=1)
    ] = 5,
    seed: int = 0,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    check: Check = 1024,
    results: Root = "results",
) -> None:
    """Several encodings on the same weights and questions: damage within the trained length beside the gain beyond it.

    Writes report.html, report.md, cells.csv, scores.json and plots.

    Example: python -m eval compare --posenc none --posenc yarn:factor=2 --tasks perplexity,vt --lengths 4096,10240
    """
    options = tasks.Options(tasks.names(task), models.numbers(lengths), text, trials, seed)
    data.check_source(text)
    loaded, tokenizer = models.load(model, dtype, device)
    run(loaded, tokenizer, model, posenc, options, check=check, root=results)


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    options: tasks.Options,
    *,
    check: int = 0,
    root: str = "results",
) -> Results:
    """Runs every task under every encoding, each filed in its own folder, and writes the comparison.

    Args:
        posencs: the first is what the others are compared with.
        check: as for `write_manifest`.
    """
    names, trained = models.full_names(model, posencs, options.lengths), models.trained_length(model)
    reader = tasks.Reader(model, tokenizer, model_name, names, root)
    parameters = {**identity(model, model_name, tokenizer), "posencs": names, **asdict(options)}
    results = Results(root, "compare", parameters, ("model", "tasks", "dtype"), ("posenc",))
    measured = list(tasks.measure(reader, options))
    comparison = without_nan(
        {
            **{name: results.config[name] for name in ("model", "dtype", "device", "posencs", "lengths")},
            "trained_length": trained,
            "hardware": hardware(model)["name"],
            "measures": [describe(m, compare(m, found, names, options.lengths, trained)) for m, found in measured],
            "costs": _costs(measured, names, options.lengths),
            "examples": _examples(measured, names, options.lengths),
        }
    )
    results.complete()
    folders = list({found.folder: found for _, found in measured}.values())
    manifest = file_manifest(results, model, tokenizer, names, options.lengths, check, folders)
    _write(results, comparison, manifest, figures(measured, comparison))
    _show(results, comparison, measured)
    return results


@dataclass(frozen=True)
class Figure:
    """A plot of a measure, named by its title: `draw` puts it into a file."""

    measure: str
    caption: str
    draw: Callable[[report.Target], None]

    @property
    def name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.measure} {self.caption}".lower()).strip("-")


def figures(measured: Sequence[tasks.Measured], comparison: dict[str, Any]) -> list[Figure]:
    """Loss by position of the longest length, scores by length, and a map of depths for every encoding."""
    trained, lengths, found = comparison["trained_length"], comparison["lengths"], []
    for (measure, results), described in zip(measured, comparison["measures"], strict=True):
        if measure.curve is not None:
            curves = {name: measure.curve(results, name, lengths[-1]) for name in comparison["posencs"]}
            draw = functools.partial(report.plot_bands, curves=curves, trained=trained)
            found.append(Figure(measure.title, "by position", draw))
        elif len(lengths) > 1:
            unit = described["unit"]
            cells = [{**c, "length": c["column"], unit: c["value"]} for c in described["cells"]]
            cells = [cell for cell in cells if isinstance(cell["length"], int)]
            draw = functools.partial(report.plot_lengths, scores=cells, value=unit, trained=trained)
            found.append(Figure(measure.title, "by length", draw))
        for name in comparison["posencs"] if measure.cells is not None else ():
            columns = [measure.cells(results, name, length) for length in lengths]
            maps, depths = {name: list(zip(*columns, strict=True))}, results.config["depths"]
            draw = functools.partial(report.plot_maps, maps=maps, lengths=lengths, depths=depths, trained=trained)
            found.append(Figure(measure.title, f"by length and depth, {name}", draw))
    return found


def _write(results: Results, comparison: dict[str, Any], manifest: dict[str, Any], drawn: Sequence[Figure]) -> None:
    results.write("scores.json", comparison)
    results.write_text("report.md", page.to_markdown(comparison))
    results.write_text("cells.csv", page.to_csv(comparison))
    shown = []
    for figure in drawn:
        figure.draw(results.folder / f"{figure.name}.png")
        light, dark = (report.as_svg(figure.draw, dark) for dark in (False, True))
        shown.append({"measure": figure.measure, "caption": figure.caption, "light": light, "dark": dark})
    results.write_text("report.html", page.to_html(comparison, shown, json.dumps(manifest, indent=2)))


def _costs(measured: Sequence[tasks.Measured], posencs: Sequence[str], lengths: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for folder in {results.folder: results for _, results in measured}.values():
        for posenc in posencs:
            costs = (cost(folder, posenc, length) for length in lengths)
            found += [{"task": folder.config["task"], **each} for each in costs if each["samples"]]
    return found


def _examples(
    measured: Sequence[tasks.Measured], posencs: Sequence[str], lengths: Sequence[int]
) -> list[dict[str, Any]]:
    """Answers to the first prompt of every task and length."""
    found = []
    for measure, results in measured:
        for length, posenc in itertools.product(lengths, posencs if measure.example else ()):
            sample = results.select(posenc=posenc, length=length, **(measure.fields or {}))[0]
            found.append({"task": measure.title, "posenc": posenc, "length": length, **measure.example(sample)})
    return found


def _show(results: Results, comparison: dict[str, Any], measured: Sequence[tasks.Measured]) -> None:
    trained, lengths = comparison["trained_length"], comparison["lengths"]
    for measure, found in measured:
        if measure.curve is not None:
            curves = {name: measure.curve(found, name, lengths[-1]) for name in comparison["posencs"]}
            console.print(report.band_table(f"{measure.title} by position, nats per token", curves, trained))
    answers = page.examples(comparison)
    if 1 < len(answers) <= MOST_ANSWERS:
        console.print(_table("Answers", answers))
    console.print(_table("Within the trained length and beyond it, with 95% intervals of the differences to the first",
                         page.summary(comparison)))  # fmt: skip
    console.print(
        f"report.html, report.md, cells.csv, scores.json and plots in {results.folder}", soft_wrap=True, markup=False
    )


def _table(title: str, rows: page.Rows) -> Table:
    table = Table(title=title, title_justify="left")
    for index, entry in enumerate(rows[0]):
        table.add_column(_text(entry), justify="right" if index else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(_text, row))
    return table


def _text(entry: page.Entry) -> str:
    colour = COLOURS[entry.mark]
    return f"{escape(entry.text)}\n[{colour}]{entry.note}[/]" if entry.note else f"[{colour}]{escape(entry.text)}[/]"
