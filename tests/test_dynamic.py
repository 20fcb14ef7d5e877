"""Length-dependent methods: query i uses the frequencies of a text of i + 1 tokens, for itself and for every key, so
that one pass, chunks, single tokens, padded batches and packed rows all compute the same.

Models run in float64 where their kernels allow, since the random models here amplify float32 noise to 1e-4.
"""

import copy
import gc
import math
import pickle
import weakref

import pytest
import reference
import torch
from reading import CACHE, greedy, padded, stepwise
from tiny import TL, tiny_model, tokens
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

import hf_posenc

LENGTH, D, BASE = 64, 16, 10000.0
SHORT, LONG = [1.0 + 0.05 * k for k in range(8)], [1.0 + 0.7 * k for k in range(8)]
LONGROPE = hf_posenc.LongRoPE(short_factor=SHORT, long_factor=LONG, factor=4)
METHODS = {
    "dynamic_ntk": "dynamic_ntk:granularity=1",
    "dynamic_ntk-default": "dynamic_ntk:factor=2",
    "dynamic_yarn": "dynamic_yarn:granularity=1",
    "dynamic_yarn-coarse": "dynamic_yarn:granularity=10",
    "longrope": LONGROPE,
}
FAMILIES = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": 24}, "gemma2": {}, "gemma3_text": {},
    "phi": {}, "phi3": {}, "gpt_neox": {}, "glm": {}, "cohere2": {}, "smollm3": {}, "llama4_text": {}, "gpt_oss": {},
    "deepseek_v2": {}, "deepseek_v3": {}, "nemotron": {}, "stablelm": {}, "moshi": {"sliding_window": 4096},
    "granite_swa": {}, "qwen2_vl": {}, "qwen3_vl": {},
}  # fmt: skip
if CACHE != "cache":
    del FAMILIES["moshi"]  # up to 5.23 its chunks see later tokens, unpatched as well
# Softcaps and sinks have no sdpa, and eager attention takes the softmax in float32, where the mask of a float64 model
# overflows.
EAGER = {"gemma2", "gpt_oss", "granite_swa"}
# Expert kernels take no float64.
FLOAT32 = EAGER | {"deepseek_v2", "deepseek_v3"}
# 24 + 9 + single tokens, and cuts on and across the trained length.
CUTS = ([24, 9] + [1] * 63, [60, 10, 26], [64, 32], [65, 31])


@pytest.fixture(autouse=True)
def _no_gradients(request):
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def llama(method="dynamic_ntk:granularity=1", **overrides):
    return hf_posenc.patch(TL(**overrides).double(), method)


def built(family: str):
    model = tiny_model(family, **FAMILIES[family])
    return model if family in FLOAT32 else model.double()


def tolerance(family: str) -> float:
    # Llama 4 normalises queries and keys in float32.
    return (
        5e-4 if family == "granite_swa" else 1e-4 if family in FLOAT32 else 1e-5 if family == "llama4_text" else 1e-8
    )


# --- the rule itself -------------------------------------------------------------------------------------------------


def rounded(n: int, granularity: int) -> int:
    return n if n <= LENGTH else math.ceil(n / granularity) * granularity


RULES = {
    "dynamic_ntk:granularity=1": lambda n: reference.dynamic_ntk(n, D, BASE, LENGTH),
    "dynamic_ntk:granularity=1,factor=3": lambda n: reference.dynamic_ntk(n, D, BASE, LENGTH, 3.0),
    # The default granularity is 64 // 32.
    "dynamic_ntk": lambda n: reference.dynamic_ntk(rounded(n, 2), D, BASE, LENGTH),
    "dynamic_ntk:granularity=24": lambda n: reference.dynamic_ntk(rounded(n, 24), D, BASE, LENGTH),
    "dynamic_yarn:granularity=1": lambda n: reference.dynamic_yarn(n, D, BASE, LENGTH),
    "dynamic_yarn": lambda n: reference.dynamic_yarn(rounded(n, 2), D, BASE, LENGTH),
    "dynamic_yarn:granularity=7,beta_fast=8,beta_slow=0.5": lambda n: reference.dynamic_yarn(
        rounded(n, 7), D, BASE, LENGTH, beta_fast=8, beta_slow=0.5
    ),
    str(LONGROPE): lambda n: reference.longrope(n, D, BASE, LENGTH, 4, SHORT, LONG),
}


