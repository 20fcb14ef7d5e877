"""`python -m eval lm-eval`."""

import logging
import re
import time
from collections.abc import Sequence
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
    console,
    file_manifest,
    identity,
    sha256,
)
from eval.results import Results


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = (models.NONE,),
    tasks: Annotated[
        list[str],
        typer.Option(help="passkey, perplexity, RULER's (niah_single_1 …) offline; any other of the harness's own."),
    ] = ("passkey,perplexity",),
    lengths: Lengths = ("1024,2048",),
    limit: Annotated[int, typer.Option(help="Prompts or texts per task.", min=1)] = 20,
    text: Annotated[str, typer.Option(help="File or offline text that perplexity reads.")] = "alice",
    seed: int = 0,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    check: Check = CHECK,
    results: Root = "results",
) -> None:
    """Tasks of lm-evaluation-harness: ours by length, offline, and its own, which need the hub, as they are.

    Needs the extra lm-eval: pip install ".\\[lm-eval]". Names that both have, as niah_single_1, are ours.

    Example: python -m eval lm-eval --posenc none --posenc yarn:factor=2 --tasks passkey,niah_single_1,hellaswag
    """
    chosen = names(tasks)
    read = data.text(text) if "perplexity" in chosen else None
    loaded, tokenizer = models.load(model, dtype, device)
    asked = models.numbers(lengths)
    found = run(loaded, tokenizer, model, posenc, chosen, asked, limit=limit, text=read, seed=seed,
        root=results)  # fmt: skip
    file_manifest(found, loaded, tokenizer, posenc, asked, check)


def names(texts: Sequence[str]) -> list[str]:
    """Tasks of an option given as `--tasks passkey,vt`, or repeated, or both; each once, as far as any is known."""
    from eval import harness

    given = list(dict.fromkeys(piece for text in texts for piece in re.split(r"[,\s]+", text.strip()) if piece))
    unknown = harness.unknown(given)
    if unknown or not given:
        raise ValueError(f"{', '.join(unknown) or 'no task'!r} is known neither here nor to lm-evaluation-harness; "
                         f"take {', '.join(harness.OFFLINE)}, or what `lm-eval ls tasks` lists")  # fmt: skip
    return given


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    limit: int = 20,
    text: str | None = None,
    seed: int = 0,
    root: str = "results",
) -> Results:
    """The harness's scores under several encodings, one sample per encoding, task and length.

    The harness's own tasks are not sized: their length is None, and prompts may take what the patched model reaches.
    """
    import lm_eval

    from eval import harness

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it advises on options that are not ours to take
    posencs, trained = models.full_names(model, posencs, lengths), models.trained_length(model)
    around = {"limit": limit, "text": None if text is None else sha256(text.encode()), "seed": seed,
              "lm_eval": lm_eval.__version__}  # fmt: skip
    parameters = {**identity(model, model_name, tokenizer), **around}
    results = Results(root, "lm-eval", parameters, ("model", "limit", "dtype"), ("posenc", "task", "length"))
    for name in posencs:
        with models.applied(model, name):
            for task in tasks:
                for length in lengths if task in harness.OFFLINE else [None]:
                    if not results.lacks(posenc=name, task=task, length=length):
                        continue
                    console.print(f"{name}: {task}" + ("" if length is None else f" at {length:,}"))
                    began = time.perf_counter()
                    found = harness.score(model, tokenizer, task, length, limit=limit, text=text, seed=seed)
                    seconds = round(time.perf_counter() - began, 2)
                    results.add({"posenc": name, "task": task, "length": length, **found, "seconds": seconds})
    results.complete()
    found = scores_of(results, tasks)
    results.write("scores.json", {"trained_length": trained, "tasks": list(tasks), "scores": found})
    shown = [score for score in found if score["posenc"] in posencs and score["length"] in (None, *lengths)]
    console.print(report.task_table(f"lm-evaluation-harness, up to {limit} prompts per cell", shown, trained))
    console.print(f"Samples and scores in {results.folder}", soft_wrap=True, markup=False)
    return results


def scores_of(results: Results, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """One dictionary per encoding and length where all tasks are scored; length None for the harness's own tasks.

    Each has `by_task`: the task's first metric and its value, as the harness gives them, and whether more is better.
    """
    own = {sample["task"] for sample in results.select(length=None)}
    lengths = sorted({sample["length"] for sample in results.samples.values()} - {None})
    kinds = [(length, [task for task in tasks if task not in own]) for length in lengths]
    kinds.append((None, [task for task in tasks if task in own]))
    scores = []
    for posenc in dict.fromkeys(sample["posenc"] for sample in results.samples.values()):
        for length, wanted in kinds:
            rows = {sample["task"]: sample for sample in results.select(posenc=posenc, length=length)}
            if wanted and rows.keys() >= set(wanted):
                seconds = round(sum(rows[task]["seconds"] for task in wanted), 1)
                by_task = [_first(rows[task]) for task in wanted]
                scores.append({"posenc": posenc, "length": length, "by_task": by_task, "seconds": seconds})
    return scores


def _first(sample: dict[str, Any]) -> dict[str, Any]:
    metric, value = next(iter(sample["metrics"].items()))
    return {"task": sample["task"], "metric": metric, "value": value, "better": sample["better"][metric],
            "prompts": sample["prompts"]}  # fmt: skip
