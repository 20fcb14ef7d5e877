"""lm-evaluation-harness with patched models: the same prompts and scores as without it, and nothing cut."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizing import TOKENIZERS
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hf_posenc
from eval.__main__ import app, main
from eval.commands import lm_eval as commands
from eval.models import encode
from eval.passkey import SCORING, passkey
from eval.report import task_table
from eval.retrieval import DEPTHS
from eval.ruler import ruler

TRAINED = TOKENIZERS["trained"]
TEXT = " ".join(f"The boat number {index} went down the river and came back." for index in range(400))


@pytest.fixture
def harness():
    pytest.importorskip("lm_eval")
    from eval import harness

    return harness


def tiny(length=600):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=800, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=length, bos_token_id=0, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Copying(LlamaForCausalLM):
    """Answers every prompt with the answer that belongs to it, or with a wrong one."""

    answers: dict = {}  # noqa: RUF012
    asked: list = []  # noqa: RUF012

    def generate(self, input_ids, **settings):
        new = self.answers[tuple(input_ids[0].tolist())]
        read = input_ids.shape[1]
        self.asked.append((read, settings.get("max_new_tokens") or settings["max_length"] - read))
        return torch.cat([input_ids, torch.tensor([new])], dim=1)


def evaluate(harness, model, tokenizer, tasks, length, max_length=None, **settings):
    import lm_eval

    built = harness.offline_tasks(tokenizer, tasks, length, **settings)
    manager = harness.TaskManager(include_defaults=False)
    lm = harness.as_lm(model, tokenizer, max_length or length)
    return lm_eval.simple_evaluate(model=lm, tasks=built, task_manager=manager, bootstrap_iters=0)


def answered(found, task):
    """Answer, prompt and score of each prompt, in order."""
    metric = {"passkey": "acc"}.get(task, "string_match")
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [(sample["resps"][0][0], sample["doc"]["text"], sample[metric]) for sample in samples]


@pytest.mark.parametrize("name", ["trained", "byte_level"])
@pytest.mark.parametrize("posenc", ["none", "yarn:factor=2"])
def test_passkey_scores_and_prompts_are_our_own(harness, posenc, name):
    """With keys copied at some depths alone, so that neither score is 0 or 100."""
    tokenizer = TOKENIZERS[name]
    model = tiny()
    if posenc != "none":
        hf_posenc.patch(model, posenc)
    model.__class__ = type("Copying", (Copying,), {"answers": {}, "asked": []})
    from eval.passkey import build

    for index, depth in enumerate(DEPTHS):
        for trial in range(2):
            prompt = build(tokenizer, 512, depth, trial, seed=3)
            answer = f" {prompt.references[0]}." if (index + trial) % 3 else f" {prompt.references[0]}1"
            model.answers[tuple(prompt.ids)] = encode(tokenizer, answer, start=False)
    own = list(passkey(model, tokenizer, [512], trials=2, seed=3))
    found = evaluate(harness, model, tokenizer, ["passkey"], 512, limit=10, seed=3)
    order = [own[depth * 2 + trial] for trial in range(2) for depth in range(5)]
    assert [(answer, bool(score)) for answer, _, score in answered(found, "passkey")] == [
        (answer.answer, bool(answer.correct[SCORING])) for answer in order
    ]
    assert found["results"]["passkey"]["acc,none"] == sum(answer.correct[SCORING] for answer in own) / 10 == 0.7
    assert sorted(model.asked[:10]) == sorted(model.asked[10:]) and len(model.asked) == 20


def test_generated_answers_are_our_own(harness):
    """The tiny model's own words, token by token, under an encoding, for each kind of task."""
    model, tasks = tiny(), ["passkey", "niah_single_1", "vt", "cwe"]
    with hf_posenc.patched(model, "yarn:factor=2"):
        own = list(ruler(model, TRAINED, tasks[1:], [512], samples=2))
        own_keys = list(passkey(model, TRAINED, [512], trials=1))
        found = evaluate(harness, model, TRAINED, tasks, 512, limit=2)
    with_words = [answer.answer for answer in own]
    assert [answer for task in tasks[1:] for answer, _, _ in answered(found, task)] == with_words
    assert all(with_words) and len(set(with_words)) > 3
    assert [answer for answer, _, _ in answered(found, "passkey")] == [answer.answer for answer in own_keys[:2]]


