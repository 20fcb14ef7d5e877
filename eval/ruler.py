"""RULER (arXiv 2404.06654): eight kinds of needles, `vt`, `cwe` and `fwe` (`ruler_tasks.py`), `qa_1` and `qa_2`
out of files (`ruler_qa.py`).

Names, counts of needles, hops, words and answer tokens, and the metric are NVIDIA's; wording and words are ours, so
compare encodings with each other, not with published tables. What differs further: the text around needles, essays
there, is made up from a small grammar unless one is given; prompts are plain text, to be continued (no chat template);
below 4,096 tokens or so `cwe` repeats its words less often; `vt` and `cwe` show a worked example from 2,048 tokens on.

Prompt and room for the answer together take 0.97 · length to length tokens of the model's own tokenizer, or it is an
error: nothing is cut. Room is NVIDIA's, or more if a tokenizer needs it. A prompt follows from task, seed, length and
trial alone, so all encodings read the same.

The metric looks for each reference anywhere in the answer, so one that echoes the whole prompt, or lists every number,
scores 100. What limits this is the room: only so many tokens are generated and scored.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval.haystack import FILL
from eval.models import encode
from eval.ruler_qa import FILES, Questions
from eval.ruler_tasks import TASKS, Draft

EXTRA_TOKENS = 5  # of the answer, beside the references
NEEDLE_TOKENS = 128
TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
EXAMPLES = {"vt": 6, "cwe": 20}  # sentences or words of filler in the worked example
EXAMPLE_FROM = 2048  # tokens of length
EXAMPLE_ROOM = 400


@dataclass(frozen=True)
class Prompt:
    """One question; `room` is how many tokens its answer may take."""

    task: str
    length: int
    trial: int
    references: list[str]
    depths: list[float]
    room: int
    ids: list[int]


@dataclass(frozen=True)
class Answer:
    """One scored answer, in percent; what goes into a results line."""

    task: str
    length: int
    trial: int
    references: list[str]
    depths: list[float]
    prompt_tokens: int
    answer: str
    score: float
    seconds: float


def ruler(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    samples: int = 20,
    seed: int = 0,
    prose: str | None = None,
    questions: Mapping[str, Questions] | None = None,
    wanted: Callable[[str, int, int], bool] = lambda task, length, trial: True,
) -> Iterator[Answer]:
    """Asks and scores one prompt after the other, greedily, with a model as it is: patch it before.

    Args:
        model: anything with transformers' `generate` and `device`.
        tasks: names of `TASKS`, and of `questions`.
        lengths: tokens of prompt and answer together.
        samples: prompts per task and length.
        prose: a text to hide needles in; its sentences repeat if it is too short. None makes one up.
        questions: what `qa_1` and `qa_2` ask, if they are among the tasks: `ruler_qa.read`.
        wanted: called with task, length and trial; False leaves that prompt out (it is scored already).
    """
    for length, task, trial in itertools.product(lengths, tasks, range(samples)):
        if wanted(task, length, trial):
            prompt = build(tokenizer, task, length, trial, seed=seed, prose=prose, questions=questions)
            yield ask(model, tokenizer, prompt)


def build(
    tokenizer: Any,
    task: str,
    length: int,
    trial: int = 0,
    *,
    seed: int = 0,
    prose: str | None = None,
    questions: Mapping[str, Questions] | None = None,
) -> Prompt:
    """A prompt that leaves room for the answer in `length` tokens.

    Raises:
        ValueError: an unknown task, a length too short for it, or a tokenizer that loses the answer.
    """
    makers = TASKS | {name: found.draft for name, found in (questions or {}).items()}
    if task not in makers:
        raise ValueError(f"task {task!r} is unknown; choose among {', '.join(makers)}")
    make, draw = makers[task], random.Random(f"{task} {seed} {length} {trial}")

    def measure(text: str) -> int:
        return len(encode(tokenizer, text, start=False))

    example = ""
    if task in EXAMPLES and length >= EXAMPLE_FROM:
        shown = make(draw, prose, measure, EXAMPLE_ROOM)
        example = f"{shown.text([EXAMPLES[task]])} {', '.join(shown.references)}.\n\n\n"
    draft = make(draw, prose, measure, length - measure(example) - TOKENS.get(task, NEEDLE_TOKENS))
    answers = draft.references if task in FILES else [", ".join(draft.references)]
    room = max(TOKENS.get(task, NEEDLE_TOKENS), *(measure(f" {answer}") + EXTRA_TOKENS for answer in answers))
    text = example + draft.text(_fill(tokenizer, task, draft, example, length, room))
    ids = encode(tokenizer, text)
    if len(ids) + room < FILL * length:
        raise ValueError(f"length {length} is too short for {task}: prompt and answer fill {len(ids) + room}, less "
                         f"than {FILL:.0%} of it; take a longer one or leave the task out")  # fmt: skip
    if string_match_all([tokenizer.decode(ids)], [draft.references]) < string_match_all([text], [draft.references]):
        raise ValueError(f"the answer of {task} does not survive this tokenizer, which has no tokens for all of it")
    return Prompt(task, length, trial, draft.references, draft.depths, room, ids)


def _fill(tokenizer: Any, task: str, draft: Draft, example: str, length: int, room: int) -> list[int]:
    """The largest counts of filler, from coarse to fine, that leave `room` tokens of `length`."""

    def tokens(counts: Sequence[int]) -> int:
        if draft.most is not None and counts[0] > draft.most:
            return length + 1
        return len(encode(tokenizer, example + draft.text(counts)))

    least = tokens([draft.least])
    if least + room > length:
        raise ValueError(f"length {length} is too short for {task}: its question takes {least} tokens and the answer "
                         f"{room}; take a longer one or leave the task out")  # fmt: skip
    counts: list[int] = []
    for first in (draft.least, *[0] * (draft.counters - 1)):
        counts.append(_most(lambda count: tokens([*counts, count]), length - room, first))
        if counts[0] == draft.most:
            raise ValueError(f"length {length} is too long for {task}: the file has {draft.most} other paragraphs; "
                             "take a shorter length, a larger file, or leave the task out")  # fmt: skip
    return counts


def ask(model: Any, tokenizer: Any, prompt: Prompt) -> Answer:
    """Lets the model continue a prompt for as many tokens as there is room, and scores what it wrote."""
    began = time.perf_counter()
    ids = torch.tensor([prompt.ids], device=model.device)
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=prompt.room,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.eos_token_id,
    )
    answer = tokenizer.decode(generated[0, len(prompt.ids) :][: prompt.room], skip_special_tokens=True)
    match = string_match_part if prompt.task in FILES else string_match_all
    score, seconds = match([answer], [prompt.references]), round(time.perf_counter() - began, 2)
    return Answer(prompt.task, prompt.length, prompt.trial, prompt.references, prompt.depths, len(prompt.ids), answer,
                  score, seconds)  # fmt: skip


def string_match_all(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """NVIDIA's metric of the synthetic tasks: the share of its references that an answer contains, mean in percent."""
    return 100 * sum(sum(found) / len(found) for found in _found(answers, references)) / len(answers)


def string_match_part(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """NVIDIA's metric of question answering: the share of answers that contain any of their references, in percent."""
    return 100 * sum(any(found) for found in _found(answers, references)) / len(answers)


def _found(answers: Sequence[str], references: Sequence[Sequence[str]]) -> Iterator[list[bool]]:
    for answer, wanted in zip(answers, references, strict=True):
        yield [reference.lower() in answer.lower() for reference in wanted]


def _most(size: Callable[[int], int], room: int, least: int) -> int:
    """The largest count whose size fits into `room`, guessed from tokens per unit; `size(least)` fits."""
    base = within = size(least)
    low, high, probe = least, None, least + 16
    while True:
        found = size(probe)
        if found <= base:
            raise ValueError("this tokenizer has no tokens for the text of the task")
        if found <= room:
            low, within = probe, found
        else:
            high = probe
        if high is not None and high - low <= 1:
            return low
        guess = low + int((room - within) * (probe - least) / (found - base))
        probe = max(low + 1, guess if high is None else min(guess, high - 1))
