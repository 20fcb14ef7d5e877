"""The judge is judged: golden numbers of shared/methods.md, and transformers' own Llama in float64."""

import doctest
import math

import pytest
import reference
import tiny
import torch

D, BASE, ORIGINAL = 16, 10000.0, 64


@pytest.mark.parametrize(
    ("d", "base", "original", "low", "high"),
    [
        (128, 1e4, 4096, 20.944, 45.027),
        (128, 5e5, 8192, 18.081, 34.984),
        (128, 1e6, 32768, 23.596, 39.651),
        (64, 150000, 4096, 8.093, 17.398),
    ],
    ids=["llama2", "llama3", "qwen2.5", "gpt_oss"],
)
def test_yarn_range(d, base, original, low, high):
    assert reference.yarn_range(d, base, original, truncate=False) == pytest.approx((low, high), abs=5e-4)
    assert reference.yarn_range(d, base, original) == (math.floor(low), math.ceil(high))


def test_yarn_range_is_clamped():
    assert reference.yarn_range(16, 1e4, 64)[0] == 0
    assert reference.yarn_range(8, 10.0, 1e9) == (reference.yarn_range(8, 10.0, 1e9)[0], 7)
    assert all(math.isfinite(frequency) for frequency in reference.yarn(8, 10.0, 4.0, 7.0, beta_fast=1, beta_slow=1))


def test_attention_factor():
    values = [reference.attention_factor(s) for s in (4, 8, 16, 32)]
    assert values == pytest.approx([1.1386294, 1.2079, 1.2773, 1.3466], abs=5e-5)
    assert reference.attention_factor(1) == reference.attention_factor(0.5) == 1
    assert reference.attention_factor(4, given=1.5, mscale=1, mscale_all_dim=0.5) == 1.5
    assert reference.attention_factor(4, mscale=1, mscale_all_dim=1) == 1
    assert reference.attention_factor(4, mscale=1, mscale_all_dim=0.5) == pytest.approx(1.0648216, abs=5e-8)
    assert reference.attention_factor(4, mscale=0.5) == reference.attention_factor(4)


def test_yarn_frequencies():
    frequencies = reference.yarn(64, 1e4, 4.0, 4096)
    expected = [0.1, 0.0279740, 0.00653846, 0.00133789, 0.00025]
    assert [frequencies[k] for k in (8, 12, 16, 20, 24)] == pytest.approx(expected, rel=5e-6)
    assert reference.yarn(64, 1e4, 4.0, 16384)[12] == pytest.approx(0.0316228, rel=5e-6)


def test_ntk_bases():
    assert reference.ntk_base(64, 1e4, 4) == pytest.approx(41829.366, abs=5e-4)
    scaled, plain = reference.ntk(64, 1e4, 4), reference.rope(64, 1e4)
    assert scaled[0] == plain[0] == 1
    assert scaled[-1] == pytest.approx(plain[-1] / 4, rel=1e-12)


def test_dynamic_ntk_bases():
    bases = [reference.dynamic_ntk_base(n, 64, 1e4, 256, 2) for n in (300, 512, 1024)]
    assert bases == pytest.approx([13566.19, 31082.24, 74534.83], abs=5e-3)
    assert reference.dynamic_ntk(256, 64, 1e4, 256, 2) == reference.rope(64, 1e4)


def test_dynamic_yarn_is_plain_up_to_the_original_length():
    frequencies, factor = reference.dynamic_yarn(64, D, BASE, 64)
    assert frequencies == pytest.approx(reference.rope(D, BASE), rel=1e-15)
    assert factor == 1
    assert reference.dynamic_yarn(256, D, BASE, 64) == (
        reference.yarn(D, BASE, 4.0, 64),
        reference.attention_factor(4),
    )


def test_rounded_length():
    assert [reference.rounded_length(n, 64, 10) for n in (1, 63, 64, 65, 70, 71)] == [1, 63, 64, 70, 70, 80]


