"""The command line ``hf-posenc``: methods, inspect, plan, export."""

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from typer.core import TyperGroup

from . import api, inspection, planner
from .export import export, require_target
from .methods.base import Method
from .persistence import recorded
from .registry import create, registered


class OneLineErrors(TyperGroup):
    """Shows what a user can put right as one line, and leaves with status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, TypeError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id of a model.")]


@app.callback()
def main(debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False) -> None:
    """Positional encodings of pretrained transformers models: what they reach, and how to extend them."""
    if not debug:
        transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@app.command("methods")
def methods_command(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Show what this one can take.")] = None,
) -> None:
    """List the methods, their parameters and what kind of encoding each is."""
    able = None
    if model is not None:
        able = set(api.methods(inspection.weightless(*inspection.look(model)).root))
    table = Table()
    columns = ["method", "parameters", "acts on", "position", "values", "symmetric", "monotone", "shift-invariant",
               "stock kernels", "needs training", "past trained length"]  # fmt: skip
    for column in [*columns, *(["this model"] if able is not None else [])]:
        table.add_column(column)
    for name, method in registered().items():
        taken = [_yes(name in able)] if able is not None else []
        table.add_row(name, _parameters(method), *_traits(method), *taken)
    _show(table)


@app.command("inspect")
def inspect_command(
    model: Model,
    context: Annotated[int | None, typer.Option(help="Tokens; by default as configured.")] = None,
    method: Annotated[str | None, typer.Option(help="Also show where this puts every pair: yarn:factor=4.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show how many tokens every rotated pair needs for a turn, and which are slower than the context."""
    report = planner.inspect(model, context, method)
    if plot is not None:
        report.plot(plot)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _show(report.table())


@app.command("plan")
def plan_command(
    model: Model, target_length: Annotated[int, typer.Argument(help="Tokens that the model shall read.")]
) -> None:
    """Suggest methods for a target length, best first."""
    suggestions = planner.plan(model, target_length)
    if suggestions and suggestions[0].method is None:
        typer.echo(suggestions[0].reason)
        return
    table = Table()
    for column in ("", "method", "needs training", "why"):
        table.add_column(column)
    for rank, suggestion in enumerate(suggestions, start=1):
        table.add_row(str(rank), suggestion.command, _yes(suggestion.needs_training), suggestion.reason)
    _show(table)


@app.command("export")
def export_command(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="Is created.")],
    method: Annotated[
        str | None, typer.Option(help="Such as yarn:factor=4; by default the one saved with it.")
    ] = None,
    target: Annotated[str, typer.Option(help="transformers, vllm or llama.cpp.")] = "transformers",
) -> None:
    """Write a model with a method for other software."""
    require_target(target)
    config, _ = inspection.look(model)
    entry = recorded(config)
    chosen = method or (entry["method"] if entry else None)
    if chosen is None:
        raise ValueError(f"{model} was saved without a scheme: give one, such as --method yarn:factor=4.")
    create(chosen)
    tokenizer = None
    if target == "transformers":
        if Path(model).exists() and folder.resolve() == Path(model).resolve():
            raise ValueError(f"{folder} is the model itself, which would be overwritten: give another folder.")
        patched, tokenizer = api.from_pretrained(model, dtype="auto"), _tokenizer(model)
    else:  # the weights stay as they are
        patched = inspection.weightless_whole(config).root
    api.patch(patched, chosen, tokenizer=tokenizer)
    typer.echo(str(export(patched, folder, target)))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _tokenizer(model: str) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):  # a model without one
        return None


def _parameters(method: type[Method]) -> str:
    parts = []
    for field in fields(method):
        default = field.default if field.default is not MISSING else None
        parts.append(field.name if default is None else f"{field.name}={default}")
    return ", ".join(parts)


def _traits(method: type[Method]) -> list[str]:
    traits = method.traits
    return [
        traits.acts_on,
        "relative" if traits.relative else "absolute",
        "learned" if traits.learned else "designed",
        _yes(traits.symmetric),
        _yes(traits.monotone),
        _yes(traits.translation_invariant),
        _yes(traits.keeps_stock_kernels),
        _yes(traits.needs_training),
        _yes(traits.reads_past_trained_length),
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _show(content: RenderableType) -> None:
    Console(width=None if sys.stdout.isatty() else 200).print(content)
