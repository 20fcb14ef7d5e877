"""Frequency methods: what a patched model computes is what transformers computes from a configuration that was written
by hand, what plain transformers reloads, and what the float64 formulas say."""

import math

import pytest
import reference
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TL, tiny_model, tokens
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import hf_posenc

LENGTH = 64
IDS = tokens(2, 96)

# The unscaled entry of every family as its own defaults give it, and how many dimensions it rotates.
FAMILIES = {
    "llama": ({"rope_theta": 10000.0}, 16),
    "qwen2": ({"rope_theta": 10000.0}, 16),
    "qwen3": ({"rope_theta": 10000.0}, 16),
    "mistral": ({"rope_theta": 10000.0}, 16),
    "gemma2": ({"rope_theta": 10000.0}, 16),
    "gemma3_text": ({"rope_theta": 1000000.0}, 16),
    "phi": ({"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, 8),
    "gpt_neox": ({"rope_theta": 10000.0, "partial_rotary_factor": 0.25}, 4),
    "glm": ({"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, 8),
    "cohere2": ({"rope_theta": 10000.0}, 16),
    "smollm3": ({"rope_theta": 2000000.0}, 16),
    "llama4_text": ({"rope_theta": 500000.0}, 16),
    "gpt_oss": ({"rope_theta": 150000.0}, 16),
    "deepseek_v3": ({"rope_theta": 10000.0}, 8),
}


def lists(pairs: int) -> tuple[list[float], list[float]]:
    """A short and a long list of LongRoPE."""
    return [1.0 + 0.05 * pair for pair in range(pairs)], [1.0 + 0.7 * pair for pair in range(pairs)]


def ramped(factor: float, **more) -> dict:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": LENGTH, **more}


def long_entry(pairs: int, always_long: bool) -> dict:
    short, long = lists(pairs)
    return {
        "rope_type": "longrope",
        "short_factor": long if always_long else short,
        "long_factor": long,
        "factor": 4.0,
        "attention_factor": math.sqrt(1 + math.log(4) / math.log(LENGTH)),
        "original_max_position_embeddings": LENGTH,
    }


# Method -> (parameters of patch, keys that a reader of transformers' documentation would write, new length).
METHODS = {
    "pi": (lambda d: {"factor": 4}, lambda theta, d: {"rope_type": "linear", "factor": 4.0}, 256),
    "ntk": (lambda d: {"factor": 4}, lambda theta, d: {"rope_theta": theta * 4 ** (d / (d - 2))}, 256),
    "abf": (lambda d: {"rope_theta": 3e6}, lambda theta, d: {"rope_theta": 3e6}, 64),
    "ntk_by_parts": (lambda d: {"factor": 4}, lambda theta, d: ramped(4.0, attention_factor=1.0), 256),
    "yarn": (lambda d: {"factor": 4}, lambda theta, d: ramped(4.0), 256),
    "yarn-options": (
        lambda d: {"factor": 8, "beta_fast": 6, "beta_slow": 0.5, "attention_factor": 1.3},
        lambda theta, d: ramped(8.0, beta_fast=6.0, beta_slow=0.5, attention_factor=1.3),
        512,
    ),
    "yarn-untruncated": (
        lambda d: {"factor": 4, "truncate": False}, lambda theta, d: ramped(4.0, truncate=False), 256,
    ),
    "llama3": (
        lambda d: {"factor": 4, "low_freq_factor": 0.5, "high_freq_factor": 2},
        lambda theta, d: {
            "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": LENGTH,
            "low_freq_factor": 0.5, "high_freq_factor": 2.0,
        },
        256,
    ),
    "longrope-stock": (
        lambda d: {**dict(zip(("short_factor", "long_factor"), lists(d // 2), strict=True)), "factor": 4,
                   "switch": "stock"},
        lambda theta, d: long_entry(d // 2, False),
        256,
    ),
    "longrope-long": (
        lambda d: {**dict(zip(("short_factor", "long_factor"), lists(d // 2), strict=True)), "factor": 4,
                   "switch": "long"},
        lambda theta, d: long_entry(d // 2, True),
        256,
    ),
}  # fmt: skip


def by_hand(family: str, method: str) -> dict:
    """`rope_parameters` for the whole family, written without looking at a patched model."""
    base, d = FAMILIES[family]
    entry = {"rope_type": "default"} | base | METHODS[method][1](base["rope_theta"], d)
    if family == "gemma3_text":
        return {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": entry}
    return entry


def applied(model, method: str, d: int):
    return hf_posenc.patch(model, method.partition("-")[0], **METHODS[method][0](d))


def fresh(family: str, state: dict, **overrides):
    """A model that transformers builds from a configuration of its own, with the weights of another."""
    model = tiny_model(family, seed=7, **overrides)
    model.load_state_dict(state)
    return model


def inv_freq(model, slot: str = "inv_freq") -> torch.Tensor:
    """Frequencies in force in the first rotary module."""
    return getattr(next(iter(tiny.rotary_modules(model).values())), slot)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_fresh_model_of_a_hand_written_config(family, method):
    if family == "gemma3_text" and method == "yarn-untruncated":
        pytest.skip("transformers ignores `truncate` in nested rope_parameters: test_gemma3_untruncated")
    model = tiny_model(family)
    stock = model(IDS).logits
    applied(model, method, FAMILIES[family][1])
    ours = model(IDS).logits
    expected = fresh(
        family, model.state_dict(), rope_parameters=by_hand(family, method), max_position_embeddings=METHODS[method][2]
    )
    assert_close(ours, expected(IDS).logits, atol=1e-5, rtol=0)
    assert model.config.max_position_embeddings == METHODS[method][2]
    assert (ours - stock).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_model_is_plain_transformers(family, tmp_path):
    for method in ("yarn", "ntk", "longrope-long"):
        model = applied(tiny_model(family), method, FAMILIES[family][1])
        model.save_pretrained(tmp_path / method)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / method)
        assert hf_posenc.current(loaded) is None
        assert_close(loaded(IDS).logits, model(IDS).logits, atol=1e-5, rtol=0)
        assert loaded.config.max_position_embeddings == 256


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_every_native_method_survives_a_plain_reload(method, tmp_path):
    model = applied(TL(), method, 16)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(loaded(IDS).logits, model(IDS).logits, atol=1e-5, rtol=0)


# --- golden numbers ----------------------------------------------------------------------------------------------

D, BASE = 16, 10000.0
FORMULAS = {
    "pi": ("pi:factor=4", reference.pi(D, BASE, 4), 1.0),
    "ntk": ("ntk:factor=4", reference.ntk(D, BASE, 4), 1.0),
    "abf": ("abf:rope_theta=500000", reference.rope(D, 5e5), 1.0),
    "ntk_by_parts": ("ntk_by_parts:factor=4", reference.ntk_by_parts(D, BASE, 4, LENGTH), 1.0),
    "yarn": ("yarn:factor=4", reference.yarn(D, BASE, 4, LENGTH), 1.1386294361),
    "yarn_untruncated": (
        "yarn:factor=4,truncate=false", reference.yarn(D, BASE, 4, LENGTH, truncate=False), 1.1386294361,
    ),
    "yarn_mscale_ratio": (
        "yarn:factor=4,mscale=1,mscale_all_dim=0.5", reference.yarn(D, BASE, 4, LENGTH), 1.0648216,
    ),
    "yarn_one_mscale": ("yarn:factor=4,mscale=0.5", reference.yarn(D, BASE, 4, LENGTH), 1.1386294361),
    "llama3": ("llama3:factor=4", reference.llama3(D, BASE, 4, LENGTH), 1.0),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("text", "frequencies", "factor"), FORMULAS.values(), ids=FORMULAS)
def test_equals_the_float64_formula(text, frequencies, factor):
    model, ids = TL(), tokens(1, 90)
    hf_posenc.patch(model, text)
    assert inv_freq(model).tolist() == pytest.approx(frequencies, rel=1e-6)
    judged = reference.frequency_logits(model, ids[0], frequencies, factor)
    assert_close(model(ids).logits[0].double(), judged, atol=1e-4, rtol=0)


@torch.no_grad()
def test_longrope_equals_the_float64_formula():
    short, long = lists(8)
    for switch, factors in (("long", long), ("stock", short)):
        model, ids = TL(), tokens(1, 60)
        hf_posenc.patch(model, "longrope", short_factor=short, long_factor=long, factor=4, switch=switch)
        frequencies, scale = reference.longrope(99 if switch == "long" else 1, D, BASE, LENGTH, 4, short, long)
        assert [a / b for a, b in zip(reference.rope(D, BASE), factors, strict=True)] == pytest.approx(frequencies)
        judged = reference.frequency_logits(model, ids[0], frequencies, scale)
        assert_close(model(ids).logits[0].double(), judged, atol=1e-4, rtol=0)


@torch.no_grad()
def test_large_models_frequencies():
    """Sizes of real checkpoints, and the golden numbers of shared/methods.md."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = TL(**sizes, max_position_embeddings=4096)
    hf_posenc.patch(model, "yarn:factor=4")
    expected = [0.1, 0.0279740, 0.00653846, 0.00133789, 0.00025]
    assert inv_freq(model)[[8, 12, 16, 20, 24]].tolist() == pytest.approx(expected, rel=5e-6)
    hf_posenc.patch(model, "ntk:factor=4")
    assert model.config.rope_parameters["rope_theta"] == pytest.approx(41829.366, abs=5e-4)
    hf_posenc.patch(model, "ntk", target_length=16384)
    assert inv_freq(model)[-1].item() == pytest.approx(1e4 ** (-62 / 64) / 4, rel=1e-6)


@torch.no_grad()
def test_pi_keeps_a_large_theta(tmp_path):
    """unsloth and DeepSpeed lose theta when they write the scaling."""
    model = TL(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    hf_posenc.patch(model, "pi", factor=2)
    expected = [5e5 ** (-2 * k / D) / 2 for k in range(D // 2)]
    assert inv_freq(model).tolist() == pytest.approx(expected, rel=1e-6)
    model.save_pretrained(tmp_path)
    plain, ours = AutoModelForCausalLM.from_pretrained(tmp_path), hf_posenc.from_pretrained(tmp_path)
    assert inv_freq(plain).tolist() == pytest.approx(expected, rel=1e-6)
    assert inv_freq(ours).tolist() == pytest.approx(expected, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    factor=st.floats(1, 64), theta=st.floats(500, 1e7), length=st.integers(32, 100_000),
    beta_slow=st.floats(0.1, 4), spread=st.floats(1, 40), truncate=st.booleans(),
)  # fmt: skip
def test_yarn_formula_everywhere(factor, theta, length, beta_slow, spread, truncate):
    """Any parameters, also where the ramp is clamped or empty: the frequencies are those of the double loop."""
    ramp = {"beta_fast": beta_slow * spread, "beta_slow": beta_slow, "truncate": truncate}
    method = hf_posenc.YaRN(factor=factor, **ramp)
    rope = hf_posenc.methods_base().Rope if hasattr(hf_posenc, "methods_base") else None
    from hf_posenc.methods import Rope

    rope = Rope(torch.tensor(reference.rope(32, theta), dtype=torch.float64), theta, length, length, 32, "default", {})
    frequencies, temperature = method.frequencies(rope)
    assert frequencies.tolist() == pytest.approx(reference.yarn(32, theta, factor, length, **ramp), rel=1e-9)
    assert temperature == pytest.approx(reference.attention_factor(factor), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    factor=st.floats(1, 64), theta=st.floats(500, 1e7), length=st.integers(32, 100_000),
    low=st.floats(0.1, 4), spread=st.floats(1.01, 8),
)  # fmt: skip
def test_llama3_and_ntk_formulas_everywhere(factor, theta, length, low, spread):
    from hf_posenc.methods import Rope

    rope = Rope(torch.tensor(reference.rope(32, theta), dtype=torch.float64), theta, length, length, 32, "default", {})
    llama3 = hf_posenc.Llama3(factor=factor, low_freq_factor=low, high_freq_factor=low * spread)
    expected = reference.llama3(32, theta, factor, length, low, low * spread)
    assert llama3.frequencies(rope)[0].tolist() == pytest.approx(expected, rel=1e-9)
    ntk = hf_posenc.NTK(factor=factor).frequencies(rope)[0].tolist()
    assert ntk == pytest.approx(reference.ntk(32, theta, factor), rel=1e-9)
