"""A saved scheme comes back, or the load fails loudly: model folders, plain loads, adapters."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tiny import TL, tiny_model, tokens
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import hf_posenc

IDS = tokens(2, 96)
LONGROPE = hf_posenc.LongRoPE([1.0 + k / 9 for k in range(8)], [1.0 + k for k in range(8)], factor=4)
NATIVE = ["pi:factor=4", "ntk:factor=4", "abf:rope_theta=500000", "yarn:factor=4,beta_fast=16", "llama3:factor=4"]
NATIVE += ["ntk_by_parts:target_length=200", str(LONGROPE) + ",switch=stock", str(LONGROPE) + ",switch=long"]
INSIDE = ["dynamic_ntk:factor=2", "dynamic_yarn:granularity=8", str(LONGROPE), "partial_rope:fraction=0.5"]
INSIDE += ["self_extend:group_size=3,window=10", "rerope:window=6", "leaky_rerope:window=7,scale=0.3", "logn"]
INSIDE += ["dca:chunk_size=12,local_window=4", "string:shift=20,window=3"]
INSIDE += ["self_extend:target_length=200+yarn:factor=2", f"rerope:window=6+{LONGROPE},switch=long"]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def logits(model) -> torch.Tensor:
    return model(IDS).logits


# --- model folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", NATIVE + INSIDE)
def test_saved_and_loaded(method, tmp_path):
    model = TL()
    stock, config = logits(model), model.config.to_dict()
    hf_posenc.patch(model, method)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    assert hf_posenc.current(loaded) == hf_posenc.current(model)
    assert torch.equal(logits(loaded), expected)
    assert loaded.config.max_position_embeddings == model.config.max_position_embeddings
    hf_posenc.unpatch(loaded)
    assert torch.equal(logits(loaded), stock)
    differing = {key for key, value in loaded.config.to_dict().items() if config.get(key) != value}
    assert differing <= {"_name_or_path", "architectures", "dtype", "transformers_version"}
    # Saved again without the scheme, it is a plain model.
    loaded.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), stock)
    assert hf_posenc.current(hf_posenc.from_pretrained(tmp_path / "plain")) is None
    assert "hf_posenc" not in (tmp_path / "plain" / "config.json").read_text()


@pytest.mark.parametrize("method", NATIVE + INSIDE)
def test_saved_twice(method, tmp_path):
    """Loaded, saved and loaded again: the same scheme over the same original."""
    hf_posenc.patch(TL(), method).save_pretrained(tmp_path / "0")
    expected = logits(hf_posenc.patch(TL(), method))
    for turn in range(2):
        load = (AutoModelForCausalLM, hf_posenc)[turn].from_pretrained
        load(tmp_path / str(turn)).save_pretrained(tmp_path / str(turn + 1))
        loaded = hf_posenc.from_pretrained(tmp_path / str(turn + 1))
        assert torch.equal(logits(loaded), expected)
        assert torch.equal(logits(hf_posenc.unpatch(loaded)), logits(TL()))


@pytest.mark.parametrize("method", NATIVE)
def test_a_plain_load_of_a_native_scheme(method, tmp_path):
    expected = logits(hf_posenc.patch(TL(), method))
    hf_posenc.patch(TL(), method).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(logits(plain), expected, atol=1e-5, rtol=0)
    assert hf_posenc.current(plain) is None
    with pytest.raises(ValueError, match="restore"):
        hf_posenc.unpatch(plain)
    assert hf_posenc.restore(plain) is plain
    assert torch.equal(logits(plain), expected)
    assert hf_posenc.restore(plain) is plain
    assert torch.equal(logits(hf_posenc.unpatch(plain)), logits(TL()))


@pytest.mark.parametrize("implementation", [None, "sdpa", "eager"])
@pytest.mark.parametrize("method", INSIDE)
def test_a_plain_load_of_a_scheme_that_transformers_cannot_express(method, implementation, tmp_path):
    """The forward says what to do; done, the model is right."""
    hf_posenc.patch(TL(), method).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"hf_posenc\.from_pretrained.*hf_posenc\.restore"):
        logits(plain)
    with pytest.raises(RuntimeError, match=r"hf_posenc\.restore"):
        plain.generate(IDS, max_new_tokens=2)
    if implementation:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
        with pytest.raises(RuntimeError, match=r"hf_posenc\.from_pretrained.*hf_posenc\.restore"):
            logits(plain)
        assert hf_posenc.methods(plain) == hf_posenc.methods(TL())
        assert hf_posenc.inspect(plain).layer_types[0].in_force == hf_posenc.inspect(TL()).layer_types[0].in_force
    hf_posenc.restore(plain)
    assert_close(logits(plain), logits(hf_posenc.patch(TL(), method)), atol=1e-4 if implementation else 0, rtol=0)
    hf_posenc.unpatch(plain)
    assert plain.config._attn_implementation == (implementation or "sdpa")
    assert_close(logits(plain), logits(TL()), atol=1e-4 if implementation else 0, rtol=0)


FAMILIES = ["gemma3_text", "gpt_oss", "deepseek_v3", "qwen2_vl", "nemotron", "granite_swa", "llama4_text", "cohere2"]
FAMILIES += ["phi3", "ernie4_5_vl_moe"]  # whose configurations allow no rope type but their own


@pytest.mark.parametrize(
    "method", ["yarn:factor=4", "dynamic_ntk:factor=2", "self_extend:group_size=2,window=8+pi:factor=2"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back(family, method, tmp_path):
    model = tiny_model(family)
    stock, stock_implementation = logits(model), model.config._attn_implementation
    expected = logits(hf_posenc.patch(model, method))
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), expected)
    if "experts_implementation" in (tmp_path / "config.json").read_text():
        with pytest.raises(ValueError, match="hf_posenc"):
            type(model).from_pretrained(tmp_path, attn_implementation=stock_implementation)
        assert torch.equal(logits(hf_posenc.unpatch(loaded)), stock)
        return
    plain = type(model).from_pretrained(tmp_path, attn_implementation=stock_implementation)
    if "attn_implementation" in (tmp_path / "config.json").read_text():
        with pytest.raises(RuntimeError, match=r"hf_posenc\.restore"):
            logits(plain)
    else:
        assert_close(logits(plain), expected, atol=1e-5, rtol=0)
    assert torch.equal(logits(hf_posenc.restore(plain)), expected)
    for one in (loaded, plain):
        assert torch.equal(logits(hf_posenc.unpatch(one)), stock)
        assert one.config._attn_implementation == tiny_model(family).config._attn_implementation


WITHOUT = """
import sys, torch
from transformers import AutoModelForCausalLM
native, inside, moved, ids, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(native)
with torch.no_grad():
    torch.save(model(torch.load(ids)).logits, out)
