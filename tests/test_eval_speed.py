"""`python -m eval speed` on a tiny model: which cells come out, what an interrupted run keeps. No test is timed."""

import json

import pytest
import torch
from test_eval_results import characters, only
from tiny import TL
from typer.testing import CliRunner

from eval import memory, speed
from eval.__main__ import app, main
from eval.commands import speed as command
from eval.models import CACHE

POSENCS = ("yarn:factor=2", "dynamic_ntk")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    TL(vocab_size=257).save_pretrained(path)
    characters().save_pretrained(path)
    return path


@pytest.fixture
def counted(monkeypatch):
    """Every measurement of the parts that are timed, and memory from a formula in place of a child process."""
    made = []

    def watch(name):
        original = getattr(command, name)

        def watched(model):
            measure = original(model)
            return lambda *place: made.append((name, *place)) or measure(*place)

        monkeypatch.setattr(command, name, watched)

    watch("reading")
    watch("training")

    def in_child(name, dtype):
        def measure(posenc, length):
            made.append(("memory", posenc, length))
            return {"memory": length * (100 if posenc == "none" else 150)}

        return measure

    monkeypatch.setattr(command.memory, "in_child", in_child)
    return made


def arguments(folder, root, *more):
    every = [part for posenc in POSENCS for part in ("--posenc", posenc)]
    given = ("--model", folder, "--dtype", "float32", "--device", "cpu", "--results", root, "--rounds", 2, *every)
    return [str(part) for part in ("speed", *given, *more)]


def run(*all_of_it):
    done = CliRunner().invoke(app, arguments(*all_of_it), catch_exceptions=False, env={"COLUMNS": "160"})
    assert done.exit_code == 0
    return done.output


def samples(root):
    lines = (only(root) / "samples.jsonl").read_text().splitlines()
    return {(s["posenc"], s["length"], s["part"]): s for s in map(json.loads, lines)}


def scores(root):
    found = json.loads((only(root) / "scores.json").read_text())["scores"]
    return {(s["posenc"], s["length"], s["part"]): s for s in found}


def test_every_cell_comes_out(folder, tmp_path, counted):
    output = run(folder, tmp_path, "--lengths", "20,80", "--parts", "prefill,decode,train,memory")
    found = scores(tmp_path)
    names = list(dict.fromkeys(posenc for posenc, *_ in found))
    assert len(names) == 2 and names[0] == "yarn:factor=2" and names[1].startswith("dynamic_ntk")
    assert list(found) == [(n, length, part) for n in names for length in (20, 80) for part in speed.PARTS]
    for (posenc, length, part), score in found.items():
        sample = samples(tmp_path)[posenc, length, part]
        ratios = sorted(mine / stock for mine, stock in zip(sample["values"], sample["unpatched"], strict=True))
        assert (score["lowest"], score["highest"]) == (ratios[0], ratios[-1]) and ratios[0] > 0
        assert score["ratio"] == pytest.approx(sum(ratios) / len(ratios))  # the median of one or two
        assert (score["rounds"], score["unit"]) == ((1, "bytes") if part == "memory" else (2, "seconds"))
    assert found["yarn:factor=2", 80, "memory"]["ratio"] == 1.5
    assert all(part in output for part in (*speed.PARTS, "1.500", "lowest-highest"))
    config = json.loads((only(tmp_path) / "config.json").read_text())
    assert (config["threads"], config["dtype"], config["device"]) == (torch.get_num_threads(), "float32", "cpu")
    assert (only(tmp_path) / "plot.png").stat().st_size > 5000


def test_encodings_take_turns_with_the_unpatched_model(folder, tmp_path, counted):
    run(folder, tmp_path, "--lengths", "20", "--parts", "prefill")
    order = [posenc.split(":")[0] for _, posenc, _ in counted]
    assert order == ["none", "yarn", "dynamic_ntk", "dynamic_ntk", "yarn", "none"]
    assert {part for *_, part in samples(tmp_path)} == {"prefill"}


def test_an_interrupted_run_measures_only_what_is_missing(folder, tmp_path, counted):
    run(folder, tmp_path, "--lengths", "20", "--parts", "prefill,decode,memory")
    before, path = samples(tmp_path), only(tmp_path) / "samples.jsonl"
    lost = next(cell for cell in before if cell[0] != "yarn:factor=2" and cell[2] == "decode")
    path.write_text("".join(json.dumps(sample) + "\n" for cell, sample in before.items() if cell != lost) + '{"cut')
    counted.clear()
    run(folder, tmp_path, "--lengths", "20", "--parts", "prefill,decode,memory")
    assert sorted({(name, posenc) for name, posenc, _ in counted}) == [("reading", lost[0]), ("reading", "none")]
    assert len(counted) == 4
    after = samples(tmp_path)
    assert after.keys() == before.keys()
    assert all(after[cell] == before[cell] for cell in before if cell != lost) and after[lost] != before[lost]
    counted.clear()
    run(folder, tmp_path, "--lengths", "20", "--parts", "train")
    assert {name for name, *_ in counted} == {"training"} and len(scores(tmp_path)) == 8


