"""Runs of `recipes/finetune.py` on tiny models that read bytes."""

import copy
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
import transformers
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from test_eval_passkey import characters
from transformers import AddedToken, AutoTokenizer, PreTrainedModel, Qwen3ForCausalLM

import hf_posenc
from recipes.chunked_loss import chunked_loss
from recipes.finetune import finetune
from recipes.merge import merge
from recipes.settings import Recipe, parse
from recipes.trained import own_parameters, prepare

ROOT = Path(__file__).parents[1]
TEXT = "The tide came in at noon and went out again before the evening, as it does on every day of the year. " * 40
QUICK = ["--per_device_train_batch_size", "4", "--learning_rate", "3e-3", "--max_steps", "8", "--logging_steps", "1",
         "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true",
         "--evaluate", "false", "--seed", "3", "--gradient_checkpointing", "true"]  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of tiny models with a tokenizer of bytes, by type."""
    root, tokenizer = tmp_path_factory.mktemp("models"), characters()
    tokenizer.pad_token = "</s>"
    tokenizer.add_tokens([AddedToken(f"<extra_id_{number}>", special=True) for number in range(10)])
    end = tokenizer.eos_token_id
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": end, "bos_token_id": None}
    own = {
        "llama": {"max_position_embeddings": 64},
        "qwen3": {"max_position_embeddings": 64, "tie_word_embeddings": True},
        "gpt2": {"n_positions": 64, "tie_word_embeddings": True},
        "t5": {"decoder_start_token_id": end, "dropout_rate": 0.0},
        "bloom": {},
    }
    for name, more in own.items():
        model = tiny.tiny_model(name, **tokens, **more)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "text.txt").write_text(TEXT)
    return root


def run(models, name: str, out, *arguments: str):
    """The trained model and its losses by step."""
    recipe, training = parse(["--model", str(models / name), "--data", str(models / "text.txt"),
                              "--output_dir", str(out), "--lengths", "64", *QUICK, *arguments])  # fmt: skip
    model = finetune(recipe, training)
    return model, losses_in(out)


def logits(model, length: int = 96) -> torch.Tensor:
    ids = torch.arange(5, 5 + length)[None]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :9]} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        return model.eval()(**inputs).logits


CLASSES = {
    "frequency": ("llama", "yarn:factor=4"),
    "by the length": ("llama", "dynamic_ntk:granularity=16"),
    "position map": ("llama", "self_extend:group_size=4,window=16"),
    "bias": ("llama", "alibi"),
    "learned bias": ("llama", "toeplitz:max_distance=32"),
    "by layer": ("llama", "irope:interval=2"),
    "learned table": ("llama", "learned:max_positions=256"),
    "stretched table": ("gpt2", "learned:max_positions=256"),
    "tied embeddings": ("qwen3", "yarn:factor=4"),
    "a rotation for BLOOM": ("bloom", "rope"),
    "T5's buckets": ("t5", "t5_bias:max_distance=512"),
}


BESIDES = ("by the length", "by layer", "stretched table", "a rotation for BLOOM")


def cases(names, besides=BESIDES):
    return [pytest.param(name, marks=pytest.mark.slow) if name in besides else name for name in names]


@pytest.mark.parametrize("case", cases(CLASSES))
def test_an_adapter_comes_back_with_its_scheme(models, tmp_path, case):
    name, method = CLASSES[case]
    layout = "single" if name in ("t5", "bloom") else "packed"
    model, losses = run(models, name, tmp_path, "--posenc", method, "--documents", layout)
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.1
    wanted, found = logits(model), hf_posenc.from_pretrained(tmp_path)
    assert str(hf_posenc.current(found)) == str(hf_posenc.current(model))
    torch.testing.assert_close(logits(found), wanted, rtol=0, atol=0)
    assert (logits(hf_posenc.from_pretrained(models / name), 48) - logits(model, 48)).abs().max() > 1e-2
    before = hf_posenc.from_pretrained(models / name)
    tied = {id(weight) for weight in (before.get_input_embeddings().weight, before.get_output_embeddings().weight)}
    if len(tied) == 1:  # a merged model is saved with one of the two
        merged = found.merge_and_unload()
        torch.testing.assert_close(merged.get_input_embeddings().weight, merged.get_output_embeddings().weight)


@pytest.mark.parametrize(
    "case, train",
    [("frequency", "full"), ("learned bias", "full"), ("learned bias", "posenc"), ("stretched table", "posenc"),
     ("T5's buckets", "posenc")],
)  # fmt: skip
def test_whole_models_come_back_with_their_scheme(models, tmp_path, case, train):
    name, method = CLASSES[case]
    layout = "single" if name == "t5" else "packed"
    model, _ = run(models, name, tmp_path, "--posenc", method, "--documents", layout, "--train", train)
    torch.testing.assert_close(logits(hf_posenc.from_pretrained(tmp_path)), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("case", cases(CLASSES))
def test_gradients_reach_everything_that_is_trained_under_checkpointing(models, case):
    name, method = CLASSES[case]
    model = hf_posenc.patch(hf_posenc.from_pretrained(models / name), method)
    own = own_parameters(model)
    model = prepare(model, Recipe(data=["emma"]), wide=False).train()
    trained = {key.replace("modules_to_save.default.", "") for key, weight in model.named_parameters()
               if weight.requires_grad}  # fmt: skip
    assert {f"base_model.model.{key}" for key in own} <= trained
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)
    ids = torch.arange(5, 101)[None]

    def gradients():
        with chunked_loss(model, 16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found = {key: weight.grad for key, weight in model.named_parameters() if weight.requires_grad}
        model.zero_grad(set_to_none=True)
        return found

    plain = gradients()
    model.enable_input_require_grads()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    checkpointed = gradients()
    unseen = {key for key, gradient in plain.items() if gradient is None or not gradient.abs().max()}
    assert not unseen
    for key, gradient in plain.items():
        if key not in unseen:
            torch.testing.assert_close(checkpointed[key], gradient, rtol=1e-4, atol=1e-5, msg=key)


MERGED = ("frequency", "position map", "bias", "learned bias", "learned table", "tied embeddings", "T5's buckets")


@pytest.mark.parametrize("case", cases(MERGED, ("learned bias",)))
def test_a_merged_model_keeps_scheme_ties_and_logits(models, tmp_path, case):
    name, method = CLASSES[case]
    layout = "single" if name == "t5" else "packed"
    model, _ = run(models, name, tmp_path / "adapter", "--posenc", method, "--documents", layout)
    wanted, base, out = logits(model.double()), hf_posenc.from_pretrained(models / name), str(tmp_path / "merged")
    with pytest.warns(UserWarning, match=r"load with hf_posenc\.from_pretrained"):
        PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert merge(str(tmp_path / "adapter"), out) == f"hf_posenc.from_pretrained({out!r})"
    found = hf_posenc.from_pretrained(out)
    assert isinstance(found, PreTrainedModel) and str(hf_posenc.current(found)) == str(hf_posenc.current(model))
    torch.testing.assert_close(logits(found.double()), wanted, rtol=0, atol=1e-5)
    tied = [model.get_input_embeddings().weight is model.get_output_embeddings().weight for model in (found, base)]
    assert tied[0] == tied[1] == (case in ("tied embeddings", "T5's buckets"))
    assert {key for key in load_file(f"{out}/model.safetensors") if "posenc" not in key} == set(
        load_file(models / name / "model.safetensors")
    )
    assert AutoTokenizer.from_pretrained(out).pad_token == "</s>"
    if case in ("frequency", "tied embeddings", "T5's buckets"):
        plain = type(base).from_pretrained(out).double()
        torch.testing.assert_close(logits(plain), wanted, rtol=0, atol=1e-5)
    else:
        with pytest.raises((ValueError, RuntimeError), match="hf_posenc"):
            logits(type(base).from_pretrained(out))


def assert_reads(folder, wanted) -> None:
    """Plain transformers computes these logits from a folder."""
    found = logits(Qwen3ForCausalLM.from_pretrained(folder).double())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_merged_model_for_other_software(models, tmp_path):
    run(models, "qwen3", tmp_path / "yarn", "--posenc", "yarn:factor=4", "--max_steps", "1")
    run(models, "llama", tmp_path / "map", "--posenc", "self_extend:group_size=4,window=16", "--max_steps", "1")
    adapter, wanted = str(tmp_path / "yarn"), logits(hf_posenc.from_pretrained(tmp_path / "yarn").double())
    for target in ("transformers", "vllm", "llama.cpp"):
        with pytest.raises(ValueError, match=f"self_extend.* is not expressible for {target}: it needs this package"):
            merge(str(tmp_path / "map"), str(tmp_path / "never"), target)
    assert not (tmp_path / "never").exists()
    told = merge(adapter, str(tmp_path / "a"), "transformers")
    assert told == f"transformers.Qwen3ForCausalLM.from_pretrained({str(tmp_path / 'a')!r})"
    assert_reads(tmp_path / "a", wanted)
    told = merge(adapter, str(tmp_path / "b"), "vllm")
    assert told.startswith(f"vllm serve {tmp_path / 'b'} --hf-overrides")
    overrides = json.loads((tmp_path / "b" / "vllm_overrides.json").read_text())
    assert overrides["rope_parameters"]["rope_type"] == "yarn"
    assert_reads(tmp_path / "b", wanted)
    told = merge(adapter, str(tmp_path / "c"), "llama.cpp")
    assert f"convert_hf_to_gguf.py {tmp_path / 'c' / 'unpatched'}" in told and "--rope-scaling yarn" in told
    unpatched = Qwen3ForCausalLM.from_pretrained(tmp_path / "c" / "unpatched")
    assert unpatched.config.rope_parameters["rope_type"] == "default" and unpatched.config.tie_word_embeddings
    found = logits(hf_posenc.patch(unpatched, "yarn:factor=4").double())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_what_cannot_be_merged_is_refused(models, tmp_path):
    for adapter, out, target, message in (
        (models / "llama", tmp_path / "out", None, "a whole model needs no merge"),
        (models / "llama", tmp_path / "out", "ollama", "Unknown target"),
        (tmp_path, models, None, "models0 is not empty"),
    ):  # fmt: skip
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(ValueError, match=message):
            merge(str(adapter), str(out), target)


def test_a_curriculum_patches_anew_and_is_saved_with_the_last(models, tmp_path):
    seen = []
    original = hf_posenc.patch

    def note(model, method, **more):
        seen.append(str(method))
        return original(model, method, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_posenc, "patch", note)
        _, losses = run(models, "llama", tmp_path, "--posenc", "yarn:target_length={length}", "--schedule",
                            "curriculum", "--lengths", "64", "128", "256", "--shares", "2", "1", "1")  # fmt: skip
    assert seen[-4:] == [f"yarn:target_length={length}" for length in (256, 64, 128, 256)]
    assert len(losses) == 8 and losses[-1] < losses[0]
    assert hf_posenc.current(hf_posenc.from_pretrained(tmp_path)).target_length == 256


def test_mixed_lengths_and_skipped_positions(models, tmp_path):
    _, losses = run(models, "llama", tmp_path / "a", "--posenc", "yarn:factor=4", "--schedule", "mixed", "--lengths",
                    "64", "256")  # fmt: skip
    assert len(losses) == 8 and losses[-1] < losses[0]
    _, losses = run(models, "llama", tmp_path / "b", "--posenc", "yarn:factor=16", "--schedule", "pose", "--lengths",
                    "64", "--target_length", "1024", "--documents", "single")  # fmt: skip
    assert len(losses) == 8 and losses[-1] < losses[0]


def test_accumulated_steps_are_those_of_a_larger_batch(models, tmp_path):
    short = ["--posenc", "yarn:factor=4", "--max_steps", "4"]
    _, whole = run(models, "llama", tmp_path / "a", *short)
    _, parts = run(models, "llama", tmp_path / "b", *short, "--per_device_train_batch_size", "1",
                   "--gradient_accumulation_steps", "4")  # fmt: skip
    assert parts == pytest.approx(whole, abs=1e-4)
    _, unchunked = run(models, "llama", tmp_path / "c", *short, "--chunk", "0")
    assert unchunked == pytest.approx(whole, abs=1e-4)


def test_a_resumed_run_has_the_same_losses(models, tmp_path):
    more = ["--posenc", "yarn:target_length={length}", "--schedule", "curriculum", "--lengths", "64", "128",
            "--save_strategy", "steps", "--save_steps", "3"]  # fmt: skip
    model, whole = run(models, "llama", tmp_path, *more)
    for later in ("checkpoint-6", "checkpoint-8"):
        for file in (tmp_path / later).iterdir():
            file.unlink()
    (tmp_path / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="--resume_from_checkpoint auto"):
        run(models, "llama", tmp_path, *more)
    again, resumed = run(models, "llama", tmp_path, *more, "--resume_from_checkpoint", "auto")
    assert resumed == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)


def test_before_and_after_in_one_table_and_in_the_card(models, tmp_path, capsys):
    held = models / "held.txt"
    held.write_text(TEXT[37:2000].upper())
    more = ["--evaluate", "true", "--evaluate_texts", str(held), "--evaluate_lengths", "64", "1024", "--posenc",
            "yarn:factor=16"]  # fmt: skip
    with pytest.raises(ValueError, match=r"too short.*passkey_trials: 0"):
        run(models, "llama", tmp_path, *more)
    model, _ = run(models, "llama", tmp_path, *more, "--passkey_trials", "0")
    rows = json.loads((tmp_path / "evaluation.json").read_text())
    base = "before, yarn:factor=16"
    assert list(rows) == ["before", base, "after"]
    tokenizer = characters()
    ids = torch.tensor([tokenizer(held.read_text()).input_ids[:1024]])
    with torch.no_grad():
        wanted = torch.nn.functional.cross_entropy(model.eval()(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    losses = {name: torch.tensor(row["readings"][0]["losses"]) for name, row in rows.items()}
    torch.testing.assert_close(losses["after"], wanted, rtol=0, atol=1e-4)
    assert rows["after"]["figures"]["perplexity of 64"] == pytest.approx(float(wanted[:63].mean().exp()), abs=1e-3)
    assert set(rows["before"]["figures"]) == {"perplexity of 64", "perplexity of 1,024"}
    assert {"beyond", "perplexity", "after"} <= set(capsys.readouterr().out.split())
    card = (tmp_path / "README.md").read_text()
    for part, title in ((slice(63), "loss within the trained 64"), (slice(63, None), "loss beyond 64")):
        line = next(line for line in card.splitlines() if line.startswith(f"| {title} |"))
        before, now = float(losses[base][part].mean()), float(losses["after"][part].mean())
        assert now < before
        cells = line.strip("| ").split(" | ")[1:]
        assert cells[1] == f"{before:.3f}" and cells[2].startswith(f"{now:.3f}, {now - before:+.3f}")
        ends = [float(number) for number in re.findall(r"[-+][\d.]+", cells[2])[1:]]
        assert len(ends) == (2 if title == "loss beyond 64" else 0) and ends == sorted(ends)
    (tmp_path / "evaluation.json").write_text(json.dumps({"before": {}}))  # of another run
    (tmp_path / "adapter_model.safetensors").unlink()
    run(models, "llama", tmp_path, *more, "--passkey_trials", "0")
    assert json.loads((tmp_path / "evaluation.json").read_text())["before"] == rows["before"]


def test_a_table_too_short_for_the_text_is_measured_stretched_alone(models, tmp_path, capsys):
    held = models / "held.txt"
    held.write_text(TEXT[37:2000].upper())
    run(models, "gpt2", tmp_path, "--evaluate", "true", "--evaluate_texts", str(held), "--evaluate_lengths", "256",
        "--posenc", "learned:max_positions=256", "--passkey_trials", "0", "--max_steps", "1")  # fmt: skip
    rows = json.loads((tmp_path / "evaluation.json").read_text())
    assert list(rows) == ["before, learned:max_positions=256", "after"]
    assert "no position for so long a text" in capsys.readouterr().out


def test_the_loss_of_spans_before_and_after(models, tmp_path):
    held = models / "held.txt"
    held.write_text((2 * TEXT)[37:].upper())
    run(models, "t5", tmp_path, "--evaluate", "true", "--evaluate_texts", str(held), "--documents", "single",
        "--posenc", "t5_bias:max_distance=512", "--evaluate_lengths", "64", "256")  # fmt: skip
    rows = json.loads((tmp_path / "evaluation.json").read_text())
    means = {name: [sum(one["losses"]) / len(one["losses"]) for one in row["readings"]] for name, row in rows.items()}
    assert all(after < before for after, before in zip(means["after"], means["before"], strict=True))
    card = (tmp_path / "README.md").read_text()
    for length, mean in zip((64, 256), means["after"], strict=True):
        line = next(line for line in card.splitlines() if line.startswith(f"| loss of spans at {length} |"))
        assert f"| {mean:.3f}, -" in line and " (-" in line.rpartition("|")[0].rpartition("|")[2]


def test_the_card_says_what_was_trained_and_how(models, tmp_path):
    run(models, "llama", tmp_path, "--posenc", "yarn:factor=16", "--schedule", "pose", "--target_length", "1024",
        "--documents", "single")  # fmt: skip
    card = ModelCard.load(tmp_path / "README.md")
    found = card.data.to_dict()
    assert found["base_model"] == str(models / "llama") and found["library_name"] == "peft"
    assert found["tags"] == ["hf_posenc", "yarn", "lora"] and found["pipeline_tag"] == "text-generation"
    size = len(characters()(TEXT).input_ids) + 1
    for line in (
        "- method: `yarn:factor=16`", "`YaRN(factor=16, ", "- trained length before: 64 tokens",
        "- read in this training: 1,024 tokens (positions up to there, in blocks of 64 tokens)",
        f"- documents: 1, of {size:,} tokens", "- steps: 8 of 4 blocks of 64 tokens under `yarn:factor=16`",
        "- learning_rate: 0.003",
        "Not measured.", f"- transformers: {transformers.__version__}",
    ):  # fmt: skip
        assert line in card.text, line
    read = int(re.search(r"- tokens read: ([\d,]+)", card.text)[1].replace(",", ""))
    assert 32 * 64 - 64 < read <= 32 * 64
    code = re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1]
    names = {}
    exec(code, names)
    assert str(hf_posenc.current(names["model"])) == "yarn:factor=16"


# Through `accelerate launch`


def launch(launcher: str, *arguments: str) -> None:
    """The script as people start it."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"recipes/launch/{launcher}.yaml"]
    done = subprocess.run([*command, "recipes/finetune.py", *arguments], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2500:]