def test_an_encoding_changes_what_the_harness_reads(harness):
    model = tiny()
    plain = evaluate(harness, model, TRAINED, ["perplexity"], 256, text=TEXT, limit=2)
    with hf_posenc.patched(model, "pi:factor=4"):
        patched = evaluate(harness, model, TRAINED, ["perplexity"], 256, text=TEXT, limit=2)
    rates = [found["results"]["perplexity"]["bits_per_byte,none"] for found in (plain, patched)]
    assert rates[0] != pytest.approx(rates[1], rel=1e-3)


def test_perplexity_by_hand(harness):
    model = tiny()
    found = evaluate(harness, model, TRAINED, ["perplexity"], 200, text=TEXT, limit=3)
    pieces = [sample["doc"]["text"] for sample in found["samples"]["perplexity"]]
    assert len(pieces) == 3 and TEXT.startswith(" ".join(pieces))
    nats = 0.0
    for piece in pieces:
        ids = TRAINED(piece).input_ids
        assert 0.95 * 200 < len(ids) <= 200
        logits = model(torch.tensor([[TRAINED.bos_token_id, *ids]])).logits[0].log_softmax(-1)
        for place, token in enumerate(ids):
            nats -= logits[place, token].item()
    size = sum(len(piece.encode()) for piece in pieces)
    assert found["results"]["perplexity"]["bits_per_byte,none"] == pytest.approx(nats / size / math.log(2), rel=1e-4)


def test_nothing_is_cut(harness):
    model = tiny()
    with pytest.raises(ValueError, match=r"does not fit into the .* that max_length 500 leaves"):
        evaluate(harness, model, TRAINED, ["passkey"], 600, max_length=500, limit=1)
    assert evaluate(harness, model, TRAINED, ["passkey"], 600, max_length=600, limit=1)
    lm = harness.as_lm(model, TRAINED, 20)
    words = "The boat went down the river and nobody was in a hurry."
    context = lm.tok_encode(words)
    assert len(lm._loglikelihood_tokens([(None, context, [1] * (21 - len(context)))])) == 1
    with pytest.raises(ValueError, match="a text of 22 tokens does not fit into the 21"):
        lm._loglikelihood_tokens([(None, context, [1] * (22 - len(context)))])


def test_the_length_is_what_the_patch_reaches(harness):
    model = tiny()
    assert harness.as_lm(model, TRAINED).max_length == 600
    with hf_posenc.patched(model, "yarn:factor=2"):
        assert harness.as_lm(model, TRAINED).max_length == 1200
        assert harness.as_lm(model, TRAINED, 700).max_length == 700
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace())
    with pytest.raises(ValueError, match="give max_length"):
        harness.as_lm(SimpleNamespace(config=config), TRAINED)


def test_wrong_tasks_and_texts(harness):
    with pytest.raises(ValueError, match="hellaswag is not known; choose among passkey, perplexity, niah_single_1"):
        harness.offline_tasks(TRAINED, ["passkey", "hellaswag"], 512)
    with pytest.raises(ValueError, match="perplexity needs a text"):
        harness.offline_tasks(TRAINED, ["perplexity"], 512)
    with pytest.raises(ValueError, match="shorter than 512 tokens"):
        harness.offline_tasks(TRAINED, ["perplexity"], 512, text="Too short a text.")
    with pytest.raises(ValueError, match="no task"):
        commands.names([","])
    assert commands.names(["vt,passkey", "vt"]) == ["vt", "passkey"]