assert "hf_posenc" not in sys.modules
for folder, chosen in [(folder, chosen) for folder in (inside, moved) for chosen in (None, "sdpa", "eager")]:
    try:
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=chosen)(torch.load(ids))
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("NOTHING RAISED")
"""


def test_without_the_plugin(tmp_path):
    """In a process that never imports hf_posenc: native schemes work, others stop with a message that names it."""
    native, inside = hf_posenc.patch(TL(), "yarn:factor=4"), hf_posenc.patch(TL(), "dynamic_ntk")
    native.save_pretrained(tmp_path / "native")
    inside.save_pretrained(tmp_path / "inside")
    hf_posenc.patch(TL(), "rerope:window=6+yarn:factor=4").save_pretrained(tmp_path / "moved")
    torch.save(IDS, tmp_path / "ids")
    paths = [str(tmp_path / name) for name in ("native", "inside", "moved", "ids", "out")]
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT, *paths]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert_close(torch.load(tmp_path / "out"), logits(native), atol=1e-5, rtol=0)
    for said in done.stdout.splitlines():
        assert said.startswith(("ValueError", "KeyError")) and "hf_posenc" in said
    assert len(done.stdout.splitlines()) == 6


def test_what_the_configuration_says(tmp_path):
    hf_posenc.patch(TL(), "yarn:factor=4").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hf_posenc"] == {
        "method": "yarn:factor=4",
        "version": 1,
        "original": {
            "length": 64,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }
    assert config["max_position_embeddings"] == 256
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert "attn_implementation" not in config


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"method": "yarn:factor=4", "version": 99, "original": {}}, "version 99.*upgrade"),
        ({"method": "yarn:factor=4", "version": 1}, "not a scheme"),
        ("yarn", "not a scheme"),
        ({"method": "yarn:factor=4", "version": 1, "original": None}, "not a scheme"),
    ],
)
def test_a_damaged_record(record, says, tmp_path):
    hf_posenc.patch(TL(), "yarn:factor=4").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hf_posenc": record}))
    with pytest.raises(ValueError, match=says):
        hf_posenc.from_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says):
        hf_posenc.restore(plain)


def restored(path):
    return hf_posenc.restore(AutoModelForCausalLM.from_pretrained(path))


@pytest.mark.parametrize(
    "method", ["yarn:factor=4", "dynamic_ntk", "rerope:window=6", "rerope:window=6+yarn:factor=4"]
)
def test_an_edited_configuration(method, tmp_path, caplog):
    """The record counts, and says so."""
    hf_posenc.patch(TL(), method).save_pretrained(tmp_path)
    for load in (hf_posenc.from_pretrained, restored):
        load(tmp_path)
        assert not [record for record in caplog.records if record.name.startswith("hf_posenc")]
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500000.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (hf_posenc.from_pretrained, restored):
        caplog.clear()
        assert torch.equal(logits(load(tmp_path)), logits(hf_posenc.patch(TL(), method)))
        (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("hf_posenc")]
        assert method in said and "500000" in said and "Patch and save again" in said


def test_restore_without_a_record():
    with pytest.raises(ValueError, match="not saved with a scheme"):
        hf_posenc.restore(TL())


def test_arguments_of_from_pretrained(tmp_path):
    for method in ("yarn:factor=4", "dynamic_ntk", "self_extend:group_size=2,window=8+yarn:factor=2"):
        hf_posenc.patch(TL(), method).save_pretrained(tmp_path)
        half = hf_posenc.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert half.dtype == torch.bfloat16
        assert torch.equal(logits(half), logits(hf_posenc.patch(TL().to(torch.bfloat16), method)))
        eager = hf_posenc.from_pretrained(str(tmp_path), attn_implementation="eager")
        assert eager(IDS, output_attentions=True).attentions[0].shape == (2, 4, 96, 96)
        assert_close(logits(eager), logits(hf_posenc.patch(TL(), method)), atol=1e-4, rtol=0)
        given = hf_posenc.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path))
        assert torch.equal(logits(given), logits(hf_posenc.patch(TL(), method)))
        pytest.importorskip("accelerate")
        mapped = hf_posenc.from_pretrained(tmp_path, device_map="cpu")
        assert torch.equal(logits(mapped), logits(hf_posenc.patch(TL(), method)))


def test_saving_while_patched_leaves_the_weights_alone(tmp_path):
    """The files hold what an unpatched model's do."""
    from safetensors.torch import load_file

    TL().save_pretrained(tmp_path / "plain")
    for method in NATIVE + INSIDE:
        hf_posenc.patch(TL(), method).save_pretrained(tmp_path / "patched")
        first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "patched"))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_plainly_loaded_model_is_patched_from_its_original(tmp_path):
    """The record counts as a scheme in force: another patch replaces it, and unpatch gives the model before both."""
    for first in ("ntk:factor=2", "dynamic_ntk:factor=4", "partial_rope:fraction=0.5"):
        hf_posenc.patch(TL(), first).save_pretrained(tmp_path)
        for second in ("ntk:factor=4", "dynamic_yarn", "yarn:factor=4"):
            plain = hf_posenc.patch(AutoModelForCausalLM.from_pretrained(tmp_path), second)
            assert torch.equal(logits(plain), logits(hf_posenc.patch(TL(), second)))
            hf_posenc.unpatch(plain)
            assert torch.equal(logits(plain), logits(TL()))
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
        written = plain.config.to_dict()
        with pytest.raises(ValueError, match="pairs"):
            hf_posenc.patch(plain, "longrope", short_factor=[1.0], long_factor=[1.0])
        assert plain.config.to_dict() == written
        assert hf_posenc.current(plain) is None
        assert torch.equal(logits(hf_posenc.restore(plain)), logits(hf_posenc.patch(TL(), first)))


