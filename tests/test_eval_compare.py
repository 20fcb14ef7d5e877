"""Comparisons: units that pair, damage and gain, and reports that say what the numbers say."""

import csv
import io
import json
import re

import numpy
import pytest
from test_eval_results import build, characters
from typer.testing import CliRunner

from eval import page
from eval.__main__ import app
from eval.compare import BEYOND, BLOCK, WITHIN, Measure, compare, cost, describe, prompt_units, token_units
from eval.scores import wilson

TRAINED = 1000
LOSS = Measure(
    "perplexity",
    "Loss",
    token_units(lambda sample: (sample["first"], sample["losses"]), ("text",)),
    lower=True,
    nested=True,
)
PASSKEY = Measure(
    "passkey", "Pass key", prompt_units(lambda s: 100.0 * s["correct"], ("depth", "trial")), percent=True
)


class Filed:
    """Samples as a results folder has them."""

    def __init__(self, samples):
        self.samples = samples

    def select(self, **fields):
        return [sample for sample in self.samples if fields.items() <= sample.items()]


def losses(posenc, length, shift, seed=0):
    drawn = numpy.random.default_rng([seed, length]).normal(3, 1, length - 1)
    drawn[TRAINED - 1 :] += shift
    return {"posenc": posenc, "length": length, "text": "a", "first": 1, "losses": drawn.tolist(), "seconds": 2.0,
            "memory": length}  # fmt: skip


def column(cells, posenc, name):
    return next(cell for cell in cells if (cell.posenc, cell.column) == (posenc, name))


def test_losses_are_split_at_the_trained_length_and_weighted_by_tokens():
    samples = [
        losses("none", 5000, 2.0),
        losses("yarn", 5000, 0.0),
        losses("none", 500, 2.0),
        losses("yarn", 500, 0.0),
    ]
    cells = compare(LOSS, Filed(samples), ["none", "yarn"], [500, 5000], TRAINED)
    for sample in samples[:2]:
        whole = numpy.array(sample["losses"])
        for name, part in ((WITHIN, whole[: TRAINED - 1]), (BEYOND, whole[TRAINED - 1 :]), (5000, whole)):
            assert column(cells, sample["posenc"], name).value == pytest.approx(part.mean(), abs=1e-12)
    beyond, within = column(cells, "yarn", BEYOND), column(cells, "yarn", WITHIN)
    assert beyond.difference == pytest.approx(-2) and beyond.is_sure and beyond.low <= -2 <= beyond.high
    assert within.difference == 0 and not within.is_sure
    assert beyond.units == 4000 // BLOCK and within.units == 999 // BLOCK  # of the longest length alone
    assert column(cells, "none", BEYOND).difference is None


def prompts(posenc, right):
    return [
        {"posenc": posenc, "length": length, "depth": depth, "trial": trial, "correct": right(length, depth, trial),
         "seconds": 1.5, "memory": None}
        for length in (500, 2000) for depth in (0.0, 1.0) for trial in range(10)
    ]  # fmt: skip


def test_prompts_pair_whatever_the_order_of_their_samples():
    base = prompts("none", lambda length, depth, trial: length == 500 and trial < 8)
    mine = prompts("yarn", lambda length, depth, trial: trial < 7)[::-1]
    cells = compare(PASSKEY, Filed(base + mine), ["none", "yarn"], [500, 2000], TRAINED)
    within, beyond = column(cells, "yarn", WITHIN), column(cells, "yarn", BEYOND)
    assert (within.value, within.difference, within.units) == (70, -10, 20)
    assert within.low < -10 < within.high and within.high - within.low < 40  # two of twenty differ: paired
    assert (beyond.value, beyond.difference) == (70, 70) and beyond.is_sure
    assert beyond.interval == tuple(round(100 * end, 1) for end in wilson(14, 20))
    assert describe(PASSKEY, cells)["effective_length"]["yarn"]["pi_kmax_20"] == 2000
    assert cost(Filed(base), "none", 500) == {
        "posenc": "none", "length": 500, "samples": 20, "seconds": 30.0, "memory": None,
    }  # fmt: skip


