"""`python -m eval speed`."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from eval import models
from eval.commands import Device, DType, Lengths, ModelName, PosEncs, Root, console, identity
from eval.results import Results
from eval.speed import speed


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = ("yarn:factor=2", "dynamic_ntk"),
    lengths: Lengths = ("4096",),
    rounds: Annotated[int, typer.Option(help="Measurements of each encoding, taken in turn.")] = 5,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    results: Root = "results",
) -> None:
    """Time of encodings against the unpatched model, in one run: medians of ratios.

    Example: python -m eval speed --posenc yarn:factor=2 --posenc dynamic_ntk --lengths 4096,16384 --rounds 3
    """
    network, tokenizer = models.load(model, dtype, device)
    names = [name for name in models.full_names(network, posenc) if name != models.NONE]
    parameters = {**identity(network, model, tokenizer), "rounds": rounds}
    folder = Results(results, "speed", parameters, ("model", "dtype", "rounds"), ("posenc", "length", "part"))
    table = Table("encoding", "tokens", "part", "seconds", "time / unpatched", title="Cost, medians in one run")
    for cost in speed(network, names, models.numbers(lengths), rounds):
        if not folder.has(posenc=cost.posenc, length=cost.length, part=cost.part):
            folder.add(asdict(cost))
        table.add_row(cost.posenc, f"{cost.length:,}", cost.part, f"{cost.seconds:.3f}", f"{cost.ratio:.3f}")
    console.print(table)
    console.print(f"Samples in {folder.folder}", soft_wrap=True)
