"""Frequency methods: what a patched model computes is what transformers computes from a configuration that was written
by hand, what plain transformers reloads, and what the float64 formulas say."""

import itertools
import math

import pytest
import reference
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TL, tiny_model, tokens
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import hf_posenc
from hf_posenc.methods import Rope

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


# transformers ignores `truncate` in nested rope_parameters: see test_gemma3_untruncated.
CASES = [case for case in itertools.product(FAMILIES, METHODS) if case != ("gemma3_text", "yarn-untruncated")]


@torch.no_grad()
@pytest.mark.parametrize(("family", "method"), CASES)
def test_equals_a_fresh_model_of_a_hand_written_config(family, method):
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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    factor=st.floats(1, 64), theta=st.floats(500, 1e7), length=st.integers(32, 100_000),
    beta_slow=st.floats(0.1, 4), spread=st.floats(1, 40), truncate=st.booleans(),
)  # fmt: skip
def test_yarn_formula_everywhere(factor, theta, length, beta_slow, spread, truncate):
    """Any parameters, also where the ramp is clamped or empty: the frequencies are those of the double loop."""
    ramp = {"beta_fast": beta_slow * spread, "beta_slow": beta_slow, "truncate": truncate}
    method = hf_posenc.YaRN(factor=factor, **ramp)
    rope = Rope(torch.tensor(reference.rope(32, theta), dtype=torch.float64), theta, length, length, 32, "default", {})
    frequencies, temperature = method.frequencies(rope)
    assert frequencies.tolist() == pytest.approx(reference.yarn(32, theta, factor, length, **ramp), rel=1e-9)
    assert temperature == pytest.approx(reference.attention_factor(factor), rel=1e-12)


def test_an_empty_ramp_is_a_step():
    """beta_fast = beta_slow with its end just below a pair: that pair is interpolated in full."""
    beta = 4096 / (2 * math.pi * 1e4 ** (2 * 5.95 / 32))
    rope = Rope(torch.tensor(reference.rope(32, 1e4), dtype=torch.float64), 1e4, 4096, 4096, 32, "default", {})
    frequencies, _ = hf_posenc.NTKByParts(factor=4, beta_fast=beta, beta_slow=beta, truncate=False).frequencies(rope)
    ratios = (rope.frequencies / frequencies).tolist()
    assert ratios == pytest.approx([1.0] * 6 + [4.0] * 10)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    factor=st.floats(1, 64), theta=st.floats(500, 1e7), length=st.integers(32, 100_000),
    low=st.floats(0.1, 4), spread=st.floats(1.01, 8),
)  # fmt: skip
def test_llama3_and_ntk_formulas_everywhere(factor, theta, length, low, spread):
    rope = Rope(torch.tensor(reference.rope(32, theta), dtype=torch.float64), theta, length, length, 32, "default", {})
    llama3 = hf_posenc.Llama3(factor=factor, low_freq_factor=low, high_freq_factor=low * spread)
    expected = reference.llama3(32, theta, factor, length, low, low * spread)
    assert llama3.frequencies(rope)[0].tolist() == pytest.approx(expected, rel=1e-9)
    ntk = hf_posenc.NTK(factor=factor).frequencies(rope)[0].tolist()
    assert ntk == pytest.approx(reference.ntk(32, theta, factor), rel=1e-9)


# --- lengths: original and extended ----------------------------------------------------------------------------------


def lengths(model) -> tuple:
    """(max_position_embeddings, original length, factor, rope type) of the configuration in force."""
    parameters = model.config.rope_parameters
    return (
        model.config.max_position_embeddings,
        parameters.get("original_max_position_embeddings"),
        parameters.get("factor"),
        parameters["rope_type"],
    )


def test_factor_and_target_length():
    model = TL()
    assert lengths(hf_posenc.patch(model, "yarn", factor=4)) == (256, 64, 4.0, "yarn")
    assert lengths(hf_posenc.patch(model, "yarn", target_length=200)) == (200, 64, 3.125, "yarn")
    assert lengths(hf_posenc.patch(model, "llama3", factor=1.5)) == (96, 64, 1.5, "llama3")
    assert lengths(hf_posenc.patch(model, "pi", target_length=64)) == (64, None, 1.0, "linear")
    with pytest.raises(ValueError, match=r"63.*64"):
        hf_posenc.patch(model, "pi", target_length=63)
    assert lengths(model) == (64, None, 1.0, "linear")


