"""`python -m eval gain`."""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from eval import data, models, report
from eval.commands import (
    CHECK,
    Check,
    Device,
    DType,
    Lengths,
    ModelName,
    PosEncs,
    Root,
    cells,
    console,
    file_manifest,
    identity,
    progress,
    sha256,
)
from eval.gain import Averages, Gain, Reading, default_stride, full_losses, near_losses, near_windows
from eval.key_tokens import align
from eval.results import Results

BANDS = 32  # of the gain-by-position curve
Reader = tuple[Any, Any, str]  # a model, its tokenizer, and the model's name
Keys = Callable[[str, int], torch.Tensor | None]  # text and length to which scored tokens are key tokens


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = (models.NONE,),
    lengths: Lengths = ("4096",),
    text: Annotated[
        list[str], typer.Option(help=f"A file, or one of {', '.join(data.text_names())}. Repeat for several.")
    ] = ("alice",),
    near: Annotated[int, typer.Option(help="Tokens that are seen at least where not all are.")] = 1024,
    stride: Annotated[int | None, typer.Option(help="So many more are seen at most. Default: near / 4.")] = None,
    evaluator: Annotated[
        str | None, typer.Option(help="Model that says which tokens are key tokens of LongPPL. Default: --model.")
    ] = None,
    evaluator_posenc: Annotated[
        str, typer.Option(help="The evaluator's encoding; past its trained length it needs one.")
    ] = models.NONE,
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    check: Check = CHECK,
    results: Root = "results",
) -> None:
    """What context farther back than --near tokens is worth, by position and by distance, and LongPPL.

    Example: python -m eval gain --posenc none --posenc yarn:factor=2 --lengths 16384 --evaluator-posenc yarn:factor=2
    """
    sizes = models.numbers(lengths)
    _check(sizes, near, stride, text)
    loaded, tokenizer = models.load(model, dtype, device)
    judge = None if evaluator is None else (*models.load(evaluator, dtype, device), evaluator)
    found = run(loaded, tokenizer, model, posenc, sizes, text, near=near, stride=stride, evaluator=judge,
        evaluator_posenc=evaluator_posenc, batch_size=batch_size, root=results)  # fmt: skip
    file_manifest(found, loaded, tokenizer, posenc, sizes, check)


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    lengths: Sequence[int],
    texts: Sequence[str],
    *,
    near: int = 1024,
    stride: int | None = None,
    evaluator: Reader | None = None,
    evaluator_posenc: str = models.NONE,
    batch_size: int = 1,
    root: str = "results",
) -> Results:
    """Gain and LongPPL of the first tokens of each text, the same tokens under every encoding.

    Args:
        lengths: tokens of full context.
        evaluator: by default this model. Another is filed in a folder of its own, once for all that it judges.
        evaluator_posenc: under which the evaluator reads.
    """
    stride = default_stride(near) if stride is None else stride
    _check(lengths, near, stride, texts)
    names = models.full_names(model, posencs, lengths)
    own, judge = (model, tokenizer, model_name), evaluator or (model, tokenizer, model_name)
    (judged_by,) = models.full_names(judge[0], [evaluator_posenc])
    asked = {text: sorted(lengths) for text in texts}
    _documents(tokenizer, asked, near + stride)
    read = functools.partial(_read, near=near, stride=stride, batch_size=batch_size, root=root)
    if evaluator is None:
        results = read(own, list(dict.fromkeys([*names, judged_by])), asked)
        keys = keys_of(results, judged_by)
    else:
        keys = _judge(judge, judged_by, tokenizer, asked, near + stride, read)
        results = read(own, names, asked)
    found, trained = scores_of(results, keys), results.config["trained_length"]
    by = {"model": judge[2], "posenc": judged_by, "trained_length": models.trained_length(judge[0])}
    results.write("scores.json", {"trained_length": trained, "evaluator": by, "scores": found})
    _show(results, [s for s in found if s["posenc"] in names and s["length"] in lengths], by)
    return results