# --- adapters --------------------------------------------------------------------------------------------------------


def adapted(model, kind: str = "lora", name: str = "default", seed: int = 11):
    pytest.importorskip("peft")
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    torch.manual_seed(seed)
    config = {
        "lora": LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["embed_tokens"],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        ),
        "prompt": PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    }[kind]
    return get_peft_model(model, config, adapter_name=name).eval()


@pytest.fixture
def base(tmp_path):
    TL().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(path):
    return AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("order", ["patch first", "adapter first", "inside"])
@pytest.mark.parametrize("method", ["yarn:factor=4", "dynamic_ntk", str(LONGROPE)])
def test_adapters_bring_the_scheme(order, method, base, tmp_path):
    if order == "patch first":
        model = adapted(hf_posenc.patch(load(base), method))
    else:
        model = adapted(load(base))
        hf_posenc.patch(model if order == "adapter first" else model.get_base_model(), method)
    expected = logits(model)
    assert (expected - logits(adapted(load(base)))).abs().max() > 0.1
    model.save_pretrained(tmp_path / "adapter")
    sidecar = json.loads((tmp_path / "adapter" / "hf_posenc.json").read_text())
    assert sidecar["method"] == str(hf_posenc.current(model))
    assert sidecar["original"]["max_position_embeddings"] == 64
    loaded = hf_posenc.from_pretrained(tmp_path / "adapter").eval()
    assert hf_posenc.current(loaded) == hf_posenc.current(model)
    assert torch.equal(logits(loaded), expected)
    hf_posenc.unpatch(loaded)
    assert torch.equal(logits(loaded), logits(adapted(load(base))))
    # Saved again from the loaded model, without the scheme: no scheme is left beside it.
    loaded.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "hf_posenc.json").exists()
    assert hf_posenc.current(hf_posenc.from_pretrained(tmp_path / "adapter")) is None


