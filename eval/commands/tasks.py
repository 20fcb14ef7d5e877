"""What `compare` can run: every task as a run that files samples, and the measures that come out of them."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval import data, passkey, ruler_tasks
from eval import needle as needles
from eval.commands import gain, needle, perplexity, recall, ruler
from eval.commands import passkey as passkeys
from eval.compare import Measure, Unit, block_units, prompt_units, token_units
from eval.perplexity import Perplexity, Score, Window
from eval.results import Results
from eval.retrieval import DEPTHS
from eval.ruler import build as make_ruler
from eval.scores import wilson

RULER, RECALL = "ruler", "recall"
TRIALS = 5
NEAR = 1024  # tokens; less where the shortest length is short
Samples = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """What all tasks of a comparison share.

    Attributes:
        trials: prompts per task and length; of passkey and needle, per depth.
    """

    tasks: list[str]
    lengths: list[int]
    text: str = "alice"
    trials: int = TRIALS
    seed: int = 0


@dataclass(frozen=True)
class Reader:
    """A model, and the encodings by their full names under which it reads."""

    model: Any
    tokenizer: Any
    name: str
    posencs: list[str]
    root: str

    def run(self, task: Callable[..., Results], *arguments: Any, **options: Any) -> Results:
        return task(self.model, self.tokenizer, self.name, self.posencs, *arguments, root=self.root, **options)


@dataclass(frozen=True, kw_only=True)
class Shown(Measure):
    """A measure and what else a report shows of it.

    Attributes:
        curve: by position, of an encoding at the longest length.
        cells: accuracy by depth, of an encoding at a length.
        example: of a sample: `wanted`, how many tokens before the question it was `told`, `answer` and `score`.
        fields: of the samples that the measure takes.
    """

    curve: Callable[[Results, str, int], list[dict[str, Any]]] | None = None
    cells: Callable[[Results, str, int], list[dict[str, Any]]] | None = None
    example: Callable[[Samples], dict[str, Any]] | None = None
    fields: Mapping[str, Any] | None = None


Measured = tuple[Shown, Results]


def names(texts: Sequence[str]) -> list[str]:
    """Tasks of an option given as `--tasks perplexity,vt`, or repeated, or both; each once."""
    given = dict.fromkeys(piece for text in texts for piece in re.split(r"[,\s]+", text.strip()) if piece)
    unknown = [name for name in given if name not in TASKS]
    if unknown or not given:
        raise ValueError(f"{', '.join(unknown) or 'no task'!r} is not known; choose among {', '.join(TASKS)}")
    return list(given)


def measure(reader: Reader, options: Options) -> Iterator[Measured]:
    """Runs the tasks one after the other; RULER's together.

    Raises:
        ValueError: the shortest length does not do for a task, before any has run.
    """
    of_ruler = (
        list(ruler_tasks.TASKS) if RULER in options.tasks else [t for t in options.tasks if t in ruler_tasks.TASKS]
    )
    build = {task: functools.partial(make_ruler, task=task) for task in of_ruler}
    build |= {"passkey": functools.partial(passkey.build, depth=0.5)}
    build |= {"needle": functools.partial(needles.build, depth=0.5, text=data.text(options.text))}
    for task in (*options.tasks, *of_ruler):
        if task in build:
            build[task](reader.tokenizer, length=options.lengths[0])
    for task in options.tasks:
        if task in RUNS:
            yield from RUNS[task](reader, options)
    if of_ruler:
        yield from _ruler(reader, options, of_ruler)


def _perplexity(reader: Reader, options: Options) -> Iterator[Measured]:
    results = reader.run(perplexity.run, options.lengths, [options.text], mode="prefix")
    units = token_units(lambda sample: (_window(sample).position, sample["losses"]), ("text", "start"))
    yield Shown("perplexity", "Loss", units, lower=True, nested=True, curve=_loss_curve), results


def _recall(reader: Reader, options: Options) -> Iterator[Measured]:
    results = reader.run(recall.run, options.lengths, options.text, seed=options.seed)
    units = token_units(lambda sample: (1, sample["losses"]), ())
    yield Shown(RECALL, "Loss (recall)", units, lower=True, nested=True, curve=_loss_curve), results
    answers = prompt_units(lambda sample: 100 * sample["correct"][passkey.SCORING], ())
    example = functools.partial(_example, scoring=passkey.SCORING)
    yield Shown(RECALL, "Pass key (recall)", answers, percent=True, example=example, fields={}), results


def _gain(reader: Reader, options: Options) -> Iterator[Measured]:
    near = min(NEAR, options.lengths[0] // 4)
    results = reader.run(gain.run, options.lengths, [options.text], near=near)

    def units(results: Results, posenc: str, length: int, trained: int | None) -> list[Unit]:
        reading = gain.reading(results, posenc, length, options.text)
        found = [] if reading is None else reading.gains.tolist()
        return block_units((), length, 0 if reading is None else reading.first, found, trained)

    yield Shown("gain", "Gain by far context", units, nested=True), results


def _passkey(reader: Reader, options: Options) -> Iterator[Measured]:
    results = reader.run(passkeys.run, options.lengths, DEPTHS, trials=options.trials, seed=options.seed)
    yield from _retrieval(results, "passkey", "Pass key", passkey.SCORING)


def _needle(reader: Reader, options: Options) -> Iterator[Measured]:
    results = reader.run(
        needle.run, options.lengths, DEPTHS, text=options.text, trials=options.trials, seed=options.seed
    )
    yield from _retrieval(results, "needle", "Needle", needles.SCORING)


def _retrieval(results: Results, task: str, title: str, scoring: str) -> Iterator[Measured]:
    key = ("depth", "trial")
    right = prompt_units(lambda sample: 100 * sample["correct"][scoring], key)
    cells = functools.partial(_by_depth, scoring=scoring)
    example = functools.partial(_example, scoring=scoring)
    yield Shown(task, title, right, percent=True, cells=cells, example=example, fields={}), results
    loss = prompt_units(lambda sample: -sum(sample["log_probs"]) / len(sample["log_probs"]), key)
    yield Shown(task, f"{title}: loss of the right answer", loss, lower=True), results


def _ruler(reader: Reader, options: Options, chosen: list[str]) -> Iterator[Measured]:
    results = reader.run(ruler.run, chosen, options.lengths, samples=options.trials, seed=options.seed)
    if len(chosen) > 1:
        mean = prompt_units(lambda sample: sample["score"], ("task", "trial"))
        yield Shown(RULER, f"RULER, mean of {len(chosen)}", mean, percent=True), results
    for task in chosen:
        units = prompt_units(lambda sample: sample["score"], ("trial",), task=task)
        yield Shown(RULER, task, units, percent=True, example=_ruler_example, fields={"task": task}), results


RUNS: dict[str, Callable[[Reader, Options], Iterator[Measured]]] = {
    "perplexity": _perplexity, "passkey": _passkey, "needle": _needle, "gain": _gain, RECALL: _recall,
}  # fmt: skip
TASKS = (*RUNS, RULER, *ruler_tasks.TASKS)


def _window(sample: Samples) -> Window:
    return Window(0, sample["start"], sample["end"], sample["first"], sample["bos"])


def _loss_curve(results: Results, posenc: str, length: int) -> list[dict[str, Any]]:
    scores = []
    for sample in results.select(posenc=posenc, length=length):
        window = _window(sample) if "start" in sample else Window(0, 0, len(sample["losses"]) + 1, 1)
        scores.append(Score(window, torch.tensor(sample["losses"])))
    return perplexity.bands(Perplexity(scores), length)


def _by_depth(results: Results, posenc: str, length: int, *, scoring: str) -> list[dict[str, Any]]:
    rows = []
    for depth in results.config["depths"]:
        found = [s["correct"][scoring] for s in results.select(posenc=posenc, length=length, depth=depth)]
        interval = [100 * end for end in wilson(min(sum(found), len(found)), len(found))]
        rows.append({"accuracy": 100 * sum(found) / len(found), "interval": interval})
    return rows


def _example(sample: Samples, *, scoring: str) -> dict[str, Any]:
    return {
        "wanted": ", ".join(sample["references"]), "told": sample["prompt_tokens"] - sample["key_position"],
        "answer": sample["answer"], "score": 100 * sample["correct"][scoring],
    }  # fmt: skip


def _ruler_example(sample: Samples) -> dict[str, Any]:
    wanted = ", ".join(sample["references"])
    return {"wanted": wanted, "told": None, "answer": sample["answer"], "score": sample["score"]}
