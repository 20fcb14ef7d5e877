"""Real text around what is hidden: whole sentences, never restarted; and needles that stand in it."""

import functools
import random
import re

import pytest
from test_eval_passkey import TOKENIZERS, Stub, copy_key, tokenizer  # noqa: F401

from eval import passkey
from eval.grading import SCORINGS
from eval.haystack import FILLER, split
from eval.needle import answer_tokens, build, make_facts, needle
from eval.retrieval import DEPTHS

_draw = random.Random(0)
_WORDS = ("the", "river", "ran", "past", "an", "old", "mill", "where", "nobody", "had", "worked", "for", "years")
STORY = "A STORY\n\n" + "".join(
    f"{' '.join(_draw.choices(_WORDS, k=_draw.randrange(4, 30))).capitalize()} in {1000 + index}"
    f"{_draw.choice('..!?')}{_draw.choice([' ', '  ', chr(10), chr(10) * 2])}"
    for index in range(400)
)
BUILDS = {
    "passkey": functools.partial(passkey.build, text=STORY),
    "needle": functools.partial(build, text=STORY),
    "three needles": functools.partial(build, text=STORY, needles=3),
    "one of three": functools.partial(build, text=STORY, needles=3, ask="one"),
}


def test_sentences_are_whole():
    text = ("THE TITLE\n\nMr. Fox met Dr. J. Crow. `Oh!' said she. \"Where to?\" He ran (far away.) Then\n"
            "it rained... and 3.5 miles on it stopped!\n\n  The end")  # fmt: skip
    assert [piece.strip() for piece in split(text)] == [
        "THE TITLE", "Mr. Fox met Dr. J. Crow.", "`Oh!' said she.", '"Where to?"', "He ran (far away.)",
        "Then\nit rained... and 3.5 miles on it stopped!", "The end",
    ]  # fmt: skip
    assert "".join(split(text)) == f"{text} " and "".join(split(STORY)) == STORY
    with pytest.raises(ValueError, match="empty"):
        split(" \n ")


@pytest.mark.parametrize("length", [1024, 2048])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("task", BUILDS)
def test_real_text_is_sized_in_tokens_and_cut_at_sentence_ends(tokenizer, task, depth, length):  # noqa: F811
    prompt = BUILDS[task](tokenizer, length, depth, 1)
    assert 0.97 * length <= len(prompt.ids) <= length - prompt.room
    if tokenizer is TOKENIZERS["words"]:
        return  # it has no tokens for most of the story
    text = tokenizer.decode(prompt.ids)
    body = text.partition("mind.\n\n")[2].partition("\n\nThat is the end")[0]
    hidden = r"The pass key is \d+\. Keep it in mind: \d+ is the pass key\. ?|The [a-z]+( \w+)* of [A-Z]\w+ is \d+\. ?"
    told = [match[0] for match in re.finditer(hidden, body)]
    assert len(told) == (3 if "three" in task else 1)
    rest = body
    for sentence in told:
        rest = rest.replace(sentence, "", 1)
    taken = 0
    while rest.startswith(split(STORY)[taken].rstrip()):
        rest, taken = rest[len(split(STORY)[taken].rstrip()) :].lstrip(), taken + 1
    assert taken > 5
    for sentence in (*FILLER, "All was quiet.", "So."):  # less than the next sentence of the text
        rest = rest.replace(sentence, "")
    assert not rest.strip()
    assert all(reference not in STORY and text.count(reference) == (2 if task == "passkey" else 1)
               for reference in prompt.references)  # fmt: skip
    place = body.index(told[0])
    assert place / len(body) == pytest.approx(depth, abs=250 / len(body))
    assert re.search(r"(^|[.!?]\s+|STORY\s+)$", body[:place])


def test_a_text_is_never_restarted():
    tokenizer = TOKENIZERS["characters"]  # noqa: F811
    text = STORY[:4000]
    for make in BUILDS.values():
        make(tokenizer, 4000, 0.5, text=text)
        with pytest.raises(ValueError, match=r"text is too short for length \d+: with the question it fills 4\d+ tok"):
            make(tokenizer, 6000, 0.5, text=text)
        with pytest.raises(ValueError, match="the text is"):
            make(tokenizer, 2048, 0.5, text="Short. ")


def test_a_key_that_the_text_holds_is_not_drawn():
    tokenizer = TOKENIZERS["characters"]  # noqa: F811
    text = " ".join(f"{number} is a number." for number in range(10, 98)) + re.sub(r"\d+", "May", STORY)
    keys = {passkey.build(tokenizer, 2048, 0.5, trial, digits=2, text=text).references[0] for trial in range(20)}
    assert keys == {"98", "99"}
    with pytest.raises(ValueError, match="take more digits"):
        passkey.build(tokenizer, 2048, 0.5, digits=2, text=text + "98, 99.")