@pytest.mark.parametrize(
    ("distance", "i", "parameters", "row"),
    [
        ("self_extend", 9, {"window": 4, "group": 2}, [6, 6, 5, 5, 4, 4, 3, 2, 1, 0]),
        ("self_extend", 5, {"window": 4, "group": 2}, [4, 4, 3, 2, 1, 0]),
        ("self_extend", 6, {"window": 4, "group": 3}, [5, 5, 5, 3, 2, 1, 0]),
        ("rerope", 9, {"window": 6}, [6, 6, 6, 6, 5, 4, 3, 2, 1, 0]),
        ("leaky_rerope", 9, {"window": 3, "scale": 0.25}, [4.5, 4.25, 4, 3.75, 3.5, 3.25, 3, 2, 1, 0]),
        ("dca", 11, {"chunk": 6, "local": 4}, [9, 8, 7, 6, 5, 4, 5, 4, 3, 2, 1, 0]),
        ("dca", 13, {"chunk": 6, "local": 4}, [9, 8, 7, 6, 5, 4, 7, 6, 5, 4, 3, 2, 1, 0]),
        ("string", 7, {"shift": 4, "window": 2}, [5, 4, 3, 2, 3, 2, 1, 0]),
    ],
)
def test_distance_rows(distance, i, parameters, row):
    assert reference.distance_row(getattr(reference, f"{distance}_distance"), i, **parameters) == row


def test_doctests():
    assert doctest.testmod(reference).failed == 0


SHORT, LONG = [1.0 + 0.05 * k for k in range(D // 2)], [1.5 + 0.5 * k for k in range(D // 2)]
SCALED = {
    "default": ({}, reference.rope(D, BASE), 1.0),
    "linear": ({"factor": 4.0}, reference.pi(D, BASE, 4.0), 1.0),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        reference.yarn(D, BASE, 4.0, ORIGINAL),
        reference.attention_factor(4.0),
    ),
    "yarn_mscale": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
        | {"mscale_all_dim": 0.5, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
        reference.yarn(D, BASE, 4.0, 4096, beta_fast=16, beta_slow=2, truncate=False),
        reference.attention_factor(4.0, mscale=1.0, mscale_all_dim=0.5),
    ),
    "llama3": (
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        reference.llama3(D, BASE, 4.0, ORIGINAL),
        1.0,
    ),
    "longrope_short": (
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
        | {"short_factor": SHORT, "long_factor": LONG},
        *reference.longrope(40, D, BASE, ORIGINAL, 4.0, SHORT, LONG),
    ),
    "longrope_long": (
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32}
        | {"short_factor": SHORT, "long_factor": LONG},
        *reference.longrope(40, D, BASE, 32, 4.0, SHORT, LONG),
    ),
}


def float64_logits(model, ids):
    """(logits (n, vocab), frequencies, attention factor) of transformers' forward, all of it in float64.

    `model.double()` is not enough: the stock rotary and RMSNorm compute in float32 whatever the dtype. The norms give
    way to torch's, the rotary to a module that takes its very frequencies to float64.
    """
    rotary = model.model.rotary_emb
    with torch.no_grad():
        rotary(torch.zeros(1), torch.arange(len(ids))[None])  # longrope chooses its factors in the forward
    frequencies, factor = rotary.inv_freq.double(), rotary.attention_scaling

    class Rotary64(torch.nn.Module):
        def forward(self, x, position_ids):
            angles = position_ids[..., None].double() * frequencies
            angles = torch.cat([angles, angles], -1)
            return angles.cos() * factor, angles.sin() * factor

    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            norm = torch.nn.RMSNorm(len(module.weight), eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    model.double().model.rotary_emb = Rotary64()
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0], frequencies.tolist(), factor


@pytest.mark.parametrize("name", SCALED)
def test_llama_forward_equals_transformers(name):
    parameters, frequencies, factor = SCALED[name]
    rope_parameters = {"rope_type": name, "rope_theta": BASE} | parameters
    model = tiny.TL(rope_parameters=rope_parameters, max_position_embeddings=256)
    ids = tiny.tokens(1, 40)[0]
    expected, stock_frequencies, stock_factor = float64_logits(model, ids)
    assert stock_frequencies == pytest.approx(frequencies, rel=2e-6)  # float32 in transformers
    assert stock_factor == pytest.approx(factor, rel=1e-12)
    actual = reference.frequency_logits(model, ids, stock_frequencies, stock_factor)
    assert (actual - expected).abs().max() <= 1e-9
    exact = reference.frequency_logits(model, ids, frequencies, factor)
    assert (exact - expected).abs().max() <= 1e-3
    if name != "default":
        plain = reference.frequency_logits(model, ids, reference.rope(D, BASE))
        assert (plain - expected).abs().max() > 0.1


