"""RULER's questions out of files in both formats: what stands in a prompt, what it is scored by, and bad files."""

import json
import random
import re

import pytest
import torch
from tokenizing import TOKENIZERS, real

from eval.commands import ruler as commands
from eval.ruler import build, ruler
from eval.ruler_qa import read

BYTES = TOKENIZERS["byte_level"]
ARTICLES, PARAGRAPHS = 40, 6


def sentences(draw, count):
    pieces = ["the red mill", "a small boat", "many people", "the old road", "an early train", "two rivers", "no one"]
    return [f"{draw.choice(pieces).capitalize()} came near {draw.choice(pieces)}." for _ in range(count)]


def squad_file(path, size=1):
    """Every paragraph names a code of its own and is asked for it; one question in two has no answer."""
    draw, data = random.Random(0), []
    for article in range(ARTICLES * size):
        paragraphs = []
        for place in range(PARAGRAPHS):
            code = f"K{article}x{place}"
            context = " ".join(
                ["In Lun,  the code was", f"{code}.\nIt", "stayed.", *sentences(draw, draw.randrange(9))]
            )
            answers = [{"text": code, "answer_start": 22}, {"text": f"{code}.\nIt", "answer_start": 22}]
            asked = {"id": code, "question": f"What was code {article}-{place}?", "answers": answers}
            paragraphs.append({"context": context, "qas": [
                {**asked, "is_impossible": False},
                {**asked, "question": "Unanswerable?", "answers": answers, "is_impossible": True},
            ]})  # fmt: skip
        data.append({"title": f"A{article}", "paragraphs": paragraphs})
    path.write_text(json.dumps({"version": "v2.0", "data": data}), encoding="utf-8")
    return path


def hotpotqa_file(path, size=1):
    """Ten paragraphs beside each question, two of them needed; one question in three is to be answered with yes."""
    draw, data = random.Random(0), []
    for index in range(60 * size):
        context = [[f"T{index}-{place}", [f"Here is P{index}x{place}."] + [f" {s}" for s in sentences(draw, 3)]]
                   for place in range(10)]  # fmt: skip
        draw.shuffle(context)
        data.append({
            "_id": str(index), "question": f"What is in T{index}-1 and T{index}-2?", "context": context,
            "answer": f"P{index}x2" if index % 3 else "yes", "type": "bridge", "level": "hard",
            "supporting_facts": [[f"T{index}-1", 0], [f"T{index}-2", 0], [f"T{index}-1", 2]],
        })  # fmt: skip
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


WRITERS = {"qa_1": squad_file, "qa_2": hotpotqa_file}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return {task: str(write(folder / f"{task}.json")) for task, write in WRITERS.items()}


@pytest.fixture(scope="module")
def questions(files):
    return {task: read(task, file) for task, file in files.items()}


def documents_of(text):
    body = text.split("\n\n", 1)[1].split("\n\nThose were the documents.")[0]
    found = re.findall(r"Document (\d+):\n(.*?)(?=\n\nDocument \d+:\n|\Z)", body, re.DOTALL)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [document for _, document in found]


def without_filler(document):
    return re.sub(r"( All was quiet\.)*( So\.)*$", "", document)


@pytest.mark.parametrize("length", [700, 2048, 8192])
@pytest.mark.parametrize("task", WRITERS)
@pytest.mark.parametrize("name", ["byte_level", "trained"])
def test_prompts_are_sized_in_tokens(questions, name, task, length):
    for trial in range(3):
        prompt = build(TOKENIZERS[name], task, length, trial, questions=questions)
        assert 0.97 * length <= len(prompt.ids) + prompt.room <= length
        assert prompt.room == 32 and prompt.references


@pytest.mark.slow
@pytest.mark.parametrize("name", ["byte_level", "smollm2", "gemma"])
@pytest.mark.parametrize("task", WRITERS)
def test_prompts_of_real_tokenizers(tmp_path, name, task):
    questions = {task: read(task, WRITERS[task](tmp_path / "large.json", size=6))}
    for length in (512, 4096, 32768):
        prompt = build(real(name), task, length, questions=questions)
        assert 0.97 * length <= len(prompt.ids) + prompt.room <= length


