"""`python -m eval passkey`."""

import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from eval import models, report
from eval.commands import Device, DType, Lengths, ModelName, PosEncs, Root, cells, console, identity, progress
from eval.passkey import passkey
from eval.results import Results
from eval.scores import effective_lengths, wilson


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = (models.NONE,),
    lengths: Lengths = ("2048,4096",),
    depths: Annotated[list[str], typer.Option(help="Places of the key, 0 (start) to 1 (end).")] = (
        "0,0.25,0.5,0.75,1",
    ),
    trials: Annotated[int, typer.Option(help="Prompts per length and depth.", min=1)] = 4,
    digits: Annotated[int, typer.Option(help="Of the key.")] = 5,
    seed: int = 0,
    share: Annotated[
        bool, typer.Option(help="Read the common start of prompts once: about half the tokens, one more cache.")
    ] = True,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    results: Root = "results",
) -> None:
    """Passkey retrieval by length and depth.

    Example: python -m eval passkey --posenc none --posenc yarn:factor=2 --lengths 4096,12288 --depths 0.1,0.5,0.9
    """
    loaded, tokenizer = models.load(model, dtype, device)
    run(loaded, tokenizer, model, posenc, models.numbers(lengths), models.numbers(depths, float), trials=trials,
        digits=digits, seed=seed, share=share, root=results)  # fmt: skip


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    trials: int = 4,
    digits: int = 5,
    seed: int = 0,
    share: bool = True,
    root: str = "results",
) -> Results:
    """Passkey retrieval under several encodings; every cell of length and depth gets `trials` prompts.

    Args:
        share: reads the common start of prompts once, under encodings for which that makes no difference.
    """
    names, trained = models.full_names(model, posencs), models.trained_length(model)
    grid = {"depths": list(depths), "trials": trials, "digits": digits, "seed": seed}
    parameters = {**identity(model, model_name, tokenizer), **grid, "share": share}
    shown, key = ("model", "digits", "seed", "dtype"), ("posenc", "length", "depth", "trial")
    results = Results(root, "passkey", parameters, shown, key)
    with progress() as bar:
        for name in names:
            with models.applied(model, name):
                sharing = share and models.reads_in_pieces(model)
                if share and not sharing:
                    console.print(f"{name} answers otherwise when it reads in pieces: every prompt is read for itself")
                for length in lengths:
                    done = len(results.select(posenc=name, length=length))
                    task = bar.add_task(f"{name} at {length:,}", total=len(depths) * trials, completed=done)
                    wanted = functools.partial(_is_missing, results, name)
                    for answer in passkey(
                        model, tokenizer, [length], log_probs=True, share=sharing, wanted=wanted, **grid
                    ):
                        results.add({"posenc": name, **asdict(answer)})
                        bar.advance(task)
    results.complete()
    found = scores_of(results, depths, trials)
    effective = {posenc: effective_lengths(by_length) for posenc, by_length in _by_posenc(found).items()}
    results.write("scores.json", {"trained_length": trained, "scores": found, "effective_length": effective})
    _show(results, [s for s in found if s["posenc"] in names and s["length"] in lengths], trained, trials)
    return results


def scores_of(results: Results, depths: Sequence[float], trials: int) -> list[dict[str, Any]]:
    """One dictionary per encoding and length of a folder, where all prompts are answered; accuracy in percent.

    Cells are of one size, so the accuracy of a length is the mean over its depths and over its prompts alike.
    """
    scores = []
    for posenc, length in cells(results):
        samples = results.select(posenc=posenc, length=length)
        if len(samples) < len(depths) * trials:
            continue
        by_depth = [[sample for sample in samples if sample["depth"] == depth] for depth in depths]
        scores.append({
            "posenc": posenc, "length": length, **_rate(samples),
            "by_depth": [{"depth": depth, **_rate(cell)} for depth, cell in zip(depths, by_depth, strict=True)],
            "seconds": round(sum(sample["seconds"] for sample in samples), 1),
        })  # fmt: skip
    return scores


def _rate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy and its 95 % interval, in percent, and the mean log-probability of the keys' digits in nats."""
    correct, count = sum(sample["correct"] for sample in samples), len(samples)
    interval = [round(100 * end, 1) for end in wilson(correct, count)]
    log_prob = sum(sum(sample["log_probs"]) / len(sample["log_probs"]) for sample in samples) / count
    return {
        "accuracy": 100 * correct / count, "correct": correct, "prompts": count, "interval": interval,
        "log_prob": log_prob,
    }  # fmt: skip


def _by_posenc(scores: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Accuracies by length of every encoding."""
    found: dict[str, dict[int, float]] = {}
    for score in scores:
        found.setdefault(score["posenc"], {})[score["length"]] = score["accuracy"]
    return found


def _is_missing(results: Results, posenc: str, length: int, depth: float, trial: int) -> bool:
    return results.lacks(posenc=posenc, length=length, depth=depth, trial=trial)


def _show(results: Results, scores: list[dict[str, Any]], trained: int | None, trials: int) -> None:
    for found in scores:
        low, high = found["interval"]
        found["text"] = f"{found['accuracy']:.0f}% ({found['correct']}/{found['prompts']}, {low:.0f}-{high:.0f})"
    depths = results.config["depths"]
    title = f"Passkey, {len(depths)} depths, {trials} prompts each, per length, with 95% intervals"
    console.print(report.length_table(title, scores, "accuracy", trained, "higher", mean=True))
    losses = [{**found, "loss": -found["log_prob"], "text": f"{-found['log_prob']:.2f}"} for found in scores]
    title = "Loss of the key, nats per token"
    console.print(report.length_table(title, losses, "loss", trained, "lower"))
    maps, lengths = {}, sorted({found["length"] for found in scores})
    for name in dict.fromkeys(found["posenc"] for found in scores):
        columns = [next(f for f in scores if f["posenc"] == name and f["length"] == length) for length in lengths]
        maps[name] = [[column["by_depth"][row] for column in columns] for row in range(len(depths))]
    effective = {posenc: effective_lengths(by_length) for posenc, by_length in _by_posenc(scores).items()}
    console.print(report.effective_table("Longest of these lengths that is still good, by rule", effective))
    report.plot_maps(results.folder / "plot.png", maps, lengths, depths, trained)
    console.print(f"Samples, scores and plot.png in {results.folder}", soft_wrap=True)
