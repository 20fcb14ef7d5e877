"""Results folders, and the subcommands from options to folder on a tiny model."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_posenc
from eval.__main__ import app, main
from eval.commands import passkey, perplexity
from eval.grading import SCORINGS
from eval.models import applied, encode, fingerprint, full_names, load, numbers, quickest_dtype, trained_length
from eval.results import Results

torch.set_num_threads(1)
TEXT = "".join(f"{number} bottles stand on the wall. " for number in range(40))


def build(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def characters():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate([*alphabet, "</s>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build().save_pretrained(path)
    characters().save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


def open_results(root, **parameters):
    return Results(root, "task", {"model": "m", "value": 1, **parameters}, ("model",), ("posenc", "index"))


def test_samples_come_back_and_other_parameters_do_not_mix(tmp_path):
    first = open_results(tmp_path)
    first.add({"posenc": "none", "index": 0, "loss": 1.5})
    first.add({"posenc": "yarn", "index": 0, "loss": 2.5})
    again = open_results(tmp_path)
    assert again.folder == first.folder
    assert again.has(posenc="yarn", index=0) and not again.has(posenc="yarn", index=1)
    assert [sample["loss"] for sample in again.select(posenc="yarn")] == [2.5]
    other = open_results(tmp_path, value=2)
    assert other.folder != first.folder and not other.samples
    assert json.loads((first.folder / "config.json").read_text())["value"] == 1


@pytest.mark.parametrize("cut", [2, 10, 30])
def test_a_line_cut_by_a_kill_costs_only_itself(tmp_path, cut):
    first = open_results(tmp_path)
    for index in range(3):
        first.add({"posenc": "none", "index": index, "loss": 1.5})
    path = first.folder / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    again = open_results(tmp_path)
    assert [sample["index"] for sample in again.samples.values()] == [0, 1]
    again.add({"posenc": "none", "index": 2, "loss": 1.5})
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_folder_of_another_configuration_is_refused(tmp_path):
    path = open_results(tmp_path).folder / "config.json"
    path.write_text(path.read_text().replace('"value": 1', '"value": 3'))
    with pytest.raises(ValueError, match="another configuration"):
        open_results(tmp_path)


def test_encodings_on_and_off():
    model, ids = build(), torch.arange(40)[None]
    before = model(ids).logits
    with applied(model, "pi:factor=2") as name:
        assert name == "pi:factor=2"
        assert (model(ids).logits - before).abs().max() > 0.1
        assert trained_length(model) == 64
        patched = model(ids).logits
        with applied(model, "none"):
            assert torch.equal(model(ids).logits, before)
        assert torch.equal(model(ids).logits, patched)
    assert torch.equal(model(ids).logits, before) and hf_posenc.current(model) is None
    assert full_names(model, ["none", "pi:factor=2.0"]) == ["none", "pi:factor=2"]
    with pytest.raises(ValueError, match="more than once"):
        full_names(model, ["pi:factor=2", "pi:factor=2.0"])
    with pytest.raises(ValueError, match="yarn"):
        full_names(model, ["none", "yran:factor=2"])


@pytest.mark.parametrize("unit, dtype", [(True, "bfloat16"), (False, "float32")])
def test_bfloat16_where_the_cpu_is_quick_in_it(monkeypatch, unit, dtype):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: unit)
    assert quickest_dtype("cpu") == dtype and quickest_dtype("cuda") == "bfloat16"


def test_fingerprints_tell_models_apart():
    model = build()
    known = fingerprint(model)
    with applied(model, "pi:factor=2"):
        assert fingerprint(model) == known == fingerprint(build())
    assert fingerprint(build(seed=1)) != known
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    assert fingerprint(model) != known


def test_encode_and_numbers():
    tokenizer = characters()
    assert tokenizer.decode(encode(tokenizer, TEXT)) == TEXT
    assert numbers(["2048,4096", "1024"]) == [1024, 2048, 4096] == numbers(["4096 2048", "1024,2048"])
    assert numbers(["0,0.5", "1"], float) == [0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match="2k"):
        numbers(["2k"])


def test_loading_says_what_is_wrong(folder):
    assert load(str(folder), "float32", "cpu")[0].dtype == torch.float32
    with pytest.raises(ValueError, match="bfloat16"):
        load(str(folder), "int8")
    with pytest.raises(ValueError, match="smollm2"):
        load(str(folder / "nothing"))


def run(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def perplexity_arguments(folder, root, *more):
    return ("perplexity", "--model", folder, "--text", folder / "text.txt", "--dtype", "float32", "--tokens", 150,
            "--results", root, *more)  # fmt: skip


def strip(line):
    return {**json.loads(line), "seconds": 0, "memory": 0}


def only(root):
    (found,) = root.iterdir()
    return found


def test_perplexity_command(folder, tmp_path):
    output = run(
        *perplexity_arguments(folder, tmp_path, "--posenc", "none", "--posenc", "pi:factor=2", "--lengths", "32,128")
    )
    assert "pi:factor=2" in output and "beyond" in output
    found = only(tmp_path)
    scores = json.loads((found / "scores.json").read_text())
    assert scores["trained_length"] == 64
    table = {(score["posenc"], score["length"]): score for score in scores["scores"]}
    assert sorted(table) == [("none", 32), ("none", 128), ("pi:factor=2", 32), ("pi:factor=2", 128)]
    model, ids = build(), characters()(TEXT).input_ids[:150]
    for posenc, length in table:
        with applied(model, posenc):
            expected = perplexity.Perplexity([*perplexity.score(
                model, [torch.tensor(ids)], perplexity.plan([150], length))])  # fmt: skip
        assert table[posenc, length]["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
        assert table[posenc, length]["scored_tokens"] == 149
        assert sum(band["tokens"] for band in table[posenc, length]["by_position"]) == 149
    assert table["none", 32]["perplexity"] != pytest.approx(table["pi:factor=2", 32]["perplexity"], rel=1e-3)
    assert (found / "plot.png").stat().st_size > 5000


def test_perplexity_scores_only_what_is_missing(folder, tmp_path, monkeypatch):
    arguments = perplexity_arguments(folder, tmp_path, "--lengths", "32")
    run(*arguments)
    samples = only(tmp_path) / "samples.jsonl"
    whole = samples.read_text().splitlines()
    assert len(whole) == 9
    samples.write_text("\n".join(whole[:5]) + "\n" + whole[5][:20])
    scored, original = [], perplexity.score

    def counted(model, documents, windows, batch_size):
        scored.extend(windows)
        return original(model, documents, windows, batch_size)

    monkeypatch.setattr(perplexity, "score", counted)
    run(*arguments)
    assert len(scored) == 4
    assert list(map(strip, samples.read_text().splitlines())) == list(map(strip, whole))
    run(*arguments, "--lengths", "64")
    lengths = [score["length"] for score in json.loads((only(tmp_path) / "scores.json").read_text())["scores"]]
    assert lengths == [32, 64]


def test_prefix_mode_shows_loss_by_position(folder, tmp_path):
    output = run(*perplexity_arguments(folder, tmp_path, "--mode", "prefix", "--lengths", "128"))
    assert "Loss by position" in output
    (score,) = json.loads((only(tmp_path) / "scores.json").read_text())["scores"]
    bands = [band for band in score["by_position"] if band["tokens"]]
    assert (bands[0]["low"], bands[-1]["high"], score["scored_tokens"]) == (1, 128, 127)
    mean = sum(band["tokens"] * band["loss"] for band in bands) / 127
    assert score["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)


def test_passkey_command_counts_every_cell(folder, tmp_path):
    arguments = ("passkey", "--model", folder, "--dtype", "float32", "--lengths", 512, "--depths", "0,1",
                 "--trials", 2, "--results", tmp_path, "--posenc", "none", "--posenc", "yarn:factor=8")  # fmt: skip
    run(*arguments)
    path = only(tmp_path) / "samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == 8
    by_posenc = {
        name: [s["references"][0] for s in samples if s["posenc"] == name] for name in ("none", "yarn:factor=8")
    }
    assert by_posenc["none"] == by_posenc["yarn:factor=8"] and len(set(by_posenc["none"])) == 4
    path.write_text(
        "".join(
            json.dumps({**sample, "correct": dict.fromkeys(SCORINGS, float(sample["depth"] == 0))}) + "\n"
            for sample in samples[:-1]
        )
    )
    output = run(*arguments)  # asks the one that is missing, and scores what is filed
    assert "50% (2/4, 15-85)" in output and "pi_kmax_20" in output
    assert len(path.read_text().splitlines()) == 8
    content = json.loads((only(tmp_path) / "scores.json").read_text())
    rules = {"ruler_85.6": None, "nolima_85": 512, "pi_kmax_20": 512, "yarn_80": None}
    assert content["effective_length"] == {"none": rules, "yarn:factor=8": rules}
    for score in content["scores"]:
        assert score["interval"] == [15.0, 85.0]
        log_probs = [s["log_probs"] for s in samples if s["posenc"] == score["posenc"]]
        assert score["log_prob"] == pytest.approx(sum(map(sum, log_probs)) / 20, rel=1e-6) and score["log_prob"] < 0
        assert [cell["interval"] for cell in score["by_depth"]] == [[34.2, 100.0], [0.0, 65.8]]
        assert (score["prompts"], score["correct"], score["accuracy"]) == (4, 2, 50.0)
        assert [(cell["accuracy"], cell["prompts"]) for cell in score["by_depth"]] == [(100.0, 2), (0.0, 2)]
        assert score["accuracy"] == sum(cell["accuracy"] for cell in score["by_depth"]) / 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "99999"], "shorter length"),
        (["--posenc", "yran:factor=2"], "yarn"),
        (["--lengths", "many"], "should be numbers"),
        (["--mode", "tails", "--lengths", "32"], "sliding, nonoverlap, prefix, tail"),
        (["--mode", "tail", "--lengths", "32"], "a tail of 1024 tokens must be shorter"),
        (["--mode", "prefix", "--stride", "8"], "a stride is of sliding windows"),
        (["--published", "press"], "yarn, longlora"),
        (["--bos", "both"], "document, window, none"),
        (["--bos", "window", "--lengths", "32"], "puts no BOS"),
        (["--text", "no-such-text"], "paradise_lost"),
    ],
)
def test_wrong_input_is_one_line(folder, tmp_path, monkeypatch, capsys, arguments, words):
    command = ["eval", *map(str, perplexity_arguments(folder, tmp_path)), *arguments]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    output = capsys.readouterr().out
    assert words in output and "Traceback" not in output


def test_passkey_runs_greedily_on_a_loaded_model(folder, tmp_path):
    model, tokenizer = load(str(folder), "float32", "cpu")
    first = passkey.run(model, tokenizer, "tiny", ["none"], [512], [0.5], trials=2, root=tmp_path / "a")
    again = passkey.run(model, tokenizer, "tiny", ["none"], [512], [0.5], trials=2, root=tmp_path / "b")
    texts = [[sample["answer"] for sample in results.samples.values()] for results in (first, again)]
    assert texts[0] == texts[1] and len(texts[0]) == 2