def test_a_scheme_that_changes_after_the_adapter_was_made(base, tmp_path):
    """What is written is what is in force when it is saved."""
    model = adapted(hf_posenc.patch(load(base), "yarn:factor=2"))
    model.save_pretrained(tmp_path / "first")
    hf_posenc.patch(model, "dynamic_ntk")
    model.save_pretrained(tmp_path / "second")
    for name, method in (("first", "yarn:factor=2"), ("second", "dynamic_ntk")):
        assert str(hf_posenc.current(hf_posenc.from_pretrained(tmp_path / name))) == method


def test_adapters_with_names(base, tmp_path):
    pytest.importorskip("peft")
    from peft import LoraConfig

    model = adapted(hf_posenc.patch(load(base), "dynamic_ntk"), name="first")
    torch.manual_seed(5)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "all")
    model.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    for name, folder in (("first", "all/first"), ("second", "all/second"), ("second", "one/second")):
        model.set_adapter(name)
        loaded = hf_posenc.from_pretrained(tmp_path / folder).eval()
        assert str(hf_posenc.current(loaded)) == "dynamic_ntk"
        assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("method", ["yarn:factor=4", "dynamic_ntk", "self_extend:group_size=2,window=8+yarn:factor=2"])
def test_merged_adapters_keep_the_scheme(method, base, tmp_path):
    model = adapted(hf_posenc.patch(load(base), method))
    expected = logits(model)
    merged = model.merge_and_unload()
    assert_close(logits(merged), expected, atol=1e-4, rtol=0)
    assert str(hf_posenc.current(merged)) == method
    merged.save_pretrained(tmp_path / "merged")
    loaded = hf_posenc.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(loaded), logits(merged))
    assert str(hf_posenc.current(loaded)) == method
    unscaled = adapted(load(base)).merge_and_unload()
    assert torch.equal(logits(hf_posenc.unpatch(loaded)), logits(unscaled))