def test_the_command_files_each_score_once(harness, tmp_path):
    folder = tmp_path / "model"
    tiny().save_pretrained(folder)
    TRAINED.save_pretrained(folder)
    (tmp_path / "text.txt").write_text(TEXT)

    def call(lengths):
        command = f"lm-eval --model {folder} --posenc none --posenc yarn:factor=2 --tasks passkey,perplexity --limit 2"
        command += f" --lengths {lengths} --text {tmp_path}/text.txt --device cpu --results {tmp_path}/results"
        result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        (found,) = (tmp_path / "results").iterdir()
        return result.output, found, (found / "samples.jsonl").read_text().splitlines()

    output, found, lines = call("512")
    assert len(lines) == 4 and "bits_per_byte" in output and "none: passkey at 512" in output
    sample = json.loads(lines[1])
    assert (sample["posenc"], sample["task"], sample["length"], sample["prompts"]) == ("none", "perplexity", 512, 2)
    assert next(iter(sample["better"].items())) == ("bits_per_byte", "lower")
    output, found, more = call("512,700")
    assert more[:4] == lines and len(more) == 8 and "at 512" not in output
    scores = json.loads((found / "scores.json").read_text())["scores"]
    assert [(score["posenc"].split(":")[0], score["length"]) for score in scores] == [
        ("none", 512), ("none", 700), ("yarn", 512), ("yarn", 700),
    ]  # fmt: skip
    assert [row["task"] for row in scores[0]["by_task"]] == ["passkey", "perplexity"]
    assert scores[0]["by_task"][1]["value"] == sample["metrics"]["bits_per_byte"]


TOY = """
task: toy
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/toy.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["no", "yes"]
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def test_tasks_of_the_harness_itself(harness, tmp_path, monkeypatch):
    """As from the hub: under the encoding, without a length, the first metric first."""
    (tmp_path / "toy.yaml").write_text(TOY.format(folder=tmp_path))
    lines = [json.dumps({"question": f"Is {index} even?", "label": index % 2}) for index in range(9)]
    (tmp_path / "toy.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    manager = harness.TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(harness, "_manager", lambda: manager)
    assert harness.unknown(["toy", "passkey", "toys"]) == ["toys"]
    model = tiny()
    found = harness.score(model, TRAINED, "toy", None, limit=7)
    assert list(found["metrics"]) == ["acc", "acc_norm"] and found["prompts"] == 7
    assert found["better"] == {"acc": "higher", "acc_norm": "higher"}
    right = 0
    for index in range(7):
        losses = []
        for answer in ("no", "yes"):
            context = TRAINED(f"Is {index} even?").input_ids
            ids = TRAINED(f"Is {index} even? {answer}").input_ids
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            losses.append(sum(logits[place - 1, ids[place]].item() for place in range(len(context), len(ids))))
        right += losses.index(max(losses)) == index % 2
    assert found["metrics"]["acc"] == pytest.approx(right / 7) and 0 < right < 7
    with pytest.raises(ValueError, match="needs data from the hub"):
        (tmp_path / "toy.jsonl").unlink()
        harness.score(model, TRAINED, "toy", None, limit=7)


def test_without_the_harness_it_says_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name == "lm_eval" or name.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "eval.harness", raising=False)
    import eval as package

    monkeypatch.delattr(package, "harness", raising=False)
    monkeypatch.setattr(sys, "argv", ["eval", "lm-eval", "--tasks", "passkey"])
    with pytest.raises(SystemExit):
        main()
    assert 'pip install "hf-posenc[lm-eval]"' in capsys.readouterr().out


def test_tasks_by_row_and_encodings_by_column():
    def score(posenc, length, task, metric, value, better):
        row = {"task": task, "metric": metric, "value": value, "better": better}
        return {"posenc": posenc, "length": length, "by_task": [row]}

    table = task_table("t", [
        score("none", 64, "a", "acc", 0.5, "higher"), score("none", 128, "a", "acc", 0.25, "higher"),
        score("none", None, "b", "loss", 2.0, "lower"), score("pi", 64, "a", "acc", 0.75, "higher"),
        score("pi", None, "b", "loss", 2.5, "lower"),
    ], 64)  # fmt: skip
    assert [list(column.cells) for column in table.columns] == [
        ["a", "a", "b"], ["64", "[yellow]128", "-"], ["acc", "acc", "loss"], ["0.500", "0.250", "2.000"],
        ["0.750 [green]+0.250[/]", "-", "2.500 [red]+0.500[/]"],
    ]  # fmt: skip


def test_every_process_gets_the_scores_of_its_own_tasks(harness, monkeypatch):
    """The harness itself gives None to all processes but the first."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = harness.score(tiny(), TRAINED, "passkey", 512, limit=1)
    assert found["prompts"] == 1 and set(found["metrics"]) == {"acc"}