def test_only_what_all_encodings_have_is_compared():
    base = prompts("none", lambda length, depth, trial: trial < 8)
    mine = [sample for sample in prompts("yarn", lambda *_: True) if sample["trial"] < 5]
    cells = compare(PASSKEY, Filed(base + mine), ["none", "yarn"], [500, 2000], TRAINED)
    assert column(cells, "none", 500).units == column(cells, "yarn", 500).units == 10
    assert column(cells, "none", 500).value == 100


def test_a_difference_lies_in_its_interval_where_blocks_differ_in_size():
    """12 whole blocks that are alike and one of a single token, beyond the trained length, that differs much."""
    base = {"posenc": "none", "length": 3100, "text": "a", "first": 1, "losses": [3.0] * 3072 + [3.0]}
    mine = {**base, "posenc": "yarn", "losses": [3.0] * 3072 + [9.0]}
    both = {**LOSS.__dict__, "nested": False}
    cell = column(compare(Measure(**both), Filed([base, mine]), ["none", "yarn"], [3100], 3073), "yarn", 3100)
    assert cell.units == 13 and cell.difference == pytest.approx(6 / 3073)
    assert cell.low <= cell.difference <= cell.high < 0.1


def test_few_units_are_never_sure():
    base = prompts("none", lambda *_: False)
    mine = prompts("yarn", lambda *_: True)
    few = [sample for sample in base + mine if sample["depth"] == 0 and sample["trial"] < 9]
    cells = compare(PASSKEY, Filed(few), ["none", "yarn"], [500], TRAINED)
    assert column(cells, "yarn", 500).low == 100 and not column(cells, "yarn", 500).is_sure
    cells = compare(PASSKEY, Filed(base + mine), ["none", "yarn"], [500], TRAINED)
    assert column(cells, "yarn", 500).is_sure


def test_a_loss_that_is_no_number_is_shown_and_not_compared():
    broken = losses("pi", 5000, 0.0)
    broken["losses"][-1] = float("inf")
    cells = compare(LOSS, Filed([losses("none", 5000, 0.0), broken]), ["none", "pi"], [5000], TRAINED)
    assert column(cells, "pi", BEYOND).value == float("inf") and column(cells, "pi", BEYOND).difference is None


@pytest.fixture
def comparison():
    names = ["none", "self_extend:group_size=4,window=2048+yarn:factor=2"]
    filed = Filed([losses(name, 5000, 2.0 if name == "none" else 0.0) for name in names])
    asked = Filed([sample for name in names for sample in prompts(name, lambda length, *_: length < TRAINED)])
    measures = [describe(LOSS, compare(LOSS, filed, names, [5000], TRAINED)),
                describe(PASSKEY, compare(PASSKEY, asked, names, [500, 2000], TRAINED))]  # fmt: skip
    found = {
        "model": "tiny <b>", "trained_length": TRAINED, "dtype": "float32", "device": "cpu", "hardware": "here",
        "posencs": names, "lengths": [500, 2000, 5000], "measures": measures,
        "costs": [{"task": "perplexity", **cost(filed, name, 5000)} for name in names],
        "examples": [{"task": "passkey", "posenc": "none", "length": 500, "wanted": "123", "told": 400,
                      "answer": " <script>1|2",
                      "score": 0.0}],
    }  # fmt: skip
    return json.loads(json.dumps(found))


def test_markdown_shows_damage_beside_gain(comparison):
    text = page.to_markdown(comparison)
    (row,) = re.findall(r"\| Loss, beyond 1,000[^\n]*", text)
    assert "-2.000" in row and row.count("*") == 1
    (row,) = re.findall(r"\| Loss, up to 1,000[^\n]*", text)
    assert "the same everywhere" in row and "*" not in row
    assert "beyond 1,000" in text and "2 times trained" in text and "ruler_85.6" in text
    widths = {
        line.count("|")
        for line in text[text.index("## Within") : text.index("## Loss")].splitlines()
        if line[:1] == "|"
    }
    assert widths == {4}


def test_csv_has_a_line_per_cell(comparison):
    rows = list(csv.DictReader(io.StringIO(page.to_csv(comparison))))
    assert len(rows) == sum(len(measure["cells"]) for measure in comparison["measures"])
    (found,) = [r for r in rows if r["task"] == "perplexity" and r["column"] == "beyond" and "yarn" in r["posenc"]]
    assert float(found["difference"]) == pytest.approx(-2) and found["unit"] == "nats per token"