@pytest.mark.parametrize("order", ["patch first", "adapter first"])
@pytest.mark.parametrize("method", ["dynamic_ntk", "yarn:factor=4", "self_extend:group_size=2,window=8+yarn:factor=2"])
def test_prompt_tuning_brings_the_scheme(order, method, base, tmp_path):
    """Its configuration stays on the wrapper."""
    if order == "patch first":
        model = adapted(hf_posenc.patch(load(base), method), "prompt")
    else:
        model = hf_posenc.patch(adapted(load(base), "prompt"), method)
    model.save_pretrained(tmp_path / "adapter")
    loaded = hf_posenc.from_pretrained(tmp_path / "adapter").eval()
    assert str(hf_posenc.current(loaded)) == method
    assert torch.equal(logits(loaded), logits(model))
    hf_posenc.unpatch(model).save_pretrained(tmp_path / "adapter")
    assert hf_posenc.current(hf_posenc.from_pretrained(tmp_path / "adapter")) is None


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_an_adapter_loaded_without_us_warns(kind, base, tmp_path, recwarn):
    """By PEFT itself, which puts it on the base as it was trained; not when the scheme comes with it."""
    from peft import AutoPeftModelForCausalLM, PeftModel

    model = adapted(hf_posenc.patch(load(base), "dynamic_ntk"), kind)
    model.save_pretrained(tmp_path / "adapter")
    hf_posenc.from_pretrained(tmp_path / "adapter")
    assert not [warning for warning in recwarn if "hf_posenc" in str(warning.message)]
    with pytest.warns(UserWarning, match=r"load with hf_posenc\.from_pretrained"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match=r"load with hf_posenc\.from_pretrained"):
        PeftModel.from_pretrained(load(base), tmp_path / "adapter")
    hf_posenc.unpatch(model).save_pretrained(tmp_path / "adapter")
    assert "hf_posenc" not in (tmp_path / "adapter" / "adapter_config.json").read_text()


def test_the_wrong_base_is_refused(base, tmp_path):
    """A base that turns otherwise, or was trained on another length; one that only carries a scheme is right."""
    adapted(hf_posenc.patch(load(base), "yarn:factor=4")).save_pretrained(tmp_path / "adapter")
    expected = logits(hf_posenc.from_pretrained(tmp_path / "adapter").eval())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    wrong = {
        "theta": TL(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "length": TL(max_position_embeddings=128),
        "scaled": TL(
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, max_position_embeddings=128
        ),
    }
    for name, model in wrong.items():
        model.save_pretrained(tmp_path / name)
        config["base_model_name_or_path"] = str(tmp_path / name)
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="base model it was trained on"):
            hf_posenc.from_pretrained(tmp_path / "adapter")
    hf_posenc.patch(load(base), "dynamic_ntk:factor=2").save_pretrained(tmp_path / "patched")
    config["base_model_name_or_path"] = str(tmp_path / "patched")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    assert torch.equal(logits(hf_posenc.from_pretrained(tmp_path / "adapter").eval()), expected)


def test_adapters_over_a_saved_scheme(base, tmp_path):
    """The base folder carries the scheme, and the adapter was trained on it loaded either way."""
    hf_posenc.patch(load(base), "dynamic_ntk").save_pretrained(tmp_path / "patched")
    for name, model in (("ours", hf_posenc.from_pretrained(tmp_path / "patched")),
                        ("restored", hf_posenc.restore(load(tmp_path / "patched")))):  # fmt: skip
        model = adapted(model)
        model.save_pretrained(tmp_path / name)
        loaded = hf_posenc.from_pretrained(tmp_path / name).eval()
        assert str(hf_posenc.current(loaded)) == "dynamic_ntk"
        assert torch.equal(logits(loaded), logits(model))