@torch.no_grad()
@pytest.mark.parametrize("method", ["pi", "ntk", "ntk_by_parts", "yarn", "llama3"])
def test_patched_twice_is_never_the_factor_squared(method, tmp_path):
    once = hf_posenc.patch(TL(), method, factor=4)
    twice = hf_posenc.patch(hf_posenc.patch(TL(), method, factor=2), method, factor=4)
    assert torch.equal(inv_freq(twice), inv_freq(once))
    assert twice.config.to_dict() == once.config.to_dict()
    twice.save_pretrained(tmp_path)
    for load in (AutoModelForCausalLM.from_pretrained, hf_posenc.from_pretrained):
        again = hf_posenc.patch(load(tmp_path), method, factor=8)
        assert torch.equal(inv_freq(again), inv_freq(hf_posenc.patch(TL(), method, factor=8)))
        assert again.config.max_position_embeddings == 512
        hf_posenc.unpatch(again)
        assert (again.config.max_position_embeddings, again.config.rope_parameters) == (
            64,
            TL().config.rope_parameters,
        )


SCALED = {
    "yarn": ramped(4.0, rope_theta=10000.0, attention_factor=1.2, beta_fast=4.0, truncate=False),
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": long_entry(8, False) | {"rope_theta": 10000.0},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("method", ["pi", "ntk", "ntk_by_parts", "yarn", "llama3"])
def test_a_scaled_checkpoint_counts_from_the_original(kind, method, tmp_path):
    """A checkpoint of 256 tokens that was trained with 64: factor 8 makes 512, whatever it carried."""
    model = TL(rope_parameters=SCALED[kind], max_position_embeddings=256)
    stock, config = model(IDS).logits, model.config.to_dict()
    hf_posenc.patch(model, method, factor=8)
    plain = hf_posenc.patch(TL(), method, factor=8)
    assert torch.equal(inv_freq(model), inv_freq(plain))
    assert model.config.max_position_embeddings == 512
    assert_close(model(IDS).logits, plain(IDS).logits, atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path)
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, plain(IDS).logits, atol=1e-5, rtol=0)
    hf_posenc.unpatch(model)
    assert torch.equal(model(IDS).logits, stock)
    # save_pretrained itself notes these two.
    config |= {"dtype": "float32", "architectures": ["LlamaForCausalLM"]}
    assert model.config.to_dict() == config


def test_yarn_keeps_the_mscales_of_a_yarn_checkpoint():
    carried = ramped(4.0, rope_theta=10000.0, mscale=1.0, mscale_all_dim=0.5)
    model = TL(rope_parameters=carried, max_position_embeddings=256)
    hf_posenc.patch(model, "yarn", factor=4)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(1.0648216)
    hf_posenc.patch(model, "yarn", factor=4, mscale=1, mscale_all_dim=1)
    assert model.model.rotary_emb.attention_scaling == 1


def test_longrope_takes_the_lists_of_its_checkpoint():
    model = TL(rope_parameters=SCALED["longrope"], max_position_embeddings=256)
    short, long = lists(8)
    hf_posenc.patch(model, "longrope", switch="long")
    expected = [frequency / factor for frequency, factor in zip(reference.rope(D, BASE), long, strict=True)]
    assert inv_freq(model).tolist() == pytest.approx(expected, rel=1e-6)
    assert hf_posenc.current(model).short_factor == tuple(short)
    assert (hf_posenc.current(model).factor, model.config.max_position_embeddings) == (4.0, 256)
    for wrong in ({"short_factor": short[:-1]}, {"long_factor": [*long, 1.0]}, {"long_factor": [0.0] * 8}):
        with pytest.raises(ValueError, match="factor"):
            hf_posenc.patch(model, "longrope", **wrong)
    with pytest.raises(ValueError, match="short_factor"):
        hf_posenc.patch(TL(), "longrope", long_factor=long)


