"""Passkey prompts by tokens, and scoring with stubs whose right score is known."""

import re

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from eval.__main__ import app
from eval.models import applied, reads_in_pieces
from eval.passkey import DEPTHS, answer_tokens, build, is_correct, key_log_probs, new_cache, passkey


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
        [passkey.HEAD, *passkey.FILLER, *passkey.SHORT_FILLER, passkey.KEY, passkey.QUESTION]))  # fmt: skip
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


ANSWERS = {
    "copies": (copy_key, 100),
    "echoes": (lambda prompt: prompt, 0),
    "is silent": (lambda prompt: "", 0),
    "says a wrong number": (lambda prompt: " 10000.", 0),
    "says one digit more": (lambda prompt: copy_key(prompt)[:-1] + "7", 0),
    "says one digit less": (lambda prompt: copy_key(prompt)[:-2], 0),
    "says another first": (lambda prompt: " 1." + copy_key(prompt), 0),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_scores_of_stubs(tokenizer, name):
    answer, expected = ANSWERS[name]
    answers = list(passkey(Stub(tokenizer, answer), tokenizer, [1024], trials=2))
    assert len(answers) == 10
    assert 100 * sum(answer.correct for answer in answers) / len(answers) == expected


@pytest.mark.parametrize("length", [512, 700, 1000, 2048])
@pytest.mark.parametrize("depth", DEPTHS)
def test_prompts_are_sized_in_tokens(tokenizer, length, depth):
    for trial in range(3):
        prompt = build(tokenizer, length, depth, trial)
        text = tokenizer.decode(prompt.ids)
        assert 0.97 * length <= len(prompt.ids) <= length - answer_tokens(5)
        assert text.count(prompt.key) == 2 and re.fullmatch(r"[1-9]\d{4}", prompt.key)
        assert text.endswith("The pass key is")
        assert tokenizer.decode(prompt.ids[prompt.key_position :]).lstrip().startswith(prompt.key)


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
    keys = [[answer.key for answer in passkey(stub, tokenizer, [512], trials=3, seed=seed)]
            for stub, seed in ((first, 3), (second, 3), (other, 4))]  # fmt: skip
    assert first.prompts == second.prompts and keys[0] == keys[1]
    assert len(set(keys[0])) > 10 and keys[0] != keys[2]
    alone = build(tokenizer, 512, 0.75, 2, seed=3)
    assert alone.key in keys[0]


def test_samples_that_are_not_wanted_are_left_out(tokenizer):
    asked = passkey(Stub(tokenizer, copy_key), tokenizer, [512], wanted=lambda length, depth, trial: depth == 1)
    assert [(answer.depth, answer.trial) for answer in asked] == [(1.0, 0), (1.0, 1), (1.0, 2), (1.0, 3)]


@pytest.mark.parametrize("digits", [1, 7, 10])
def test_number_of_digits(tokenizer, digits):
    prompt = build(tokenizer, 1024, 0.5, digits=digits)
    assert re.fullmatch(rf"[1-9]\d{{{digits - 1}}}", prompt.key)


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
    with pytest.raises(ValueError, match="no tokens for its digits"):
        build(tokenizer, 1024, 0.5)


@pytest.mark.parametrize(
    ("answer", "correct"),
    [(" 12345", True), ("12345.", True), (" **12345**", True), ("123456", False), ("012345", False), ("1234", False),
     ("1 12345", False), ("", False), ("12,345", False)],
)  # fmt: skip
def test_is_correct(answer, correct):
    assert is_correct(answer, "12345") is correct


def test_no_trials():
    result = CliRunner().invoke(app, ["passkey", "--trials", "0"])
    assert result.exit_code == 2 and "--trials" in result.output


def tiny(config=LlamaConfig, **settings):
    torch.manual_seed(0)
    if config is GPT2Config:
        settings = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 4096, **settings}
    else:
        settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "num_key_value_heads": 1, "max_position_embeddings": 256, **settings}  # fmt: skip
    settings = {"vocab_size": len(TOKENIZERS["words"]), "initializer_range": 0.5, **settings}
    return AutoModelForCausalLM.from_config(config(bos_token_id=0, eos_token_id=1, **settings)).eval()


