"""export: what each target is told, read back by plain transformers or by the target's own arithmetic."""

import itertools
import json
import math

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posenc
from hf_posenc.export import export

NATIVE = ["pi:factor=4", "ntk:factor=4", "abf:rope_theta=50000", "yarn:factor=4", "ntk_by_parts:factor=4",
          "yarn:factor=4,attention_factor=1.5,beta_fast=16", "llama3:factor=4"]  # fmt: skip


def patched(name, method):
    return hf_posenc.patch(tiny.TL() if name == "TL" else tiny.tiny_model(name), method)


@pytest.mark.parametrize("method", NATIVE)
def test_exported_folder_loads_in_plain_transformers(method, tmp_path):
    model, ids = patched("TL", method), torch.arange(3, 103)[None]
    result = export(model, tmp_path / "new" / "folder")
    loaded = AutoModelForCausalLM.from_pretrained(result.path)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(loaded(ids).logits, expected)
        assert (tiny.TL()(ids).logits - expected).abs().max() > 1e-2
    assert loaded.config.max_position_embeddings == model.config.max_position_embeddings
    assert result.command == f"transformers.LlamaForCausalLM.from_pretrained({str(result.path)!r})"


@pytest.mark.parametrize(
    "method",
    ["dynamic_ntk", "dynamic_yarn", "partial_rope:fraction=0.5", "logn", "self_extend:group_size=2,window=8",
     "rerope:window=6+yarn:factor=2"],
)  # fmt: skip
@pytest.mark.parametrize("target", ["transformers", "vllm", "llama.cpp"])
def test_a_scheme_that_needs_this_package_is_refused(method, target, tmp_path):
    model = patched("TL", method)
    with pytest.raises(ValueError, match=r"not expressible.*save_pretrained.*hf_posenc.from_pretrained") as caught:
        export(model, tmp_path / "folder", target)
    assert method in str(caught.value)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("target", ["transformers", "vllm", "llama.cpp"])
def test_an_unpatched_model_is_refused(target, tmp_path):
    with pytest.raises(ValueError, match=r"hf_posenc.patch"):
        export(tiny.TL(), tmp_path, target)


def test_an_unknown_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Unknown target: 'ggml'. Available: transformers, vllm, llama.cpp"):
        export(patched("TL", "pi:factor=2"), tmp_path, "ggml")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own, on transformers 5.24
def test_adapters_are_not_exported_as_a_model(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(patched("TL", "yarn:factor=4"), config)
    with pytest.raises(ValueError, match="merge_and_unload"):
        export(wrapped, tmp_path)
    injected = patched("TL", "yarn:factor=4")
    injected._hf_peft_config_loaded = True  # what model.add_adapter(config) leaves; it needs a newer peft
    with pytest.raises(ValueError, match="merge_and_unload"):
        export(injected, tmp_path)
    merged = wrapped.merge_and_unload()
    export(merged, tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(torch.ones(1, 9).long()).logits,
                       merged(torch.ones(1, 9).long()).logits)  # fmt: skip


def as_vllm_would_load(folder, overrides):
    """Configuration of a checkpoint under ``--hf-overrides``: whole values, but key by key inside a part."""
    config = AutoConfig.from_pretrained(folder)
    for key, value in overrides.items():
        part = getattr(config, key, None)
        if hasattr(part, "to_dict"):
            for name, inner in value.items():
                if isinstance(inner, dict):
                    getattr(part, name).update(inner)
                else:
                    setattr(part, name, inner)
        else:
            setattr(config, key, value)
    return config


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gpt_oss", "yarn:factor=4"),
        *itertools.product(
            ["TL", "gemma3_text", "glm", "deepseek_v3", "qwen2_vl"],
            ["ntk:factor=4", "yarn:factor=4", "yarn:factor=4,mscale=1,mscale_all_dim=0.5"],
        ),
    ],
)
def test_vllm_overrides_on_the_old_checkpoint_give_the_patched_configuration(name, method, tmp_path):
    model = patched(name, method)
    hf_posenc.unpatch(model)
    model.save_pretrained(tmp_path / "old")
    result = export(hf_posenc.patch(model, method), tmp_path / "out", "vllm")
    overrides = json.loads(result.path.read_text())
    assert overrides == result.settings
    assert result.path == tmp_path / "out" / "vllm_overrides.json"
    config = as_vllm_would_load(tmp_path / "old", overrides)
    assert config.get_text_config().rope_parameters == model.config.get_text_config().rope_parameters
    assert config.get_text_config().max_position_embeddings == 4 * 64
    assert result.command.endswith(f'--hf-overrides "$(cat {result.path})" --max-model-len 256')


