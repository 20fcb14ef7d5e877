"""Position maps: every key has the distance that the paper's rule gives, however a text is read, on every family."""

import copy
import logging
import math
import threading

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import CACHE, Largest, Unturned, greedy, padded, stepwise
from test_dynamic import FAMILIES, FLOAT32, built
from tiny import TL, tiny_model, tokens
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from transformers import AttentionInterface, DynamicCache, StaticCache

import hf_posenc
from hf_posenc import compiled, families, kernels, twin, two_part
from hf_posenc.methods import STRING, DualChunk, LeakyReRoPE, ReRoPE, SelfExtend

LENGTH, D, BASE = 64, 16, 10000.0
RULES = {
    "self_extend:group_size=2,window=8": (reference.self_extend_distance, {"window": 8, "group": 2}),
    "self_extend:group_size=3,window=10": (reference.self_extend_distance, {"window": 10, "group": 3}),
    "self_extend:group_size=4,window=1": (reference.self_extend_distance, {"window": 1, "group": 4}),
    "rerope:window=6": (reference.rerope_distance, {"window": 6}),
    "leaky_rerope:window=7,scale=0.3": (reference.leaky_rerope_distance, {"window": 7, "scale": 0.3}),
    "dca:chunk_size=12,local_window=4": (reference.dca_distance, {"chunk": 12, "local": 4}),
    "string:shift=20,window=3": (reference.string_distance, {"shift": 20, "window": 3}),
}
METHODS = [
    *list(RULES)[1::2],
    "rerope:window=6",
    "string:shift=20,window=3",
    "self_extend:group_size=4,window=16,logn=true",
    "self_extend:group_size=2,window=8+yarn:factor=2",
    "logn",
]
FAR = "self_extend:group_size=3,window=10"
# 24 + 9 + single tokens, and cuts on and across the window.
CUTS = ([24, 9] + [1] * 63, [10, 50, 36])


@pytest.fixture(autouse=True)
def _small_blocks_without_gradients(request, monkeypatch):
    """Blocks of 16 queries, so that short texts have many."""
    monkeypatch.setattr(kernels, "rows_per_block", lambda *_, banded: 16 if banded else 40)
    monkeypatch.setattr(kernels, "CAUSAL_ROWS", 30)
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def llama(method: str = FAR, **overrides):
    return hf_posenc.patch(TL(**overrides), method)


def tolerance(family: str) -> float:
    # Tables are float32 in a float64 model too. Granite's random weights amplify rounding.
    return 2e-3 if family == "granite_swa" else 1e-4 if family in FLOAT32 else 1e-5


# --- the rule itself -------------------------------------------------------------------------------------------------

ROWS = [
    (SelfExtend(group_size=2, window=4), 9, [6, 6, 5, 5, 4, 4, 3, 2, 1, 0]),
    (SelfExtend(group_size=2, window=4), 5, [4, 4, 3, 2, 1, 0]),
    (SelfExtend(group_size=3, window=4), 6, [5, 5, 5, 3, 2, 1, 0]),
    (ReRoPE(window=6), 9, [6, 6, 6, 6, 5, 4, 3, 2, 1, 0]),
    (LeakyReRoPE(window=3, scale=0.25), 9, [4.5, 4.25, 4, 3.75, 3.5, 3.25, 3, 2, 1, 0]),
    (DualChunk(chunk_size=6, local_window=4), 11, [9, 8, 7, 6, 5, 4, 5, 4, 3, 2, 1, 0]),
    (DualChunk(chunk_size=6, local_window=4), 13, [9, 8, 7, 6, 5, 4, 7, 6, 5, 4, 3, 2, 1, 0]),
    (STRING(shift=4, window=2), 7, [5, 4, 3, 2, 3, 2, 1, 0]),
]