@torch.no_grad()
def test_stock_switch_of_longrope_follows_the_longest_row():
    """transformers' own rule, for parity: long factors as soon as a call is longer than the original length."""
    short, long = lists(8)
    model = hf_posenc.patch(TL(), "longrope", short_factor=short, long_factor=long, factor=4, switch="stock")
    always = hf_posenc.patch(TL(), "longrope", short_factor=short, long_factor=long, factor=4, switch="long")
    never = hf_posenc.patch(TL(), "longrope", short_factor=short, long_factor=short, factor=4, switch="long")
    for _ in range(2):
        assert_close(model(IDS).logits, always(IDS).logits, atol=1e-5, rtol=0)
        assert_close(model(IDS[:, :64]).logits, never(IDS[:, :64]).logits, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["pi:factor=1", "ntk:factor=1", "yarn:factor=1", "llama3:target_length=64"])
def test_identity_parameters(family, method):
    model = tiny_model(family)
    stock = model(IDS).logits
    # Three times 1e-5: transformers' ramps round the frequencies in float32 even where they change nothing.
    assert_close(hf_posenc.patch(model, method)(IDS).logits, stock, atol=3e-5, rtol=0)


# --- what single families add ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_gemma3_scales_global_layers_only():
    model = tiny_model("gemma3_text")
    hf_posenc.patch(model, "yarn:factor=4")
    assert inv_freq(model, "sliding_attention_inv_freq").tolist() == pytest.approx(reference.rope(16, 1e4), rel=1e-6)
    expected = reference.yarn(16, 1e6, 4, LENGTH)
    assert inv_freq(model, "full_attention_inv_freq").tolist() == pytest.approx(expected, rel=1e-6)
    rotary = model.model.rotary_emb
    assert rotary.sliding_attention_attention_scaling == 1
    assert rotary.full_attention_attention_scaling == pytest.approx(1.1386294)