def test_vllm_multiplies_by_a_linear_factor_itself(tmp_path):
    assert export(patched("TL", "pi:factor=4"), tmp_path, "vllm").settings["max_position_embeddings"] == 64
    gemma = export(patched("gemma3_text", "pi:factor=4"), tmp_path, "vllm")
    assert gemma.settings["max_position_embeddings"] == 256  # but not for Gemma 3
    assert gemma.settings["rope_parameters"]["full_attention"]["factor"] == 4
    assert "factor" not in gemma.settings["rope_parameters"]["sliding_attention"]
    assert "--max-model-len 256" in export(patched("TL", "pi:factor=4"), tmp_path, "vllm").command


def test_vllm_reads_no_key_of_the_scaling_before(tmp_path):
    """Inside a part, vLLM lays new keys over old ones; those that are gone are made null."""
    before = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32,
        "attention_factor": 1.7, "truncate": False, "mrope_section": [2, 3, 3],
    }  # fmt: skip
    model = hf_posenc.patch(tiny.tiny_model("qwen2_vl", rope_parameters=before), "yarn:factor=4")
    entry = export(model, tmp_path, "vllm").settings["text_config"]["rope_parameters"]
    assert entry["attention_factor"] is None
    assert entry["truncate"] is True
    assert entry["factor"] == 4


@pytest.mark.parametrize(
    ("name", "method", "text"),
    [
        ("deepseek_v3", "pi:factor=4", "latent attention"),
        ("deepseek_v3", "llama3:factor=4", "latent attention"),
        ("deepseek_v3", "ntk_by_parts:factor=4", "no attention factor"),
        ("qwen2_vl", "pi:factor=4", "M-RoPE"),
        ("qwen2_vl", "llama3:factor=4", "M-RoPE"),
        ("gpt_oss", "ntk:factor=4", "plain YaRN"),
        ("gpt_oss", "ntk_by_parts:factor=4", "plain YaRN"),
        ("gemma4_text", "pi:factor=4", "proportional"),
        ("granite_swa", "yarn:factor=4", "configuration per set of frequencies"),
    ],
)
def test_vllm_refusals(name, method, text, tmp_path):
    model = patched(name, method)
    with pytest.raises(ValueError, match=rf"'{method}' is not expressible for vLLM.*{text}"):
        export(model, tmp_path, "vllm")


@pytest.mark.parametrize(
    ("name", "method", "note"),
    [
        ("qwen2_vl", "yarn:factor=4", "four times the original length"),
        ("TL", "ntk_by_parts:factor=4", "56446"),
        ("TL", "yarn:factor=4", None),
    ],
)
def test_vllm_notes_say_where_it_differs(name, method, note, tmp_path):
    result = export(patched(name, method), tmp_path, "vllm")
    assert [note in one for one in result.notes] == ([True] if note else [])
    assert (f"Note: {result.notes[0]}" if note else result.command) in str(result)


