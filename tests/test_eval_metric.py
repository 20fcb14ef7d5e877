"""The passkey score through `evaluate`, with no way to a hub."""

import socket

import pytest
from test_eval_passkey import ANSWERS, TOKENIZERS, Stub

from eval.passkey import passkey
from eval.scores import wilson

pytest.importorskip("evaluate")
from eval.metric import PasskeyScore


@pytest.fixture
def metric(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise AssertionError(f"the metric asked the network: {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return PasskeyScore(cache_dir=str(tmp_path))


@pytest.mark.parametrize("name", ANSWERS)
def test_it_scores_stubs_as_passkey_does(metric, name):
    answer, (expected, anywhere, _) = ANSWERS[name]
    tokenizer = TOKENIZERS["words"]
    answers = list(passkey(Stub(tokenizer, answer), tokenizer, [512], trials=1))
    found = metric.compute(predictions=[a.answer for a in answers], references=[a.references[0] for a in answers])
    low, high = wilson(found["correct"], 5)
    assert found == {"accuracy": expected, "correct": expected // 20, "prompts": 5,
                     "interval": pytest.approx([100 * low, 100 * high])}  # fmt: skip
    pairs = {"predictions": [a.answer for a in answers], "references": [a.references[0] for a in answers]}
    assert metric.compute(**pairs, scoring="substring")["accuracy"] == anywhere


def test_batches_add_up_and_zeros_count(metric):
    metric.add_batch(predictions=[" 01234.", "1234"], references=["01234", "01234"])
    metric.add(prediction="It is 77777", reference="77777")
    metric.add(prediction="", reference="77777")
    assert metric.compute()["accuracy"] == 50


def test_nothing_to_score(metric):
    with pytest.raises(ValueError, match="at least one trial"):
        metric.compute(predictions=[], references=[])


@pytest.mark.parametrize(("scoring", "words"), [("exact_tokens", "needs the tokens"), ("rouge", "choose one of")])
def test_scorings_that_text_alone_does_not_allow(metric, scoring, words):
    with pytest.raises(ValueError, match=words):
        metric.compute(predictions=["12345"], references=["12345"], scoring=scoring)
