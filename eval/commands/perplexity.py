"""`python -m eval perplexity`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from eval import data, models, report
from eval.commands import Device, DType, Lengths, ModelName, PosEncs, Root, cells, console, identity, progress, sha256
from eval.perplexity import MODES, Perplexity, Score, Window, plan, score
from eval.results import Results

BANDS = 96  # of the loss-by-position curve: divides by 6, 8 and 12, as the table may need


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = (models.NONE,),
    lengths: Lengths = ("2048,4096",),
    text: Annotated[
        list[str], typer.Option(help=f"A file, or one of {', '.join(data.text_names())}. Repeat for several.")
    ] = ("alice",),
    mode: Annotated[str, typer.Option(help=f"One of {', '.join(MODES)}.")] = "sliding",
    stride: Annotated[int | None, typer.Option(help="Of sliding windows. Default: half the length.")] = None,
    tokens: Annotated[int, typer.Option(help="How much of each text is scored in sliding mode.")] = 16384,
    batch_size: int = 1,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    results: Root = "results",
) -> None:
    """Perplexity and loss by position, within the trained length and beyond it.

    Example: python -m eval perplexity --posenc none --posenc yarn:factor=2 --lengths 4096,16384 --mode prefix
    """
    loaded, tokenizer = models.load(model, dtype, device)
    run(loaded, tokenizer, model, posenc, models.numbers(lengths), text, mode=mode, stride=stride, tokens=tokens,
        batch_size=batch_size, root=results)  # fmt: skip


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    lengths: Sequence[int],
    texts: Sequence[str],
    *,
    mode: str = "sliding",
    stride: int | None = None,
    tokens: int = 16384,
    batch_size: int = 1,
    root: str = "results",
) -> Results:
    """Perplexity of texts under several encodings and context lengths.

    Args:
        model_name: as results are filed.
        lengths: windows (`sliding`) or prefixes (`prefix`) in tokens.
        tokens: how much of each text is scored in `sliding` mode, the same for all lengths.
    """
    names, trained = models.full_names(model, posencs), models.trained_length(model)
    documents = {name: torch.tensor(models.encode(tokenizer, data.text(name))) for name in texts}
    parameters = {
        **identity(model, model_name, tokenizer),
        "text": "+".join(texts),
        "text_sha256": {name: sha256(document.numpy().tobytes()) for name, document in documents.items()},
        "mode": mode,
        "stride": stride,
        "tokens": tokens if mode == "sliding" else None,
    }
    shown, key = ("model", "text", "mode", "dtype"), ("posenc", "length", "text", "start")
    if mode == "sliding":
        documents = {name: document[:tokens] for name, document in documents.items()}
    _check_lengths(documents, lengths)

    def windows_at(length: int) -> list[Window]:
        return plan([len(document) for document in documents.values()], length, stride, mode)

    plans = {length: windows_at(length) for length in lengths}
    results = Results(root, "perplexity", parameters, shown, key)
    with progress() as bar:
        for name in names:
            with models.applied(model, name):
                for length, windows in plans.items():
                    _score_windows(results, bar, model, documents, (name, length), windows, batch_size)
    found = scores_of(results, windows_at)
    results.write("scores.json", {"trained_length": trained, "scores": found})
    _show(results, [s for s in found if s["posenc"] in names and s["length"] in lengths], trained)
    return results


def scores_of(results: Results, windows_at: Callable[[int], list[Window]]) -> list[dict[str, Any]]:
    """One dictionary per encoding and length of a folder, where all windows are scored."""
    scores = []
    for posenc, length in cells(results):
        samples = results.select(posenc=posenc, length=length)
        if len(samples) < len(windows_at(length)):
            continue
        windows = [Window(0, sample["start"], sample["end"], sample["first"]) for sample in samples]
        losses = [torch.tensor(sample["losses"]) for sample in samples]
        found = Perplexity([Score(*pair) for pair in zip(windows, losses, strict=True)])
        scores.append({
            "posenc": posenc, "length": length, "perplexity": found.perplexity, "loss": found.loss,
            "scored_tokens": found.scored, "windows": len(samples),
            "seconds": round(sum(sample["seconds"] for sample in samples), 1),
            "by_position": bands(found, length),
        })  # fmt: skip
    return scores


def bands(found: Perplexity, length: int) -> list[dict[str, Any]]:
    """The loss-by-position curve over a length."""
    edges = sorted({length * band // BANDS for band in range(BANDS + 1)})
    return [asdict(band) for band in found.by_position(edges)]


def _score_windows(results: Results, bar: Progress, model: Any, documents: dict[str, torch.Tensor],
                   cell: tuple[str, int], windows: list[Window], batch_size: int) -> None:  # fmt: skip
    (posenc, length), texts = cell, list(documents)
    place = {"posenc": posenc, "length": length}
    missing = [w for w in windows if not results.has(**place, text=texts[w.document], start=w.start)]
    done = len(windows) - len(missing)
    task = bar.add_task(f"{posenc} at {length:,}", total=len(windows), completed=done)
    began = time.perf_counter()
    for scored in score(model, list(documents.values()), missing, batch_size):
        window = asdict(scored.window)
        sample = {**place, "text": texts[window.pop("document")], **window}
        sample["seconds"] = round(time.perf_counter() - began, 2)
        results.add({**sample, "losses": [round(loss, 5) for loss in scored.losses.tolist()]})
        bar.advance(task)
        began = time.perf_counter()


def _show(results: Results, scores: list[dict[str, Any]], trained: int | None) -> None:
    for found in scores:
        found["text"] = f"{found['perplexity']:.2f}"
    counts = ", ".join(f"{count:,}" for count in sorted({found["scored_tokens"] for found in scores}))
    title = f"Perplexity ({results.config['mode']}) of {results.config['text']}, {counts} tokens scored"
    console.print(report.length_table(title, scores, "perplexity", trained, "lower"))
    path, longest = results.folder / "plot.png", max(found["length"] for found in scores)
    if results.config["mode"] == "prefix":
        curves = {found["posenc"]: found["by_position"] for found in scores if found["length"] == longest}
        console.print(report.band_table("Loss by position, nats per token", curves, trained))
        report.plot_bands(path, curves, trained)
    else:
        report.plot_lengths(path, scores, "perplexity", trained)
    console.print(f"Samples, scores and plot.png in {results.folder}", soft_wrap=True)


def _check_lengths(documents: dict[str, torch.Tensor], lengths: Sequence[int]) -> None:
    for name, document in documents.items():
        if len(document) < max(lengths):
            raise ValueError(f"{max(lengths)} tokens are asked for, but {len(document)} of {name} are there: give a "
                             f"shorter length, a longer text, or more --tokens")  # fmt: skip