@pytest.mark.parametrize("task", WRITERS)
def test_documents_are_paragraphs_of_the_file(questions, task):
    """Whole, each once, the needed ones among them at their depths, those of the question first; one is begun."""
    found, known = questions[task], {document: index for index, document in enumerate(questions[task].documents)}
    for trial in range(5):
        prompt = build(BYTES, task, 4096, trial, questions=questions)
        text = BYTES.decode(prompt.ids)
        asked = next(q for q in found.questions if f"Question: {q.text}\nAnswer:" in text)
        assert text.endswith(f"Question: {asked.text}\nAnswer:") and asked.answers == prompt.references
        documents = [without_filler(document) for document in documents_of(text)]
        whole = [known[document] for document in documents if document in known]
        begun = [document for document in documents if document not in known]
        assert len(set(whole)) == len(whole) and len(begun) <= 1
        assert not begun or any(document.startswith(begun[0]) for document in found.documents)
        assert set(asked.needed) <= set(whole) and set(asked.beside) <= set(whole)
        assert len(whole) > len(asked.needed) + len(asked.beside)
        places = [documents.index(found.documents[index]) for index in asked.needed]
        assert [place / len(documents) for place in places] == pytest.approx(prompt.depths, abs=2 / len(documents))


def test_short_prompts_hold_paragraphs_of_the_same_article_alone(questions):
    documents = documents_of(BYTES.decode(build(BYTES, "qa_1", 900, questions=questions).ids))
    codes = [code for document in documents if (code := re.search(r"K(\d+)x", document))]
    assert len(codes) > 1 and len({code[1] for code in codes}) == 1


def test_short_lengths_ask_about_short_paragraphs(tmp_path):
    """Not about the first question drawn, which hardly ever fits here."""
    content = json.loads(squad_file(tmp_path / "squad.json").read_text())
    for article in content["data"][1:]:
        for paragraph in article["paragraphs"]:
            paragraph["context"] += " And so it went on." * 40
    (tmp_path / "squad.json").write_text(json.dumps(content))
    questions = {"qa_1": read("qa_1", tmp_path / "squad.json")}
    for trial in range(5):
        assert build(BYTES, "qa_1", 900, trial, questions=questions).references[0].startswith("K0x")


def test_needed_paragraphs_stand_everywhere(questions):
    depths = [build(BYTES, "qa_2", 2048, trial, questions=questions).depths for trial in range(30)]
    assert min(min(pair) for pair in depths) < 0.2 and max(max(pair) for pair in depths) > 0.8
    assert {pair[0] < pair[1] for pair in depths} == {True, False}


def test_what_is_read(questions):
    squad, hotpotqa = questions["qa_1"], questions["qa_2"]
    assert len(squad.questions) == len(squad.documents) == ARTICLES * PARAGRAPHS
    first = squad.questions[0]
    assert first.answers == ["K0x0", "K0x0. It"] and first.needed == [0] and first.beside == [1, 2, 3, 4, 5]
    assert squad.documents[0].startswith("In Lun, the code was K0x0. It stayed.")
    assert len(hotpotqa.documents) == 600
    needed = [hotpotqa.documents[index] for index in hotpotqa.questions[4].needed]
    assert [document[:22] for document in needed] == ["T4-1\nHere is P4x1. " + needed[0][19:22],
                                                      "T4-2\nHere is P4x2. " + needed[1][19:22]]  # fmt: skip
    assert len(hotpotqa.questions[4].beside) == 8


class Stub:
    device = torch.device("cpu")

    def __init__(self, answer):
        self.answer, self.rooms = answer, []

    def generate(self, ids, **settings):
        self.rooms.append(settings["max_new_tokens"])
        new = BYTES(self.answer(BYTES.decode(ids[0])), add_special_tokens=False).input_ids
        return torch.cat([ids, torch.tensor([new], dtype=torch.long)], dim=1)


