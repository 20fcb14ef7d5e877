"""xPos and rotated values: equal to a double loop, however a text is read; and what a partial rotation does inside
attention."""

import pytest
import reference
import torch
from reading import Unturned, greedy, padded, stepwise
from test_dynamic import FAMILIES
from tiny import TL, tiny_model, tokens
from torch.testing import assert_close
from transformers import AttentionInterface, StaticCache

import hf_posenc
from hf_posenc import families, stacked, twin

LENGTH, D, BASE = 64, 16, 10000.0
METHODS = ["xpos", "xpos:gamma=0.2,scale_base=8+yarn:factor=2", "vo_rope"]
CUTS = [24, 9, *[1] * 7, 20]


@pytest.fixture(autouse=True)
def _small_blocks_without_gradients(request, monkeypatch):
    """Blocks of 16 queries, so that short texts have several."""
    monkeypatch.setattr(stacked, "_ROWS", 16)
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def judged(model, ids, layer):
    """Logits of a model whose attention is the double loop over raw queries and keys.

    Args:
        layer: (index, trained frequencies of the layer or None, whether it sees a window only) -> arguments for
            ``reference.attention_loop``
    """
    located = families.locate(model)
    plans = {plan.name: plan for plan in twin.plan(located)}
    names = {id(module): name for name, module in located.owner.named_modules()}
    slots = [(site, slot) for site in located.sites for slot in site.slots]
    trained = [getattr(site.module, slot.buffer).double().tolist() for site, slot in slots]

    def naive(module, query, key, value, mask, scaling=None, sliding_window=None, s_aux=None, **_):
        plan = plans[names[id(module)]]
        index = int(plan.name.split(".")[1])
        own = None if plan.source is None else trained[plan.source]
        windowed = plan.source is not None and not families.is_global(slots[plan.source][1])
        more = {"angle": reference.by_frequencies([]), **layer(index, own, windowed)}
        sinks = None if s_aux is None else s_aux.tolist()
        out = reference.attention_loop(
            query[0], key[0], value[0], scale=scaling, pairing=plan.pairing, start=plan.start, window=sliding_window,
            sinks=sinks, **more,
        )  # fmt: skip
        return out.transpose(0, 1)[None].to(query.dtype), None

    for site in located.sites:
        setattr(site.parent, site.name, Unturned(site.module))
    AttentionInterface.register("naive", naive)
    located.config._attn_implementation_internal = "naive"
    return model(ids, use_cache=False).logits


def of_method(method):
    """What every layer that turns does under a method."""

    def layer(index, own, windowed):
        if own is None:
            return {}
        if method == "vo_rope":
            return {
                "angle": reference.by_frequencies(own),
                **({} if windowed else {"value_angle": lambda i, j: [(i - j) * frequency for frequency in own]}),
            }
        if windowed:
            return {"angle": reference.by_frequencies(own)}
        if method == "xpos":
            return {
                "angle": reference.by_frequencies(own),
                "fade": lambda i, j: reference.xpos_fade(i, j, 2 * len(own)),
            }
        d, factor = 2 * len(own), reference.attention_factor(2.0)
        return {
            "angle": reference.by_frequencies(reference.yarn(d, own[-1] ** (-d / (d - 2)), 2.0, LENGTH)),
            # YaRN's temperature, where only a part of a head turns, is on that part.
            "fade": lambda i, j: [factor**2 * kept for kept in reference.xpos_fade(i, j, d, 0.2, 8)],
        }

    return layer


NAMED = ["llama", "qwen3", "gemma3_text", "gpt_neox", "cohere2", "gpt_oss", "smollm3"]


