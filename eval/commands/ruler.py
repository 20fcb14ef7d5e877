"""`python -m eval ruler`."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

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
from eval.results import Results
from eval.ruler import ruler
from eval.ruler_qa import FILES, Questions, read
from eval.ruler_tasks import TASKS
from eval.scores import wilson

ALL = "all"


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = (models.NONE,),
    tasks: Annotated[list[str], typer.Option(help="all, or as in niah_single_1,vt. May be repeated.")] = (ALL,),
    lengths: Lengths = ("2048,4096",),
    samples: Annotated[int, typer.Option(help="Prompts per task and length.", min=1)] = 20,
    text: Annotated[
        str | None,
        typer.Option(help="File or offline text to hide needles in, instead of made-up sentences."),
    ] = None,
    squad: Annotated[str | None, typer.Option(help=f"File for qa_1: {FILES['qa_1']}.")] = None,
    hotpotqa: Annotated[str | None, typer.Option(help=f"File for qa_2: {FILES['qa_2']}.")] = None,
    seed: int = 0,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    check: Check = CHECK,
    results: Root = "results",
) -> None:
    """RULER by length: eight kinds of needles, variable tracking, common and frequent words; qa_1, qa_2 out of files.

    Example: python -m eval ruler --posenc none --posenc yarn:factor=4 --tasks niah_single_1,vt --lengths 1024,2048

    Example: python -m eval ruler --squad dev-v2.0.json --hotpotqa hotpot_dev_distractor_v1.json --lengths 4096
    """
    files = {task: file for task, file in (("qa_1", squad), ("qa_2", hotpotqa)) if file is not None}
    chosen = names(tasks, files)
    questions = {task: read(task, file) for task, file in files.items()}
    prose = None if text is None else data.text(text)
    loaded, tokenizer = models.load(model, dtype, device)
    asked = models.numbers(lengths)
    found = run(loaded, tokenizer, model, posenc, chosen, asked, samples=samples, prose=prose,
        questions=questions, seed=seed, root=results)  # fmt: skip
    file_manifest(found, loaded, tokenizer, posenc, asked, check)


def names(texts: Sequence[str], files: Mapping[str, str]) -> list[str]:
    """Tasks of an option given as `--tasks vt,cwe`, or repeated, or both; each once, in NVIDIA's order.

    Args:
        files: what the tasks of question answering read; without its file none of them can be chosen.
    """
    offered = [*TASKS, *files]
    given = [piece for text in texts for piece in re.split(r"[,\s]+", text.strip()) if piece]
    given = offered if given == [ALL] else given
    unread = [name for name in FILES if name in given and name not in files]
    if unread:
        raise ValueError(f"{unread[0]} needs the file of {FILES[unread[0]]}: --squad FILE for qa_1, --hotpotqa FILE "
                         "for qa_2")  # fmt: skip
    unknown = [name for name in given if name not in offered]
    if unknown or not given:
        raise ValueError(f"{', '.join(unknown) or 'no task'!r} is not known; choose among {', '.join(offered)}")
    if not files.keys() <= set(given):
        raise ValueError(f"a file is given for {', '.join(files)}, so name it among the tasks, or take {ALL}")
    return [task for task in offered if task in given]


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    samples: int = 20,
    prose: str | None = None,
    questions: Mapping[str, Questions] | None = None,
    seed: int = 0,
    root: str = "results",
) -> Results:
    """RULER's tasks under several encodings. More tasks, samples or lengths later go into the same folder.

    Other files of questions go to another folder, and so do none.
    """
    posencs, trained = models.full_names(model, posencs, lengths), models.trained_length(model)
    around = {"prose": "made up" if prose is None else sha256(prose.encode()), "seed": seed,
              "questions": {task: found.sha256 for task, found in (questions or {}).items()}}  # fmt: skip
    parameters = {**identity(model, model_name, tokenizer), **around}
    key = ("posenc", "task", "length", "trial")
    results = Results(root, "ruler", parameters, ("model", "seed", "dtype"), key)
    with progress() as bar:
        for name in posencs:
            with models.applied(model, name):
                for length in lengths:
                    left = functools.partial(_is_missing, results, name)
                    asked = [(task, length, trial) for task in tasks for trial in range(samples)]
                    done = sum(not left(*question) for question in asked)
                    shown = bar.add_task(f"{name} at {length:,}", total=len(asked), completed=done)
                    for answer in ruler(model, tokenizer, tasks, [length], samples=samples, seed=seed, prose=prose,
                                        questions=questions, wanted=left):  # fmt: skip
                        results.add({"posenc": name, **asdict(answer)})
                        bar.advance(shown)
    found = scores_of(results, tasks, samples)
    results.write(
        "scores.json", {"trained_length": trained, "tasks": list(tasks), "samples": samples, "scores": found}
    )
    _show(results, [s for s in found if s["posenc"] in posencs and s["length"] in lengths], tasks, trained, samples)
    return results


def scores_of(results: Results, tasks: Sequence[str], samples: int) -> list[dict[str, Any]]:
    """One dictionary per encoding and length where all these prompts are answered; scores in percent.

    `score` is the mean over tasks. The intervals are Wilson's, too wide where answers can be right in part.
    """
    scores = []
    for posenc, length in cells(results):
        asked = results.select(posenc=posenc, length=length)
        by_task = {task: [a for a in asked if a["task"] == task and a["trial"] < samples] for task in tasks}
        if any(len(answers) < samples for answers in by_task.values()):
            continue
        rows = [{"task": task, **_mean([a["score"] for a in answers])} for task, answers in by_task.items()]
        scores.append({
            "posenc": posenc, "length": length, "score": sum(row["score"] for row in rows) / len(rows),
            "prompts": samples * len(rows), "by_task": rows,
            "seconds": round(sum(a["seconds"] for answers in by_task.values() for a in answers), 1),
        })  # fmt: skip
    return scores


def _mean(scores: Sequence[float]) -> dict[str, Any]:
    interval = wilson(min(sum(scores) / 100, len(scores)), len(scores))
    return {"score": sum(scores) / len(scores), "prompts": len(scores),
            "interval": [round(100 * end, 1) for end in interval]}  # fmt: skip


def _is_missing(results: Results, posenc: str, task: str, length: int, trial: int) -> bool:
    return not results.has(posenc=posenc, task=task, length=length, trial=trial)


def _show(
    results: Results, scores: list[dict[str, Any]], tasks: Sequence[str], trained: int | None, samples: int
) -> None:
    for index, task in enumerate(tasks):
        found = [{**score, **score["by_task"][index]} for score in scores]
        _table(f"{task}, {samples} prompts per length", found, trained)
    if len(tasks) > 1:
        _table(f"Mean of {len(tasks)} tasks", scores, trained)
    report.plot_lengths(results.folder / "plot.png", scores, "score", trained)
    console.print(f"Samples, scores and plot.png in {results.folder}", soft_wrap=True, markup=False)


def _table(title: str, scores: list[dict[str, Any]], trained: int | None) -> None:
    rows = [{**score, "text": f"{score['score']:.1f}"} for score in scores]
    console.print(report.length_table(title, rows, "score", trained, "higher", mean=True))