def llama_cpp_rotation(flags, dim, theta, override=1.0):
    """Frequencies and factor that llama.cpp makes of flags: ``ggml_rope_yarn_corr_dims``, ``rope_yarn`` and
    ``llama_context`` (after pull request 17945), in their own words."""
    kind = flags["--rope-scaling"]
    base = float(flags.get("--rope-freq-base", theta))
    freq_scale = 1.0 if kind == "none" else 1 / float(flags["--rope-scale"])
    speeds = [base ** (-2 * pair / dim) for pair in range(dim // 2)]
    if kind != "yarn":
        return [freq_scale * speed for speed in speeds], 1.0
    length = int(flags["--yarn-orig-ctx"])
    ends = [
        dim * math.log(length / (float(flags[beta]) * 2 * math.pi)) / (2 * math.log(base))
        for beta in ("--yarn-beta-fast", "--yarn-beta-slow")
    ]
    low, high = max(0, math.floor(ends[0])), min(dim - 1, math.ceil(ends[1]))
    mixes = [1 - min(1, max(0, (pair - low) / max(0.001, high - low))) for pair in range(dim // 2)]
    attn_factor = (0.1 * math.log(1 / freq_scale) + 1) / (1 + 0.1 * math.log(1 / freq_scale)) * override
    return (
        [freq_scale * speed * (1 - mix) + speed * mix for speed, mix in zip(speeds, mixes, strict=True)],
        attn_factor * (1 + 0.1 * math.log(1 / freq_scale)),
    )


@pytest.mark.parametrize("name", ["TL", "glm", "qwen3"])
@pytest.mark.parametrize("method", [one for one in NATIVE if "llama3" not in one])
def test_llama_cpp_turns_as_the_model_does(name, method, tmp_path):
    model = patched(name, method)
    if name == "glm" and ("ntk_by_parts" in method or "attention_factor" in method):
        with pytest.raises(ValueError, match=r"--override-kv NAME.rope.scaling.attn_factor=float:\d"):
            export(model, tmp_path, "llama.cpp")
        return
    result = export(model, tmp_path, "llama.cpp")
    rotary = tiny.rotary_modules(model)["model.rotary_emb"]
    override = float(result.settings.get("--override-kv", "float:1").rpartition("float:")[2])
    theta = model.config.hf_posenc["original"]["rope_parameters"]["rope_theta"]
    speeds, factor = llama_cpp_rotation(result.settings, 2 * len(rotary.inv_freq), theta, override)
    assert rotary.inv_freq.tolist() == pytest.approx(speeds, rel=1e-5)
    assert rotary.attention_scaling == pytest.approx(factor, rel=1e-6)
    assert result.settings["--ctx-size"] == str(model.config.max_position_embeddings)
    assert result.path.read_text().strip() in result.command


def test_llama_cpp_flags_of_yarn(tmp_path):
    result = export(patched("TL", "yarn:factor=4"), tmp_path, "llama.cpp")
    assert result.command == (
        "llama-server -m MODEL.gguf --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 64 --yarn-beta-fast 32 "
        "--yarn-beta-slow 1 --ctx-size 256"
    )


def test_llama_cpp_ignores_its_own_flag_for_the_temperature(tmp_path):
    """So it is never written; the GGUF key of the same meaning is overridden instead."""
    settings = export(patched("TL", "yarn:factor=4,attention_factor=1.5"), tmp_path, "llama.cpp").settings
    assert "--yarn-attn-factor" not in settings
    key, _, value = settings["--override-kv"].partition("=float:")
    assert key == "llama.rope.scaling.attn_factor"
    assert float(value) == pytest.approx(1.5 / (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("name", "method", "text", "convertible"),
    [
        ("TL", "llama3:factor=4", "there is none for llama3", True),
        ("gemma3_text", "yarn:factor=4", "frequencies per layer type", True),
        ("gemma3_text", "ntk_by_parts:factor=4", "frequencies per layer type", False),
        ("deepseek_v3", "yarn:factor=4", "latent attention", True),
        ("gpt_oss", "yarn:factor=4", "windowed layers", True),
        ("TL", "yarn:factor=4,truncate=False", "rounds the ends", False),
        ("TL", "yarn:factor=4,mscale=1,mscale_all_dim=0.5", "none for mscale", False),
        ("glm", "partial_rope:fraction=0.25", "fixed in the GGUF", True),
    ],
)
def test_llama_cpp_refusals(name, method, text, convertible, tmp_path):
    model = patched(name, method)
    with pytest.raises(ValueError, match=text) as caught:
        export(model, tmp_path, "llama.cpp")
    assert f"'{method}' is not expressible as llama.cpp flags" in str(caught.value)
    assert ("convert_hf_to_gguf.py" in str(caught.value)) == convertible


def test_llama_cpp_refuses_a_checkpoint_whose_gguf_holds_factors(tmp_path):
    carried = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = hf_posenc.patch(tiny.TL(rope_parameters=carried), "yarn:factor=4")
    with pytest.raises(ValueError, match="already holds the factors of its llama3 scaling"):
        export(model, tmp_path, "llama.cpp")


def test_longrope_for_vllm_carries_its_attention_factor(tmp_path):
    lists = ",".join(["2"] * 8)
    text = f"longrope:short_factor=[{lists}],long_factor=[{lists}],switch=long,factor=4"
    model = patched("TL", text)
    entry = export(model, tmp_path, "vllm").settings["rope_parameters"]
    _, factor = ROPE_INIT_FUNCTIONS["longrope"](model.config, device="cpu")
    assert entry["long_mscale"] == entry["short_mscale"] == pytest.approx(factor)