@pytest.mark.parametrize("family", NAMED)
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_double_loop(method, family):
    if "yarn" in method and family not in ("llama", "qwen3", "gpt_neox"):
        pytest.skip("YaRN on other bases and scaled checkpoints is tested with frequency methods")
    build, ids = (lambda: tiny_model(family, **FAMILIES.get(family, {}))), tokens(1, 37)
    ours = hf_posenc.patch(build(), method)(ids).logits
    assert_close(ours, judged(build(), ids, of_method(method)), atol=1e-4, rtol=0)
    assert (ours - build()(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize("heads, key_heads", [(3, 3), (6, 2), (12, 12), (8, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_heads(method, heads, key_heads):
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "hidden_size": 16 * heads,
    }
    ids = tokens(1, 30)
    ours = hf_posenc.patch(TL(**sizes), method)(ids).logits
    assert_close(ours, judged(TL(**sizes), ids, of_method(method)), atol=1e-4, rtol=0)


READ = ["llama", "gemma3_text", "gpt_neox", "gpt_oss", "nemotron"]


@pytest.mark.parametrize("family", READ)
@pytest.mark.parametrize("method", METHODS[1:])
def test_read_in_pieces_and_padded(method, family):
    model, ids = hf_posenc.patch(tiny_model(family), method), tokens(2, 60)
    whole = model(ids).logits
    assert_close(stepwise(model, ids, CUTS), whole, atol=1e-4, rtol=0)
    cache = StaticCache(config=model.config, max_cache_len=70)
    assert_close(stepwise(model, ids, CUTS, cache), whole, atol=1e-4, rtol=0)
    rows = [tokens(1, length, length)[0] for length in (21, 47)]
    alone = [model(row[None]).logits[0] for row in rows]
    for side in ("left", "right"):
        batch, mask = padded(rows, side)
        together = model(batch, attention_mask=mask).logits
        other = model(torch.where(mask.bool(), batch, 9), attention_mask=mask).logits
        for index, expected in enumerate(alone):
            assert_close(together[index, mask[index].bool()], expected, atol=1e-4, rtol=0)
            assert torch.equal(other[index, mask[index].bool()], together[index, mask[index].bool()])


@pytest.mark.parametrize("method", METHODS)
def test_generate_packs_and_beams(method):
    model = hf_posenc.patch(TL(), method)
    rows = [tokens(1, length, length)[0] for length in (21, 40)]
    batch, mask = padded(rows, "left")
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(batch, attention_mask=mask, **settings)
    for index, row in enumerate(rows):
        assert torch.equal(found[index, -8:], greedy(model, row[None], 8)[0, -8:])
    beams = model.generate(batch, attention_mask=mask, num_beams=3, **settings)
    alone = model.generate(rows[0][None], num_beams=3, **settings)
    assert torch.equal(beams[0, -8:], alone[0, -8:])
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = model(torch.cat(rows)[None], position_ids=places, use_cache=False).logits[0, 21:]
    assert_close(packed, model(rows[1][None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_later_tokens_do_not_matter_and_eager_is_the_same(method):
    model, ids = hf_posenc.patch(TL(), method), tokens(1, 50)
    other = ids.clone()
    other[0, -1] += 1
    expected = model(ids).logits
    assert torch.equal(model(other).logits[0, :-1], expected[0, :-1])
    short = hf_posenc.patch(TL().to(torch.bfloat16), method)(ids).logits.float()
    stock = TL().to(torch.bfloat16)(ids).logits.float() - TL()(ids).logits
    assert (short - expected).abs().mean() < 2 * stock.abs().mean()
    model.set_attn_implementation("eager")
    assert_close(model(ids).logits, expected, atol=1e-4, rtol=0)
    assert model(ids, output_attentions=True).attentions[0].shape == (1, 4, 50, 50)


def test_xpos_is_the_same_far_away_and_in_float16():
    """Distances alone count: at 32,000 neither factor leaves the range of float16."""
    model, ids = hf_posenc.patch(TL(), "xpos"), tokens(1, 90)
    expected, far = model(ids).logits, torch.arange(32000, 32090)[None]
    assert_close(model(ids, position_ids=far, use_cache=False).logits, expected, atol=2e-2, rtol=0)
    half = hf_posenc.patch(TL().half(), "xpos")(ids, position_ids=far, use_cache=False).logits.float()
    assert half.isfinite().all() and (half - expected).abs().mean() < 0.05


def test_xpos_blocks_span_few_positions():
    """Where a second document or a gap would stretch a block, it is cut."""
    model = hf_posenc.patch(TL(), "xpos:scale_base=1")
    rows = [tokens(1, length, length) for length in (301, 20)]
    places = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    packed = model(torch.cat(rows, 1), position_ids=places, use_cache=False).logits[0, 301:]
    assert_close(packed, model(rows[1]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_gradients(method):
    found = []
    for rows, options in ((16, None), (4096, None), (16, {"use_reentrant": False}), (16, {"use_reentrant": True})):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(stacked, "_ROWS", rows)
            model = hf_posenc.patch(TL(), method).train()
            if options:
                model.gradient_checkpointing_enable(options)
            ids = tokens(2, 50)
            model(ids, labels=ids).loss.backward()
        found.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    for other in found[1:]:
        assert (other - found[0]).norm() <= 1e-5 * found[0].norm()


def test_refusals():
    model = TL()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(hf_posenc.UnsupportedMethodError, match="sees later keys"):
        hf_posenc.patch(model, "xpos")
    assert "xpos" not in hf_posenc.methods(model) and "vo_rope" in hf_posenc.methods(model)
    model = tiny_model("deepseek_v3")
    with pytest.raises(hf_posenc.UnsupportedMethodError, match="no pairs to turn"):
        hf_posenc.patch(model, "vo_rope")
    assert "vo_rope" not in hf_posenc.methods(model) and "xpos" in hf_posenc.methods(model)
    with pytest.raises(hf_posenc.UnsupportedMethodError, match="8 dimensions to turn"):
        hf_posenc.patch(tiny_model("mistral4"), "partial_rope:fraction=0.5")
    for method in ("xpos", "vo_rope", "irope", "layers:layers={0:'alibi'}"):
        with pytest.raises(hf_posenc.UnsupportedMethodError, match="no rotation"):
            hf_posenc.patch(tiny_model("gpt2"), method)


def test_a_partial_rotation_inside_attention():
    """Where the rotary module of a family turns whole heads whatever its configuration says."""
    model, ids = hf_posenc.patch(TL(), "partial_rope:fraction=0.5"), tokens(1, 40)
    assert "_hf_posenc" in vars(model.model.layers[0].self_attn)
    frequencies = reference.rope(8)
    expected = reference.llama_logits(TL(), ids[0], reference.by_frequencies(frequencies))
    assert_close(model(ids).logits[0].double(), expected, atol=1e-4, rtol=0)