def count_tokens(model):
    read = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: read.append(inputs[0].numel()))
    return read


STOCK_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}


@pytest.mark.parametrize(
    ("posenc", "config", "settings"),
    [("none", LlamaConfig, {}), ("none", MistralConfig, {"sliding_window": 64}), ("none", GPT2Config, {}),
     ("yarn:factor=4", LlamaConfig, {}), ("dynamic_ntk", LlamaConfig, {}),
     ("self_extend:group_size=8,window=64", LlamaConfig, {}), ("alibi", LlamaConfig, {})],
)  # fmt: skip
def test_sharing_changes_no_answer(posenc, config, settings):
    model, tokenizer = tiny(config, **settings), TOKENIZERS["words"]
    with applied(model, posenc):
        assert reads_in_pieces(model)
        alone, shared = (
            list(passkey(model, tokenizer, [512], trials=2, log_probs=True, share=share)) for share in (False, True)
        )
    assert len({answer.answer for answer in alone}) > 1
    assert [(a.key, a.depth, a.trial, a.answer) for a in shared] == [
        (a.key, a.depth, a.trial, a.answer) for a in alone
    ]
    for one, other in zip(alone, shared, strict=True):
        assert other.log_probs == pytest.approx(one.log_probs, abs=2e-4)


def test_stock_dynamic_scaling_is_not_shared():
    assert not reads_in_pieces(tiny(**STOCK_DYNAMIC))
    model = tiny(**STOCK_DYNAMIC)
    with applied(model, "dynamic_ntk:factor=2"):
        assert reads_in_pieces(model)


def test_sharing_reads_about_half_of_the_tokens():
    model, tokenizer = tiny(num_hidden_layers=1), TOKENIZERS["words"]
    read = count_tokens(model)
    answers = list(passkey(model, tokenizer, [4096], log_probs=True, share=True))
    assert len(answers) == 20
    assert sum(read) <= sum(answer.prompt_tokens for answer in answers) / 1.8  # even with what is generated


def test_prompts_of_one_length_start_alike(tokenizer):
    first, second = build(tokenizer, 2048, 0.5, 0), build(tokenizer, 2048, 1.0, 1)
    assert first.key != second.key
    before = first.key_position - len(tokenizer("The pass key is", add_special_tokens=False).input_ids) - 1
    assert before > 900 and first.ids[:before] == second.ids[:before]


@pytest.mark.parametrize("posenc", ["none", "yarn:factor=4", "dynamic_ntk"])
@pytest.mark.parametrize("digits", [5, 7])
def test_log_probabilities_against_one_forward_per_token(posenc, digits):
    model, tokenizer = tiny(), TOKENIZERS["words"]
    prompt = build(tokenizer, 512, 0.5, digits=digits)
    with applied(model, posenc), torch.no_grad():
        (answer,) = passkey(model, tokenizer, [512], depths=[0.5], trials=1, digits=digits, log_probs=True)
        ids, expected = list(prompt.ids), []
        for token in tokenizer(f" {prompt.key}").input_ids:
            if tokenizer.decode([token]).isdigit():
                expected.append(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token].item())
            ids.append(token)
    assert len(expected) == digits
    assert answer.log_probs == pytest.approx(expected, abs=2e-4)


def test_an_answer_without_tokens_of_its_own():
    from dataclasses import replace

    model, tokenizer = tiny(), TOKENIZERS["words"]
    with pytest.raises(ValueError, match="no tokens of its own"):
        key_log_probs(model, tokenizer, replace(build(tokenizer, 512, 0.5), key_ids=[]), new_cache(model))