def test_the_page_needs_nothing_beside_itself(comparison):
    figures = [{"measure": "Loss", "caption": "by position", "light": b"<svg/>", "dark": b"<svg/>"}]
    html = page.to_html(comparison, figures, json.dumps({"torch": "2.13"}))
    assert "tiny &lt;b&gt;" in html and "&lt;script&gt;1|2" in html and "<script" not in html
    assert not re.findall(r'(?:src|href|srcset)="(?!data:)', html) and "url(" not in html and "@import" not in html
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html
    assert "self_extend:<wbr>group_size=4,<wbr>window=2048+<wbr>yarn" in html
    assert html.count('class="better"') >= 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build().save_pretrained(path)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 800}))
    characters().save_pretrained(path)
    (path / "story.txt").write_text("".join(f"Line {n} of a story. And one more.\n\n" for n in range(200)))
    return path


def test_every_task_ends_in_one_report(folder, tmp_path, monkeypatch):
    command = ["compare", "--model", folder, "--text", folder / "story.txt", "--dtype", "float32", "--trials", 1,
               "--tasks", "perplexity,passkey,needle,gain,recall,vt", "--lengths", "700,1000", "--check", 60,
               "--posenc", "none", "--posenc", "yarn:factor=2", "--results", tmp_path]  # fmt: skip
    done = CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)
    assert done.exit_code == 0 and "Within the trained length" in done.output
    (found,) = tmp_path.glob("compare-*")
    comparison = json.loads((found / "scores.json").read_text())
    titles = [measure["title"] for measure in comparison["measures"]]
    assert titles == [
        "Loss", "Pass key", "Pass key: loss of the right answer", "Needle", "Needle: loss of the right answer",
        "Gain by far context", "Loss (recall)", "Pass key (recall)", "vt",
    ]  # fmt: skip
    for measure in comparison["measures"]:
        columns = {cell["column"] for cell in measure["cells"]}
        assert columns == {700, 1000, WITHIN, BEYOND}
        assert {cell["posenc"] for cell in measure["cells"]} == {"none", "yarn:factor=2"}
    loss = {(c["posenc"], c["column"]): c["value"] for c in comparison["measures"][0]["cells"]}
    (scores,) = tmp_path.glob("perplexity-*/scores.json")
    for score in json.loads(scores.read_text())["scores"]:
        assert loss[score["posenc"], score["length"]] == pytest.approx(score["loss"], abs=1e-6)
    costs = {(cost["task"], cost["posenc"], cost["length"]) for cost in comparison["costs"]}
    assert ("passkey", "yarn:factor=2", 1000) in costs
    assert all(cost["memory"] > 2**20 for cost in comparison["costs"])
    manifest = json.loads((found / "manifest.json").read_text())
    assert manifest["truncated"] == 0 and all(encoding["cache"]["agrees"] for encoding in manifest["encodings"])
    html = (found / "report.html").read_text()
    assert html.count("<img") >= 8 and html.count("data:image/svg") == 2 * html.count("<img")
    monkeypatch.setattr("eval.retrieval.ask", None)  # nothing is asked again
    again = CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)
    assert again.exit_code == 0
    without = [{**measure, "cells": 0} for measure in comparison["measures"]]
    assert [{**m, "cells": 0} for m in json.loads((found / "scores.json").read_text())["measures"]] == without


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--tasks", "pasky"], "passkey"), (["--tasks", "vt", "--lengths", "100"], "too short for vt"),
     (["--text", "none-such"], "alice"), (["--tasks", "needle", "--lengths", "400,99999"], "too short")],
)  # fmt: skip
def test_what_cannot_be_compared_is_said_before_anything_is_read(folder, tmp_path, options, words):
    command = [
        "compare",
        "--model",
        folder,
        "--dtype",
        "float32",
        "--text",
        folder / "story.txt",
        "--results",
        tmp_path,
    ]
    done = CliRunner().invoke(app, list(map(str, [*command, *options])))
    assert isinstance(done.exception, ValueError) and words in str(done.exception)
    assert not list(tmp_path.glob("*/samples.jsonl"))