def losses_in(folder) -> list[float]:
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def common(models, out, *arguments: str) -> list[str]:
    return ["--model", str(models / "llama"), "--data", str(models / "text.txt"), "--output_dir", str(out),
            "--posenc", "yarn:factor=4", "--lengths", "64", *QUICK, *arguments]  # fmt: skip


@pytest.mark.slow
def test_two_processes_learn_what_one_does(models, tmp_path):
    """Under a curriculum, on documents of unequal lengths, so that processes hold unequal numbers of labels."""
    texts = []
    for number, size in enumerate((30, 41, 17, 64, 100, 55, 23, 80, 12, 90, 33, 47)):
        texts.append(str(models / f"{number}.txt"))
        (models / f"{number}.txt").write_text(TEXT[number : number + size])
    more = ["--data", *texts, "--documents", "single", "--schedule", "curriculum", "--lengths", "64", "96", "--posenc",
            "yarn:target_length={length}"]  # fmt: skip
    launch("cpu", *common(models, tmp_path / "one", *more))
    launch("cpu_two", *common(models, tmp_path / "two", *more, "--per_device_train_batch_size", "2"))
    launch("cpu_two", *common(models, tmp_path / "three", *more, "--per_device_train_batch_size", "1",
                              "--gradient_accumulation_steps", "2"))  # fmt: skip
    one, two, three = (losses_in(tmp_path / name) for name in ("one", "two", "three"))
    assert len(one) == 8 and two == pytest.approx(one, abs=2e-4) and three == pytest.approx(one, abs=2e-4)
    found = [logits(hf_posenc.from_pretrained(tmp_path / name)) for name in ("one", "two", "three")]
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[2], found[0], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_losses(models, tmp_path):
    more = ["--max_steps", "40", "--save_strategy", "steps", "--save_steps", "5"]
    _, whole = run(models, "llama", tmp_path / "whole", "--posenc", "yarn:factor=4", *more)
    killed = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "recipes/finetune.py", *common(models, killed, *more)], cwd=ROOT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    while process.poll() is None and not (killed / "checkpoint-10" / "trainer_state.json").exists():
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert process.returncode == -9 and not (killed / "trainer_state.json").exists()
    launch("cpu", *common(models, killed, *more, "--resume_from_checkpoint", "auto"))
    assert losses_in(killed) == pytest.approx(whole, abs=1e-6)


