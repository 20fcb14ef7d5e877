"""The command line, run as a user runs it."""

import json
import subprocess
import sys

import pytest
import tiny
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.planner import inspect
from hf_posenc.registry import registered


@pytest.fixture(autouse=True)
def _verbosity():
    """The command line silences transformers; other tests go on as they were."""
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


@pytest.fixture
def folder(tmp_path):
    tiny.TL().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def good(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_methods_lists_every_method_with_parameters_and_traits():
    text = good("methods")
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert set(registered()) <= set(rows)
    assert "beta_fast=32" in text
    assert "this model" not in text
    # acts on, position, values, symmetric, monotone, shift-invariant, stock kernels, training, past trained length
    pi = [cell.strip() for cell in rows["pi"].split("│")[3:-1]]
    assert pi == ["query and key", "relative", "designed", "no", "no", "yes", "yes", "yes", "yes"]
    dynamic = [cell.strip() for cell in rows["dynamic_ntk"].split("│")[3:-1]]
    assert dynamic[5:] == ["no", "no", "no", "yes"]
    assert [cell.strip() for cell in rows["rerope"].split("│")[3:-1]][5:] == ["yes", "no", "no", "yes"]
    assert [cell.strip() for cell in rows["self_extend"].split("│")[3:-1]][5:] == ["no", "no", "no", "yes"]


def test_methods_says_what_a_model_can_take(folder, tmp_path):
    tiny.tiny_model("falcon").save_pretrained(tmp_path / "falcon")
    taken = {
        path: {
            line.split("│")[1].strip(): line.split("│")[-2].strip()
            for line in good("methods", path).splitlines()
            if line.startswith("│")
        }
        for path in (folder, tmp_path / "falcon")
    }
    assert taken[folder]["dynamic_ntk"] == taken[folder]["yarn"] == "yes"
    assert (taken[tmp_path / "falcon"]["dynamic_ntk"], taken[tmp_path / "falcon"]["yarn"]) == ("no", "yes")


def test_inspect_prints_every_pair(folder):
    text = good("inspect", folder, "--context", 256, "--method", "yarn:factor=4")
    assert "4 of 8" in text.splitlines()[4]
    assert next(line for line in text.splitlines() if line.startswith("│    0 │")).count("6.28") == 3
    assert "cos and sin x 1.1386" in text
    assert "rerope:window=6 moves far tokens closer;" in good("inspect", folder, "--method", "rerope:window=6")


def test_inspect_json_and_plot(folder, tmp_path):
    plain = json.loads(good("inspect", folder, "--context", 256, "--json", "--plot", tmp_path / "waves.png"))
    assert plain == inspect(folder, 256).to_dict()
    assert (tmp_path / "waves.png").read_bytes()[:4] == b"\x89PNG"


def test_plan(folder):
    text = good("plan", folder, 256)
    assert [line.split("│")[2].strip() for line in text.splitlines() if line.startswith("│ 1 ")] == ["yarn:factor=4"]
    assert "self_extend:group_size=5,window=16" in text and "(64 - 16) x 5 + 16 =" in text
    assert "Nothing is needed" in good("plan", folder, 64)


def test_export_to_transformers_brings_the_tokenizer(folder, tmp_path):
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder)
    out = tmp_path / "out"
    assert str(out) in good("export", folder, out, "--method", "yarn:factor=4")
    expected = hf_posenc.patch(tiny.TL(), "yarn:factor=4")
    ids = torch.arange(3, 103)[None]
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(ids).logits, expected(ids).logits)
    assert AutoTokenizer.from_pretrained(out).model_max_length == 256


@pytest.mark.parametrize(
    ("target", "file", "command"),
    [("vllm", "vllm_overrides.json", "--max-model-len 256"), ("llama.cpp", "llama_cpp_flags.txt", "--rope-scale 4")],
)
def test_export_for_engines_reads_no_weight(target, file, command, folder, tmp_path):
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    text = good("export", folder, tmp_path / "out", "--method", "yarn:factor=4", "--target", target)
    assert command in text
    assert folder in text or target == "llama.cpp"
    assert (tmp_path / "out" / file).exists()


def test_export_takes_the_scheme_a_model_was_saved_with(tmp_path):
    hf_posenc.patch(tiny.TL(), "yarn:factor=8").save_pretrained(tmp_path / "model")
    for target in ("vllm", "transformers"):
        good("export", tmp_path / "model", tmp_path / "out", "--target", target)
    assert json.loads((tmp_path / "out" / "vllm_overrides.json").read_text())["rope_parameters"]["factor"] == 8
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]["factor"] == 8
    good("export", tmp_path / "model", tmp_path / "out", "--target", "vllm", "--method", "ntk:factor=2")
    entry = json.loads((tmp_path / "out" / "vllm_overrides.json").read_text())
    assert entry["max_position_embeddings"] == 128


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("inspect", "/no/such/folder"), "There is no folder /no/such/folder."),
        (("inspect", "{folder}", "--method", "yrn"), "Did you mean 'yarn'"),
        (("inspect", "{folder}", "--method", "yarn:factor=0.5"), "at least 1"),
        (("inspect", "{folder}", "--context", 0), "context_length is at least 1"),
        (("inspect", "{gpt2}"), "no rotary module"),
        (("plan", "{folder}", 0), "target_length is at least 1"),
        (("export", "{folder}", "{out}"), "give one, such as --method yarn:factor=4"),
        (("export", "{folder}", "{out}", "--method", "yarn:factor=4", "--target", "ggml"), "Available: transformers"),
        (("export", "{folder}", "{out}", "--method", "dynamic_ntk", "--target", "vllm"), "not expressible"),
        (
            ("export", "{folder}", "{out}", "--method", "rerope:window=6+pi:factor=2", "--target", "llama.cpp"),
            "not expressible for llama.cpp",
        ),
        (("export", "{folder}", "{out}", "--method", "rerope:window=6"), "not expressible for transformers"),
        (("inspect", "{folder}", "--method", "dca:chunk_size=64,local_window=1"), "beyond the 64 tokens"),
        (("export", "{folder}", "{folder}/../model", "--method", "yarn:factor=4"), "give another folder"),
        (("export", "{adapter}", "{out}"), "is a PEFT adapter"),
        (("inspect", "{adapter}"), "is a PEFT adapter"),
    ],
)
def test_errors_are_one_line(arguments, text, folder, tmp_path):
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    places = {"folder": folder} | {name: tmp_path / name for name in ("gpt2", "adapter", "out")}
    result = run(*(str(argument).format(**places) for argument in arguments))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert text in line
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_error_itself(folder):
    result = run("--debug", "plan", folder, 0)
    assert isinstance(result.exception, ValueError)


def test_runs_as_a_module_and_prints_one_line_there_too():
    result = subprocess.run(
        [sys.executable, "-m", "hf_posenc", "inspect", "/no/such/folder"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "Error: There is no folder /no/such/folder."
    assert "Traceback" not in result.stderr
