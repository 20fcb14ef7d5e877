"""Tables and plots of scores. Lengths within the trained one and beyond it stand side by side."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
from rich.box import SIMPLE_HEAD
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot

from eval import processes

Scores = Sequence[dict[str, Any]]
Target = Path | BinaryIO
# Of a figure inside a page, which may be as narrow as a phone.
PAGE = {"savefig.format": "svg", "savefig.transparent": True, "font.size": 13, "legend.framealpha": 0}
INK = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
Curves = dict[str, Sequence[dict[str, Any]]]  # encoding: bands with low, high, tokens and loss or gain


def length_table(
    title: str, scores: Scores, value: str, trained: int | None, better: str, mean: bool = False
) -> Table:
    """One row per encoding, one column per length; behind each value its change against the first row.

    Args:
        scores: dictionaries with `posenc`, `length`, `text` (what a cell shows) and the number `value`.
        better: `lower` or `higher`.
        mean: adds the mean of `value` over all lengths.
    """
    posencs, lengths = _distinct(scores, "posenc"), sorted(_distinct(scores, "length"))
    table = _table(title)
    for length in lengths:
        table.add_column(_column(length, trained), justify="right")
    if mean:
        table.add_column("mean", justify="right")
    cells = {(score["posenc"], score["length"]): score for score in scores}
    for posenc in posencs:
        row = [cells[posenc, length] for length in lengths]
        bases = [cells[posencs[0], length] for length in lengths]
        texts = [_compared(score, base, value, better) for score, base in zip(row, bases, strict=True)]
        table.add_row(posenc, *texts, *([f"{sum(score[value] for score in row) / len(row):.1f}"] if mean else []))
    return table


def effective_table(title: str, lengths: dict[str, dict[str, int | None]]) -> Table:
    """One row per encoding, one column per rule; a dash where no length is good."""
    table = _table(title)
    for rule in next(iter(lengths.values()), {}):
        table.add_column(rule, justify="right")
    for posenc, by_rule in lengths.items():
        table.add_row(posenc, *("-" if length is None else f"{length:,}" for length in by_rule.values()))
    return table


def task_table(title: str, scores: Scores, trained: int | None) -> Table:
    """One row per task and length, one column per encoding; behind each value its change against the first column.

    Args:
        scores: dictionaries with `posenc`, `length` (or None) and `by_task`: `task`, `metric`, `value` and `better`.
    """
    cells = {(row["task"], score["length"], score["posenc"]): row for score in scores for row in score["by_task"]}
    posencs = _distinct(scores, "posenc")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("task", "tokens", "metric", *posencs):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right", overflow="fold")
    for task, length in dict.fromkeys((task, length) for task, length, _ in cells):
        row = [cells.get((task, length, posenc)) for posenc in posencs]
        metric = next(cell["metric"] for cell in row if cell)
        beyond = "[yellow]" if trained is not None and length is not None and length > trained else ""
        changes = (_changed(cell, row[0]) for cell in row)
        table.add_row(task, "-" if length is None else f"{beyond}{length:,}", metric, *changes)
    return table


def band_table(title: str, curves: Curves, trained: int | None, columns: int | None = None) -> Table:
    """Mean loss per band of positions, one row per encoding; green where it is below the first row's, red above.

    By default 4 to 8 bands, so that one ends at the trained length if that can be; bands beyond it are yellow.
    """
    length = next(iter(curves.values()))[-1]["high"]
    fitting = [count for count in (8, 6, 4) if trained and trained * count % length == 0]
    table = _table(title)
    rows = {posenc: _merge(bands, columns or [*fitting, 8][0]) for posenc, bands in curves.items()}
    first = next(iter(rows.values()))
    for low, high, _ in first:
        mark = "[yellow]" if trained is not None and high > trained else ""
        table.add_column(f"{mark}{_range(low, high)}", justify="right")
    for posenc, row in rows.items():
        table.add_row(posenc, *(_coloured(loss, base) for (*_, loss), (*_, base) in zip(row, first, strict=True)))
    return table


def cost_table(title: str, scores: Scores) -> Table:
    """One row per encoding, length and part: its median, the unpatched model's, and the ratio over the rounds."""
    table = _table(title)
    for column in ("tokens", "part", "median", "unpatched", "ratio", "lowest-highest"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for score in scores:
        values = (_amount(score[name], score["unit"]) for name in ("value", "unpatched"))
        spread = f"{score['lowest']:.3f}-{score['highest']:.3f}" if score["rounds"] > 1 else "-"
        table.add_row(score["posenc"], f"{score['length']:,}", score["part"], *values, f"{score['ratio']:.3f}", spread)
    return table


def as_svg(plot: Callable[[BinaryIO], None], dark: bool) -> bytes:
    """What a plot function draws, as SVG on a transparent ground, for a light page or a dark one."""
    with pyplot.rc_context({**PAGE, **dict.fromkeys(INK, "#d5d9dd" if dark else "#33383d")}):
        buffer = io.BytesIO()
        plot(buffer)
        return buffer.getvalue()


def gain_table(title: str, scores: Scores) -> Table:
    """Gain within and beyond the trained length, one row per encoding and length; a dash where there is none."""
    table = _table(title)
    for column in ("length", "tokens", "loss", "within", "beyond", ">2 nats", "keys", "LongPPL"):
        table.add_column(column, justify="right", no_wrap=True)
    for score in scores:
        gains = (_or_dash(score[name], "+.3f") for name in ("gain_within", "gain_beyond"))
        keys = (_or_dash(score["key_tokens"], ",d"), _or_dash(score["long_perplexity"], ".2f"))
        table.add_row(score["posenc"], f"{score['length']:,}", f"{score['tokens']:,}", f"{score['loss']:.3f}", *gains,
                      f"{score['share']:.1%}", *keys)  # fmt: skip
    return table


def distance_table(title: str, curves: Curves) -> Table:
    """Mean gain by how far back a token last occurred, one row per encoding; distance 0 is a token that is new."""
    table = _table(title)
    for band in next(iter(curves.values())):
        table.add_column(_range(band["low"], band["high"]) if band["low"] else "new", justify="right")
    for posenc, bands in curves.items():
        table.add_row(posenc, *(_or_dash(band["gain"], "+.3f") for band in bands))
    return table


def plot_bands(path: Target, curves: Curves, trained: int | None, value: str = "loss") -> None:
    """Loss, or another value in nats, by position, one line per encoding."""
    lines = {}
    for posenc, bands in curves.items():
        filled = [band for band in bands if band[value] is not None]
        lines[posenc] = ([(b["low"] + b["high"]) / 2 for b in filled], [b[value] for b in filled])
    _plot_lines(path, lines, ("position, tokens", f"{value}, nats per token"), trained)


def plot_lengths(path: Target, scores: Scores, value: str, trained: int | None) -> None:
    """A value by context length, one line per encoding."""
    lines = {}
    for posenc in _distinct(scores, "posenc"):
        mine = sorted((score["length"], score[value]) for score in scores if score["posenc"] == posenc)
        lines[posenc] = ([length for length, _ in mine], [number for _, number in mine])
    _plot_lines(path, lines, ("context length, tokens", value), trained)


def plot_maps(path: Target, maps: dict[str, Sequence[Sequence[dict[str, Any]]]], lengths: Sequence[int],
              depths: Sequence[float], trained: int | None) -> None:  # fmt: skip
    """Accuracy in percent by depth (rows) and length (columns), one map per encoding, dashed at the trained length.

    Args:
        maps: per encoding the rows of cells, each with `accuracy` and, both in percent, its `interval`.
    """
    figure, row = pyplot.subplots(
        1, len(maps), figsize=(1.5 + 3.2 * len(maps), 3.4), squeeze=False, layout="constrained"
    )
    inside = sum(trained is None or length <= trained for length in lengths)
    marked = trained is not None and 0 < inside < len(lengths)
    label = "length in tokens" + (f" (dashed: trained, {_short(trained)})" if trained and marked else "")
    for axes, (name, values) in zip(row[0], maps.items(), strict=True):
        accuracies = [[cell["accuracy"] for cell in line] for line in values]
        image = axes.imshow(accuracies, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(lengths)), [_short(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set(title=name, xlabel=label, ylabel="depth of the key")
        axes.title.set_fontsize("small")
        if marked:
            axes.axvline(inside - 0.5, color="black", linestyle="--", linewidth=1)
        for y, line in enumerate(values):
            for x, cell in enumerate(line):
                low, high = cell["interval"]
                colour = "black" if 15 < cell["accuracy"] < 85 else "white"
                axes.text(x, y, f"{cell['accuracy']:.0f}", ha="center", va="bottom", fontsize=8, color=colour)
                axes.text(x, y, f"{low:.0f}-{high:.0f}", ha="center", va="top", fontsize=6, color=colour)
    figure.colorbar(image, ax=row[0].tolist(), label="correct, %")
    _save(figure, path)


def plot_ratios(path: Target, scores: Scores) -> None:
    """Ratio to the unpatched model by length, with lowest and highest: one graph per part, one line per encoding."""
    parts, lengths = _distinct(scores, "part"), sorted(_distinct(scores, "length"))
    figure, row = pyplot.subplots(1, len(parts), figsize=(1 + 4 * len(parts), 4), squeeze=False, layout="constrained")
    for axes, part in zip(row[0], parts, strict=True):
        for posenc in _distinct(scores, "posenc"):
            mine = [score for score in scores if (score["posenc"], score["part"]) == (posenc, part)]
            mine.sort(key=lambda score: score["length"])
            x, y = ([score[name] for score in mine] for name in ("length", "ratio"))
            below = [score["ratio"] - score["lowest"] for score in mine]
            above = [score["highest"] - score["ratio"] for score in mine]
            axes.errorbar(x, y, [below, above], label=posenc, marker="o", capsize=3, linewidth=1.6)
        axes.axhline(1, color="grey", linestyle="--", linewidth=1, label="unpatched")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [_short(length) for length in lengths])
        axes.set(title=part, xlabel="tokens", ylabel="patched / unpatched")
        axes.grid(alpha=0.3)
    figure.legend(*row[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    _save(figure, path)


def _plot_lines(path: Target, lines: dict[str, tuple[list[float], list[float]]], labels: tuple[str, str],
                trained: int | None) -> None:  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="tight")
    for name, (x, y) in lines.items():
        axes.plot(x, y, label=name, marker="o" if len(x) < 12 else "", linewidth=1.6)
    if trained is not None:
        axes.axvline(trained, color="grey", linestyle="--", linewidth=1, label=f"trained length {trained:,}")
    axes.set(xlabel=labels[0], ylabel=labels[1], ylim=(-3, 103) if labels[1] == "%" else None)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    _save(figure, path)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("posenc", overflow="fold")
    return table


def _save(figure: Any, path: Target) -> None:
    if processes.is_main():
        figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _column(length: int, trained: int | None) -> str:
    if trained is None or length <= trained:
        return f"{length:,}"
    return f"[yellow]{length:,}\nbeyond, x{length / trained:.3g}"


def _distinct(scores: Scores, field: str) -> list[Any]:
    return list(dict.fromkeys(score[field] for score in scores))


def _compared(score: dict[str, Any], base: dict[str, Any], value: str, better: str) -> str:
    if score is base:
        return score["text"]
    if better == "higher":
        change, text = score[value] - base[value], f"{score[value] - base[value]:+.0f}"
    else:
        change = score[value] / max(base[value], 1e-9) - 1
        text = f"{change:+.1%}" if change < 10 else f"x{change + 1:.0f}"
    good = (change > 0) == (better == "higher")
    colour = "dim" if abs(change) < 0.005 else "green" if good else "red"
    return f"{score['text']} [{colour}]{text}[/]"


def _changed(cell: dict[str, Any] | None, base: dict[str, Any] | None) -> str:
    if cell is None or base is None or cell is base:
        return "-" if cell is None else f"{cell['value']:.3f}"
    change = cell["value"] - base["value"]
    colour = "dim" if abs(change) < 5e-4 else "green" if (change > 0) == (cell["better"] == "higher") else "red"
    return f"{cell['value']:.3f} [{colour}]{change:+.3f}[/]"


def _merge(bands: Sequence[dict[str, Any]], columns: int) -> list[tuple[int, int, float | None]]:
    """Joins neighbouring bands into about `columns` of them, weighted by their tokens."""
    step = max(1, len(bands) // columns)
    merged = []
    for index in range(0, len(bands), step):
        group = [band for band in bands[index : index + step] if band["tokens"]]
        tokens = sum(band["tokens"] for band in group)
        loss = sum(band["tokens"] * band["loss"] for band in group) / tokens if tokens else None
        merged.append((bands[index]["low"], bands[min(index + step, len(bands)) - 1]["high"], loss))
    return merged


def _coloured(loss: float | None, base: float | None) -> str:
    if loss is None or base is None:
        return "-"
    return f"{'[green]' if loss < base - 0.05 else '[red]' if loss > base + 0.05 else ''}{loss:.3f}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _range(low: int, high: int) -> str:
    return f"{low // 1024}-{high // 1024}k" if low % 1024 == high % 1024 == 0 else f"{_short(low)}-{_short(high)}"


def _short(length: float) -> str:
    return f"{length / 1024:g}k" if length and length % 512 == 0 else f"{length:g}"
