"""Asking: what sharing costs and changes, and log-probabilities, for passkey and needle; then the two commands."""

import functools
import json
from dataclasses import replace

import pytest
import torch
from matplotlib import pyplot
from test_eval_needle import STORY
from test_eval_passkey import TOKENIZERS
from test_eval_results import folder, only, run  # noqa: F401
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

from eval import data, models, needle, passkey, report
from eval.__main__ import main
from eval.commands import needle as needle_command
from eval.commands import passkey as passkey_command
from eval.models import applied, reads_in_pieces
from eval.retrieval import key_log_probs, new_cache

TASKS = {
    "passkey": passkey.passkey,
    "passkey in a text": functools.partial(passkey.passkey, text=STORY),
    "needle": functools.partial(needle.needle, text=STORY),
}


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
    """Tokens that each forward of the model is given."""
    read = []
    model.register_forward_pre_hook(
        lambda module, arguments, given: read.append(given["input_ids"].numel()), with_kwargs=True
    )
    return read


def both_ways(model, task, length, **options):
    """Answers read prompt by prompt and sharing, and the tokens that the model was given for each."""
    read, answers, counts = count_tokens(model), [], []
    for share in (False, True):
        found = task(model, TOKENIZERS["words"], [length], log_probs=True, share=share, **options)
        answers.append(sorted(found, key=lambda answer: (answer.depth, answer.trial)))
        counts.append(sum(read))
        read.clear()
    return answers, counts


def assert_same(answers):
    alone, shared = answers
    assert len({answer.answer for answer in alone}) > 1
    for one, other in zip(alone, shared, strict=True):
        assert other.log_probs == pytest.approx(one.log_probs, abs=1e-4)
        assert one.truncated == other.truncated == 0
        assert replace(other, seconds=0, log_probs=None) == replace(one, seconds=0, log_probs=None)


STOCK_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}


@pytest.mark.parametrize(
    ("posenc", "config", "settings"),
    [("none", LlamaConfig, {}), ("none", MistralConfig, {"sliding_window": 64}), ("none", GPT2Config, {}),
     ("yarn:factor=4", LlamaConfig, {}), ("dynamic_ntk", LlamaConfig, {}),
     ("self_extend:group_size=8,window=64", LlamaConfig, {}), ("alibi", LlamaConfig, {})],
)  # fmt: skip
@pytest.mark.parametrize("task", ["passkey", "needle"])
def test_sharing_changes_no_answer(task, posenc, config, settings):
    model = tiny(config, **settings)
    with applied(model, posenc):
        assert reads_in_pieces(model)
        answers, (alone, shared) = both_ways(model, TASKS[task], 512, trials=2)
    assert_same(answers)
    assert shared < 0.8 * alone


SELF_EXTEND = "self_extend:group_size=16,window=64"
QUICK = [("passkey", "yarn:factor=8", 2048), ("passkey in a text", "none", 2048), ("needle", "none", 2048)]
LONGER = [(task, posenc, length) for task in TASKS for posenc in ("none", "yarn:factor=32", "dynamic_ntk", SELF_EXTEND)
          for length in (2048, 3000) if (task, posenc, length) not in QUICK]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "posenc", "length"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONGER)]
)
def test_the_default_grid_reads_little_more_than_half_with_all_that_is_read(task, posenc, length):
    model = tiny(num_hidden_layers=1)
    with applied(model, posenc):
        answers, (alone, shared) = both_ways(model, TASKS[task], length)
    assert_same(answers)
    assert len(answers[0]) == 25
    room, key = len(answers[0][0].answer_ids), len(answers[0][0].key_ids)
    assert alone == sum(a.prompt_tokens - 1 + key + len(a.answer_ids) for a in answers[0]) and room == 10
    assert shared <= alone / 1.8


def test_sharing_of_several_needles():
    answers, (alone, shared) = both_ways(tiny(), TASKS["needle"], 1024, trials=2, needles=3)
    assert_same(answers)
    assert shared < 0.8 * alone


