"""What can be evaluated, and how wrong models, adapters and tables are told."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_eval_results import build, characters
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

from eval import models
from eval.__main__ import app
from eval.commands import perplexity

SIZES = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": 256}


def saved(model, path):
    model.save_pretrained(path)
    characters().save_pretrained(path)
    (path / "text.txt").write_text("A line of a text. " * 60)
    return path


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=100,
                                      bos_token_id=None, eos_token_id=256)).eval()  # fmt: skip


def test_any_changed_number_is_another_model():
    known = models.fingerprint(build())
    for index in (0, 1, -1):
        model = build()
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight[5, index] += 1e-3
        assert models.fingerprint(model) != known


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(tmp_path):
    saved(build(), tmp_path / "base")
    base, _ = models.load(str(tmp_path / "base"), "float32", "cpu")
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).save_pretrained(
        tmp_path / "peft"
    )
    model, tokenizer = models.load(str(tmp_path / "peft"), "float32", "cpu")
    assert tokenizer("A").input_ids == characters()("A").input_ids
    assert models.trained_length(model) == 64


def test_a_table_of_positions_has_an_end(tmp_path):
    model = gpt2()
    assert models.trained_length(model) == 100
    assert models.full_names(model, ["none"], [100]) == ["none"]
    with pytest.raises(ValueError, match="positions for 100 tokens"):
        models.full_names(model, ["learned:max_positions=200", "none"], [150])
    assert len(models.full_names(model, ["learned:max_positions=200", "rope"], [150])) == 2


def test_a_model_that_takes_no_encoding_is_evaluated_without_one(tmp_path):
    folder = saved(MambaForCausalLM(MambaConfig(**SIZES, state_size=4)), tmp_path / "mamba")
    model, tokenizer = models.load(str(folder), "float32", "cpu")
    text = str(folder / "text.txt")
    results = perplexity.run(model, tokenizer, "m", ["none"], [64], [text], tokens=200, root=tmp_path / "results")
    assert perplexity.scores_of(results)[0]["scored_tokens"] == 199
    with pytest.raises(ValueError, match="rotary"):
        models.full_names(model, ["yarn:factor=2"])


def both_ways():
    return BertForMaskedLM(BertConfig(**SIZES, num_attention_heads=4, intermediate_size=32, initializer_range=0.2))


def with_encoder():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=257, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, eos_token_id=256)
    )


@pytest.mark.parametrize(("make", "words"), [(both_ways, "later tokens"), (with_encoder, "encoder and a decoder")])
def test_models_that_are_not_causal_are_refused(tmp_path, make, words):
    folder = saved(make(), tmp_path / "model")
    with pytest.raises(ValueError, match=words):
        models.load(str(folder), "float32", "cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--posenc", "yarn:factor=abc"], "yarn:factor=abc"),
        (["--device", "foo"], "device 'foo' is not here"),
        (["--lengths", ""], "there are no lengths"),
        (["--text", "BAD"], "is not UTF-8 text"),
    ],
)
def test_wrong_values_are_one_line(tmp_path, options, words):
    folder = saved(build(), tmp_path / "model")
    (folder / "bad.txt").write_bytes(b"abc \xff def")
    options = [str(folder / "bad.txt") if option == "BAD" else option for option in options]
    options += [] if "--lengths" in options else ["--lengths", "64"]
    command = ["perplexity", "--model", str(folder), "--text", str(folder / "text.txt"), "--dtype", "float32",
               "--results", str(tmp_path / "results"), *options]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, ValueError) and words in str(done.exception)


def test_a_loss_that_is_no_number_leaves_json_readable(tmp_path):
    model = build()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    folder = saved(model, tmp_path / "model")
    command = ["compare", "--model", folder, "--text", folder / "text.txt", "--dtype", "float32", "--check", "0",
               "--tasks", "perplexity", "--lengths", "40,100", "--posenc", "none", "--posenc", "pi:factor=2",
               "--results", tmp_path / "results"]  # fmt: skip
    done = CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)
    assert done.exit_code == 0 and "not a number" in done.output

    def refuse(constant):
        raise AssertionError(constant)

    for path in (tmp_path / "results").glob("*/scores.json"):
        json.loads(path.read_text(), parse_constant=refuse)
    (page,) = (tmp_path / "results").glob("*/report.html")
    assert "not a number" in page.read_text()