def test_facts_follow_from_the_seed_and_are_all_different():
    facts, again, others = (make_facts(random.Random(seed), 100, STORY) for seed in (1, 1, 2))
    assert facts == again and not set(facts) & set(others)
    names, values = ({subject.split()[-1] for subject, _ in facts}, {value for _, value in facts})
    assert len(names) == len(values) == 100
    assert all(word not in STORY for word in names | values)


def test_several_needles_are_spread_from_the_depth_on():
    tokenizer = TOKENIZERS["characters"]  # noqa: F811
    for depth in (0.2, 0.6):
        for ask in ("all", "one"):
            prompt = build(tokenizer, 4096, depth, text=STORY, needles=4, ask=ask)
            text = tokenizer.decode(prompt.ids)
            places = [match.start() / len(prompt.ids) for match in re.finditer(r"The [a-z ]+ of [A-Z]\w+ is \d", text)]
            assert places == pytest.approx([depth + index * (1 - depth) / 4 for index in range(4)], abs=0.1)
            values = re.findall(r"of [A-Z]\w+ is (\d{5})\.", text)
            assert prompt.references == (values if ask == "all" else values[:1])
            assert prompt.room == answer_tokens(4, ask) == (31 if ask == "all" else 10)
            subjects = re.findall(r"The ([a-z ]+ of [A-Z]\w+) is \d", text)
            question = text.partition("Complete from it:")[2]
            assert [subject in question.replace("The ", "the ") for subject in (f"the {s}" for s in subjects)] == [
                True, *[ask == "all"] * 3,
            ]  # fmt: skip


def values(prompt):
    return re.findall(r" is (\d{5})", prompt)


# What the answer to three needles is, and what it scores as first number, substring and exact tokens.
ANSWERS = {
    "copies": (lambda prompt: f" {', '.join(values(prompt))}.", (100, 100, 100)),
    "copies in another order": (lambda prompt: " " + " ".join(values(prompt)[::-1]), (100, 100, 0)),
    "knows two": (lambda prompt: f" {', '.join(values(prompt)[:2])}, 10000", (200 / 3, 200 / 3, 0)),
    "guesses first": (lambda prompt: f" 7, {', '.join(values(prompt))}", (200 / 3, 100, 0)),
    "echoes": (lambda prompt: prompt, (0, 0, 0)),
    "is silent": (lambda prompt: "", (0, 0, 0)),
    "says wrong numbers": (lambda prompt: " 10000, 10001, 10002.", (0, 0, 0)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_scores_of_stubs(tokenizer, name):  # noqa: F811
    answer, expected = ANSWERS[name]
    asked = needle(Stub(tokenizer, answer), tokenizer, [2048], text=STORY, needles=3, depths=[0, 0.5, 1], trials=2)
    answers = list(asked)
    for scoring, score in zip(SCORINGS, expected, strict=True):
        assert 100 * sum(answer.correct[scoring] for answer in answers) / 6 == pytest.approx(score), scoring


@pytest.mark.parametrize("scoring", SCORINGS)
def test_an_echo_of_any_prompt_scores_nothing(tokenizer, scoring):  # noqa: F811
    echo, copying = Stub(tokenizer, lambda prompt: prompt), Stub(tokenizer, lambda prompt: f" {values(prompt)[0]}")
    for options in ({}, {"needles": 6}, {"needles": 6, "ask": "one"}):
        (answer,) = needle(echo, tokenizer, [2048], text=STORY, depths=[0], trials=1, **options)
        assert answer.correct[scoring] == 0 and answer.key_position >= len(answer.answer_ids) > 0
    for text in (None, STORY):
        (answer,) = passkey.passkey(echo, tokenizer, [1024], depths=[0], trials=1, digits=10, text=text)
        assert answer.correct[scoring] == 0
    (answer,) = needle(copying, tokenizer, [2048], text=STORY, depths=[0], trials=1, needles=6, ask="one")
    assert answer.correct[scoring] == 1
    (answer,) = passkey.passkey(Stub(tokenizer, copy_key), tokenizer, [1024], depths=[0], trials=1, digits=10)
    assert answer.correct[scoring] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [({"needles": 0}, "1 to 1000"), ({"ask": "some"}, "all, one"), ({"depth": 1.5}, "must lie in"),
     ({"length": 300}, "too short"), ({"length": 1000, "needles": 6}, "take")],
)  # fmt: skip
def test_wrong_needles(options, words):
    with pytest.raises(ValueError, match=words):
        build(TOKENIZERS["words"], **{"length": 1024, "depth": 0.5, "text": STORY, **options})