def test_one_of_the_references_is_enough(questions):
    def answer(text):
        article, place = re.search(r"code (\d+)-(\d+)\?\nAnswer:$", text).groups()
        return f" It was k{article}X{place}"

    stub = Stub(answer)
    answers = list(ruler(stub, BYTES, ["qa_1"], [2048], samples=3, questions=questions))
    assert [found.score for found in answers] == [100] * 3 and stub.rooms == [32] * 3
    silent = list(ruler(Stub(lambda text: " none"), BYTES, list(WRITERS), [2048], samples=3, questions=questions))
    assert [found.score for found in silent] == [0] * 6


def test_prompts_follow_from_seed_and_trial(questions):
    def ids(trial, seed):
        return build(BYTES, "qa_2", 2048, trial, seed=seed, questions=questions).ids

    assert ids(1, 3) == ids(1, 3) and len({tuple(ids(*pair)) for pair in ((1, 3), (2, 3), (1, 4))}) == 3


def test_lengths_that_a_file_cannot_meet(questions):
    with pytest.raises(ValueError, match="length 150 is too short for qa_1"):
        build(BYTES, "qa_1", 150, questions=questions)
    with pytest.raises(ValueError, match="length 200000 is too long for qa_1: the file has 239 other paragraphs"):
        build(BYTES, "qa_1", 200_000, questions=questions)
    longest = sum(len(document) + 20 for document in questions["qa_1"].documents) - 2000
    assert build(BYTES, "qa_1", longest, questions=questions)


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [("qa_1", "{", "not in the format of SQuAD"), ("qa_1", "[]", "not in the format of SQuAD"),
     ("qa_1", '{"data": [{"paragraphs": [{"qas": []}]}]}', "'context'"),
     ("qa_1", '{"data": []}', "no question with an answer"), ("qa_2", '{"data": []}', "not in the format of HotpotQA"),
     ("qa_2", "[]", "no question with an answer"), ("qa_2", '[{"_id": "1", "question": "?"}]', "'context'"),
     ("qa_2", '[{"_id": "7", "context": [["A", ["x"]]], "supporting_facts": [["B", 0]]}]', "support question 7")],
)  # fmt: skip
def test_bad_files(tmp_path, task, content, message):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read(task, path)


def test_tasks_and_their_files(tmp_path):
    with pytest.raises(ValueError, match="is not a file; qa_2 needs the one of HotpotQA"):
        read("qa_2", tmp_path / "missing.json")
    with pytest.raises(ValueError, match="qa_1 needs the file of SQuAD"):
        commands.names(["vt,qa_1"], {"qa_2": "file"})
    with pytest.raises(ValueError, match="a file is given for qa_2"):
        commands.names(["vt"], {"qa_2": "file"})
    assert commands.names(["all"], {"qa_2": "file"})[10:] == ["fwe", "qa_2"]
    assert commands.names(["qa_2,vt"], {"qa_2": "file"}) == ["vt", "qa_2"]
    with pytest.raises(ValueError, match="choose among niah_single_1"):
        build(BYTES, "qa_1", 2048)


def test_the_command_files_questions_beside_the_other_tasks(files, tmp_path):
    from test_eval_ruler import write_model
    from typer.testing import CliRunner

    from eval.__main__ import app

    folder = write_model(tmp_path / "model")
    command = f"ruler --model {folder} --tasks qa_1,vt,qa_2 --squad {files['qa_1']} --hotpotqa {files['qa_2']}"
    command += f" --lengths 640 --samples 1 --device cpu --results {tmp_path / 'results'}"
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0 and "Mean of 3 tasks" in result.output
    (found,) = (tmp_path / "results").iterdir()
    lines = (found / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["task"] for line in lines] == ["vt", "qa_1", "qa_2"]
    assert list(json.loads((found / "config.json").read_text())["questions"]) == ["qa_1", "qa_2"]
