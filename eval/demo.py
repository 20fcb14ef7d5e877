"""`python -m eval demo`: what happens past the trained length, and how little it takes to go on reading."""

import time
from typing import Annotated

import typer

from eval import data, models
from eval.commands import Device, ModelName, PosEncs, Root, compare, console, tasks

POSENCS = (models.NONE, "pi:factor=2", "yarn:factor=2", "dynamic_ntk")


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = POSENCS,
    text: Annotated[str, typer.Option(help="A file, or a name as for `perplexity`.")] = "alice",
    length: Annotated[
        int | None, typer.Option(help="Tokens of text, question and answer. Default: twice the trained length.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="As for `perplexity`. Default: bfloat16, or float32 on a CPU slower in it.")
    ] = None,
    device: Device = "auto",
    results: Root = "results",
) -> None:
    """Loss by position and an answer from afar, unpatched and patched: about five minutes on two CPU cores.

    It is `compare` with the task `recall`: a note with a pass key is hidden in a text, every encoding reads the text
    once, and is then asked for the key.
    """
    began = time.perf_counter()
    console.print(f"Loading {model} (the first time it is downloaded and converted) …")
    data.text(text)
    loaded, tokenizer = models.load(model, dtype or models.quickest_dtype(device), device)
    if length is None:
        trained = models.trained_length(loaded)
        if trained is None:
            raise ValueError(f"the configuration of {model} has no trained length: give --length")
        length = 2 * trained
    compare.run(loaded, tokenizer, model, posenc, tasks.Options([tasks.RECALL], [length], text), root=results)
    console.print(f"{time.perf_counter() - began:.0f} s")