CONFIGS = sorted(path.stem for path in (ROOT / "recipes" / "configs").glob("*.yaml"))
SMALLER = {"self_extend_lora": "self_extend:group_size=4,window=16", "curriculum": "yarn:target_length={length}",
           "t5_buckets": "t5_bias:max_distance=256"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_recipe_runs_on_a_tiny_model(models, tmp_path, name):
    path = ROOT / "recipes" / "configs" / f"{name}.yaml"
    written = yaml.safe_load(path.read_text())
    kind = next((kind for kind in ("bloom", "t5") if kind in written["model"]), "llama")
    lengths = [str(64 * 2**number) for number in range(len(written["lengths"]))]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": TEXT[part : part + 600]}) for part in (0, 50, 100)))
    given = ["--data", f"dataset:json:data_files={data}", "--documents_per_source", "3"]
    target = ["--target_length", "128"] if "target_length" in written else []
    launch(
        "cpu", "--config", str(path), "--model", str(models / kind), *given, "--lengths", *lengths, *target,
        "--posenc", SMALLER.get(name, written["posenc"]), "--dtype", "float32", "--bf16", "false",
        "--use_cpu", "true", "--evaluate", "false", "--per_device_train_batch_size", "1",
        "--gradient_accumulation_steps", "1", "--max_steps", "5", "--output_dir", str(tmp_path / "out"),
        "--pad_token", "</s>",
    )  # fmt: skip
    model = hf_posenc.from_pretrained(tmp_path / "out")
    assert hf_posenc.current(model) is not None and torch.isfinite(logits(model, 60)).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_recipe_says_what_it_is_for_and_how_to_run_it(name):
    text = (ROOT / "recipes" / "configs" / f"{name}.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert len(header) >= 3 and len(header[0]) > 40
    found = re.fullmatch(r"# accelerate launch --config_file (\S+) recipes/finetune.py --config (\S+)", header[-1])
    assert found and (ROOT / found[1]).exists() and found[2] == f"recipes/configs/{name}.yaml"
    recipe, training = parse(["--config", str(ROOT / found[2]), "--use_cpu", "true", "--bf16", "false"])
    assert training.max_steps > 0 and str(training.output_dir) == f"runs/{name}" and recipe.posenc != "none"


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "recipes" / "launch").glob("*.yaml")))
def test_accelerate_reads_every_launch_file(name):
    path = str(ROOT / "recipes" / "launch" / f"{name}.yaml")
    arguments = launch_command_parser().parse_args(["--config_file", path, "recipes/finetune.py"])
    read, config, _ = _validate_launch_command(arguments)
    kinds = {"cpu": "NO", "gpu": "NO", "cpu_two": "MULTI_GPU", "ddp": "MULTI_GPU", "fsdp2": "FSDP",
             "context_parallel": "FSDP", "zero3": "DEEPSPEED"}  # fmt: skip
    assert config.distributed_type == kinds[name] and read.num_processes == {"cpu": 1, "gpu": 1, "cpu_two": 2}.get(
        name, 8
    )
    assert (read.use_fsdp, read.use_deepspeed) == (kinds[name] == "FSDP", kinds[name] == "DEEPSPEED")
    if name == "context_parallel":
        assert read.parallelism_config_cp_size == 4 and str(read.fsdp_version) == "2"