def test_stock_dynamic_scaling_is_not_shared():
    assert not reads_in_pieces(tiny(**STOCK_DYNAMIC))
    model = tiny(**STOCK_DYNAMIC)
    with applied(model, "dynamic_ntk:factor=2"):
        assert reads_in_pieces(model)


@pytest.mark.parametrize("posenc", ["none", "yarn:factor=4", "dynamic_ntk"])
@pytest.mark.parametrize(
    ("task", "options"), [("passkey", {}), ("passkey", {"digits": 7}), ("needle", {"needles": 2})]
)
def test_log_probabilities_against_one_forward_per_token(task, options, posenc):
    model, tokenizer = tiny(), TOKENIZERS["words"]
    make = {"passkey": passkey.build, "needle": functools.partial(needle.build, text=STORY)}[task]
    prompt = make(tokenizer, 700, 0.5, **options)
    with applied(model, posenc), torch.no_grad():
        (answer,) = TASKS[task](model, tokenizer, [700], depths=[0.5], trials=1, log_probs=True, **options)
        ids, expected = list(prompt.ids), []
        for token in tokenizer(f" {', '.join(prompt.references)}").input_ids:
            if tokenizer.decode([token]).isdigit():
                expected.append(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token].item())
            ids.append(token)
    assert len(expected) == sum(map(len, prompt.references))
    assert answer.log_probs == pytest.approx(expected, abs=2e-4)


def test_an_answer_without_tokens_of_its_own():
    model, tokenizer = tiny(), TOKENIZERS["words"]
    prompt = replace(passkey.build(tokenizer, 512, 0.5), key_ids=[])
    with pytest.raises(ValueError, match="no tokens of its own"):
        key_log_probs(model, tokenizer, prompt, new_cache(model))


@pytest.fixture
def arguments(folder, tmp_path):  # noqa: F811
    (folder / "story.txt").write_text(STORY)
    return ("--model", folder, "--dtype", "float32", "--results", tmp_path / "results", "--depths", "0,0.5,1",
            "--trials", 2, "--lengths", "1024")  # fmt: skip


def scores(tmp_path):
    return json.loads((only(tmp_path / "results") / "scores.json").read_text())


@pytest.mark.parametrize(
    ("command", "more"),
    [(("passkey", "--filler"), ()), (("needle", "--text"), ("--needles", 3)),
     (("needle", "--text"), ("--needles", 3, "--ask", "one"))],
)  # fmt: skip
def test_another_scoring_asks_nothing_anew(folder, arguments, tmp_path, command, more):  # noqa: F811
    arguments = (*command, folder / "story.txt", *arguments, *more)
    if more == ("--needles", 3):
        arguments = tuple("1500" if argument == "1024" else argument for argument in arguments)
    run(*arguments)
    path = only(tmp_path / "results") / "samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == 6 and not any(sample["truncated"] for sample in samples)
    assert {len(sample["references"]) for sample in samples} == {3 if more == ("--needles", 3) else 1}
    for index, sample in enumerate(samples):  # as if the model had answered: uneven over the cells
        sample["correct"] = {"first_number": float(index < 1), "substring": 0.5 * (index < 3), "exact_tokens": 0.0}
    path.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    for scoring, expected in (("first_number", 100 / 6), ("substring", 150 / 6), ("exact_tokens", 0)):
        run(*arguments, "--scoring", scoring)
        assert len(path.read_text().splitlines()) == 6
        found = scores(tmp_path)
        (score,) = found["scores"]
        cells = [cell["accuracy"] for cell in score["by_depth"]]
        assert found["scoring"] == score["scoring"] == scoring and len(set(cells)) > (expected > 0)
        assert score["accuracy"] == pytest.approx(expected) == pytest.approx(sum(cells) / len(cells))
        assert score["by_scoring"] == pytest.approx({"first_number": 100 / 6, "substring": 150 / 6, "exact_tokens": 0})
        assert score["truncated"] == 0


