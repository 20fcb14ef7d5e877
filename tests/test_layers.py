"""Encodings by layer: every layer equals the double loop of its own method, however a text is read."""

import copy

import pytest
import reference
import torch
from reading import CACHE, greedy, padded, stepwise
from test_dynamic import FAMILIES
from test_rotations import judged
from tiny import TL, tiny_model, tokens
from torch.testing import assert_close
from transformers import LlamaForCausalLM, StaticCache

import hf_posenc
from hf_posenc import stacked
from hf_posenc.methods.irope import Temperature

LENGTH, D = 64, 16
MIXED = "layers:layers={0:'nope',1:'rerope:window=6',2:'alibi',3:'xpos'},default='yarn:factor=4'"
OTHER = "layers:layers={0:'dynamic_ntk:granularity=4',1:'partial_rope:fraction=0.5',3:'vo_rope+yarn:factor=2'}"
IROPE = "irope:interval=2,temperature=True,chunk=16+yarn:factor=2"
CUTS = [24, 9, *[1] * 7, 20]


@pytest.fixture(autouse=True)
def _small_blocks_without_gradients(request, monkeypatch):
    monkeypatch.setattr(stacked, "_ROWS", 16)
    monkeypatch.setattr(Temperature, "query_scale", _early_temperature)
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def _early_temperature(self, positions):
    """Llama 4's, from the 8th token on instead of the 8192nd."""
    return 1 + 0.1 * (1 + (positions + 1) // 8).float().log()


def llama(method, **overrides):
    return hf_posenc.patch(TL(num_hidden_layers=4, **overrides), method)


SLOPES = [0.25, 0.0625, 0.015625, 0.00390625]
PLAIN, YARN = reference.rope(D), reference.ntk_by_parts(D, 10000.0, 4.0, LENGTH)
TURNED = {"angle": reference.by_frequencies(PLAIN)}
KINDS = {
    "nope": {},
    "plain": TURNED,
    "squeezed": {"angle": reference.by_frequencies(reference.pi(D, 10000.0, 2.0))},
    "yarn": {
        "angle": reference.by_frequencies(YARN),
        "query_scale": lambda i: reference.attention_factor(4.0) ** 2,
    },
    "rerope": {"angle": reference.by_distance(PLAIN, lambda i, j: reference.rerope_distance(i, j, 6))},
    "farther": {"angle": reference.by_distance(PLAIN, lambda i, j: reference.rerope_distance(i, j, 9))},
    "alibi": {"bias": lambda head, i, j: -SLOPES[head] * (i - j)},
    "xpos": {**TURNED, "fade": lambda i, j: reference.xpos_fade(i, j, D)},
    "vo_rope": {**TURNED, "value_angle": lambda i, j: [(i - j) * frequency for frequency in PLAIN]},
    "dynamic": {"angle": reference.by_length(lambda n: reference.dynamic_ntk(n, D, 10000.0, LENGTH))},
    "partial": {"angle": reference.by_frequencies(reference.rope(8))},
    "chunk": {**TURNED, "chunk": 8},
    "hot": {"query_scale": lambda i: 1 + 0.1 * reference.math.log(1 + (i + 1) // 8)},
}
TABLES = {
    "layers:layers={0:'nope',3:'yarn:factor=4'}": ["nope", "plain", "plain", "yarn"],
    "layers:layers={0:'nope',1:'rerope:window=6',2:'alibi',3:'xpos'},default='pi:factor=2'":
        ["nope", "rerope", "alibi", "xpos"],
    "layers:layers={1:'dynamic_ntk:granularity=1',2:'partial_rope:fraction=0.5',3:'vo_rope'},default='yarn:factor=4'":
        ["yarn", "dynamic", "partial", "vo_rope"],
    "layers:layers={2:'logn+yarn:factor=4'},default='alibi'": ["alibi", "alibi", "yarn", "alibi"],
    "layers:layers={0:'rerope:window=6',2:'rerope:window=9'}": ["rerope", "plain", "farther", "plain"],
    "layers:layers={3:'xpos'},default='pi:factor=2'": ["squeezed", "squeezed", "squeezed", "xpos"],
    "irope": ["plain", "plain", "plain", "nope"],
    "irope:interval=3": ["plain", "plain", "nope", "plain"],
    "irope:interval=2+yarn:factor=4": ["yarn", "nope", "yarn", "nope"],
    "irope:interval=2,temperature=True,chunk=8": ["chunk", "hot", "chunk", "hot"],
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("method", TABLES)
def test_every_layer_equals_the_double_loop_of_its_method(method, implementation):
    length = 70 if "dynamic" in method else 40
    model, ids = TL(num_hidden_layers=4), tokens(1, length)
    model.set_attn_implementation(implementation)
    ours = hf_posenc.patch(model, method)(ids).logits
    expected = judged(TL(num_hidden_layers=4), ids, lambda index, *_: KINDS[TABLES[method][index]])
    assert_close(ours, expected, atol=1e-4, rtol=0)
    assert (ours - TL(num_hidden_layers=4)(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3_text", "gpt_neox", "cohere2", "smollm3", "gpt_oss", "deepseek_v3"]
)
def test_named_families_equal_the_double_loop(family):
    """NoPE where it was asked for, on layers with windows too, and the model's own elsewhere."""
    ids = tokens(1, 40)

    def layer(index, own, windowed):
        return {} if own is None or index in (0, 3) else {"angle": reference.by_frequencies(own)}

    def build():
        return tiny_model(family, **FAMILIES.get(family, {}))

    model = hf_posenc.patch(build(), "layers:layers={0:'nope',3:'nope'}")
    assert "_hf_posenc" not in vars(hf_posenc.families.locate(model).owner)  # stock kernels
    assert_close(model(ids).logits, judged(build(), ids, layer), atol=1e-4, rtol=0)


def test_latent_attention_is_scaled_in_the_layers_that_have_yarn():
    """Half of YaRN's temperature lies in the softmax scale of DeepSeek's attention."""
    ids, yarn = tokens(1, 30), "yarn:factor=4,mscale=1,mscale_all_dim=1"
    model = tiny_model("deepseek_v3")
    plain = [layer.self_attn.scaling for layer in model.model.layers]
    hf_posenc.patch(model, yarn)
    expected, scaled = model(ids).logits, [layer.self_attn.scaling for layer in model.model.layers]
    assert scaled[0] > plain[0]
    hf_posenc.patch(model, hf_posenc.PerLayer(dict.fromkeys(range(4), yarn)))
    assert torch.equal(model(ids).logits, expected)
    hf_posenc.patch(model, f"irope:interval=2+{yarn}")
    assert [layer.self_attn.scaling for layer in model.model.layers] == [scaled[0], plain[0]] * 2
    hf_posenc.unpatch(model)
    assert [layer.self_attn.scaling for layer in model.model.layers] == plain


def test_the_temperature_of_llama4(monkeypatch):
    monkeypatch.undo()
    places = torch.tensor([0, 8190, 8191, 16383, 131071])
    assert_close(
        Temperature().query_scale(places),
        torch.tensor([1, 1, 1.0693147, 1.1098612, 1.2833213]), atol=1e-6, rtol=0,
    )  # fmt: skip
    assert [float(Temperature().query_scale(place)) for place in places] == pytest.approx(
        [reference.temperature(int(place)) for place in places]
    )


READ = ["llama", "gemma3_text", "gpt_neox", "nemotron"]


@pytest.mark.parametrize("family", READ)
@pytest.mark.parametrize("method", [MIXED, OTHER, IROPE])
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


@pytest.mark.parametrize("method", ["irope:interval=2", MIXED, IROPE])
def test_generate_packs_and_beams(method):
    model = llama(method)
    rows = [tokens(1, length, length)[0] for length in (21, 40)]
    batch, mask = padded(rows, "left")
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(batch, attention_mask=mask, **settings)
    for index, row in enumerate(rows):
        assert torch.equal(found[index, -8:], greedy(model, row[None], 8)[0, -8:])
    beams = model.generate(batch, attention_mask=mask, num_beams=3, **settings)
    assert torch.equal(beams[0, -8:], model.generate(rows[0][None], num_beams=3, **settings)[0, -8:])
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = model(torch.cat(rows)[None], position_ids=places, use_cache=False).logits[0, 21:]
    assert_close(packed, model(rows[1][None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["irope:interval=2", MIXED, OTHER, IROPE])
def test_later_tokens_do_not_matter_and_bfloat16_is_near(method):
    model, ids = llama(method), tokens(1, 50)
    other = ids.clone()
    other[0, -1] += 1
    expected = model(ids).logits
    assert torch.equal(model(other).logits[0, :-1], expected[0, :-1])
    stock = TL(num_hidden_layers=4)
    noise = copy.deepcopy(stock).to(torch.bfloat16)(ids).logits.float() - stock(ids).logits
    short = llama(method).to(torch.bfloat16)(ids).logits.float()
    assert (short - expected).abs().mean() < 2 * noise.abs().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "nemotron"])
@pytest.mark.parametrize("method", ["irope:interval=2", MIXED, IROPE])
def test_gradients_with_checkpointing(method, family):
    found = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = hf_posenc.patch(tiny_model(family), method).train()
        if options:
            model.gradient_checkpointing_enable(options)
        one, other = tokens(1, 50, 1), tokens(2, 40, 2)
        # Two forwards before one backward: a recomputation must not see the other's rotations.
        (model(one, labels=one).loss + model(other, labels=other).loss).backward()
        found.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    for other in found[1:]:
        assert (other - found[0]).norm() <= 1e-5 * found[0].norm()


@pytest.mark.parametrize("method", [IROPE, "layers:layers={0:'nope',1:'alibi',2:'xpos',3:'vo_rope'}"])
def test_one_graph_when_compiled(method):
    model, ids = llama(method), tokens(1, 40)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
    assert_close(compiled(ids, use_cache=False).logits, model(ids).logits, atol=1e-4, rtol=0)


def test_a_backend_chosen_later_reaches_every_layer():
    model, ids = llama(MIXED), tokens(1, 30)
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions
    assert [found.shape for found in weights] == [(1, 4, 30, 30)] * 4


def test_a_chunk_longer_than_the_text_changes_nothing():
    ids = tokens(1, 60)
    plain, whole = llama("irope:interval=2"), llama("irope:interval=2,chunk=60")
    assert torch.equal(plain(ids).logits, whole(ids).logits)
    assert not torch.equal(plain(ids).logits, llama("irope:interval=2,chunk=59")(ids).logits)


def test_the_table_may_hold_objects_and_what_it_learns_is_saved(tmp_path):
    ids = tokens(1, 30)
    table = hf_posenc.PerLayer({1: hf_posenc.ALiBi(learned_slopes=True), 3: "nope"}, default=hf_posenc.PI(factor=2))
    model = llama(table)
    assert [name for name, _ in model.named_parameters() if "posenc" in name] == [
        "model.layers.1.self_attn.posenc.slopes"
    ]
    model.model.layers[1].self_attn.posenc.slopes *= 3
    model.save_pretrained(tmp_path)
    again = hf_posenc.from_pretrained(tmp_path)
    assert hf_posenc.current(again) == table and torch.equal(again(ids).logits, model(ids).logits)
    assert model.config.max_position_embeddings == 2 * LENGTH


def test_unpatch_takes_every_hook_along():
    model = llama(MIXED)
    before = len(model.state_dict())
    assert any("Aside" in type(module).__name__ for module in model.modules())
    hf_posenc.unpatch(model)
    assert not any("Aside" in type(module).__name__ for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not any("_hf_posenc" in name for module in model.modules() for name in vars(module))
    assert len(model.state_dict()) == before and torch.equal(
        model(tokens()).logits, TL(num_hidden_layers=4)(tokens()).logits
    )


def test_a_cache_of_another_table_is_refused():
    model, ids = llama(MIXED), tokens(1, 20)
    cache = model(ids, use_cache=True)[CACHE]
    hf_posenc.patch(model, OTHER)
    with pytest.raises(RuntimeError, match="filled under another encoding"):
        stepwise(model, ids, [3], cache)


@pytest.mark.parametrize(
    ("family", "method", "says"),
    [
        ("moshi", "irope", "looks its rotation up itself"),
        ("smollm3", "irope:interval=3", "carries no rotation, which irope"),
        ("smollm3", "irope", "would change no layer"),
        ("smollm3", "layers:layers={3:'yarn:factor=2'}", "carries no rotation that yarn"),
        ("llama", "layers:layers={9:'nope'}", "there is no 9"),
        ("qwen3_next", "layers:layers={0:'nope'}", "there is no 0"),
        ("gemma3n_text", "layers:layers={0:'nope'}", "takes its keys from"),
        ("deepseek_v3", "layers:layers={0:'vo_rope'}", "no pairs to turn"),
    ],
)
def test_refusals(family, method, says):
    model, ids = tiny_model(family), tokens(1, 20)
    before, names = model(ids).logits, {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(hf_posenc.UnsupportedMethodError, match=says):
        hf_posenc.patch(model, method)
    assert torch.equal(model(ids).logits, before) and hf_posenc.current(model) is None
    assert {name: set(vars(module)) for name, module in model.named_modules()} == names


def test_a_scaling_that_changes_with_each_call_stays_out():
    model = TL(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(hf_posenc.UnsupportedMethodError, match="give the other layers a fixed one"):
        hf_posenc.patch(model, "irope:interval=2")
    assert isinstance(hf_posenc.patch(model, "irope:interval=2+yarn:factor=2"), LlamaForCausalLM)