@torch.no_grad()
def test_gemma3_untruncated(tmp_path):
    """transformers ignores `truncate` in nested parameters: our own tables, and a plain load that fails loudly."""
    model = hf_posenc.patch(tiny_model("gemma3_text"), "yarn:factor=4,truncate=false")
    expected = reference.yarn(16, 1e6, 4, LENGTH, truncate=False)
    assert inv_freq(model, "full_attention_inv_freq").tolist() == pytest.approx(expected, rel=1e-6)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"hf_posenc\.restore"):
        AutoModelForCausalLM.from_pretrained(tmp_path)(IDS)
    assert torch.equal(hf_posenc.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_softmax_scale_of_latent_attention(family, tmp_path):
    """With mscale_all_dim the softmax scale of every layer changes, and comes back."""
    entry = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": LENGTH}
    entry |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    model = tiny_model(family)
    stock, scale = model(IDS).logits, model.model.layers[0].self_attn.scaling
    hf_posenc.patch(model, "yarn:factor=4,mscale=1,mscale_all_dim=1")
    expected = fresh(family, model.state_dict(), rope_parameters=entry, max_position_embeddings=256)
    assert_close(model(IDS).logits, expected(IDS).logits, atol=1e-5, rtol=0)
    assert [layer.self_attn.scaling for layer in model.model.layers] == pytest.approx(
        [scale * reference.mscale_of(4) ** 2] * 4
    )
    model.save_pretrained(tmp_path)
    assert_close(hf_posenc.from_pretrained(tmp_path)(IDS).logits, expected(IDS).logits, atol=1e-5, rtol=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(loaded(IDS).logits, expected(IDS).logits, atol=1e-5, rtol=0)
    for patched in (model, hf_posenc.restore(loaded)):
        hf_posenc.unpatch(patched)
        assert torch.equal(patched(IDS).logits, stock)
        assert {layer.self_attn.scaling for layer in patched.model.layers} == {scale}
    hf_posenc.patch(model, "yarn:factor=4")
    assert {layer.self_attn.scaling for layer in model.model.layers} == {scale}


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("qwen2_vl", {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}),
        ("qwen3_vl", {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}),
    ],
)
@pytest.mark.parametrize("method", ["pi", "ntk", "yarn", "llama3"])
def test_sections_of_three_axes_are_kept(family, rope, method, tmp_path):
    line = torch.arange(96)
    places = torch.stack((line, line // 3 + 40, line % 11 + 70))[:, None].expand(3, 2, 96)
    model = tiny_model(family)
    stock = model(IDS, position_ids=places).logits
    hf_posenc.patch(model, method, **METHODS[method][0](16))
    ours = model(IDS, position_ids=places).logits
    entry = rope | METHODS[method][1](10000.0, 16)
    expected = fresh(family, model.state_dict(), rope_parameters=entry, max_position_embeddings=256)
    assert_close(ours, expected(IDS, position_ids=places).logits, atol=1e-5, rtol=0)
    assert (ours - stock).abs().max() > 1e-2
    assert model.config.text_config.rope_parameters["mrope_section"] == rope["mrope_section"]
    assert model.config.text_config.max_position_embeddings == 256
    model.save_pretrained(tmp_path)
    for load in (AutoModelForImageTextToText.from_pretrained, hf_posenc.from_pretrained):
        assert_close(load(tmp_path)(IDS, position_ids=places).logits, ours, atol=1e-5, rtol=0)
    hf_posenc.unpatch(model)
    assert torch.equal(model(IDS, position_ids=places).logits, stock)


# --- precision -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text", "deepseek_v3", "gpt_neox", "qwen2_vl"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_before_and_after_the_patch(family, dtype):
    first = hf_posenc.patch(tiny_model(family).to(dtype), "yarn:factor=4")
    second = hf_posenc.patch(tiny_model(family), "yarn:factor=4").to(dtype)
    third = hf_posenc.patch(tiny_model(family), "yarn:factor=4").to(dtype).to(torch.float32).to(dtype)
    assert first(IDS).logits.dtype == dtype
    assert torch.equal(first(IDS).logits, second(IDS).logits)
    assert torch.equal(first(IDS).logits, third(IDS).logits)


@torch.no_grad()
def test_a_cast_leaves_far_positions_where_they_are(tmp_path):
    """Frequencies rounded to bfloat16 would turn position 5000 by radians."""
    model = hf_posenc.patch(TL(), "yarn:factor=4")
    exact = inv_freq(model).clone()
    model.to(torch.bfloat16)
    assert inv_freq(model).dtype == torch.float32
    assert torch.equal(inv_freq(model), exact)
    model.save_pretrained(tmp_path)
    for load in (AutoModelForCausalLM.from_pretrained, hf_posenc.from_pretrained):
        loaded = load(tmp_path, dtype=torch.bfloat16)
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_compiles_without_a_graph_break():
    """Lengths 30 ... 60 recompile at most twice."""
    torch._dynamo.reset()
    model, counter = hf_posenc.patch(TL(), "yarn:factor=4"), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (*range(30, 61, 3), 96):
        ids = IDS[:, :length]
        assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, atol=1e-5, rtol=0)
    assert counter.frame_count <= 3


@torch.no_grad()
def test_a_compiled_model_notices_the_patch():
    torch._dynamo.reset()
    model = TL()
    compiled = torch.compile(model, backend="eager")
    stock = compiled(IDS, use_cache=False).logits
    hf_posenc.patch(model, "yarn:factor=4")
    assert_close(compiled(IDS, use_cache=False).logits, model(IDS).logits, atol=1e-5, rtol=0)
    hf_posenc.unpatch(model)
    assert torch.equal(compiled(IDS, use_cache=False).logits, stock)


def test_gradients_and_checkpointing():
    """Stock kernels: the gradients are those of a fresh model of the same configuration."""
    found = []
    for kind in ("patched", "fresh", "checkpointed"):
        model = TL(rope_parameters=by_hand("llama", "yarn")) if kind == "fresh" else TL()
        if kind != "fresh":
            hf_posenc.patch(model, "yarn:factor=4")
        if kind == "checkpointed":
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.train()(IDS, labels=IDS, use_cache=False).loss.backward()
        found.append([weight.grad for weight in model.parameters()])
    for others in found[1:]:
        for ours, theirs in zip(found[0], others, strict=True):
            assert_close(ours, theirs, atol=1e-5, rtol=0)


# --- partial_rope ----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["phi", "gpt_neox", "glm", "nemotron", "stablelm"])
def test_partial_rope_where_the_family_knows_it(family, tmp_path):
    model = tiny_model(family)
    stock = model(IDS).logits
    hf_posenc.patch(model, "partial_rope", fraction=0.8)
    entry = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}  # 12 of 16 dimensions
    expected = fresh(family, model.state_dict(), rope_parameters=entry)
    assert_close(model(IDS).logits, expected(IDS).logits, atol=1e-5, rtol=0)
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits, atol=1e-5, rtol=0)
    assert torch.equal(hf_posenc.unpatch(model)(IDS).logits, stock)