def test_what_the_model_did_not_receive_is_shown(arguments, tmp_path):
    run("passkey", *arguments)
    path = only(tmp_path / "results") / "samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    samples[0]["truncated"] = 7
    path.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    assert "did not receive 7 tokens" in run("passkey", *arguments)
    assert scores(tmp_path)["scores"][0]["truncated"] == 7


@pytest.mark.parametrize(
    ("more", "words"),
    [(("passkey", "--scoring", "rouge"), "choose one of first_number"), (("needle", "--scoring", "x"), "substring"),
     (("passkey", "--depths", "0.5,1.5"), "must lie in [0, 1]"), (("passkey", "--depths", "nan"), "must lie in"),
     (("passkey", "--depths", " "), "there are no depths"), (("needle", "--lengths", ","), "there are no lengths"),
     (("passkey", "--lengths", "4096,333"), "take 334 at least"), (("needle", "--lengths", "-1"), "too short"),
     (("passkey", "--digits", 10, "--lengths", 400), "take 500 at least"),
     (("needle", "--needles", 4, "--lengths", 1000), "take 1034 at least"), (("needle", "--ask", "two"), "all, one"),
     (("needle", "--needles", 5000, "--ask", "one"), "1 to 1000"),
     (("passkey", "--filler", "no-such-text"), "neither a file"), (("needle", "--text", "x"), "paradise_lost")],
)  # fmt: skip
def test_wrong_input_fails_before_a_model_is_loaded(monkeypatch, capsys, more, words):
    monkeypatch.setattr(models, "load", lambda *arguments: pytest.fail("a model was loaded"))
    monkeypatch.setattr("sys.argv", ["eval", *map(str, more)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert words in capsys.readouterr().out.replace("\n", " ")


def test_a_length_that_is_too_short_fails_before_the_first_prompt(folder, tmp_path):  # noqa: F811
    model, tokenizer = models.load(str(folder), "float32", "cpu")
    story = folder / "story.txt"
    story.write_text(STORY)
    read = count_tokens(model)
    for command, options in ((passkey_command, {"filler": str(story)}), (needle_command, {"text": str(story)})):
        with pytest.raises(ValueError, match="text is too short for length 500000: with the question it fills"):
            command.run(model, tokenizer, "tiny", ["none"], [512, 500_000], [0.5], root=tmp_path, **options)
        with pytest.raises(ValueError, match="trials must be at least 1"):
            command.run(model, tokenizer, "tiny", ["none"], [512], [0.5], trials=0, root=tmp_path, **options)
    assert not read


def test_the_offline_text_of_the_default_is_known():
    assert needle.TEXT in data.TEXTS


@pytest.mark.parametrize(
    ("trained", "line"),
    [(2048, 0.5), (3000, 0.5), (4096, 1.5), (8192, 2.5), (9000, 2.5), (1024, None), (16384, None), (99999, None),
     (None, None)],
)  # fmt: skip
def test_the_dashed_line_parts_the_lengths_at_the_trained_one(monkeypatch, tmp_path, trained, line):
    lengths, kept = [2048, 4096, 8192, 16384], []
    monkeypatch.setattr(report, "_save", lambda figure, path: kept.append(figure))
    cells = [[{"accuracy": 10.0 * column, "interval": [0.0, 50.0]} for column in range(4)] for _ in range(2)]
    report.plot_maps(tmp_path / "plot.png", {"none": cells}, lengths, [0.0, 1.0], trained)
    axes = kept[0].axes[0]
    assert [found.get_xdata()[0] for found in axes.get_lines()] == ([] if line is None else [line])
    assert ("dashed" in axes.get_xlabel()) == (line is not None)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["2k", "4k", "8k", "16k"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # depth 0 is on top
    pyplot.close(kept[0])
