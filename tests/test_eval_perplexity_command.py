"""`python -m eval perplexity` on a tiny model whose tokenizer makes one token of each byte and puts a BOS first."""

import json
import math

import pytest
import torch
from datasets import Dataset
from test_eval_documents import byte_level
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from eval.__main__ import app
from eval.commands import perplexity as command
from eval.perplexity import perplexity

torch.set_num_threads(1)
TEXT = "".join(f"{number} Flaschen stehen auf der Wand — schön. " for number in range(9))
BYTES = list(TEXT.encode())


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64, initializer_range=0.2)
    ).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level(bos=True)


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    (folder / "b.txt").write_text(TEXT[::-1], encoding="utf-8")
    return folder


@pytest.fixture
def scored(model, tokenizer, files, tmp_path):
    def run(lengths, **options):
        results = command.run(
            model, tokenizer, "tiny", ["none"], lengths, [str(files)], root=tmp_path / "results", **options
        )
        return results, {score["length"]: score for score in command.scores_of(results)}

    return run


def ids_of(tokenizer, text, bos=True):
    return tokenizer(text, add_special_tokens=bos).input_ids


def nats(score):
    return score["loss"] * score["scored_tokens"]


def test_tail_scores_the_same_tokens_at_every_length(scored, model, tokenizer):
    results, scores = scored([16, 40, 100], mode="tail", tail=8, tokens=300)
    assert [score["scored_tokens"] for score in scores.values()] == [2 * 3 * 8] * 3
    assert len({score["scored_bytes"] for score in scores.values()}) == 1
    documents = [ids_of(tokenizer, text)[:300] for text in (TEXT, TEXT[::-1])]
    for length, score in scores.items():
        expected = perplexity(model, documents, window=length, mode="tail", tail=8, sample=100)
        assert score["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
        tails = [sample["end"] for sample in results.select(length=length)]
        assert tails == [100, 200, 300] * 2
        assert sum(band["tokens"] for band in score["by_position"]) == 48
    assert results.config["sample"] == 100


def test_bits_per_byte_of_what_is_scored(scored):
    _, scores = scored([50], mode="nonoverlap")
    score, length = scores[50], len(BYTES) + 1
    starts = range(50, length, 50)  # of windows without a BOS: their first token is not scored
    counted = 2 * (len(BYTES) - len(starts))
    assert score["scored_tokens"] == counted and score["windows"] == 2 * (1 + len(starts))
    lost = 0
    for raw in (TEXT.encode(), TEXT[::-1].encode()):
        for start in starts:
            before, after = raw[: start - 1], raw[:start]
            lost += len(after.decode(errors="ignore").encode()) - len(before.decode(errors="ignore").encode())
    assert score["scored_bytes"] == 2 * len(BYTES) - lost
    assert score["bits_per_byte"] == pytest.approx(nats(score) / math.log(2) / score["scored_bytes"])


@pytest.mark.parametrize(
    ("bos", "windows", "tokens"),
    [
        ("document", math.ceil((len(BYTES) + 1) / 50), len(BYTES) + 1 - math.ceil((len(BYTES) + 1) / 50)),
        ("window", math.ceil(len(BYTES) / 49), len(BYTES)),
        ("none", math.ceil(len(BYTES) / 50), len(BYTES) - math.ceil(len(BYTES) / 50)),
    ],
)
def test_bos_is_never_scored(scored, model, tokenizer, bos, windows, tokens):
    _, scores = scored([50], mode="nonoverlap", bos=bos)
    score = scores[50]
    assert (score["windows"], score["scored_tokens"]) == (2 * windows, 2 * tokens)
    documents = [ids_of(tokenizer, text, bos != "none") for text in (TEXT, TEXT[::-1])]
    special = tokenizer.bos_token_id if bos == "window" else None
    expected = perplexity(model, documents, window=50, mode="nonoverlap", bos=special)
    assert score["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
    if bos == "window":
        assert score["scored_bytes"] == 2 * len(BYTES)


def test_published_figures_are_other_numbers(scored, model, tokenizer):
    documents = [ids_of(tokenizer, TEXT), ids_of(tokenizer, TEXT[::-1])]
    found = {}
    for published in (None, "yarn", "longlora"):
        results, scores = scored([50], stride=20, published=published)
        if published == "longlora":
            documents[1] = documents[1][1:]  # one text, one BOS
            assert {sample["text"] for sample in results.samples.values()} == {results.config["text"]}
        expected = perplexity(model, documents, window=50, stride=20, published=published)
        assert scores[50]["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
        assert scores[50]["bits_per_byte"] == pytest.approx(expected.bits_per_byte(scores[50]["scored_bytes"]))
        found[published] = scores[50]
    assert len({round(score["perplexity"], 3) for score in found.values()}) == 3
    assert found[None]["bits_per_byte"] == found["yarn"]["bits_per_byte"]
    assert found["longlora"]["scored_tokens"] > 2 * found[None]["scored_tokens"]


def test_a_second_run_scores_nothing(scored, monkeypatch):
    first, scores = scored([16, 40], mode="tail", tail=8)
    monkeypatch.setattr(command, "score", lambda model, documents, windows, batch_size: iter(windows and [None]))
    again, same = scored([16, 40], mode="tail", tail=8)
    assert again.folder == first.folder and same == scores


def test_a_data_set_from_the_command_line(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    Dataset.from_dict({"text": [TEXT, "too short", TEXT, TEXT[::-1], TEXT[::2]]}).save_to_disk(tmp_path / "saved")
    arguments = ["perplexity", "--model", tmp_path / "model", "--text", f"dataset:{tmp_path / 'saved'}",
                 "--lengths", "32,64", "--mode", "tail", "--tail", 8, "--dtype", "float32",
                 "--results", tmp_path / "results"]  # fmt: skip
    done = CliRunner().invoke(app, [str(argument) for argument in [*arguments, "--documents", 2]])
    assert done.exit_code == 0, done.output
    assert "1 rows of data sets were too short" in done.output and "Taken once" in done.output
    assert "Bits per byte" in done.output
    (folder,) = (tmp_path / "results").iterdir()
    content = json.loads((folder / "scores.json").read_text())
    source = f"dataset:{tmp_path / 'saved'}"
    assert content["skipped"] == 1 and content["repeated"] == [f"{source}#2"]
    assert list(json.loads((folder / "config.json").read_text())["documents"]) == [f"{source}#0", f"{source}#3"]
    without = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(without.exception, ValueError) and "--documents" in str(without.exception)