@pytest.mark.parametrize("method", RULES, ids=[method[:34] for method in RULES])
def test_equals_the_float64_rule(method):
    model, ids = llama(method), tokens(1, 92)
    ours = model(ids).logits[0]
    assert_close(ours, reference.dynamic_logits(model, ids[0], RULES[method]), atol=1e-4, rtol=0)
    assert (ours - TL().double()(ids).logits[0]).abs().amax(-1)[LENGTH:].min() > 1e-2


def test_golden_bases():
    """Dynamic NTK, s = 2, L = 256, d = 64, b = 1e4."""
    from hf_posenc.methods import Rope

    frequencies = torch.tensor(reference.rope(64, 1e4), dtype=torch.float64)
    rope = Rope(frequencies, 1e4, 256, 256, 64, "default", {})
    lengths = torch.tensor([256, 300, 512, 1024])
    left, _ = hf_posenc.DynamicNTK(factor=2.0).turn(rope, lengths)
    bases = ((left + frequencies)[:, -1] ** (-64 / 62)).tolist()
    assert bases == pytest.approx([1e4, 13566.19, 31082.24, 74534.83], rel=1e-6)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_within_the_trained_length_nothing_changes(method):
    """Bit for bit; LongRoPE excepted, whose short factors hold there."""
    model, ids = TL(), tokens(2, LENGTH)
    expected = model(ids).logits
    ours = hf_posenc.patch(model, method)(ids).logits
    if method is LONGROPE:
        short = hf_posenc.LongRoPE(short_factor=SHORT, long_factor=SHORT, factor=4, switch="long")
        assert_close(ours, hf_posenc.patch(model, short)(ids).logits, atol=1e-4, rtol=0)
    else:
        assert torch.equal(ours, expected)


def test_no_length_is_rounded_beyond_the_trained_one():
    """With steps of 48, a text of 50 tokens still is plain RoPE, and one of 65 uses the frequencies of 96."""
    coarse, ids = llama("dynamic_ntk:granularity=48"), tokens(1, 96)
    assert torch.equal(coarse(ids[:, :64]).logits, TL().double()(ids[:, :64]).logits)
    model = llama("dynamic_ntk:granularity=1000")
    assert_close(
        model(ids).logits[0],
        reference.dynamic_logits(model, ids[0], lambda n: reference.dynamic_ntk(rounded(n, 1000), D, BASE, LENGTH)),
        atol=1e-4,
        rtol=0,
    )