def test_llama_forward_with_tied_head_and_bias_free_gqa():
    model = tiny.TL(tie_word_embeddings=True, num_key_value_heads=1)
    ids = tiny.tokens(1, 16)[0]
    expected, frequencies, _ = float64_logits(model, ids)
    assert (reference.frequency_logits(model, ids, frequencies) - expected).abs().max() <= 1e-9


def test_attention_loop_equals_the_rows_of_the_forward():
    """The double loop against one layer of transformers' attention in float64."""
    model = tiny.TL(num_hidden_layers=1).double()
    attention, hidden = model.model.layers[0].self_attn, torch.randn(1, 12, 64, dtype=torch.float64)
    angles = torch.arange(12).double()[:, None] * torch.tensor(reference.rope(D), dtype=torch.float64)
    table = torch.cat([angles, angles], -1)[None]
    mask = torch.full((12, 12), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected = attention(hidden, position_embeddings=(table.cos(), table.sin()), attention_mask=mask)[0][0]
        query, key, value = (
            projection(hidden)[0].view(12, -1, D).transpose(0, 1)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        output = reference.attention_loop(query, key, value, reference.by_frequencies(reference.rope(D)))
        actual = attention.o_proj(output.transpose(0, 1).reshape(12, 64))
    assert (actual - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("start", [0, 4])
def test_scores_depend_on_the_distance_alone(pairing, start):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(h, 9, D, generator=generator, dtype=torch.float64) for h in (2, 1, 1))
    angle = reference.by_frequencies(reference.rope(8))
    options = {"pairing": pairing, "start": start, "window": 5}
    base = reference.attention_loop(query, key, value, angle, **options)
    shifted = list(range(100, 109))
    moved = reference.attention_loop(
        query, key, value, angle, query_positions=shifted, key_positions=shifted, **options
    )
    mapped = reference.attention_loop(
        query, key, value, reference.by_distance(reference.rope(8), reference.plain_distance), **options
    )
    assert (moved - base).abs().max() <= 1e-12
    assert (mapped - base).abs().max() <= 1e-12
    other = "half" if pairing == "interleaved" else "interleaved"
    different = reference.attention_loop(query, key, value, angle, **options | {"pairing": other})
    assert (different - base).abs().max() > 1e-3


def test_interleaved_is_half_after_a_permutation():
    vector, angles = [float(x) for x in range(1, 9)], [0.3, 0.7, 1.1, 1.9]
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    half = reference.rotate([vector[k] for k in order], angles, "half")
    assert reference.rotate(vector, angles, "interleaved") == pytest.approx(
        [half[order.index(k)] for k in range(8)], abs=1e-15
    )


def test_dynamic_logits_are_causal():
    model = tiny.TL(max_position_embeddings=16)
    ids = tiny.tokens(1, 40)[0]

    def frequencies(n):
        return reference.dynamic_ntk(reference.rounded_length(n, 16, 4), D, BASE, 16, 2.0)

    whole = reference.dynamic_logits(model, ids, frequencies)
    assert torch.equal(whole[:24], reference.dynamic_logits(model, ids[:24], frequencies))
    plain = reference.frequency_logits(model, ids, reference.rope(D, BASE))
    assert torch.equal(whole[:16], plain[:16])
    assert (whole[16:] - plain[16:]).abs().max() > 0.1


def test_position_maps_change_nothing_at_their_identity():
    model = tiny.TL()
    ids = tiny.tokens(1, 14)[0]
    plain = reference.frequency_logits(model, ids, reference.rope(D, BASE))

    def mapped(name, **parameters):
        distance = getattr(reference, f"{name}_distance")
        angle = reference.by_distance(reference.rope(D, BASE), lambda i, j: distance(i, j, **parameters))
        return reference.llama_logits(model, ids, angle)

    for identity in (
        mapped("self_extend", window=5, group=1),
        mapped("self_extend", window=14, group=3),
        mapped("rerope", window=14),
        mapped("leaky_rerope", window=14, scale=0.5),
        mapped("dca", chunk=14, local=2),
        mapped("string", shift=14, window=2),
    ):
        assert (identity - plain).abs().max() <= 1e-10
    for change in (mapped("rerope", window=4), mapped("dca", chunk=6, local=4), mapped("string", shift=4, window=2)):
        assert (change - plain).abs().max() > 0.1