def test_adapters_that_cannot_come_back_say_so(base, tmp_path):
    adapted(hf_posenc.patch(TL(), "yarn:factor=4")).save_pretrained(tmp_path / "nameless")
    with pytest.raises(ValueError, match=r"which base.*yarn:factor=4.*PeftModel\.from_pretrained"):
        hf_posenc.from_pretrained(tmp_path / "nameless")
    adapted(hf_posenc.patch(load(base), "yarn:factor=4")).save_pretrained(tmp_path / "damaged")
    for text in ("{", "{}", "[]", "null"):
        (tmp_path / "damaged" / "hf_posenc.json").write_text(text)
        with pytest.raises(ValueError, match=r"hf_posenc\.json does not hold a scheme"):
            hf_posenc.from_pretrained(tmp_path / "damaged")


def test_the_adapter_configuration_stays_light(base):
    """It can be copied and pickled without the model, and writes the scheme of its own model."""
    import copy
    import pickle

    model = adapted(hf_posenc.patch(load(base), "yarn:factor=4"))
    model.state_dict()
    assert len(pickle.dumps(model.peft_config["default"])) < 20_000
    copy.deepcopy(model.peft_config["default"])


def test_adapters_of_two_schemes_at_once(base, tmp_path):
    first, second = adapted(hf_posenc.patch(load(base), "yarn:factor=2")), adapted(load(base))
    third = adapted(hf_posenc.patch(load(base), "dynamic_ntk"))
    for name, model in (("first", first), ("second", second), ("third", third)):
        model.save_pretrained(tmp_path / name)
    assert "yarn" in (tmp_path / "first" / "hf_posenc.json").read_text()
    assert not (tmp_path / "second" / "hf_posenc.json").exists()
    assert "dynamic_ntk" in (tmp_path / "third" / "hf_posenc.json").read_text()


def test_deep_copied_adapters(base, tmp_path):
    """The copy saves its own scheme, not that of the model it was copied from."""
    import copy

    model = adapted(hf_posenc.patch(load(base), "yarn:factor=2"))
    model.save_pretrained(tmp_path / "first")
    twin = copy.deepcopy(model)
    hf_posenc.patch(model, "dynamic_ntk")
    twin.save_pretrained(tmp_path / "twin")
    model.save_pretrained(tmp_path / "model")
    assert "yarn" in (tmp_path / "twin" / "hf_posenc.json").read_text()
    assert "dynamic_ntk" in (tmp_path / "model" / "hf_posenc.json").read_text()
    assert torch.equal(logits(hf_posenc.from_pretrained(tmp_path / "twin").eval()), logits(twin))


def test_what_the_configuration_knows_goes_there(tmp_path):
    """Further arguments, as transformers takes them; those of PEFT for an adapter."""
    hf_posenc.patch(TL(), "dynamic_ntk").save_pretrained(tmp_path)
    for more in ({}, {"config": str(tmp_path)}):
        model = hf_posenc.from_pretrained(tmp_path, use_cache=False, dtype=torch.bfloat16, **more)
        assert model.config.use_cache is False and model.dtype == torch.bfloat16
        assert str(hf_posenc.current(model)) == "dynamic_ntk"


@pytest.mark.parametrize("more", [{"max_position_embeddings": 512}, {"rope_parameters": {"rope_theta": 5e5}}])
def test_the_trained_length_under_a_scheme_is_not_changed_in_passing(more, tmp_path):
    hf_posenc.patch(TL(), "yarn:factor=4").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="then patch it"):
        hf_posenc.from_pretrained(tmp_path, **more)


def test_an_adapter_goes_on_training(tmp_path):
    peft = pytest.importorskip("peft")
    TL().save_pretrained(tmp_path / "base")
    base = hf_posenc.patch(hf_posenc.from_pretrained(tmp_path / "base"), "dynamic_ntk")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    again = hf_posenc.from_pretrained(tmp_path / "adapter", is_trainable=True)
    assert any(weight.requires_grad for weight in again.parameters())