# --- every family: cuts, caches, padding -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_in_any_pieces(family):
    model, ids = built(family), tokens(1, 96)
    stock = model(ids).logits
    hf_posenc.patch(model, "dynamic_ntk:granularity=4")
    whole = model(ids).logits
    assert_close(whole[:, :LENGTH], stock[:, :LENGTH], atol=1e-6, rtol=0)
    assert (whole - stock)[:, LENGTH:].abs().max() > 0.05
    for cuts in CUTS:
        assert_close(stepwise(model, ids, cuts), whole, atol=tolerance(family), rtol=0)
    hf_posenc.unpatch(model)
    assert torch.equal(model(ids).logits, stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_a_static_cache(family):
    model, ids = hf_posenc.patch(built(family), "dynamic_yarn:granularity=8"), tokens(2, 90)
    whole, cache = model(ids).logits, None
    for cuts in ([40] + [1] * 50, [70, 9] + [1] * 11):
        if cache is None:
            cache = StaticCache(config=model.config, max_cache_len=96)
        else:
            cache.reset()
        assert_close(stepwise(model, ids, cuts, cache), whole, atol=tolerance(family), rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_padding(family, side):
    """A row of 40 and one of 100 tokens: neither sees the other."""
    model = hf_posenc.patch(built(family), "dynamic_ntk:granularity=4")
    rows = [tokens(1, 40, 3)[0], tokens(1, 100, 4)[0]]
    ids, mask = padded(rows, side)
    places = [{}] if side == "right" else [{}, {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}]
    for more in places:
        if family.endswith("_vl") and more:
            more = {"position_ids": more["position_ids"].expand(3, -1, -1)}
        together = model(ids, attention_mask=mask, **more).logits
        for index, row in enumerate(rows):
            assert_close(
                together[index][mask[index].bool()], model(row[None]).logits[0], atol=tolerance(family), rtol=0
            )


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_method_reads_in_any_pieces(method, implementation):
    model, ids = llama(method, attn_implementation=implementation), tokens(2, 150)
    whole, atol = model(ids).logits, 1e-4 if implementation == "eager" else 1e-8
    for cuts in ([24, 9] + [1] * 7, [24, 9] + [1] * 7 + [60, 20, 30], [1] * 150, [63, 1, 1, 85], [40, 110]):
        assert_close(stepwise(model, ids, cuts), whole[:, : sum(cuts)], atol=atol, rtol=0)
    static = StaticCache(config=model.config, max_cache_len=160)
    assert_close(stepwise(model, ids, [24, 9] + [1] * 60 + [57], static), whole, atol=atol, rtol=0)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_calls_leave_no_trace(method):
    """Lengths 40, 128, 40, 64, 100 in turn give what a fresh model gives."""
    model = llama(method)
    for length in (40, 128, 40, 64, 100):
        assert torch.equal(model(tokens(1, length)).logits, llama(method)(tokens(1, length)).logits)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_rows_of_a_batch_are_alone(method):
    model = llama(method)
    rows = [tokens(1, length, length)[0] for length in (40, 128, 70)]
    alone = [model(row[None]).logits[0] for row in rows]
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        garbage = torch.where(mask == 1, ids, 99)
        for given in ({}, {"position_ids": places}):
            for text in (ids, garbage):
                together = model(text, attention_mask=mask, **given).logits
                for index, logits in enumerate(alone):
                    assert_close(together[index][mask[index].bool()], logits, atol=1e-8, rtol=0)


# --- caches ----------------------------------------------------------------------------------------------------------


def test_padded_prompts_continued_with_a_cache():
    """Prompts of 30 and 66 tokens padded on either side, then 10 more tokens: keys keep their positions."""
    model = llama()
    rows = [tokens(1, 40, 5)[0], tokens(1, 76, 6)[0]]
    alone = [model(row[None]).logits[0, -10:] for row in rows]
    more = torch.stack([row[-10:] for row in rows])
    for side in ("left", "right"):
        for static in (False, True):
            ids, mask = padded([row[:-10] for row in rows], side)
            cache = StaticCache(config=model.config, max_cache_len=80) if static else DynamicCache(config=model.config)
            model(ids, attention_mask=mask, use_cache=True, **{CACHE: cache})
            pieces = []
            for start, stop in ((0, 4), (4, 5), (5, 10)):
                mask = torch.cat((mask, mask.new_ones(2, stop - start)), dim=1)
                pieces.append(model(more[:, start:stop], attention_mask=mask, use_cache=True, **{CACHE: cache}).logits)
            for index, logits in enumerate(alone):
                assert_close(torch.cat(pieces, dim=1)[index], logits, atol=1e-8, rtol=0)


def test_a_cache_repeated_for_more_rows():
    """One padded prompt, three continuations: every copy of its keys stands where the prompt stood."""
    model = llama()
    prompt, rest = tokens(1, 50, 5), tokens(3, 30, 6)
    ids, mask = padded([prompt[0], tokens(1, 60, 7)[0]], "right")
    cache = DynamicCache(config=model.config)
    model(ids[:1], attention_mask=mask[:1], use_cache=True, **{CACHE: cache})
    cache.batch_repeat_interleave(3)
    together = torch.cat((mask[:1].expand(3, -1), torch.ones(3, 30, dtype=torch.long)), dim=1)
    ours = model(rest, attention_mask=together, use_cache=True, **{CACHE: cache}).logits
    alone = model(torch.cat((prompt.expand(3, -1), rest), dim=1)).logits[:, 50:]
    assert_close(ours, alone, atol=1e-8, rtol=0)


def doubled(cache):
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("copied", [lambda cache: cache, copy.deepcopy, doubled])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cache_whose_rows_move(side, copied):
    """Differently padded rows are reordered, selected and repeated: their positions go with them."""
    model = llama()
    texts = [tokens(1, length, length)[0] for length in (30, 50, 41)]
    ids, mask = padded(texts, side)
    cache = DynamicCache(config=model.config)
    model(ids, attention_mask=mask, use_cache=True, **{CACHE: cache})
    kept, cache = cache, copied(cache)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor([True, True, False]))
    cache.batch_repeat_interleave(3)
    order = [2, 2, 2, 0, 0, 0]
    rest = tokens(6, 40, 6)
    together = torch.cat((mask[order], torch.ones(6, 40, dtype=torch.long)), dim=1)
    pieces = [
        model(rest[:, start:stop], attention_mask=together[:, : 50 + stop], use_cache=True, **{CACHE: cache}).logits
        for start, stop in ((0, 30), (30, 31), (31, 40))
    ]
    for row, (text, logits) in enumerate(zip(order, torch.cat(pieces, dim=1), strict=True)):
        alone = model(torch.cat((texts[text], rest[row]))[None]).logits[0, -40:]
        assert_close(logits, alone, atol=1e-8, rtol=0)
    if kept is not cache:
        assert kept.get_seq_length() == 50 and kept._hf_posenc_positions.shape == (1, 3, 50)


def test_a_cache_is_freed_at_once():
    """Not by the garbage collector, some time later."""
    model, cache = llama(), DynamicCache()
    model(tokens(2, 20), use_cache=True, **{CACHE: cache})
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_crop_and_go_on():
    """Assisted decoding takes rejected tokens out of the cache again."""
    model, ids = llama(), tokens(1, 100)
    whole = model(ids).logits
    cache = DynamicCache(config=model.config)
    model(torch.cat((ids[:, :60], tokens(1, 20, 9)), dim=1), use_cache=True, **{CACHE: cache})
    cache.crop(-20)
    pieces = [
        model(ids[:, start:stop], use_cache=True, **{CACHE: cache}).logits for start, stop in ((60, 70), (70, 100))
    ]
    assert_close(torch.cat(pieces, dim=1), whole[:, 60:], atol=1e-8, rtol=0)


def test_a_cache_filled_before_the_patch():
    model, ids = TL().double(), tokens(1, 90)
    cache = model(ids[:, :50], use_cache=True)[CACHE]
    hf_posenc.patch(model, "dynamic_ntk:granularity=1")
    assert_close(model(ids[:, 50:], **{CACHE: cache}).logits, model(ids).logits[:, 50:], atol=1e-8, rtol=0)


def test_a_gap_in_the_positions_of_the_cache():
    """Keys keep the positions they came with, not those that the slots suggest."""
    model, ids = llama(), tokens(1, 30)
    places = torch.cat((torch.arange(12), torch.arange(60, 78)))[None]
    mask = torch.ones(1, 30, dtype=torch.long)
    whole = model(ids, position_ids=places, attention_mask=mask).logits[0]
    judged = reference.dynamic_logits(
        model, ids[0], lambda n: reference.dynamic_ntk(n, D, BASE, LENGTH), positions=places[0].tolist()
    )
    assert_close(whole, judged, atol=1e-4, rtol=0)
    cache, pieces = DynamicCache(config=model.config), []
    for start, stop in ((0, 10), (10, 20), (20, 21), (21, 30)):
        given = {"position_ids": places[:, start:stop], "attention_mask": mask[:, :stop]}
        pieces.append(model(ids[:, start:stop], use_cache=True, **{CACHE: cache}, **given).logits)
    assert_close(torch.cat(pieces, dim=1)[0], whole, atol=1e-8, rtol=0)


def test_offset_positions():
    """A text that starts at position 100 is read as one of 100 tokens more."""
    model, ids = llama(), tokens(2, 30)
    places = torch.arange(100, 130)
    judged = reference.dynamic_logits(
        model, ids[1], lambda n: reference.dynamic_ntk(n, D, BASE, LENGTH), positions=places.tolist()
    )
    for given in (places[None], places.expand(2, -1)):
        assert_close(model(ids, position_ids=given).logits[1], judged, atol=1e-4, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_packed_documents_are_alone(method, implementation):
    """Positions restart, no mask, no cache: as a padding-free trainer sends them."""
    model = llama(method, attn_implementation=implementation)
    documents = [tokens(1, length, length) for length in (50, 75, 1, 80)]
    places = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    packed = model(torch.cat(documents, dim=1), position_ids=places, use_cache=False).logits
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    assert_close(packed, alone, atol=1e-8, rtol=0)


# --- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "nemotron", "qwen2_vl", "mistral"])
def test_generate_with_left_padding(family):
    model = hf_posenc.patch(built(family), "dynamic_ntk:granularity=1")
    rows = [tokens(1, length, length)[0] for length in (40, 61)]
    ids, mask = padded(rows, "left")
    made = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    for index, row in enumerate(rows):
        assert made[index, 61:].tolist() == greedy(model, row[None], 24)[0, len(row) :].tolist()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_generate_in_every_way(method):
    """Static cache and prompt lookup give the greedy text; beams give the sequences of a recomputing search."""
    model = llama(method)
    ids = tokens(1, 12).repeat(1, 5)
    expected = greedy(model, ids, 24)
    options = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", disable_compile=True, **options), expected)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=4, **options), expected)
    beams = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    cached = model.generate(torch.cat((ids, tokens(1, 60, 8))), **options, **beams)
    recomputed = model.generate(torch.cat((ids, tokens(1, 60, 8))), use_cache=False, **options, **beams)
    assert torch.equal(cached.sequences, recomputed.sequences)
    assert_close(cached.sequences_scores, recomputed.sequences_scores, atol=1e-6, rtol=0)


def test_assisted_decoding_by_another_model():
    model, assistant = llama(), llama("dynamic_yarn", num_hidden_layers=1)
    ids = tokens(1, 56)
    made = model.generate(ids, assistant_model=assistant, max_new_tokens=24, do_sample=False)
    assert torch.equal(made, greedy(model, ids, 24))


# --- attention as the family has it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - EAGER))
def test_eager_equals_sdpa(family):
    model, ids = hf_posenc.patch(tiny_model(family, **FAMILIES[family]), "dynamic_ntk:granularity=8"), tokens(2, 90)
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[0, :20] = 0
    first = model(ids, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert_close(model(ids, attention_mask=mask).logits[mask.bool()], first, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral", "deepseek_v3", "nemotron"])
def test_attention_weights_on_request(family):
    model, ids = tiny_model(family, **FAMILIES[family], attn_implementation="eager"), tokens(2, 90)
    stock = model(ids[:, :60], output_attentions=True).attentions
    hf_posenc.patch(model, "dynamic_ntk:granularity=4")
    for ours, theirs in zip(model(ids[:, :60], output_attentions=True).attentions, stock, strict=True):
        assert_close(ours, theirs, atol=1e-6, rtol=0)
    weights = model(ids, output_attentions=True).attentions
    assert [layer.shape for layer in weights] == [(2, 4, 90, 90)] * len(stock)
    for layer in weights:
        assert not layer.triu(1).any()
        if family != "gpt_oss":  # its sinks take a share
            assert_close(layer.sum(-1), torch.ones(2, 4, 90), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_tokens_change_nothing_earlier(family):
    model, ids = hf_posenc.patch(built(family), "dynamic_ntk:granularity=8"), tokens(1, 90)
    first = model(ids).logits
    ids[0, -1] = (ids[0, -1] + 1) % 128
    second = model(ids).logits
    assert torch.equal(second[:, :-1], first[:, :-1])
    assert not torch.equal(second[:, -1], first[:, -1])


def test_mrope_axes():
    """Three axes that differ: the length is that of the farthest, sections turn by their own axis."""
    for family in ("qwen2_vl", "qwen3_vl"):
        model, ids = built(family), tokens(1, 40)
        line = torch.arange(40)
        places = torch.stack((line, line // 3, line % 7))[:, None] + torch.tensor([0, 50, 20])[:, None, None]
        stock = model(ids, position_ids=places).logits
        hf_posenc.patch(model, "dynamic_ntk:granularity=1")
        assert_close(model(ids, position_ids=places).logits, stock, atol=1e-8, rtol=0)
        # Beyond the trained length the frequencies of length n are those of an NTK model whose n is fixed.
        far = places + 60
        last = int(far.amax()) + 1
        fixed = hf_posenc.patch(built(family), "abf", rope_theta=reference.dynamic_ntk_base(last, D, BASE, LENGTH))
        coarse = hf_posenc.patch(built(family), f"dynamic_ntk:granularity={last}")
        assert_close(coarse(ids, position_ids=far).logits, fixed(ids, position_ids=far).logits, atol=1e-4, rtol=0)
        assert (fixed(ids, position_ids=far).logits - model(ids, position_ids=places).logits).abs().max() > 0.05


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "cohere2", "llama4_text", "deepseek_v3", "gpt_neox", "phi3"]
)
def test_far_frequencies_are_those_of_a_fixed_model(family):
    """All tokens beyond the trained length, in one step of granularity: the same as a fixed base."""
    model, ids = built(family), tokens(2, 20)
    d = {"deepseek_v3": 8, "gpt_neox": 4}.get(family, 16)
    theta = {"gemma3_text": 1e6, "llama4_text": 5e5}.get(family, 1e4)
    places = torch.arange(100, 120)[None]
    fixed = hf_posenc.patch(built(family), "abf", rope_theta=reference.dynamic_ntk_base(128, d, theta, LENGTH))
    hf_posenc.patch(model, "dynamic_ntk:granularity=128")
    ours = model(ids, position_ids=places).logits
    assert_close(ours, fixed(ids, position_ids=places).logits, atol=1e-4, rtol=0)
    assert (ours - hf_posenc.unpatch(model)(ids, position_ids=places).logits).abs().max() > 1e-3


def test_granularity_only_saves_work():
    """Coarse and fine steps agree where they use the same length, and differ elsewhere."""
    ids = tokens(1, 96)
    fine, coarse = llama("dynamic_yarn:granularity=1"), llama("dynamic_yarn:granularity=16")
    first, second = fine(ids).logits, coarse(ids).logits
    assert torch.equal(first[:, :LENGTH], second[:, :LENGTH])
    assert (first - second)[:, LENGTH:].abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("method", ["dynamic_ntk", "dynamic_yarn"])
def test_a_scaled_checkpoint_counts_from_the_original(family, method):
    """YaRN that a checkpoint carries is gone, the softmax scale of latent attention included, and comes back."""
    carried = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": LENGTH}
    carried |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    model, ids = tiny_model(family, rope_parameters=carried, max_position_embeddings=256), tokens(1, 100)
    plain = tiny_model(family)
    plain.load_state_dict(model.state_dict())
    stock = model(ids).logits
    hf_posenc.patch(model, method)
    assert_close(model(ids).logits, hf_posenc.patch(plain, method)(ids).logits, atol=1e-4, rtol=0)
    assert "mscale" not in model.config.rope_parameters
    assert torch.equal(hf_posenc.unpatch(model)(ids).logits, stock)


# --- training --------------------------------------------------------------------------------------------------------


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def checkpointed(model, reentrant: bool):
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize(
    "family", sorted(FAMILIES.keys() & {"llama", "nemotron", "stablelm", "gemma3_text", "moshi", "phi"})
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_under_checkpointing(family, reentrant):
    """Two forwards before one backward: the recomputation must not mix their positions."""
    batches = [(tokens(1, 90, 1), None), (tokens(1, 90, 2), torch.arange(40, 130)[None])]
    found = []
    for model in (built(family), checkpointed(built(family), reentrant)):
        hf_posenc.patch(model, "dynamic_ntk:granularity=8").train()
        loss = sum(model(ids, position_ids=places, labels=ids, use_cache=False).loss for ids, places in batches)
        loss.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("method", ["dynamic_ntk:granularity=1", "dynamic_yarn:granularity=1", LONGROPE], ids=str)
def test_gradients_of_every_query(method):
    """In one layer a query meets one set of frequencies: its gradient is that of a model which always has them."""
    ids, places = tokens(1, 100), (40, 70, 99)
    ours = llama(method, num_hidden_layers=1)
    expected: dict[str, torch.Tensor] = {}
    for place in places:
        fixed = TL(num_hidden_layers=1).double()
        factor = max(1.0, (place + 1) / LENGTH)
        if method is LONGROPE:
            factors = LONG if place >= LENGTH else SHORT
            hf_posenc.patch(fixed, "longrope", short_factor=factors, long_factor=factors, factor=4, switch="long")
        elif "yarn" in method:
            hf_posenc.patch(fixed, "yarn", factor=factor)
        else:
            hf_posenc.patch(fixed, "abf", rope_theta=reference.dynamic_ntk_base(place + 1, D, BASE, LENGTH))
        fixed(ids).logits[0, place].square().sum().backward()
        for name, gradient in gradients(fixed).items():
            expected[name] = expected.get(name, 0) + gradient
    ours(ids).logits[0, places].square().sum().backward()
    for name, gradient in gradients(ours).items():
        assert_close(gradient, expected[name], atol=1e-5 * expected[name].abs().max().item(), rtol=0)


def test_dropout_stays_in_training_gradient():
    model, ids = TL(attention_dropout=0.5), tokens(2, 60)
    model.train()
    torch.manual_seed(5)
    expected = model(ids).logits
    hf_posenc.patch(model, "dynamic_ntk")
    torch.manual_seed(5)
    assert torch.equal(model(ids).logits, expected)
    assert not torch.equal(model(ids).logits, expected)


def test_lora_either_way_gradient():
    """A patch over PEFT is PEFT over a patch; adapters can be switched off; every factor gets a gradient."""
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    def adapted(model):
        torch.manual_seed(11)
        return get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
        )

    ids = tokens(2, 90)
    over = hf_posenc.patch(adapted(TL().double()), "dynamic_ntk:granularity=8")
    under = adapted(hf_posenc.patch(TL().double(), "dynamic_ntk:granularity=8"))
    plain = adapted(TL().double())
    logits = over(ids).logits
    assert_close(under(ids).logits, logits, atol=1e-8, rtol=0)
    assert (plain(ids).logits - logits).abs().max() > 0.1
    with over.disable_adapter():
        assert_close(over(ids).logits, llama("dynamic_ntk:granularity=8")(ids).logits, atol=1e-8, rtol=0)
    over(ids, labels=ids).loss.backward()
    trainable = [weight for weight in over.parameters() if weight.requires_grad]
    assert len(trainable) == 12
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in trainable)
    merged = copy.deepcopy(under).merge_and_unload()
    assert_close(merged(ids).logits, logits, atol=1e-8, rtol=0)


def test_inputs_embeds():
    model, ids = llama(), tokens(2, 90)
    ids, mask = padded([ids[0], ids[1, :40]], "left")
    embeddings = model.get_input_embeddings()(ids)
    expected = model(ids, attention_mask=mask).logits
    assert torch.equal(model(inputs_embeds=embeddings, attention_mask=mask).logits, expected)
    assert torch.equal(model(ids, mask).logits, expected)


def test_bfloat16_before_and_after():
    ids = tokens(1, 96)
    first = hf_posenc.patch(TL(), "dynamic_yarn").to(torch.bfloat16)
    second = hf_posenc.patch(TL().to(torch.bfloat16), "dynamic_yarn")
    assert first(ids).logits.dtype == torch.bfloat16
    assert torch.equal(first(ids).logits, second(ids).logits)


def test_compiles():
    """Past the trained length too; by the eager backend, since the inductor would take minutes."""
    torch._dynamo.reset()
    model, ids = hf_posenc.patch(TL(), "dynamic_ntk"), tokens(1, 70)
    compiled = torch.compile(model, backend="eager")
    assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["dynamic_ntk", "dynamic_yarn:granularity=1"])
def test_decoding_compiles_without_a_graph_break(method):
    """One graph for every step with a static cache, across the trained length."""
    torch._dynamo.reset()
    model, ids, counter = hf_posenc.patch(TL(), method), tokens(2, 80), CompileCounter()
    whole, cache = model(ids).logits, StaticCache(config=model.config, max_cache_len=96)
    model(ids[:, :50], use_cache=True, **{CACHE: cache})
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(50, 80):
        places = torch.full((2, 1), step)
        out = compiled(ids[:, step : step + 1], position_ids=places, use_cache=True, **{CACHE: cache})
        assert_close(out.logits[:, 0], whole[:, step], atol=1e-4, rtol=0)
    assert counter.frame_count == 1


def test_three_axes_in_pieces():
    """Image positions with a cache; a fourth row of plain text positions changes nothing."""
    model, ids = hf_posenc.patch(built("qwen2_vl"), "dynamic_ntk:granularity=1"), tokens(1, 90)
    line = torch.arange(90)
    places = torch.stack((line, line // 2, line % 9))[:, None]
    whole, cache, pieces = model(ids, position_ids=places).logits, None, []
    assert torch.equal(model(ids, position_ids=torch.cat((line[None, None], places))).logits, whole)
    for start, stop in ((0, 40), (40, 70), (70, 71), (71, 90)):
        given = {"position_ids": places[..., start:stop], CACHE: cache}
        out = model(ids[:, start:stop], use_cache=True, **given)
        cache = out[CACHE]
        pieces.append(out.logits)
    assert_close(torch.cat(pieces, dim=1), whole, atol=1e-8, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss", "cohere2", "nemotron", "qwen2_vl"])
def test_generate_static_and_beams_with_left_padding(family):
    model = hf_posenc.patch(built(family), "dynamic_ntk:granularity=1")
    rows = [tokens(1, length, length)[0] for length in (30, 61)]
    ids, mask = padded(rows, "left")
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    static = {"cache_implementation": "static", "disable_compile": True}
    made = model.generate(ids, **options, **static)
    for index, row in enumerate(rows):
        assert made[index, 61:].tolist() == greedy(model, row[None], 12)[0, len(row) :].tolist()
    recomputed = model.generate(ids, num_beams=2, use_cache=False, **options)
    assert torch.equal(model.generate(ids, num_beams=2, **options), recomputed)
    assert torch.equal(model.generate(ids, num_beams=2, **options, **static), recomputed)
