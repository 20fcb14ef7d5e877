"""RULER's two tasks of question answering, for those who have the files: `qa_1` out of SQuAD, `qa_2` out of HotpotQA.

The paragraphs that hold the answer stand between others of the same file, first those that its authors put beside the
question (the article's in SQuAD, the search results in HotpotQA), then any. Documents, room and metric are NVIDIA's,
the wording is ours. What differs: lengths are met by whole sentences of one more paragraph; a question is drawn among
those whose own paragraphs leave room, so short lengths ask about short ones; HotpotQA's other paragraphs are not all
there where a length is too short for them. SQuAD's unanswerable questions are left out.

The metric finds a reference anywhere in the answer: one of HotpotQA's "yes" and "no" also in "eyes" and "know".
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.haystack import SHORT_FILLER
from eval.ruler_tasks import Draft, Measure

HEAD = "The documents below are needed for a question at their end.\n\n"
END = "\n\nThose were the documents. Answer from them, in as few words as possible.\nQuestion: {question}\nAnswer:"
FILES = {"qa_1": "SQuAD (dev-v2.0.json)", "qa_2": "HotpotQA (hotpot_dev_distractor_v1.json)"}


@dataclass(frozen=True)
class Question:
    """A question; `needed` are the documents that hold its answer, `beside` those that belong to it otherwise."""

    text: str
    answers: list[str]
    needed: list[int]
    beside: list[int]


@dataclass(frozen=True)
class Questions:
    """All that one file asks, and all its paragraphs."""

    documents: list[str]
    questions: list[Question]
    sha256: str

    def draft(self, draw: random.Random, prose: str | None, measure: Measure, room: int) -> Draft:
        """One of the questions that fit, with the number of other documents still open; any if none fits."""
        order = draw.sample(self.questions, len(self.questions))
        fitting = (question for question in order if self._least(question, measure) <= room)
        return self._between_others(next(fitting, order[0]), draw, room)

    def _least(self, question: Question, measure: Measure) -> int:
        """Tokens of a prompt without other documents, and of the answer."""
        text = _prompt([self.documents[index] for index in question.needed], "", question)
        return measure(text) + max(map(measure, question.answers))

    def _between_others(self, question: Question, draw: random.Random, room: int) -> Draft:
        beside = draw.sample(question.beside, len(question.beside))
        size = len(self.documents)
        further = draw.sample(range(size), min(size, max(1, room)))  # a document takes several tokens
        others = [index for index in dict.fromkeys([*beside, *further]) if index not in question.needed]
        depths = [round(draw.random(), 3) for _ in question.needed]

        def text(counts: Sequence[int]) -> str:
            whole, sentences, *short = [*counts, *[0] * (2 + len(SHORT_FILLER) - len(counts))]
            documents = [self.documents[index] for index in others[:whole]]
            if sentences:
                documents.append("".join(_sentences(self.documents[others[whole]])[:sentences]).rstrip())
            places = len(documents) + 1
            for depth, index in sorted(zip(depths, question.needed, strict=True), reverse=True):
                documents.insert(int(depth * places), self.documents[index])
            filler = "".join(f" {sentence}" * count for sentence, count in zip(SHORT_FILLER, short, strict=True))
            return _prompt(documents, filler, question)

        return Draft(text, question.answers, depths, counters=2 + len(SHORT_FILLER), most=len(others))


def read(task: str, path: str | Path) -> Questions:
    """The questions of a file in the format of SQuAD (`qa_1`, 1.1 or 2.0) or of HotpotQA (`qa_2`, distractor setting).

    Raises:
        ValueError: no such file, another format, or no question that has an answer.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file; {task} needs the one of {FILES[task]}")
    content = Path(path).read_bytes()
    try:
        documents, questions = _READERS[task](json.loads(content))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not in the format of {FILES[task]}: {error!r}") from error
    if not questions:
        raise ValueError(f"{path} has no question with an answer; {task} needs the file of {FILES[task]}")
    return Questions(documents, questions, hashlib.sha256(content).hexdigest())


def _squad(content: Any) -> tuple[list[str], list[Question]]:
    places: dict[str, int] = {}
    questions = []
    for article in content["data"]:
        paragraphs = [_index(places, paragraph["context"]) for paragraph in article["paragraphs"]]
        for paragraph, own in zip(article["paragraphs"], paragraphs, strict=True):
            beside = [index for index in dict.fromkeys(paragraphs) if index != own]
            questions += [
                Question(_line(asked["question"]), answers, [own], beside)
                for asked in paragraph["qas"]
                if not asked.get("is_impossible", False)
                and (answers := list(dict.fromkeys(_line(answer["text"]) for answer in asked["answers"])))
            ]
    return list(places), questions


def _hotpotqa(content: Any) -> tuple[list[str], list[Question]]:
    places: dict[str, int] = {}
    questions = []
    for asked in content:
        own = {title: _index(places, "".join(sentences), title) for title, sentences in asked["context"]}
        needed = list(dict.fromkeys(title for title, _ in asked["supporting_facts"]))
        if not needed or not own.keys() >= set(needed):
            raise ValueError(f"the paragraphs that support question {asked['_id']} are not among its own")
        beside = [index for title, index in own.items() if title not in needed]
        questions.append(
            Question(_line(asked["question"]), [_line(asked["answer"])], [own[title] for title in needed], beside)
        )
    return list(places), questions


_READERS: dict[str, Callable[[Any], tuple[list[str], list[Question]]]] = {"qa_1": _squad, "qa_2": _hotpotqa}


def _index(places: dict[str, int], text: str, title: str = "") -> int:
    """Where a document stands, each text once."""
    document = f"{_line(title)}\n{_line(text)}".strip()
    if not document:
        raise ValueError("a paragraph is empty")
    return places.setdefault(document, len(places))


def _line(text: str) -> str:
    return " ".join(text.split())


def _sentences(document: str) -> list[str]:
    """Pieces that make up the document, each with the space behind it."""
    return re.findall(r".+?(?:[.!?]\s+|$)", document, re.DOTALL)


def _prompt(documents: Sequence[str], filler: str, question: Question) -> str:
    numbered = "\n\n".join(f"Document {index}:\n{document}" for index, document in enumerate(documents, 1))
    return HEAD + numbered + filler + END.format(question=question.text)
