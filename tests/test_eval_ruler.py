"""RULER's tasks by tokens, the metric by hand, and scoring with stubs whose right score is known."""

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizing import TOKENIZERS, real
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from eval import ruler_tasks
from eval.__main__ import app
from eval.commands import ruler as commands
from eval.haystack import FILLER
from eval.ruler import build, ruler, string_match_all, string_match_part
from eval.ruler_tasks import TASKS

torch.set_num_threads(1)


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    if TOKENIZERS[request.param] is None:
        pytest.skip("SmolLM2 is not in the cache")
    return TOKENIZERS[request.param]


def read(task, length=1024, trial=0, tokenizer=TOKENIZERS["byte_level"], **settings):
    """A prompt and its text."""
    prompt = build(tokenizer, task, length, trial, **settings)
    return prompt, tokenizer.decode(prompt.ids, skip_special_tokens=True)


class Stub:
    """Answers with a function of the prompt's text and of its references."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, answer, tasks=TASKS, length=1024):
        self.tokenizer, self.answer, self.asked = tokenizer, answer, []
        prompts = [build(tokenizer, task, length) for task in tasks]
        self.references = {tuple(prompt.ids): prompt.references for prompt in prompts}

    def generate(self, input_ids, **settings):
        ids = input_ids[0].tolist()
        self.asked.append((len(ids), settings["max_new_tokens"]))
        text = self.answer(self.tokenizer.decode(ids), self.references[tuple(ids)])
        new = self.tokenizer(text, add_special_tokens=False).input_ids
        return torch.cat([input_ids, torch.tensor([new], dtype=torch.long)], dim=1)


@pytest.mark.parametrize("length", [512, 4096])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_sized_in_tokens(tokenizer, task, length):
    for trial in range(3 if length == 512 else 1):
        prompt, text = read(task, length, trial, tokenizer)
        assert 0.97 * length <= len(prompt.ids) + prompt.room <= length
        assert all(reference in text for reference in prompt.references)


@pytest.mark.slow
@pytest.mark.parametrize("length", [512, 4096, 32768])
@pytest.mark.parametrize("name", ["byte_level", "smollm2", "gemma"])
def test_prompts_are_sized_in_tokens_of_real_tokenizers(name, length):
    tokenizer = real(name)
    for task, trial in itertools.product(TASKS, range(2 if length < 32768 else 1)):
        prompt, text = read(task, length, trial, tokenizer)
        assert 0.97 * length <= len(prompt.ids) + prompt.room <= length
        assert all(reference in text for reference in prompt.references)


@pytest.mark.parametrize("task", ["niah_multikey_3", "cwe", "fwe"])
def test_long_prompts_are_sized_in_tokens(tokenizer, task):
    prompt, _ = read(task, 32768, 0, tokenizer)
    assert 0.99 * 32768 <= len(prompt.ids) + prompt.room <= 32768


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_follows_from_seed_length_and_trial(task):
    prompt = build(TOKENIZERS["trained"], task, 1024, 1, seed=3)
    assert prompt == build(TOKENIZERS["trained"], task, 1024, 1, seed=3)
    others = [(1024, 1, 4), (1024, 2, 3), (1100, 1, 3)]
    for length, trial, seed in others:
        assert build(TOKENIZERS["trained"], task, length, trial, seed=seed).references != prompt.references


@pytest.mark.parametrize(
    ("task", "key", "value", "needles", "keys", "references"),
    [("niah_single_1", "word", "number", 1, 1, 1), ("niah_single_2", "word", "number", 1, 1, 1),
     ("niah_single_3", "word", "uuid", 1, 1, 1), ("niah_multikey_1", "word", "number", 4, 4, 1),
     ("niah_multikey_2", "word", "number", None, None, 1), ("niah_multikey_3", "uuid", "uuid", None, None, 1),
     ("niah_multivalue", "word", "number", 4, 1, 4), ("niah_multiquery", "word", "number", 4, 4, 4)],
)  # fmt: skip
def test_needles(task, key, value, needles, keys, references):
    form = {
        "word": r"[a-z]{4}-[a-z]{4}",
        "number": r"[1-9]\d{6}",
        "uuid": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    }
    prompt, text = read(task, 2048, 1)
    body, question = text.split("\n\n")[1:]
    found = re.findall(rf"A magic {value} for ({form[key]}) is ({form[value]})\.", body)
    assert len(found) == (needles or body.count(".") - len(re.findall(r"quiet\.|So\.", body)))
    assert len({name for name, _ in found}) == (keys or len(found))
    asked = re.findall(form[key], question)
    assert [number for name in asked for number in dict_of(found)[name]] == in_order(prompt.references, found)
    assert len(prompt.references) == references == len(set(prompt.references))
    assert (body.count(FILLER[0]) > 1) == (task == "niah_single_1")
    assert needles or len(found) > 15


def dict_of(pairs):
    return {name: [number for other, number in pairs if other == name] for name, _ in pairs}


def in_order(references, pairs):
    """References that share a key, in the order of the text."""
    one_key = len({name for name, number in pairs if number in references}) == 1
    return [number for _, number in pairs if number in references] if one_key else references


def test_needles_stand_where_their_depths_say():
    for trial in range(5):
        prompt, text = read("niah_multiquery", 8192, trial)
        places = [text.index(reference) / len(text) for reference in prompt.references]
        assert places == pytest.approx(prompt.depths, abs=0.04)


def test_sentences_are_hidden_in_the_order_of_their_depths():
    text = ruler_tasks._hidden_in(iter("abcdef"), [(1.0, "Z"), (0.0, "X"), (0.5, "Y")], "<", ">")
    assert text([4]) == "<X a b Y c d Z>" == text([4, 0, 0])
    assert text([2, 0, 2]) == "<X a b Y So. So. Z>" and text([0]) == "<X Y Z>"


def test_variables_hand_on_the_value():
    prompt, text = read("vt", 4096, tokenizer=TOKENIZERS["trained"])
    examples = text.split("\n\n\n")
    assert len(examples) == 2 and len(read("vt", 1024, tokenizer=TOKENIZERS["trained"])[1].split("\n\n\n")) == 1
    assert re.search(r"have the value \d{5} are [A-Z]{5}(, [A-Z]{5}){4}\.$", examples[0])
    pairs = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?([A-Z]{5}|\d{5})\.", examples[1])
    value = re.search(r"have the value (\d{5}) are$", examples[1])[1]
    assert [name for name, _ in pairs] == prompt.references and len(pairs) == 5
    assert [source for _, source in pairs] == [value, *prompt.references[:-1]]
    assert prompt.depths == sorted(prompt.depths)


@pytest.mark.parametrize(("length", "often", "seldom"), [(512, 2, 1), (4096, 10, 2), (16384, 30, 3)])
def test_common_words_are_the_most_frequent(length, often, seldom):
    prompt, text = read("cwe", length)
    numbered = re.findall(r"(\d+)\. (\w+)", text.split("\n\n\n")[-1])
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    counts = Counter(word for _, word in numbered)
    assert {word for word, count in counts.items() if count == often} == set(prompt.references)
    assert len(prompt.references) == 10
    rest = [count for word, count in counts.items() if word not in prompt.references]
    assert max(rest) == seldom and sum(count < seldom for count in rest) <= 1


@pytest.mark.parametrize("length", [512, 1024, 32768])
def test_frequent_words_follow_the_zeta_law(length):
    prompt, text = read("fwe", length)
    counts = Counter(re.findall(r"\b[a-z]{6}\b", text.split("\n\n")[1]))
    ranked = counts.most_common()
    assert [word for word, _ in ranked[:3]] == prompt.references
    numbers = [number for _, number in ranked]
    assert numbers[0] > numbers[1] > numbers[2] > numbers[3]
    if length > 20000:  # shares of ranks 2 to 5 among all words, dots included
        total = sum(numbers) + text.count("... ")
        shares = [number / total for number in numbers[:4]]
        assert shares == pytest.approx([6 / 3.14159265**2 / rank**2 for rank in (2, 3, 4, 5)], rel=0.02)


def test_a_text_instead_of_made_up_sentences():
    prose = "Call me Ishmael. It is a way I have of driving off the spleen! Is it not?"
    _, text = read("niah_single_2", prose=prose)
    body = re.sub(r"A magic \S+ for \S+ is \d+\. ?|All was quiet\. ?|So\. ?", "", text.split("\n\n")[1])
    assert body.count("Call me Ishmael.") > 5
    assert not re.sub(r"Call me Ishmael\.|It is a way I have of driving off the spleen!|Is it not\?|\s", "", body)


def test_words_never_run_out_or_repeat():
    for kind, count in (("word", 20_000), ("number", 1000), ("uuid", 1000)):
        drawn = list(itertools.islice(ruler_tasks._supply(kind, random.Random(0)), count))
        assert len(set(drawn)) == count


ANSWERS = {
    "copies": (lambda prompt, references: " " + ", ".join(references), 100),
    "shouts": (lambda prompt, references: " " + ", ".join(references).upper(), 100),
    "is silent": (lambda prompt, references: "", 0),
    "says wrong ones": (lambda prompt, references: " 1000000, abcdef, gatehill, AAAAA", 0),
    "gives them too late": (lambda prompt, references: "so " * 200 + ", ".join(references), 0),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_scores_of_stubs(tokenizer, name):
    answer, expected = ANSWERS[name]
    answers = list(ruler(Stub(tokenizer, answer, length=512), tokenizer, list(TASKS), [512], samples=1))
    assert [score.score for score in answers] == [expected] * 11


def test_an_echo_scores_what_the_room_lets_it_repeat():
    tokenizer = TOKENIZERS["byte_level"]
    prompt, text = read("niah_single_1", 4096)
    assert string_match_all([text], [prompt.references]) == 100
    tasks = ["niah_single_1", "niah_multiquery", "vt"]
    answers = list(ruler(Stub(tokenizer, lambda text, _: text, tasks, 4096), tokenizer, tasks, [4096], samples=1))
    assert [answer.score for answer in answers] == [0, 0, 0]


def test_a_part_of_the_references():
    half = Stub(TOKENIZERS["trained"], lambda prompt, references: " ".join(references[: len(references) // 2]))
    scores = {answer.task: answer.score for answer in
              ruler(half, TOKENIZERS["trained"], list(TASKS), [1024], samples=1)}  # fmt: skip
    assert scores["niah_multivalue"] == scores["niah_multiquery"] == scores["cwe"] == 50
    assert scores["vt"] == 40 and scores["fwe"] == pytest.approx(100 / 3) and scores["niah_single_1"] == 0


def test_the_prompt_leaves_room_for_what_is_generated():
    stub = Stub(TOKENIZERS["byte_level"], lambda prompt, references: "")
    list(ruler(stub, stub.tokenizer, list(TASKS), [1024], samples=1))
    assert all(993 <= prompt + new <= 1024 for prompt, new in stub.asked)
    assert [new for _, new in stub.asked] == [128] * 8 + [39, 120, 50]


def test_metrics_by_hand():
    answers, references = ["Red and BLUE.", "none", "12"], [["red", "blue", "green", "pink"], ["no"], ["3", "4"]]
    assert string_match_all(answers, references) == pytest.approx(100 * (0.5 + 1 + 0) / 3)
    assert string_match_part(answers, references) == pytest.approx(100 * 2 / 3)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [0, 100, 180])
def test_too_short_a_length_is_an_error(task, length):
    with pytest.raises(ValueError, match=f"length {length} is too short for {task}"):
        build(TOKENIZERS["byte_level"], task, length)


def test_a_tokenizer_without_digits_is_an_error():
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<unk>")
    with pytest.raises(ValueError, match="does not survive this tokenizer"):
        build(tokenizer, "niah_single_1", 1024)


def test_unknown_tasks():
    with pytest.raises(ValueError, match="choose among niah_single_1"):
        build(TOKENIZERS["byte_level"], "qa_1", 1024)
    for given in (["vt,qa_3"], [""]):
        with pytest.raises(ValueError, match="choose among niah_single_1"):
            commands.names(given, {})
    assert commands.names(["fwe,vt", "cwe"], {}) == ["vt", "cwe", "fwe"]
    assert commands.names(["all"], {}) == list(TASKS)


def write_model(path):
    """A folder with a tiny model and the trained tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=800, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=600, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    TOKENIZERS["trained"].save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_the_command_scores_goes_on_and_extends(folder, tmp_path):
    def call(tasks, samples):
        command = f"ruler --model {folder} --posenc none --posenc yarn:factor=2 --tasks {tasks} --lengths 512,640"
        command += f" --samples {samples} --device cpu --results {tmp_path}"
        result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        (found,) = Path(tmp_path).iterdir()
        return result.output, found, (found / "samples.jsonl").read_text().splitlines()

    output, found, lines = call("vt,fwe", 1)
    assert len(lines) == 8 and (found / "plot.png").stat().st_size > 5000
    assert "vt, 1 prompts per length" in output and "Mean of 2 tasks" in output and "beyond, x1.07" in output
    samples = [json.loads(line) for line in lines]
    references = {
        name: [s["references"] for s in samples if s["posenc"] == name] for name in ("none", "yarn:factor=2")
    }
    assert references["none"] == references["yarn:factor=2"] and len(references["none"]) == 4
    # Made-up scores, the last line cut as by a kill: what is there stays, what is missing is asked.
    edited = [json.dumps({**sample, "score": 100.0 if sample["task"] == "vt" else 20.0}) for sample in samples[:-1]]
    (found / "samples.jsonl").write_text("\n".join([*edited, lines[-1][:40]]))
    output, found, again = call("vt,fwe", 1)
    assert again[:-1] == edited and json.loads(again[-1])["references"] == samples[-1]["references"]
    scores = json.loads((found / "scores.json").read_text())["scores"]
    first = scores[0]
    assert (first["posenc"], first["length"], first["score"], first["prompts"]) == ("none", 512, 60, 2)
    assert [(row["task"], row["score"], row["prompts"]) for row in first["by_task"]] == [
        ("vt", 100, 1),
        ("fwe", 20, 1),
    ]
    assert "60.0" in output
    _, _, more = call("vt", 2)
    assert len(more) == 8 + 4 and more[:8] == again
    call("vt,fwe", 1)
    assert json.loads((found / "scores.json").read_text())["scores"] == scores
