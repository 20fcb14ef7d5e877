"""What `passkey` and `needle` share: from prompts to a results folder, scores by length and depth, tables and maps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from eval import models, report
from eval.commands import cells, console, identity, progress
from eval.grading import SCORINGS, check_scoring
from eval.haystack import Prompt, check_depth, check_length
from eval.results import Results
from eval.retrieval import Answer, retrieve
from eval.scores import effective_lengths, wilson

Depths = Annotated[list[str], typer.Option(help="Places of what is hidden, 0 (start) to 1 (end).")]
Trials = Annotated[int, typer.Option(help="Prompts per length and depth.", min=1)]
Share = Annotated[
    bool,
    typer.Option(
        help="Read the common start of prompts once: little more than half the tokens of the default grid, for the "
        "memory of one more cache."
    ),
]
Scoring = Annotated[
    str, typer.Option(help=f"What is right: {', '.join(SCORINGS)}. Nothing is asked anew for another.")
]

ALL_DEPTHS = ("0,0.25,0.5,0.75,1",)


def check(lengths: Sequence[int], depths: Sequence[float], trials: int, scoring: str, room: int) -> None:
    """What can be known before a model is loaded.

    Args:
        room: tokens of an answer.

    Raises:
        ValueError: no lengths, depths or trials, a length that leaves no room, a wrong depth or scoring.
    """
    check_scoring(scoring)
    for name, values, example in (("lengths", lengths, "2048,4096"), ("depths", depths, "0,0.5,1")):
        if not values:
            raise ValueError(f"there are no {name}: give some, as in --{name} {example}")
    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    for depth in depths:
        check_depth(depth)
    for length in lengths:
        check_length(length, room)


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    *,
    task: str,
    build: Callable[[int, float, int], Prompt],
    parameters: dict[str, Any],
    shown: Sequence[str],
    scoring: str,
    share: bool,
    root: str,
) -> Results:
    """A task under several encodings; every cell of length and depth gets `trials` prompts.

    Args:
        build: makes the prompt of a length, a depth and a trial, from `parameters`, which with those of the grid tell
            one results folder from another; its name shows those in `shown`.
        share: reads the common start of prompts once, under encodings for which that makes no difference.
    """
    names, trained = models.full_names(model, posencs, lengths), models.trained_length(model)
    for length in lengths:
        build(length, depths[0], 0)  # one that is too short fails before hours are spent on others
    grid = {"depths": list(depths), "trials": trials, **parameters, "share": share}
    key = ("posenc", "length", "depth", "trial")
    results = Results(root, task, {**identity(model, model_name, tokenizer), **grid}, shown, key)
    with progress() as bar:
        for name in names:
            with models.applied(model, name):
                sharing = share and models.reads_in_pieces(model)
                if share and not sharing:
                    console.print(f"{name} answers otherwise when it reads in pieces: every prompt is read for itself")
                for length in lengths:
                    done = len(results.select(posenc=name, length=length))
                    shown_as = bar.add_task(f"{name} at {length:,}", total=len(depths) * trials, completed=done)
                    for answer in _missing(results, name, model, tokenizer, build, length, depths, trials, sharing):
                        results.add({"posenc": name, **asdict(answer)})
                        bar.advance(shown_as)
    results.complete()
    found = scores_of(results, depths, trials, scoring)
    effective = {posenc: effective_lengths(by_length) for posenc, by_length in _by_posenc(found).items()}
    results.write(
        "scores.json",
        {"trained_length": trained, "scoring": scoring, "scores": found, "effective_length": effective},
    )
    _show(results, [s for s in found if s["posenc"] in names and s["length"] in lengths], trained)
    return results


def scores_of(results: Results, depths: Sequence[float], trials: int, scoring: str) -> list[dict[str, Any]]:
    """One dictionary per encoding and length of a folder, where all prompts are answered; accuracy in percent.

    Cells are of one size, so the accuracy of a length is the mean over its depths and over its prompts alike.
    """
    check_scoring(scoring)
    scores = []
    for posenc, length in cells(results):
        samples = results.select(posenc=posenc, length=length)
        if len(samples) < len(depths) * trials:
            continue
        by_depth = [[sample for sample in samples if sample["depth"] == depth] for depth in depths]
        scores.append({
            "posenc": posenc, "length": length, "scoring": scoring, **_rate(samples, scoring),
            "by_scoring": {other: _rate(samples, other)["accuracy"] for other in SCORINGS},
            "by_depth": [
                {"depth": depth, **_rate(cell, scoring)} for depth, cell in zip(depths, by_depth, strict=True)
            ],
            "truncated": sum(sample["truncated"] for sample in samples),
            "seconds": round(sum(sample["seconds"] for sample in samples), 1),
        })  # fmt: skip
    return scores


def _missing(
    results: Results, posenc: str, model: Any, tokenizer: Any, build: Callable[[int, float, int], Prompt],
    length: int, depths: Sequence[float], trials: int, share: bool,
) -> Iterator[Answer]:  # fmt: skip
    """Answers to the prompts of one length that this process has to ask."""

    def wanted(length: int, depth: float, trial: int) -> bool:
        return results.lacks(posenc=posenc, length=length, depth=depth, trial=trial)

    return retrieve(model, tokenizer, build, [length], depths, trials, log_probs=True, share=share, wanted=wanted)


def _rate(samples: Sequence[dict[str, Any]], scoring: str) -> dict[str, Any]:
    """Accuracy and its 95 % interval, in percent, and the mean log-probability of the right values' digits in nats.

    The interval is Wilson's, too wide where answers can be right in part.
    """
    correct, count = sum(sample["correct"][scoring] for sample in samples), len(samples)
    interval = [round(100 * end, 1) for end in wilson(min(correct, count), count)]
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


def _show(results: Results, scores: list[dict[str, Any]], trained: int | None) -> None:
    for found in scores:
        low, high = found["interval"]
        found["text"] = f"{found['accuracy']:.0f}% ({found['correct']:.3g}/{found['prompts']}, {low:.0f}-{high:.0f})"
    depths, trials, task = (results.config[name] for name in ("depths", "trials", "task"))
    title = (f"{task.capitalize()}, {len(depths)} depths, {trials} prompts each, per length, with 95% intervals, "
             f"by {scores[0]['scoring']}")  # fmt: skip
    console.print(report.length_table(title, scores, "accuracy", trained, "higher", mean=True))
    losses = [{**found, "loss": -found["log_prob"], "text": f"{-found['log_prob']:.2f}"} for found in scores]
    title = "Loss of the right answer's digits, nats per token"
    console.print(report.length_table(title, losses, "loss", trained, "lower"))
    maps, lengths = {}, sorted({found["length"] for found in scores})
    for name in dict.fromkeys(found["posenc"] for found in scores):
        columns = [next(f for f in scores if f["posenc"] == name and f["length"] == length) for length in lengths]
        maps[name] = [[column["by_depth"][row] for column in columns] for row in range(len(depths))]
    effective = {posenc: effective_lengths(by_length) for posenc, by_length in _by_posenc(scores).items()}
    console.print(report.effective_table("Longest of these lengths that is still good, by rule", effective))
    truncated = sum(found["truncated"] for found in scores)
    if truncated:
        console.print(f"[red]The model did not receive {truncated:,} tokens of the prompts: do not use these scores")
    report.plot_maps(results.folder / "plot.png", maps, lengths, depths, trained)
    console.print(f"Samples, scores and plot.png in {results.folder}", soft_wrap=True, markup=False)