@torch.no_grad()
@pytest.mark.parametrize(("fraction", "dim"), [(0.5, 8), (0.2, 2), (0.7, 10), (1.0, 16)])
def test_partial_rope_inside_attention(fraction, dim):
    """On a Llama, which always turns whole heads; with a cache, padding and positions beyond the trained length."""
    model, ids = hf_posenc.patch(TL(), "partial_rope", fraction=fraction), tokens(1, 90)
    whole = model(ids).logits
    judged = reference.frequency_logits(model, ids[0], reference.rope(dim, BASE))
    assert_close(whole[0].double(), judged, atol=1e-4, rtol=0)
    out = model(ids[:, :30], use_cache=True)
    name = "cache" if "cache" in out else "past_key_values"
    rest = [out.logits]
    for start, stop in ((30, 39), (39, 40), (40, 90)):
        out = model(ids[:, start:stop], use_cache=True, **{name: out[name]})
        rest.append(out.logits)
    assert_close(torch.cat(rest, dim=1), whole, atol=1e-4, rtol=0)
    mask = torch.ones(1, 100, dtype=torch.long)
    mask[0, :10] = 0
    padded = model(torch.cat((ids[:, :10], ids), dim=1), attention_mask=mask).logits
    assert_close(padded[:, 10:], whole, atol=1e-4, rtol=0)


def test_partial_rope_refuses_an_empty_fraction():
    for fraction in (0, -0.5, 1.1, 0.05, math.nan):
        with pytest.raises(ValueError, match="fraction"):
            hf_posenc.patch(TL(), "partial_rope", fraction=fraction)


# --- checkpoints with a scheme of their own --------------------------------------------------------------------------


@torch.no_grad()
def test_a_longrope_checkpoint():
    """Phi-3 as published: within the original length causal switching is what it was, `stock` is bit for bit."""
    short, long = lists(8)
    entry = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    entry |= {"partial_rotary_factor": 1.0}
    model = tiny_model("phi3", rope_parameters=entry, original_max_position_embeddings=64, max_position_embeddings=256)
    stock, brief = model(IDS).logits, model(IDS[:, :64]).logits
    hf_posenc.patch(model, "longrope")
    assert_close(model(IDS[:, :64]).logits, brief, atol=1e-4, rtol=0)
    assert hf_posenc.current(model).factor == 4
    assert model.config.max_position_embeddings == 256
    hf_posenc.patch(model, "longrope:switch=stock")
    assert torch.equal(model(IDS).logits, stock)
    hf_posenc.patch(model, "longrope:switch=long")
    assert torch.equal(model(IDS).logits, stock)
    assert (model(IDS[:, :64]).logits - brief).abs().max() > 0.1
    hf_posenc.unpatch(model)
    assert torch.equal(model(IDS).logits, stock)


@torch.no_grad()
def test_a_family_that_refuses_other_types_gets_our_tables(tmp_path):
    """Phi-3's configuration validates longrope only: the numbers are right all the same, and a plain load stops."""
    model = hf_posenc.patch(tiny_model("phi3"), "yarn:factor=4")
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.tolist() == pytest.approx(reference.yarn(16, 1e4, 4, LENGTH), rel=1e-6)
    assert rotary.attention_scaling == pytest.approx(1.1386294)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="hf_posenc"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(hf_posenc.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_a_rotation_that_is_computed_anew_at_every_forward_cannot_be_taken_away():
    """PhiMoE's module answers with the frequencies of its configuration, whatever it holds."""
    for method in ("nope", "alibi", "sinusoidal", "yarn:factor=4"):
        with pytest.raises(hf_posenc.UnsupportedMethodError):
            hf_posenc.patch(tiny_model("phimoe"), method)
