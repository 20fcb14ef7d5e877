"""`python -m eval demo`: what happens past the trained length, and how little it takes to go on reading.

One forward per encoding over a book gives the loss by position, within the trained length and beyond. Then a note is
hidden in the book and the model, unpatched and with YaRN, is asked for it from farther away than it was trained for.
"""

import random
import time
from typing import Annotated, Any

import typer
from rich.table import Table

from eval import data, models
from eval.commands import Device, DType, ModelName, PosEncs, Root, console, perplexity, progress
from eval.passkey import KEY, QUESTION, Prompt, answer_tokens, ask

POSENCS = (models.NONE, "pi:factor=2", "yarn:factor=2", "dynamic_ntk")
DEPTH = 0.3


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = POSENCS,
    text: Annotated[str, typer.Option(help="A file, or a name as for `perplexity`.")] = "alice",
    length: Annotated[
        int | None,
        typer.Option(help="Tokens to read. Default: twice the trained length, on a CPU 1.5 times, to keep it short."),
    ] = None,
    ask_with: Annotated[list[str], typer.Option(help="Encodings that are asked the question.")] = (
        models.NONE,
        "yarn:factor=2",
    ),
    dtype: DType = "bfloat16",
    device: Device = "auto",
    results: Root = "results",
) -> None:
    """Loss by position and one answer, within the trained length and beyond: about five minutes on two CPU cores."""
    began = time.perf_counter()
    console.print(f"Loading {model} (the first time it is downloaded and converted) …")
    loaded, tokenizer = models.load(model, dtype, device)
    trained = models.trained_length(loaded)
    if length is None:
        if trained is None:
            raise ValueError(f"the configuration of {model} has no trained length: give --length")
        length = trained * (3 if loaded.device.type == "cpu" else 4) // 2
    found = perplexity.run(loaded, tokenizer, model, posenc, [length], [text], mode="prefix", root=results)
    prompt = hide(tokenizer, data.text(text), length)
    console.print(_answers(loaded, tokenizer, prompt, ask_with))
    console.print(f"{time.perf_counter() - began:.0f} s. The plot is {found.folder / 'plot.png'}", soft_wrap=True)


def hide(tokenizer: Any, text: str, length: int, depth: float = DEPTH, seed: int = 0) -> Prompt:
    """A question of `length` tokens, answer included, about a note between two paragraphs of a text.

    Raises:
        ValueError: the text is too short.
    """
    key = str(random.Random(seed).randrange(10_000, 100_000))
    note, question = f"{KEY.format(key=key)}\n\n", models.encode(tokenizer, QUESTION)
    room = length - answer_tokens(len(key)) - len(question) - len(models.encode(tokenizer, note))
    book = models.encode(tokenizer, text)
    if len(book) < room:
        raise ValueError(f"the text has {len(book)} tokens, {room} are needed: give a longer --text or less --length")
    story = tokenizer.decode(book[:room], skip_special_tokens=True)
    place = story.find("\n\n", round(depth * len(story))) + 2
    before = models.encode(tokenizer, story[:place])
    ids = models.encode(tokenizer, story[:place] + note + story[place:] + QUESTION)
    return Prompt(length, depth, 0, key, len(before), ids)


def _answers(model: Any, tokenizer: Any, prompt: Prompt, posencs: list[str]) -> Table:
    distance = len(prompt.ids) - prompt.key_position
    table = Table(
        title=f"A pass key is hidden in the text, {distance:,} tokens before the question: {prompt.key}",
        title_justify="left",
    )
    for column in ("posenc", "answer", ""):
        table.add_column(column, overflow="fold")
    with progress() as bar:
        for name in bar.track(models.full_names(model, posencs), description=f"asking at {len(prompt.ids):,} tokens"):
            with models.applied(model, name):
                answer = ask(model, tokenizer, prompt)
            verdict = "[green]right[/]" if answer.correct else "[red]wrong[/]"
            table.add_row(name, repr(answer.answer)[1:-1], verdict)
    return table