def scores_of(results: Results, keys: Keys | None = None) -> list[dict[str, Any]]:
    """One dictionary per encoding and length of a folder, where all of it is read; losses and gains in nats.

    Args:
        keys: the evaluator's; by default the unpatched model is the evaluator, out of the same folder.
    """
    keys, trained, scores = keys or keys_of(results, models.NONE), results.config["trained_length"], []
    for posenc, length in cells(results):
        readings = {text: reading(results, posenc, length, text) for text in results.config["text_sha256"]}
        if None in readings.values():
            continue
        found, masks = Gain(list(readings.values())), [keys(text, length) for text in readings]
        known = None not in masks
        (_, _, _, within), (_, _, beyond, past) = found.by_position(
            [0, trained or length, max(length, trained or 0) + 1]
        )
        scores.append({
            "posenc": posenc, "length": length, "tokens": len(found.gains), "loss": found.loss, "gain": found.mean,
            "gain_within": within, "gain_beyond": past, "tokens_beyond": beyond, "share": found.share(),
            "key_tokens": sum(int(mask.sum()) for mask in masks) if known else None,
            "long_perplexity": found.long_perplexity(masks) if known else None,
            "by_position": _named(found.by_position(sorted({length * band // BANDS for band in range(BANDS + 1)}))),
            "by_distance": _named(found.by_distance(_doublings(found.readings[0].first, length))),
            "seconds": _seconds(results, posenc, length),
        })  # fmt: skip
    return scores


def keys_of(results: Results, posenc: str) -> Keys:
    """Key tokens that the model of a folder finds under an encoding; None for what it has not read."""

    def keys(text: str, length: int) -> torch.Tensor | None:
        found = reading(results, posenc, length, text)
        return None if found is None else found.keys

    return keys


def _judge(evaluator: Reader, posenc: str, tokenizer: Any, asked: dict[str, list[int]], first: int,
           read: Callable[..., Results]) -> Keys:  # fmt: skip
    """Another model reads the same characters; its key tokens, as tokens of `tokenizer`."""
    contents = {text: data.text(text) for text in asked}
    if all(models.encode(tokenizer, content) == models.encode(evaluator[1], content) for content in contents.values()):
        return keys_of(read(evaluator, [posenc], asked), posenc)
    aligned = {text: align(evaluator[1], tokenizer, content) for text, content in contents.items()}
    lengths = {text: sorted({aligned[text].covering(length) for length in asked[text]}) for text in asked}
    keys = keys_of(read(evaluator, [posenc], lengths), posenc)

    def carried(text: str, length: int) -> torch.Tensor | None:
        found = keys(text, aligned[text].covering(length))
        if found is None:
            return None
        unscored = torch.zeros(first, dtype=torch.bool)
        return aligned[text].carry_over(torch.cat([unscored, found]))[first:length]

    return carried


def _read(reader: Reader, posencs: Sequence[str], asked: dict[str, list[int]], *, near: int, stride: int,
          batch_size: int, root: str) -> Results:  # fmt: skip
    """Files a model's losses: those of near windows once for all lengths."""
    model, tokenizer, name = reader
    documents = _documents(tokenizer, asked, near + stride)
    parameters = {
        **identity(model, name, tokenizer),
        "text": "+".join(documents),
        "text_sha256": {text: sha256(document.numpy().tobytes()) for text, document in documents.items()},
        "near": near,
        "stride": stride,
        "head": len(models.encode(tokenizer, "")),
        "trained_length": models.trained_length(model),
    }
    shown, key = ("model", "text", "near", "dtype"), ("posenc", "part", "length", "text", "start")
    results = Results(root, "gain", parameters, shown, key)
    with progress() as bar:
        for posenc in posencs:
            with models.applied(model, posenc):
                for text, document in documents.items():
                    place = {"posenc": posenc, "text": text}
                    _read_document(results, bar, model, document, place, asked[text], batch_size)
    results.complete()
    return results


def _read_document(results: Results, bar: Progress, model: Any, document: torch.Tensor, place: dict[str, str],
                   lengths: Sequence[int], batch_size: int) -> None:  # fmt: skip
    near, stride, head = (results.config[name] for name in ("near", "stride", "head"))
    windows = [window for window in near_windows(len(document), near, stride) if window.first < max(lengths)]
    close, full = {**place, "part": "near", "length": near + stride}, {**place, "part": "full", "start": 0}
    left = [window for window in windows if results.lacks(**close, start=window.start)]
    unread = [length for length in lengths if results.lacks(**full, length=length)]
    total, done = len(windows) + len(lengths), len(windows) - len(left) + len(lengths) - len(unread)
    task = bar.add_task(f"{place['posenc']}, {Path(place['text']).name}", total=total, completed=done)

    def file(sample: dict[str, Any], losses: torch.Tensor) -> None:
        seconds = round(time.perf_counter() - began, 2)
        results.add({**sample, "seconds": seconds, "losses": [round(loss, 5) for loss in losses.tolist()]})
        bar.advance(task)

    began = time.perf_counter()
    for scored in near_losses(model, document, left, head, batch_size):
        file({**close, "start": scored.window.start, "first": scored.window.first}, scored.losses)
        began = time.perf_counter()
    for length in unread:
        began, first = time.perf_counter(), near + stride
        losses = full_losses(model, document, length, first)
        file({**full, "length": length, "first": first, "ids": document[:length].tolist()}, losses)


def reading(results: Results, posenc: str, length: int, text: str) -> Reading | None:
    """What the samples say of one text at one length; None where some are missing."""
    full = results.select(posenc=posenc, part="full", length=length, text=text)
    if not full:
        return None
    near = {sample["start"]: sample["losses"] for sample in results.select(posenc=posenc, part="near", text=text)}
    starts = [window.start for window in near_windows(length, results.config["near"], results.config["stride"])]
    if not near.keys() >= set(starts):
        return None
    losses = [loss for start in starts for loss in near[start]][: len(full[0]["losses"])]
    return Reading(torch.tensor(full[0]["ids"]), torch.tensor(losses), torch.tensor(full[0]["losses"]))


def _documents(tokenizer: Any, asked: dict[str, list[int]], first: int) -> dict[str, torch.Tensor]:
    documents = {text: torch.tensor(models.encode(tokenizer, data.text(text))) for text in asked}
    for text, lengths in asked.items():
        if len(documents[text]) < max(lengths):
            raise ValueError(f"{max(lengths)} tokens are asked for, but {len(documents[text])} of {text} are there: "
                             f"give a shorter length or a longer text")  # fmt: skip
        if min(lengths) <= first:
            raise ValueError(f"an evaluator reads as much of {text} in {min(lengths)} tokens, no more than near + "
                             f"stride = {first}: give a longer length, or less near")  # fmt: skip
    return documents


def _check(lengths: Sequence[int], near: int, stride: int | None, texts: Sequence[str]) -> None:
    """What can be wrong without a model."""
    for length in lengths:
        near_windows(length, near, stride)
    for text in texts:
        data.text(text)


def _seconds(results: Results, posenc: str, length: int) -> float:
    samples = results.select(posenc=posenc)
    used = [s for s in samples if (s["length"] == length if s["part"] == "full" else s["first"] < length)]
    return round(sum(sample["seconds"] for sample in used), 1)


def _named(bands: Averages) -> list[dict[str, Any]]:
    return [dict(zip(("low", "high", "tokens", "gain"), band, strict=True)) for band in bands]


def _doublings(first: int, length: int) -> list[int]:
    """Distances: 0, then all that near context shows for sure or in part, then twice as far each time."""
    edges = [0, 1, first]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return edges


def _show(results: Results, scores: list[dict[str, Any]], by: dict[str, Any]) -> None:
    config, trained = results.config, results.config["trained_length"]
    title = f"Gain from context farther back than {config['near']:,} tokens of {config['text']}, nats per token"
    console.print(report.gain_table(title, scores))
    longest = max(found["length"] for found in scores)
    last = {found["posenc"]: found for found in scores if found["length"] == longest}
    title = f"Gain by how far back the token last occurred, {longest:,} tokens"
    console.print(report.distance_table(title, {posenc: found["by_distance"] for posenc, found in last.items()}))
    for length in sorted({found["length"] for found in scores if found["key_tokens"] == 0}):
        console.print(f"No key tokens in {length:,}, so no LongPPL: no loss of {by['model']} under {by['posenc']} "
                      f"falls by more than 2 nats to less than 2", soft_wrap=True)  # fmt: skip
    if by["posenc"] == models.NONE and by["trained_length"] and longest > by["trained_length"]:
        console.print(f"The evaluator reads past its trained length, {by['trained_length']:,}, with no other "
                      f"encoding: it may miss key tokens. See --evaluator-posenc", soft_wrap=True)  # fmt: skip
    curves = {posenc: found["by_position"] for posenc, found in last.items()}
    report.plot_bands(results.folder / "plot.png", curves, trained, "gain")
    console.print(f"Samples, scores and plot.png in {results.folder}", soft_wrap=True, markup=False)
