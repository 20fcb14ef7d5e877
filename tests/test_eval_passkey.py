"""Passkey prompts by tokens, and scoring with stubs whose right score is known."""

import re

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from eval import haystack, needle
from eval.__main__ import app
from eval.grading import SCORINGS
from eval.passkey import answer_tokens, build, passkey
from eval.retrieval import DEPTHS


def characters():
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate([*alphabet, "</s>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def words():
    """One token per word or mark, one per digit; a first BOS."""
    from eval import passkey

    pieces = re.findall(r" ?[A-Za-z]+|\s+|[^A-Za-z\s]", " ".join(
        [passkey.HEAD, *haystack.FILLER, *haystack.SHORT_FILLER, passkey.KEY, passkey.QUESTION, needle.HEAD,
         *needle.SUBJECTS]))  # fmt: skip
    known = sorted(
        {*pieces, *(piece.strip() for piece in pieces), *"0123456789", " ", "\n\n", *(f" {w.strip()}" for w in pieces)}
    )
    backend = Tokenizer(
        models.WordLevel({piece: index for index, piece in enumerate(["<s>", "</s>", "<unk>", *known])}, "<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|\s+|[^A-Za-z\s]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"characters": characters(), "words": words()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]


class Stub:
    """Answers with a function of the prompt's text."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, answer):
        self.tokenizer, self.answer, self.prompts = tokenizer, answer, []

    def generate(self, input_ids, **settings):
        prompt = self.tokenizer.decode(input_ids[0])
        self.prompts.append((input_ids.shape[1], settings["max_new_tokens"], prompt))
        new = self.tokenizer(self.answer(prompt), add_special_tokens=False).input_ids
        return torch.cat([input_ids, torch.tensor([new], dtype=torch.long)], dim=1)


def copy_key(prompt):
    return " " + re.search(r"\d+", prompt)[0] + "."


# What the answer is, and what it scores as first number, substring and exact tokens.
ANSWERS = {
    "copies": (copy_key, (100, 100, 100)),
    "echoes": (lambda prompt: prompt, (0, 0, 0)),
    "is silent": (lambda prompt: "", (0, 0, 0)),
    "says a wrong number": (lambda prompt: " 10000.", (0, 0, 0)),
    "says one digit more": (lambda prompt: copy_key(prompt)[:-1] + "7", (0, 100, 100)),
    "says one digit less": (lambda prompt: copy_key(prompt)[:-2], (0, 0, 0)),
    "says another first": (lambda prompt: " 1." + copy_key(prompt), (0, 100, 0)),
    "says it in words": (lambda prompt: " key" + copy_key(prompt), (100, 100, 0)),
}


@pytest.mark.parametrize("digits", [5, 7, 10])
@pytest.mark.parametrize("name", ANSWERS)
def test_scores_of_stubs(tokenizer, name, digits):
    answer, expected = ANSWERS[name]
    answers = list(passkey(Stub(tokenizer, answer), tokenizer, [700], depths=[0, 0.5, 1], trials=1, digits=digits))
    assert len(answers) == 3
    for scoring, score in zip(SCORINGS, expected, strict=True):
        assert 100 * sum(answer.correct[scoring] for answer in answers) / len(answers) == score, scoring


def test_a_model_that_loses_the_start_of_a_prompt_is_found_out(tokenizer):
    class Forgetful(Stub):
        def generate(self, input_ids, **settings):
            return super().generate(input_ids, **settings)[:, 100:]

    (whole,), (cut,) = (
        passkey(kind(tokenizer, copy_key), tokenizer, [512], depths=[1], trials=1) for kind in (Stub, Forgetful)
    )
    assert whole.truncated == 0 and cut.truncated > 90


@pytest.mark.parametrize("length", [700, 2048])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("digits", [5, 7, 10])
def test_prompts_are_sized_in_tokens(tokenizer, length, depth, digits):
    for trial in range(2):
        prompt = build(tokenizer, length, depth, trial, digits=digits)
        text, (key,) = tokenizer.decode(prompt.ids), prompt.references
        assert 0.97 * length <= len(prompt.ids) <= length - answer_tokens(digits)
        assert text.count(key) == 2 and re.fullmatch(rf"[1-9]\d{{{digits - 1}}}", key)
        assert text.endswith("The pass key is")
        assert tokenizer.decode(prompt.ids[prompt.key_position :]).lstrip().startswith(key)


def test_the_key_stands_where_the_depth_says(tokenizer):
    prompts = [build(tokenizer, 4096, depth) for depth in DEPTHS]
    places = [prompt.key_position / len(prompt.ids) for prompt in prompts]
    assert places == sorted(places)
    assert places[0] < 0.05 and places[-1] > 0.9
    assert places[2] == pytest.approx(0.5, abs=0.03)
    start, end = (tokenizer.decode(prompt.ids) for prompt in (prompts[0], prompts[-1]))
    assert "keep it in mind.\n\nThe pass key is" in start
    assert "is the pass key.\n\nThat is the end" in end


def test_the_prompt_leaves_room_for_what_is_generated(tokenizer):
    stub = Stub(tokenizer, copy_key)
    list(passkey(stub, tokenizer, [512, 1024], trials=1))
    assert len(stub.prompts) == 10
    assert all(
        prompt + new <= length for (prompt, new, _), length in zip(stub.prompts, [512] * 5 + [1024] * 5, strict=True)
    )


def test_the_same_seed_asks_the_same(tokenizer):
    first, second, other = (Stub(tokenizer, copy_key) for _ in range(3))
    keys = [[answer.references[0] for answer in passkey(stub, tokenizer, [512], trials=3, seed=seed)]
            for stub, seed in ((first, 3), (second, 3), (other, 4))]  # fmt: skip
    assert first.prompts == second.prompts and keys[0] == keys[1]
    assert len(set(keys[0])) > 10 and keys[0] != keys[2]
    alone = build(tokenizer, 512, 0.75, 2, seed=3)
    assert alone.references[0] in keys[0]


def test_samples_that_are_not_wanted_are_left_out(tokenizer):
    asked = passkey(Stub(tokenizer, copy_key), tokenizer, [512], wanted=lambda length, depth, trial: depth == 1)
    assert [(answer.depth, answer.trial) for answer in asked] == [(1.0, trial) for trial in range(5)]


@pytest.mark.parametrize("length", [0, 10, 60, 200, 300])
def test_too_short_a_length_is_an_error(tokenizer, length):
    with pytest.raises(ValueError, match=f"length {length} is too short"):
        build(tokenizer, length, 0.5)


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan")])
def test_depth_outside_the_text_is_an_error(tokenizer, depth):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        build(tokenizer, 1024, depth)


def test_a_tokenizer_without_digits_is_an_error():
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<unk>")
    with pytest.raises(ValueError, match="no tokens for their digits"):
        build(tokenizer, 1024, 0.5)


def test_no_trials():
    result = CliRunner().invoke(app, ["passkey", "--trials", "0"])
    assert result.exit_code == 2 and "--trials" in result.output


def test_prompts_of_one_length_start_alike(tokenizer):
    first, second = build(tokenizer, 2048, 0.5, 0), build(tokenizer, 2048, 1.0, 1)
    assert first.references != second.references
    before = first.key_position - len(tokenizer("The pass key is", add_special_tokens=False).input_ids) - 1
    assert before > 900 and first.ids[:before] == second.ids[:before]