def test_a_round_that_is_cut_short_leaves_no_sample(folder, tmp_path, monkeypatch):
    def stopping(model):
        measure, calls = speed.reading(model), []

        def once(*place):
            calls.append(place)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return measure(*place)

        return once

    monkeypatch.setattr(command, "reading", stopping)
    CliRunner().invoke(app, arguments(folder, tmp_path, "--lengths", "20", "--parts", "prefill"))
    assert not (only(tmp_path) / "samples.jsonl").exists()


def test_other_rounds_do_not_mix(folder, tmp_path, counted):
    run(folder, tmp_path, "--lengths", "20", "--parts", "memory")
    run(folder, tmp_path, "--lengths", "20", "--parts", "memory", "--rounds", 3)
    assert len(list(tmp_path.iterdir())) == 2


def test_measuring_leaves_the_model_as_it_was():
    model, ids = TL(), torch.arange(40)[None]
    before = model(ids).logits
    costs = speed.compare(speed.training(model), ["dynamic_ntk"], 80, 1)
    assert [cost.part for cost in costs] == ["train"]
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model(ids).logits, before)


def test_training_reaches_every_parameter(monkeypatch):
    model, reached = TL(tie_word_embeddings=False), {}
    zero = type(model).zero_grad

    def watched(self, **keywords):
        reached.update({name: parameter.grad for name, parameter in self.named_parameters()})
        zero(self, **keywords)

    monkeypatch.setattr(type(model), "zero_grad", watched)
    speed.training(model)("dynamic_ntk", 80)
    assert reached and all(gradient is not None and gradient.abs().max() > 0 for gradient in reached.values())


def test_a_frozen_model_cannot_be_trained():
    with pytest.raises(ValueError, match="leave `train` out"):
        speed.training(TL().requires_grad_(False))("none", 20)


def test_no_measurement_computes_more_logits_than_one_token():
    model, seen = TL(), []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    for measure in (speed.reading(model), speed.training(model)):
        measure("none", 30)
    assert set(seen) == {1}


def test_decoding_starts_from_what_was_read():
    model, cached = TL(), []
    model.model.register_forward_pre_hook(
        lambda module, inputs, keywords: cached.append(keywords[CACHE].get_seq_length() if keywords.get(CACHE) else 0),
        with_kwargs=True,
    )
    speed.reading(model)("none", 30)
    assert cached == [0, 0, *range(30, 30 + speed.STEPS)]  # the first is the warm-up


@pytest.mark.skipif(memory.why_not(torch.device("cpu")) is not None, reason="the system cannot reset its marks")
def test_memory_of_a_child_process(folder):
    measure, hidden = memory.in_child(str(folder), "float32"), 4096 * 64 * 4
    assert 5 * hidden < measure("none", 4096)["memory"] < 20 * hidden
    with pytest.raises(ValueError, match="give longer lengths"):
        measure("none", 64)


def test_a_child_process_that_fails_says_why(tmp_path):
    with pytest.raises(ValueError, match=r"memory of none at 20 tokens .* leave it out"):
        memory.in_child(str(tmp_path / "nothing"), "float32")("none", 20)


def test_memory_is_left_out_where_the_system_lacks_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "RESET", tmp_path / "missing" / "clear_refs")
    output = run(folder, tmp_path / "results", "--lengths", "20", "--parts", "prefill,memory")
    assert "memory is left out" in output and "Linux alone" in output
    assert {part for *_, part in samples(tmp_path / "results")} == {"prefill"}
    assert "not measured on mps" in memory.why_not(torch.device("mps"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--parts", "prefil"], "prefill, decode, train, memory"),
        (["--lengths", "0"], "numbers of tokens"),
        (["--lengths", ""], "there are no lengths"),
        (["--lengths", "4k"], "should be numbers"),
        (["--posenc", "yran:factor=2"], "yarn"),
        (["--posenc", "dynamic_ntk"], "more than once"),
    ],
)
def test_wrong_input_is_one_line(folder, tmp_path, monkeypatch, capsys, more, words):
    monkeypatch.setattr("sys.argv", ["eval", *arguments(folder, tmp_path, *more)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    output = capsys.readouterr().out
    assert words in output and "Traceback" not in output


def test_no_rounds():
    assert CliRunner().invoke(app, ["speed", "--rounds", "0"]).exit_code == 2
    with pytest.raises(ValueError, match="at least 1"):
        speed.compare(lambda *place: {}, ["yarn"], 20, 0)