@pytest.mark.parametrize("method, i, row", ROWS, ids=str)
def test_golden_rows(method, i, row):
    query, found = torch.tensor(i), []
    for j in torch.arange(i + 1):
        steps = [(part, i // part.block - int(j) // part.block) for part in method.parts()]
        (part,) = [part for part, step in steps if part.first <= step and (part.last is None or step < part.last)]
        found.append(float(part.query(query) - (j if part.plain_keys else method.far(j))))
    assert found == row


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("method", RULES)
def test_equals_the_float64_rule(method, implementation):
    model, ids = TL(), tokens(1, 92)
    distance, parameters = RULES[method]
    angle = reference.by_distance(reference.rope(D), lambda i, j: distance(i, j, **parameters))
    expected = reference.llama_logits(model, ids[0], angle)
    model.set_attn_implementation(implementation)
    ours = hf_posenc.patch(model, method)(ids).logits[0].double()
    assert_close(ours, expected, atol=1e-4, rtol=0)
    assert (ours - TL()(ids).logits[0]).abs().amax(-1)[LENGTH:].min() > 1e-2


NAMED = ["llama", "qwen2", "qwen3", "mistral", "phi", "glm", "gemma3_text", "smollm3", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("family", NAMED)
@pytest.mark.parametrize("method", [FAR, "rerope:window=6", "dca:chunk_size=12,local_window=4"])
def test_named_families_equal_a_double_loop_over_raw_queries_and_keys(method, family):
    """Queries and keys before any rotation, turned pair by pair by the distances of the rule."""
    model, ids = tiny_model(family, **FAMILIES[family]), tokens(1, 40)
    rule, parameters = RULES[method]
    located = families.locate(model)
    plans = {plan.name: plan for plan in twin.plan(located)}
    names = {id(module): name for name, module in located.owner.named_modules()}
    slots = [(site, slot) for site in located.sites for slot in site.slots]
    frequencies = [getattr(site.module, slot.buffer).double().tolist() for site, slot in slots]

    def naive(module, query, key, value, mask, scaling=None, sliding_window=None, s_aux=None, **_):
        plan = plans[names[id(module)]]
        if plan.source is None:
            angle = reference.by_distance([], lambda i, j: 0)
        elif families.is_global(slots[plan.source][1]):
            angle = reference.by_distance(frequencies[plan.source], lambda i, j: rule(i, j, **parameters))
        else:
            angle = reference.by_distance(frequencies[plan.source], lambda i, j: i - j)
        sinks = None if s_aux is None else s_aux.tolist()
        out = reference.attention_loop(
            query[0], key[0], value[0], angle, scale=scaling, pairing=plan.pairing, start=plan.start,
            window=sliding_window, sinks=sinks,
        )  # fmt: skip
        return out.transpose(0, 1)[None].to(query.dtype), None

    ours = hf_posenc.patch(model, method)(ids).logits
    hf_posenc.unpatch(model)
    for site in located.sites:
        setattr(site.parent, site.name, Unturned(site.module))
    AttentionInterface.register("naive", naive)
    model.config._attn_implementation_internal = "naive"
    assert_close(ours, model(ids, use_cache=False).logits, atol=1e-4, rtol=0)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["self_extend", "rerope", "leaky_rerope", "dca", "string"]),
    length=st.integers(1, 60),
    window=st.integers(1, 63),
    size=st.integers(1, 9),
    rows=st.sampled_from([1, 7, 16, 256]),
)
def test_any_numbers_equal_the_rule(kind, length, window, size, rows):
    """Groups that do not divide the window, windows of one, longer than the text, and texts shorter than both."""
    if kind == "self_extend":
        method, distance = SelfExtend(size, window), (reference.self_extend_distance, (window, size))
    elif kind == "rerope":
        method, distance = ReRoPE(window), (reference.rerope_distance, (window,))
    elif kind == "leaky_rerope":
        method, distance = LeakyReRoPE(window, size / 10), (reference.leaky_rerope_distance, (window, size / 10))
    elif kind == "dca":
        method, distance = DualChunk(window, 64 - window), (reference.dca_distance, (window, 64 - window))
    else:
        method, distance = STRING(window, min(size, window)), (reference.string_distance, (window, min(size, window)))
    model, ids = TL(num_hidden_layers=1), tokens(1, length, window)
    rule, numbers = distance
    angle = reference.by_distance(reference.rope(D), lambda i, j: rule(i, j, *numbers))
    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(kernels, "rows_per_block", lambda *_, banded: rows)
        ours = hf_posenc.patch(model, method)(ids).logits[0].double()
    assert_close(ours, reference.llama_logits(model, ids[0], angle), atol=1e-4, rtol=0)


def test_logn_scales_queries_by_their_position():
    model, ids = TL(), tokens(1, 92)
    expected = reference.llama_logits(
        model, ids[0], reference.by_distance(reference.rope(D), lambda i, j: i - j),
        scale=lambda i: max(1.0, math.log(i + 1) / math.log(LENGTH)),
    )  # fmt: skip
    assert_close(hf_posenc.patch(model, "logn")(ids).logits[0].double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("order", ["{0}+{1}", "{1}+{0}"])
def test_over_a_frequency_method(order):
    """Self-Extend's distances, YaRN's frequencies and temperature."""
    text = order.format("self_extend:group_size=2,window=8", "yarn:factor=2")
    model, ids = TL(), tokens(1, 92)
    frequencies = reference.ntk_by_parts(D, BASE, 2.0, LENGTH)
    factor = reference.attention_factor(2.0)
    angle = reference.by_distance(frequencies, lambda i, j: reference.self_extend_distance(i, j, 8, 2))
    expected = reference.llama_logits(model, ids[0], angle, scale=lambda i: factor**2)
    assert_close(hf_posenc.patch(model, text)(ids).logits[0].double(), expected, atol=1e-4, rtol=0)
    assert str(hf_posenc.current(model)) == "self_extend:group_size=2,window=8+yarn:factor=2"


IDENTITIES = [
    "self_extend:group_size=1,window=8", "self_extend:group_size=4,window=63", "rerope:window=63",
    "leaky_rerope:window=63,scale=0.5", "dca:chunk_size=63,local_window=1", "string:shift=63,window=1",
    "string:shift=9,window=9", "logn",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_identity_parameters_are_stock_bit_for_bit(family):
    ids, mask = padded([tokens(1, 60)[0], tokens(1, 33)[0]], "left")
    stock = tiny_model(family, **FAMILIES[family])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    expected, batch = stock(ids[:1]).logits, stock(ids, attention_mask=mask, position_ids=places).logits
    for method in IDENTITIES if family == "llama" else IDENTITIES[:3]:
        model = hf_posenc.patch(tiny_model(family, **FAMILIES[family]), method)
        assert torch.equal(model(ids[:1]).logits, expected)
        assert torch.equal(model(ids, attention_mask=mask).logits, batch)
        pieces = stepwise(model, ids[:1], [20, 3] + [1] * 37)
        assert torch.equal(pieces, stepwise(stock, ids[:1], [20, 3] + [1] * 37))


# --- read in any way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_every_family_reads_in_any_pieces(method, family):
    model, ids = hf_posenc.patch(built(family), method), tokens(2, 96)
    whole = model(ids).logits
    for cuts in CUTS[: 2 if method == FAR else 1]:
        assert_close(stepwise(model, ids, cuts), whole, atol=tolerance(family), rtol=0)
    if method == FAR:
        cache = StaticCache(config=model.config, max_cache_len=110)
        assert_close(stepwise(model, ids, CUTS[0], cache), whole, atol=tolerance(family), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS[:2])
def test_every_family_takes_padding(method, family):
    model = hf_posenc.patch(built(family), method)
    rows = [tokens(1, length, length)[0] for length in (50, 96, 70)]
    alone = [model(row[None]).logits[0] for row in rows]
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        together = model(ids, attention_mask=mask).logits
        for index, expected in enumerate(alone):
            assert_close(together[index, mask[index].bool()], expected, atol=tolerance(family), rtol=0)
    ids, mask = padded(rows, "left")
    together = stepwise(model, ids, [40, 9] + [1] * 47, mask=mask)
    for index, expected in enumerate(alone):
        assert_close(together[index, mask[index].bool()], expected, atol=tolerance(family), rtol=0)


def packed_and_alone(model):
    documents = [tokens(1, length, length) for length in (30, 7, 61)]
    places = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    packed = model(torch.cat(documents, dim=1), position_ids=places, use_cache=False).logits
    return packed, torch.cat([model(document).logits for document in documents], dim=1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS[:2])
def test_packed_documents_are_alone(method, family):
    model = built(family)
    packed, alone = packed_and_alone(model)
    if not torch.allclose(packed, alone, atol=tolerance(family), rtol=0):
        # GPT-OSS and Qwen-VL in every release, Llama 4 (whose chunks it counts from the row's start) in 5.15.
        pytest.skip("the unpatched model does not tell that positions which start again are a new document")
    packed, alone = packed_and_alone(hf_posenc.patch(model, method))
    assert_close(packed, alone, atol=tolerance(family), rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_generate_in_every_way(method):
    """Left padding, static cache, prompt lookup with a cropped cache and another model's help give the greedy text;
    beams give what a search without a cache gives."""
    model, assistant = llama(method), llama(method, num_hidden_layers=1)
    rows = [tokens(1, length, length)[0].repeat(3) for length in (15, 20)]
    ids, mask = padded(rows, "left")
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = [greedy(model, row[None], 24)[0, len(row) :] for row in rows]
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        made = model.generate(ids, attention_mask=mask, **options, **more)[:, 60:]
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
    for more in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
        assert torch.equal(model.generate(rows[1][None], **options, **more)[0, 60:], expected[1])
    beams = {"num_beams": 3, "num_return_sequences": 3}
    cached = model.generate(rows[1][None], **options, **beams)
    assert torch.equal(cached, model.generate(rows[1][None], use_cache=False, **options, **beams))


@pytest.mark.parametrize("method", METHODS[:4])
def test_positions_that_start_elsewhere_or_have_gaps(method):
    """True positions count, not slots: with a gap, keys before it are that much farther."""
    model, ids, distance = llama(method), tokens(1, 70), RULES[method]
    rule, parameters = distance
    angle = reference.by_distance(reference.rope(D), lambda i, j: rule(i, j, **parameters))
    for places in (list(range(37, 107)), [*range(30), *range(45, 85)]):
        expected = reference.llama_logits(TL(), ids[0], angle, positions=places)
        found = stepwise_at(model, ids, torch.tensor(places)[None], [30, 39, 1])
        assert_close(found[0].double(), expected, atol=1e-4, rtol=0)


def stepwise_at(model, ids, places, cuts):
    cache, pieces, start = DynamicCache(config=model.config), [], 0
    for count in cuts:
        stop = start + count
        out = model(ids[:, start:stop], position_ids=places[:, start:stop], use_cache=True, **{CACHE: cache})
        pieces, start = [*pieces, out.logits], stop
    return torch.cat(pieces, dim=1)


def test_a_cache_whose_rows_move():
    """Rows of different padding trade places: their positions go with them."""
    model = llama()
    rows = [tokens(1, length, length)[0] for length in (50, 70)]
    ids, mask = padded(rows, "left")
    out = model(ids[:, :69], attention_mask=mask[:, :69], use_cache=True)
    out[CACHE].reorder_cache(torch.tensor([1, 0]))
    moved = model(ids[[1, 0], 69:], attention_mask=mask[[1, 0]], **{CACHE: out[CACHE]}).logits[:, 0]
    for found, row in zip(moved, rows[::-1], strict=True):
        assert_close(found, model(row[None]).logits[0, -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("first", [None, "rerope:window=6", "dynamic_ntk", FAR + "+yarn:factor=2"])
def test_a_cache_filled_under_another_scheme_is_refused(first):
    model, ids = TL(), tokens(1, 40)
    if first:
        hf_posenc.patch(model, first)
    cache = model(ids, use_cache=True)[CACHE]
    hf_posenc.patch(model, FAR)
    with pytest.raises(RuntimeError, match="cache was filled"):
        model(ids[:, :1], **{CACHE: cache})


def test_three_axes_in_pieces():
    """Positions of text beside an image: near is what is near in the text order."""
    model, ids = hf_posenc.patch(tiny_model("qwen2_vl"), FAR), tokens(1, 90)
    line = torch.arange(90)
    plain = model(ids).logits
    assert_close(model(ids, position_ids=line.expand(3, 1, 90)).logits, plain, atol=1e-4, rtol=0)
    places = torch.stack((line, line // 2, line % 9))[:, None]
    whole, cache, pieces = model(ids, position_ids=places).logits, None, []
    for start, stop in ((0, 40), (40, 70), (70, 71), (71, 90)):
        out = model(ids[:, start:stop], position_ids=places[..., start:stop], use_cache=True, **{CACHE: cache})
        cache, pieces = out[CACHE], [*pieces, out.logits]
    assert_close(torch.cat(pieces, dim=1), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_tokens_change_nothing_earlier(family):
    model, ids = hf_posenc.patch(tiny_model(family, **FAMILIES[family]), FAR), tokens(1, 90)
    first = model(ids).logits
    ids[0, -1] = (ids[0, -1] + 1) % 128
    assert torch.equal(model(ids).logits[:, :-1], first[:, :-1])


def test_attention_weights_on_request():
    model, ids = llama(attn_implementation="eager"), tokens(2, 90)
    for layer in model(ids, output_attentions=True).attentions:
        assert layer.shape == (2, 4, 90, 90) and not layer.triu(1).any()
        assert_close(layer.sum(-1), torch.ones(2, 4, 90), atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [6, 24, 40])
def test_sliding_windows(window):
    """Layers that see no farther than the near part stay as they are; others meet the rule within their window."""
    model, ids = tiny_model("mistral", sliding_window=window), tokens(1, 92)
    llama_twin = TL(num_hidden_layers=4, intermediate_size=96)
    llama_twin.load_state_dict(model.state_dict())
    angle = reference.by_distance(reference.rope(D), lambda i, j: reference.self_extend_distance(i, j, 10, 3))
    expected = reference.llama_logits(llama_twin, ids[0], angle, window=window)
    hf_posenc.patch(model, FAR)
    assert_close(model(ids).logits[0].double(), expected, atol=1e-4, rtol=0)
    assert_close(stepwise(model, ids, CUTS[0][:-4]), model(ids).logits, atol=1e-4, rtol=0)


# --- training --------------------------------------------------------------------------------------------------------


def gradients(model) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


@pytest.mark.parametrize("method", METHODS)
def test_gradients_equal_those_of_the_dense_path(method, monkeypatch):
    ids, mask = padded([tokens(1, 96)[0], tokens(1, 60)[0]], "left")
    found = []
    for dense in (False, True):
        with monkeypatch.context() as patched:
            if dense:
                patched.setattr(two_part, "kernels_do", lambda *_: False)
            model = llama(method).double().train()
            labels = ids.masked_fill(mask.roll(1, 1) * mask == 0, -100)  # none predicted by padding
            model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
            found.append(gradients(model))
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm() and found[1].norm() > 0.1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "nemotron", "deepseek_v3", "gemma2"])
def test_gradients_under_checkpointing(family):
    found = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = hf_posenc.patch(tiny_model(family), FAR).train()
        if options:
            model.gradient_checkpointing_enable(options)
        first, second = tokens(1, 96, 1), tokens(2, 80, 2)
        (model(first, labels=first).loss + model(second, labels=second).loss).backward()
        found.append(gradients(model))
    for other in found[1:]:
        assert (other - found[0]).norm() <= 1e-5 * found[0].norm()


def test_lora_either_way_gradients():
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(11)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config)

    ids = tokens(2, 90)
    over, under = hf_posenc.patch(adapted(TL()), FAR), adapted(llama())
    logits = over(ids).logits
    assert_close(under(ids).logits, logits, atol=1e-5, rtol=0)
    with over.disable_adapter():
        assert_close(over(ids).logits, llama()(ids).logits, atol=1e-5, rtol=0)
    over(ids, labels=ids).loss.backward()
    trainable = [weight for weight in over.parameters() if weight.requires_grad]
    assert len(trainable) == 12 and all(weight.grad.abs().max() > 0 for weight in trainable)
    assert_close(copy.deepcopy(under).merge_and_unload()(ids).logits, logits, atol=1e-4, rtol=0)


def test_dropout_in_training_gradient():
    """It falls on the weights of near and far keys: over many draws the attention of one layer is that without."""
    model, ids, seen = llama(num_hidden_layers=1, attention_dropout=0.5), tokens(1, 70), []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(ids)
    model.train()
    torch.manual_seed(5)
    for _ in range(400):
        model(ids)
    expected, draws = seen[0], torch.stack(seen[1:])
    assert (draws.mean(0) - expected).abs().mean() < 0.1 * draws.std(0).mean()


# --- precision, compilers, limits ------------------------------------------------------------------------------------


def test_long_blocks_equal_the_dense_path(monkeypatch):
    monkeypatch.setattr(kernels, "rows_per_block", lambda *_, banded: 128 if banded else 300)
    for method in ("self_extend:group_size=8,window=100", "dca:chunk_size=200,local_window=20"):
        model, ids = llama(method, max_position_embeddings=256), tokens(1, 900)
        blocks = model(ids).logits
        with monkeypatch.context() as patched:
            patched.setattr(two_part, "kernels_do", lambda *_: False)
            assert_close(model(ids).logits, blocks, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mask", [None, "causal", "numbers"])
def test_plain_kernels_equal_fused_ones(mask):
    query, grad = (torch.randn(2, 3, 18, 8, dtype=torch.float64) for _ in range(2))  # two heads to a key head
    key, value = (torch.randn(2, 3, 9, 8, dtype=torch.float64) for _ in range(2))
    hidden = torch.ones(9, 9).triu(1).bool().repeat(2, 1)
    numbers = torch.zeros(1, 1, 18, 9, dtype=torch.float64).masked_fill_(hidden, -1e300)
    given = (0.3, numbers if mask == "numbers" else mask, 2)
    (fused,), plain = (
        kernels.attend(query, key, value, *given),
        kernels.plain(query, key, value, 0.3, numbers if mask else None),
    )
    for one, other in zip(fused, plain, strict=True):
        assert_close(one, other)
    whole = (plain[0], plain[1])
    fused = kernels.attend_backward(grad, query, key, value, *whole, *given)
    plain = kernels.plain_backward(grad, query, key, value, *whole, 0.3, numbers if mask else None)
    for one, other in zip(fused, plain, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    ("method", "cores"), [(METHODS[0], 2), (METHODS[1], 3), ("dca:chunk_size=12,local_window=4", 3)]
)
def test_one_query_shares_its_keys_among_the_cores_gradient(method, cores, monkeypatch):
    model = llama(method, num_key_value_heads=1)
    ids = tokens(1, 90)
    whole = model(ids)
    (expected,) = torch.autograd.grad(whole.logits[0, -1].sum(), model.model.embed_tokens.weight)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(kernels, "_SPLIT_KEYS", 4)
    seen = []
    kernel = kernels._attend
    monkeypatch.setattr(kernels, "_attend", lambda query, *rest: seen.append(len(query)) or kernel(query, *rest))
    first = model(ids[:, :-1])
    last = model(ids[:, -1:], **{CACHE: first[CACHE]})
    (found,) = torch.autograd.grad(last.logits[0, -1].sum(), model.model.embed_tokens.weight)
    assert max(seen) == cores
    assert_close(last.logits[0, -1], whole.logits[0, -1], atol=1e-4, rtol=0)
    assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("method", [FAR, "dynamic_ntk"])
@pytest.mark.parametrize("later", [0, 1])
def test_a_mask_of_a_whole_static_buffer(method, later):
    """Slots that hold nothing yet may be shown or not: no query sees them."""
    model, ids = llama(method), tokens(1, 80)
    cache, pieces, start = StaticCache(config=model.config, max_cache_len=100), [], 0
    for count in [50, 9] + [1] * 21:
        mask = torch.full((1, 100), later)
        mask[:, : start + count] = 1
        piece = ids[:, start : start + count]
        pieces.append(model(piece, attention_mask=mask, use_cache=True, **{CACHE: cache}).logits)
        start += count
    assert_close(torch.cat(pieces, dim=1), model(ids).logits, atol=1e-4, rtol=0)


def test_a_chunk_that_starts_again_behind_far_keys():
    """All of its tokens stand within the window, and the keys before them do not."""
    model, ids = llama(), tokens(1, 45)
    places = torch.cat([torch.arange(40), torch.arange(5)])[None]
    mask = torch.ones(1, 1, 45, 45).tril().bool()
    whole = model(ids, position_ids=places, attention_mask=mask, use_cache=False).logits
    first = model(ids[:, :40], position_ids=places[:, :40], use_cache=True)
    more = {"position_ids": places[:, 40:], "attention_mask": mask[:, :, 40:], CACHE: first[CACHE]}
    assert_close(model(ids[:, 40:], **more).logits, whole[:, 40:], atol=1e-4, rtol=0)


def test_positions_of_any_kind():
    """Whole numbers of 32 bits, and distances that reach below 0."""
    ids, places = tokens(1, 80), torch.arange(80)[None]
    for method in (FAR, "string:shift=20,window=3", "rerope:window=6"):
        model = llama(method)
        expected = model(ids).logits
        assert_close(model(ids, position_ids=places.int()).logits, expected, atol=1e-4, rtol=0)
        if method != FAR:  # the others depend on distances alone
            assert_close(model(ids, position_ids=places - 40).logits, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "exaone4_5", "qwen2_vl"])
@pytest.mark.parametrize("method", [FAR, "sinusoidal"])
def test_models_of_images_and_text_are_told_of_padding(method, family):
    """They hand other masks down to the text decoder, or count positions from the start of the row."""
    model = hf_posenc.patch(tiny_model(family), method)
    rows = [tokens(1, 42)[0], tokens(1, 50, 5)[0]]
    ids, mask = padded(rows, "left")
    together = model(ids, attention_mask=mask).logits
    first = model(ids[:, :45], attention_mask=mask[:, :45], use_cache=True)
    last = model(ids[:, 45:], attention_mask=mask, use_cache=True, **{CACHE: first[CACHE]}).logits
    for index, row in enumerate(rows):
        expected = model(row[None]).logits[0]
        assert_close(together[index, mask[index].bool()], expected, atol=2e-4, rtol=0)
        assert_close(last[index], expected[-5:], atol=2e-4, rtol=0)


def mapped(query, key, value, mask=None):
    """The operator of compiled models, on positions in a row."""
    places = torch.arange(key.shape[2])[None, None]
    frequencies = torch.tensor(reference.rope(D), dtype=torch.float64)
    queries = places[..., -query.shape[2] :]
    return torch.ops.hf_posenc.mapped(
        query, key, value, queries, places, None, mask, frequencies, None, FAR, LENGTH, 0, D, "half", 1, 0.25
    )[0]


def test_the_operator_keeps_the_padding_of_every_call():
    """Other padding under the same positions is another text."""
    states = torch.randn(1, 4, 1, D), torch.randn(1, 2, 50, D), torch.randn(1, 2, 50, D)
    masks = [torch.ones(1, 1, 1, 50).bool() for _ in range(2)]
    masks[1][..., :20] = False
    first, second = (mapped(*states, mask) for mask in masks)
    assert (first - second).abs().max() > 1e-3
    for mask, expected in zip(masks, (first, second), strict=True):
        compiled._last.call = None
        assert_close(mapped(*states, mask), expected)


@pytest.mark.parametrize("length", [1, 50])
def test_the_operator_keeps_the_promises_that_graphs_rely_on_gradient(length):
    """States as a model has them, transposed: shapes and strides of answers and gradients are those announced."""
    query, key, value = (
        torch.randn(2, count, heads, D).transpose(1, 2).requires_grad_()
        for count, heads in ((length, 4), (50, 2), (50, 2))
    )
    places = torch.arange(50)[None, None].expand(1, 2, -1)
    frequencies = torch.tensor(reference.rope(D), dtype=torch.float64)
    given = (query, key, value, places[..., 50 - length :], places, None, None, frequencies, None)
    torch.library.opcheck(
        torch.ops.hf_posenc.mapped.default,
        (*given, FAR, LENGTH, 0, D, "half", 1, 0.25),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static"),
    )
    output, sums = torch.ops.hf_posenc.mapped(*given, FAR, LENGTH, 0, D, "half", 1, 0.25)
    backward = (torch.randn_like(output), *given[:3], output, sums, *given[3:], FAR, LENGTH, 0, D, "half", 1, 0.25)
    torch.library.opcheck(
        torch.ops.hf_posenc.mapped_backward.default,
        tuple(part.detach() if isinstance(part, torch.Tensor) else part for part in backward),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_the_operator_in_two_threads():
    texts = [(torch.randn(1, 4, 700, D), torch.randn(1, 2, 700, D), torch.randn(1, 2, 700, D)) for _ in range(2)]
    expected, wrong = [mapped(*text) for text in texts], []

    def read(text, right):
        wrong.extend(not torch.allclose(mapped(*text), right, atol=1e-4) for _ in range(30))

    threads = [threading.Thread(target=read, args=pair) for pair in zip(texts, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 60 and not any(wrong)


@pytest.mark.parametrize("method", ["self_extend:group_size=4,window=100", "dca:chunk_size=200,local_window=20"])
def test_no_tensor_grows_with_the_square_of_the_length_gradient(method):
    model, found = llama(method, max_position_embeddings=256, num_hidden_layers=1, vocab_size=16), []
    for length in (512, 1024):
        with Largest() as largest:
            model(tokens(1, length) % 16, use_cache=False).logits.sum().backward()
        found.append(largest.numbers)
    assert found[1] <= 2 * found[0]


def test_bfloat16_is_within_its_noise():
    ids = tokens(1, 96)
    exact = llama()(ids).logits
    stock = (TL().to(torch.bfloat16)(ids[:, :60]).logits - TL()(ids[:, :60]).logits).abs().mean()
    before, after = llama().to(torch.bfloat16), hf_posenc.patch(TL().to(torch.bfloat16), FAR)
    assert torch.equal(before(ids).logits, after(ids).logits)
    assert (after(ids).logits - exact).abs().mean() < 2 * stock


@pytest.mark.parametrize("method", METHODS[:3])
def test_autocast_gradient(method):
    model, ids = llama(method).train(), tokens(1, 96)
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids)
    out.loss.backward()
    stock, short = TL(), ids[:, :60]
    with torch.autocast("cpu", torch.bfloat16):
        narrow = stock(short).logits
    noise = (narrow - stock(short).logits).abs().mean()
    assert (out.logits - exact).abs().mean() < 2 * noise and gradients(model).abs().max() > 0


@pytest.mark.parametrize("method", [FAR, "dca:chunk_size=12,local_window=4", "logn"])
def test_compiles_without_a_graph_break_gradient(method):
    """One graph for a whole text, its gradients, and one for every step with a static cache."""
    torch._dynamo.reset()
    model, ids, counter = llama(method), tokens(2, 90), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    found = []
    for one in (model, compiled):
        model.zero_grad()
        out = one(ids, labels=ids, use_cache=False)
        out.loss.backward()
        found.append((out.logits.detach(), gradients(model)))
    assert_close(found[1][0], found[0][0], atol=1e-4, rtol=0)
    assert (found[1][1] - found[0][1]).norm() <= 1e-5 * found[0][1].norm()
    torch._dynamo.reset()
    counter.frame_count = 0
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=96)
        model(ids[:, :50], use_cache=True, **{CACHE: cache})
        for step in range(50, 80):
            places = torch.full((2, 1), step)
            out = compiled(ids[:, step : step + 1], position_ids=places, use_cache=True, **{CACHE: cache})
            assert_close(out.logits[:, 0], found[0][0][:, step], atol=1e-4, rtol=0)
    assert counter.frame_count == 1


def test_a_capacity_is_told_when_it_is_passed(caplog):
    model = llama("self_extend:group_size=2,window=32")
    assert model.config.max_position_embeddings == 96
    with caplog.at_level(logging.WARNING, "hf_posenc"):
        model(tokens(1, 96))
        assert not caplog.records
        model(tokens(1, 97))
        model(tokens(1, 98))
    assert [record.getMessage().count("96 tokens") for record in caplog.records] == [1]


def test_self_extend_fills_in_what_reaches_a_length():
    method = hf_posenc.current(llama("self_extend:target_length=200"))
    assert method == SelfExtend(group_size=4, window=16)  # (64 - 16) 4 + 16 = 208
    assert hf_posenc.current(llama("self_extend:target_length=200,window=40")) == SelfExtend(7, 40)
    with pytest.raises(ValueError, match="reads 112 tokens"):
        llama("self_extend:target_length=200,window=16,group_size=2")


def test_a_checkpoints_own_scaling_stays():
    """A model that was extended and tuned keeps its frequencies, and counts from the length it reads."""
    scaling = {"rope_type": "yarn", "rope_theta": BASE, "factor": 2.0, "original_max_position_embeddings": 32}
    model, ids = TL(rope_parameters=scaling), tokens(1, 92)
    frequencies, factor = reference.ntk_by_parts(D, BASE, 2.0, 32), reference.attention_factor(2.0)
    angle = reference.by_distance(frequencies, lambda i, j: reference.self_extend_distance(i, j, 10, 3))
    expected = reference.llama_logits(model, ids[0], angle, scale=lambda i: factor**2)
    assert_close(hf_posenc.patch(model, FAR)(ids).logits[0].double(), expected, atol=1e-4, rtol=0)
    assert model.config.max_position_embeddings == (64 - 10) * 3 + 10
    dynamic = TL(rope_parameters={"rope_type": "dynamic", "rope_theta": BASE, "factor": 2.0})
    with pytest.raises(hf_posenc.UnsupportedMethodError, match="changes with the length"):
        hf_posenc.patch(dynamic, FAR)


WRONG = {
    "self_extend": "group_size and window, or target_length",
    "self_extend:group_size=0,window=4": "at least 1",
    "self_extend:group_size=2.5,window=4": "whole number",
    "rerope": "needs window",
    "rerope:window=0": "at least 1",
    "rerope:window=10000000000000000000000": "at most",
    "rerope:window=4,logn=maybe": "true or false",
    "leaky_rerope:window=4,scale=1": "below 1",
    "leaky_rerope:window=4,scale=0": "above 0",
    "dca:chunk_size=60,local_window=10": "beyond the 64 tokens",
    "string:shift=4,window=5": "at most its shift",
    "rerope:window=6+self_extend:group_size=2,window=4": "give one",
    "yarn:factor=2+ntk:factor=2": "give one",
    "rerope:window=6+dynamic_ntk": "give one",
    "rerope:window=6+longrope:factor=2,switch=stock": "switch='long'",
    "rerope:window=6+yarn:factor=2+logn": "give one",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_say_what_to_do(text):
    model = TL()
    with pytest.raises((ValueError, TypeError), match=WRONG[text]):
        hf_posenc.patch(model, text)
    assert hf_posenc.current(model) is None


def test_a_window_beyond_the_trained_length_is_told(caplog):
    with caplog.at_level(logging.WARNING, "hf_posenc"):
        llama("rerope:window=100")
    assert "beyond the 64 tokens" in caplog.text
