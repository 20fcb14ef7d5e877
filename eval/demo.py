"""`python -m eval demo`: what happens past the trained length, and how little it takes to go on reading.

A note with a pass key is hidden in a text of twice the trained length. Every encoding reads the text once: that gives
the loss by position, within the trained length and beyond, and a cache, on top of which the model is asked for the key
from farther away than it was trained for. The key follows from a fixed seed; whatever comes out is shown.
"""

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from eval import data, models, report
from eval.commands import Device, ModelName, PosEncs, Root, console, identity, progress, sha256
from eval.commands.perplexity import bands
from eval.haystack import Prompt
from eval.likelihood import token_losses
from eval.passkey import KEY, QUESTION, SCORING, answer_tokens
from eval.perplexity import Perplexity, Score, Window
from eval.results import Results
from eval.retrieval import ask, new_cache

POSENCS = (models.NONE, "pi:factor=2", "yarn:factor=2", "dynamic_ntk")
DEPTH = 0.3  # of the note in the text: so the question comes 1.4 trained lengths after it


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
    """Loss by position and an answer from afar, unpatched and patched: about five minutes on two CPU cores."""
    began = time.perf_counter()
    console.print(f"Loading {model} (the first time it is downloaded and converted) …")
    loaded, tokenizer = models.load(model, dtype or models.quickest_dtype(device), device)
    names, trained = models.full_names(loaded, posenc), models.trained_length(loaded)
    if length is None:
        if trained is None:
            raise ValueError(f"the configuration of {model} has no trained length: give --length")
        length = 2 * trained
    prompt, read = hide(tokenizer, data.text(text), length)
    parameters = {**identity(loaded, model, tokenizer), "text": text, "length": length, "read": read}
    parameters["prompt_sha256"] = sha256(json.dumps(prompt.ids).encode())
    found = Results(results, "demo", parameters, ("model", "text", "length", "dtype"), ("posenc",))
    with progress() as bar:
        missing = [name for name in names if not found.has(posenc=name)]
        task = bar.add_task("", total=len(missing) * len(_layers(loaded)))
        for name in missing:
            bar.update(task, description=f"{name} reads {read:,} tokens")
            with models.applied(loaded, name):
                sample = read_and_answer(loaded, tokenizer, prompt, read, lambda: bar.advance(task))
            found.add({"posenc": name, **sample})
    _show([found.select(posenc=name)[0] for name in names], prompt, trained, found.folder / "plot.png")
    console.print(f"{time.perf_counter() - began:.0f} s. Samples and plot.png in {found.folder}", soft_wrap=True)


def hide(tokenizer: Any, text: str, length: int, depth: float = DEPTH, seed: int = 0) -> tuple[Prompt, int]:
    """A text with a note between two of its paragraphs and a question about it, and how many tokens are the text.

    Args:
        length: tokens of text, question and answer.
        depth: where the note stands in what is read of the text, 0 to 1.

    Raises:
        ValueError: the text, or the length, is too short.
    """
    key = str(random.Random(seed).randrange(10_000, 100_000))
    question = models.encode(tokenizer, QUESTION, start=False)
    read = length - len(question) - answer_tokens(len(key))
    start = tokenizer.decode(models.encode(tokenizer, text)[: max(0, round(depth * read))], skip_special_tokens=True)
    gap = text.rfind("\n\n", 0, len(start))
    place = gap + 2 if gap >= 0 else len(start)
    before = models.encode(tokenizer, text[:place])
    note = models.encode(tokenizer, f"{KEY.format(key=key)}\n\n", start=False)
    ids = before + note + models.encode(tokenizer, text[place:], start=False)
    if read < len(before) + len(note):
        raise ValueError(f"length {length} is too short for the note and the question: give a longer --length")
    if len(ids) < read:
        raise ValueError(f"the text has {len(ids)} tokens, {read} are needed: give a longer --text or less --length")
    return Prompt(length, depth, 0, [key], len(before), ids[:read] + question, [], answer_tokens(len(key))), read


def read_and_answer(
    model: Any, tokenizer: Any, prompt: Prompt, read: int, after_layer: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Losses of the first `read` tokens of a prompt and the answer to it, from one pass over the text.

    Args:
        after_layer: called after every layer of that pass.
    """
    began = time.perf_counter()
    cache = new_cache(model)
    hooks = [layer.register_forward_hook(lambda *_: after_layer()) for layer in _layers(model)]
    try:
        losses = token_losses(model, torch.tensor([prompt.ids[:read]]), cache=cache)[0]
    finally:
        for hook in hooks:
            hook.remove()
    answer = asdict(ask(model, tokenizer, prompt, cache))
    return {
        **answer,
        "seconds": round(time.perf_counter() - began, 2),
        "losses": [round(x, 5) for x in losses.tolist()],
    }


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _show(samples: list[dict[str, Any]], prompt: Prompt, trained: int | None, path: Path) -> None:
    curves = {}
    for sample in samples:
        score = Score(Window(0, 0, len(sample["losses"]) + 1, 1), torch.tensor(sample["losses"]))
        curves[sample["posenc"]] = bands(Perplexity([score]), prompt.length)
    console.print(report.band_table("Loss by position, nats per token", curves, trained))
    report.plot_bands(path, curves, trained)
    distance = len(prompt.ids) - prompt.key_position
    table = Table(
        title=f"What was the pass key, {distance:,} tokens ago? {prompt.references[0]}", title_justify="left"
    )
    for column in ("posenc", "answer", ""):
        table.add_column(column, overflow="fold")
    for sample in samples:
        verdict = "[green]right[/]" if sample["correct"][SCORING] else "[red]wrong[/]"
        table.add_row(sample["posenc"], escape(repr(sample["answer"])[1:-1]), verdict)
    console.print(table)
