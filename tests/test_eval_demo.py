"""The demo on a tiny model: what is hidden, what one pass gives, and what an interruption leaves."""

import json
import re

import pytest
import torch
from test_eval_results import build, characters
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from eval import demo, recall
from eval.__main__ import app
from eval.models import applied
from eval.passkey import QUESTION
from eval.perplexity import perplexity
from eval.retrieval import ask

STORY = "".join(f"Line {number} of a story.\nAnd one more.\n\n" for number in range(300))


def test_the_note_is_hidden_in_the_text():
    tokenizer = characters()
    prompt, read = recall.hide(tokenizer, STORY, 4000)
    text = tokenizer.decode(prompt.ids[:read])
    assert tokenizer.decode(prompt.ids[read:]) == QUESTION
    assert len(prompt.ids) == 4000 - 10 and text.count(prompt.references[0]) == 2
    before, after = text[: prompt.key_position], text[prompt.key_position :]
    assert before.endswith("one more.\n\n") and after.startswith("The pass key is")
    assert (before + after.partition("\n\n")[2]) == STORY[: read - after.index("\n\n") - 2]
    assert len(before) / read == pytest.approx(0.3, abs=0.02)
    with pytest.raises(ValueError, match="longer text"):
        recall.hide(tokenizer, STORY, 40_000)
    for length in (1, 20, 90):
        with pytest.raises(ValueError, match="too short for the note"):
            recall.hide(tokenizer, STORY, length)


def test_one_bos_and_no_blank_line():
    tokenizer = characters()
    tokenizer.bos_token = "</s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("</s> $A", special_tokens=[("</s>", 256)])
    prompt, _ = recall.hide(tokenizer, STORY.replace("\n", " "), 4000)
    assert prompt.ids[0] == 256 and prompt.ids.count(256) == 1
    assert prompt.key_position / len(prompt.ids) == pytest.approx(0.3, abs=0.02)


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def hidden():
    return recall.hide(characters(), STORY, 400)


@pytest.mark.parametrize("posenc", demo.POSENCS)
def test_one_pass_gives_the_losses_and_the_answer_of_two(model, hidden, posenc):
    (prompt, read), tokenizer, lengths = hidden, characters(), []
    with applied(model, posenc):
        alone = ask(model, tokenizer, prompt)
        expected = perplexity(model, [prompt.ids[:read]], mode="prefix").scores[0].losses
        hook = model.model.layers[0].register_forward_hook(lambda *states: lengths.append(states[2].shape[1]))
        found = recall.read_and_answer(model, tokenizer, prompt, read)
        hook.remove()
    assert found["answer"] == alone.answer and found["correct"] == alone.correct
    torch.testing.assert_close(torch.tensor(found["losses"]), expected, atol=1e-5, rtol=0)
    assert lengths[:2] == [read, len(prompt.ids) - read] and set(lengths[2:]) == {1}


def test_a_wrong_cache_would_change_the_answer(model, hidden):
    prompt, read = hidden
    with applied(model, "none"):
        right = recall.read_and_answer(model, characters(), prompt, read)["answer"]
    with applied(model, "pi:factor=2"):
        assert recall.read_and_answer(model, characters(), prompt, read)["answer"] != right


def test_progress_counts_the_layers_of_the_pass(model, hidden):
    prompt, read = hidden
    steps = []
    recall.read_and_answer(model, characters(), prompt, read, lambda: steps.append(1))
    assert len(steps) == len(model.model.layers)
    recall.read_and_answer(model, characters(), prompt, read)
    assert len(steps) == len(model.model.layers)


@pytest.fixture
def arguments(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 200}))
    characters().save_pretrained(tmp_path / "model")
    (tmp_path / "story.txt").write_text(STORY)
    options = {"model": tmp_path / "model", "text": tmp_path / "story.txt", "results": tmp_path / "results",
               "dtype": "float32"}  # fmt: skip
    return ["demo", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]


def samples(tmp_path):
    (path,) = (tmp_path / "results").glob("recall-*/samples.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def tables(output):
    return output[output.index("Loss (recall) by position") : output.rindex("report.html")]


def test_an_interrupted_demo_goes_on(arguments, tmp_path, monkeypatch):
    asked = []

    def interrupted(*arguments):
        asked.append(arguments)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return ask(*arguments)

    monkeypatch.setattr(recall, "ask", interrupted)
    assert CliRunner().invoke(app, arguments).exit_code != 0
    assert [sample["posenc"] for sample in samples(tmp_path)] == ["none", "pi:factor=2"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and len(asked) == 5
    assert [sample["posenc"].partition(":")[0] for sample in samples(tmp_path)] == [
        "none", "pi", "yarn", "dynamic_ntk",
    ]  # fmt: skip
    assert {(sample["length"], sample["prompt_tokens"]) for sample in samples(tmp_path)} == {(400, 390)}
    assert "Loss (recall) by position" in done.output and "Answers" in done.output
    (folder,) = (tmp_path / "results").glob("compare-*")
    assert (folder / "loss-recall-by-position.png").stat().st_size > 5000
    assert re.search(r"told \d+ tokens before", (folder / "report.html").read_text())
    again = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert len(asked) == 5 and tables(again.output) == tables(done.output)
