"""Biases and no position: the terms of the papers on the scores, however a text is read, on every family."""

import copy
import pickle

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import CACHE, Largest, greedy, padded, stepwise
from test_dynamic import FAMILIES, FLOAT32, built
from tiny import TL, tokens
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, StaticCache

import hf_posenc
from hf_posenc import biases
from hf_posenc.methods.alibi import alibi_slopes
from hf_posenc.methods.t5_bias import t5_buckets

BIASES = ["alibi", "alibi:interpolate=4", "alibi:learned_slopes=true", "toeplitz:max_distance=20",
          "t5_bias:num_buckets=8,max_distance=40", "alibi:keep_rope=true"]  # fmt: skip
METHODS = [*BIASES, "nope"]
LEARNED = [method for method in METHODS if method.startswith(("toeplitz", "t5", "alibi:learned"))]
CUTS = [24, 9] + [1] * 63
HEADS = [(3, 3), (6, 2), (8, 2), (12, 4)]


@pytest.fixture(autouse=True)
def _small_blocks_without_gradients(request, monkeypatch):
    monkeypatch.setattr(biases, "_BUDGET", 4 * 96 * 16)
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def stirred(model):
    """The same with learned parameters somewhere, as after training: they start at zero, or as fixed ones."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        noise = 0.5 * torch.randn(parameter.shape, generator=generator)
        if name.endswith("slopes"):
            parameter.data *= noise.exp()
        elif "posenc" in name:
            parameter.data += noise
    return model


def patched(model, method):
    return stirred(hf_posenc.patch(model, method))


def tolerance(family: str) -> float:
    return 2e-3 if family == "granite_swa" else 1e-4 if family in FLOAT32 else 1e-5


# --- the term itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads, slopes",
    [
        (8, [2.0**-head for head in range(1, 9)]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (12, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625, 0.70711, 0.35355, 0.17678, 0.08839]),
        (3, [0.0625, 0.00390625, 0.25]),
        (1, [2.0**-8]),
    ],
)
def test_golden_slopes(heads, slopes):
    assert_close(alibi_slopes(heads), torch.tensor(slopes), atol=1e-5, rtol=0)
    assert alibi_slopes(heads).tolist() == pytest.approx(reference.alibi_slopes(heads))


def test_golden_buckets():
    def causal(distance):
        return int(t5_buckets(torch.tensor(distance), 32, 128, True))

    assert [causal(d) for d in (15, 16, 31, 64, 127, 1000, -3)] == [15, 16, 21, 26, 31, 31, 0]

    def both(distance):
        return int(t5_buckets(torch.tensor(distance), 32, 128, False))

    assert [both(d) for d in (7, 8, 11, 12, 15, 90, 91, 5000)] == [7, 8, 8, 9, 9, 14, 15, 15]
    assert [both(-1), both(-128)] == [17, 31]


@settings(max_examples=200, deadline=None)
@given(
    distance=st.integers(-5000, 5000), half=st.integers(2, 64), most=st.integers(130, 4000), causal=st.booleans(),
    interpolate=st.sampled_from([1.0, 2.0, 3.5]),
)  # fmt: skip
def test_buckets_equal_the_rule(distance, half, most, causal, interpolate):
    found = int(t5_buckets(torch.tensor(distance), 2 * half, most, causal, interpolate))
    # At the borders float32 decides, as in T5 itself.
    rules = {reference.t5_bucket(distance, 2 * half, most, causal, interpolate, nudge) for nudge in (-1e-5, 1e-5)}
    assert found in rules


def rule(method: str, model, layer: int):
    """The bias that a method adds, (head, i, j) -> number, from the learned numbers of the layer if there are any."""
    heads = model.config.num_attention_heads
    weights = {name.split("posenc.")[1]: weight.double().tolist() for name, weight in model.state_dict().items()
               if f"layers.{layer}.self_attn.posenc." in name}  # fmt: skip
    slopes = weights.get("slopes", reference.alibi_slopes(heads))
    if method.startswith("alibi"):
        factor = 4 if "interpolate" in method else 1
        return lambda head, i, j: -slopes[head] / factor * abs(i - j)
    if method.startswith("toeplitz"):
        return lambda head, i, j: weights["table"][head][min(i - j, 19)]
    if method.startswith("t5_bias"):
        return lambda head, i, j: weights["table"][head][reference.t5_bucket(i - j, 8, 40, True)]
    return lambda head, i, j: 0.0


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_float64_double_loop(method, heads):
    count, pairs = heads
    model = TL(hidden_size=16 * count, num_attention_heads=count, num_key_value_heads=pairs, num_hidden_layers=1)
    model, ids = patched(model, method), tokens(1, 80)
    frequencies = reference.rope(16) if "keep_rope" in method else [0.0] * 8
    expected = reference.llama_logits(
        model, ids[0], reference.by_frequencies(frequencies), bias=rule(method, model, 0)
    )
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert_close(model(ids).logits[0].double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", LEARNED)
def test_what_is_learned_differs_by_layer(method):
    model = patched(TL(), method)
    ids = tokens(1, 80)
    biases_of_layers = [rule(method, model, layer) for layer in range(2)]
    expected = reference.llama_logits(model, ids[0], reference.by_frequencies([0.0] * 8),
                                      bias_of_layer=lambda layer: biases_of_layers[layer])  # fmt: skip
    assert_close(model(ids).logits[0].double(), expected, atol=1e-4, rtol=0)


# --- read in any way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_every_family_reads_in_any_pieces(method, family):
    model, ids = patched(built(family), method), tokens(2, 96)
    whole = model(ids).logits
    assert_close(stepwise(model, ids, CUTS), whole, atol=tolerance(family), rtol=0)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 100
    assert torch.equal(model(changed).logits[:, :-1], whole[:, :-1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["alibi", LEARNED[-1]])
def test_every_family_takes_padding_and_a_static_cache(method, family):
    model = patched(built(family), method)
    rows = [tokens(1, length, length)[0] for length in (50, 96, 70)]
    alone = [model(row[None]).logits[0] for row in rows]
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        together = model(ids, attention_mask=mask).logits
        other = model(torch.where(mask.bool(), ids, 7), attention_mask=mask).logits
        for index, expected in enumerate(alone):
            seen = mask[index].bool()
            assert_close(together[index, seen], expected, atol=tolerance(family), rtol=0)
            assert_close(other[index, seen], together[index, seen], atol=tolerance(family), rtol=0)
    ids, mask = padded(rows, "left")
    together = stepwise(model, ids, [40, 9] + [1] * 47, mask=mask)
    for index, expected in enumerate(alone):
        assert_close(together[index, mask[index].bool()], expected, atol=tolerance(family), rtol=0)
    try:
        cache = StaticCache(config=model.config, max_cache_len=110)
        steps = stepwise(model, rows[1][None], [40, 9] + [1] * 47, cache)
    except (ValueError, NotImplementedError, AttributeError, KeyError):
        return
    assert_close(steps[0], alone[1], atol=tolerance(family), rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_packed_documents_are_alone(method):
    model = patched(TL(), method)
    documents = [tokens(1, length, length) for length in (30, 7, 51)]
    places = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    packed = model(torch.cat(documents, dim=1), position_ids=places, use_cache=False).logits
    assert_close(packed, torch.cat([model(document).logits for document in documents], dim=1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_generate_in_every_way(method):
    model, prompt = patched(TL(eos_token_id=None), method), tokens(1, 40)
    expected = greedy(model, prompt, 24)
    assert torch.equal(model.generate(prompt, max_new_tokens=24, do_sample=False), expected)
    assert torch.equal(
        model.generate(prompt, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=3), expected
    )
    ids, mask = padded([prompt[0], tokens(1, 29, 5)[0]], "left")
    batch = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    assert torch.equal(batch[0], expected[0])
    assert torch.equal(batch[1, 11:], greedy(model, ids[1:, 11:], 24)[0])
    beams = model.generate(prompt, max_new_tokens=12, num_beams=3, do_sample=False, use_cache=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=12, num_beams=3, do_sample=False), beams)


@pytest.mark.parametrize("method", BIASES)
def test_a_cache_that_was_filled_without_the_bias_is_refused(method):
    cache = TL()(tokens(1, 20), use_cache=True)[CACHE]
    with pytest.raises(RuntimeError, match="filled under another encoding"):
        patched(TL(), method)(tokens(1, 1), **{CACHE: cache})


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_near_at_length_4096(method):
    """Absolute positions have no resolution in bfloat16 at 4k, distances do."""
    model = patched(TL(num_hidden_layers=1, max_position_embeddings=4096), method)
    ids = tokens(1, 4096)
    with pytest.MonkeyPatch.context() as context:
        context.setattr(biases, "_BUDGET", 1 << 24)
        exact = model(ids, logits_to_keep=256).logits
        model.to(torch.bfloat16)
        assert all(
            parameter.dtype == torch.float32 for name, parameter in model.named_parameters() if "posenc" in name
        )
        rounded = model(ids, logits_to_keep=256).logits.float()
        hf_posenc.unpatch(model)
        stock = model(ids, logits_to_keep=256).logits.float()
        noise = (stock - model.float()(ids, logits_to_keep=256).logits).abs().mean()
    assert (rounded - exact).abs().mean() < 2 * noise + 1e-3


def test_no_bias_of_a_whole_layer_stands_at_once_gradient(monkeypatch):
    monkeypatch.setattr(biases, "_BUDGET", 1 << 16)
    model = patched(TL(num_hidden_layers=1, vocab_size=16), "alibi").train()
    kept = []
    with (
        Largest() as seen,
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x),
    ):
        loss = model(tokens(1, 1024) % 16, use_cache=False).logits.square().mean()
        loss.backward()
    assert seen.numbers <= 1 << 17 and max(kept) <= 1 << 17


# --- training, copies, files -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", BIASES)
def test_gradients_by_blocks_and_with_checkpointing_gradient(method, monkeypatch):
    found = []
    for budget, options in ((1 << 24, None), (4 * 96 * 16, None), (4 * 96 * 16, {"use_reentrant": False})):
        monkeypatch.setattr(biases, "_BUDGET", budget)
        model = patched(TL(), method).train()
        if options:
            model.gradient_checkpointing_enable(options)
        first, second = tokens(1, 96, 1), tokens(2, 80, 2)
        (
            model(first, labels=first, use_cache=False).loss + model(second, labels=second, use_cache=False).loss
        ).backward()
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, expected in found[0].items():
        assert expected is not None and expected.abs().max() > 0, name
        for other in found[1:]:
            assert (other[name] - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.parametrize("method", METHODS)
def test_undo_copies_and_siblings(method):
    ids = tokens(1, 60)
    model, plain = TL(), TL()
    sibling = type(model)(model.config).eval()
    before, keys = sibling(ids).logits, list(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    patched(model, method)
    learned = [name for name in model.state_dict() if "posenc" in name]
    assert [name for name in model.state_dict() if "posenc" not in name] == keys
    assert bool(learned) == (method in LEARNED)
    ours = model(ids).logits
    assert (ours - plain(ids).logits).abs().max() > 0.1
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(clone(ids).logits, ours)
        assert torch.equal(hf_posenc.unpatch(clone)(ids).logits, plain(ids).logits)
    assert torch.equal(sibling(ids).logits, before)
    with hf_posenc.patched(model, "pi:factor=2"):
        assert not any("posenc" in name for name in model.state_dict())
    assert torch.equal(model(ids).logits, ours)
    hf_posenc.unpatch(model)
    assert list(model.state_dict()) == keys and torch.equal(model(ids).logits, plain(ids).logits)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.config.to_dict() == plain.config.to_dict()


@pytest.mark.parametrize("size", ["5GB", "100KB"])
@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded(method, size, tmp_path):
    model, ids = patched(TL(), method), tokens(1, 60)
    model.save_pretrained(tmp_path, max_shard_size=size)
    again = hf_posenc.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert str(hf_posenc.current(again)) == str(hf_posenc.current(model))
    assert torch.equal(hf_posenc.unpatch(again)(ids).logits, TL()(ids).logits)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="restore"):
        plain(ids)
    if method in LEARNED:
        with pytest.raises(ValueError, match="a plain load has dropped"):
            hf_posenc.restore(plain)
    else:
        assert torch.equal(hf_posenc.restore(plain)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("size", ["5GB", "100KB"])
def test_saved_under_a_variant(size, tmp_path):
    model, ids = patched(TL(), LEARNED[0]), tokens(1, 60)
    model.save_pretrained(tmp_path, variant="mine", max_shard_size=size)
    assert torch.equal(hf_posenc.from_pretrained(tmp_path, variant="mine")(ids).logits, model(ids).logits)


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("method", ["alibi", *LEARNED, "nope"])
@pytest.mark.filterwarnings("ignore")
def test_adapters_bring_what_was_learned(method, patch_first, tmp_path):
    peft = pytest.importorskip("peft")
    TL().save_pretrained(tmp_path / "base")
    base, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tokens(1, 60)
    learns = method in LEARNED
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False,
        modules_to_save=["posenc"] if learns else None,
    )  # fmt: skip
    if patch_first or learns:
        model = peft.get_peft_model(hf_posenc.patch(base, method), config)
    else:
        model = hf_posenc.patch(peft.get_peft_model(base, config), method)
    stirred(model)
    with torch.enable_grad():
        model.train()(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if parameter.requires_grad)
    assert learns == any("posenc" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    expected = model.eval()(ids).logits
    model.save_pretrained(tmp_path / "adapter")
    again = hf_posenc.from_pretrained(tmp_path / "adapter").eval()
    assert_close(again(ids).logits, expected, atol=1e-6, rtol=0)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_close(hf_posenc.from_pretrained(tmp_path / "merged")(ids).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_over_a_base_that_learned(tmp_path):
    peft = pytest.importorskip("peft")
    ids = tokens(1, 60)
    patched(TL(), LEARNED[1]).save_pretrained(tmp_path / "base")
    base = hf_posenc.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    assert_close(hf_posenc.from_pretrained(tmp_path / "adapter")(ids).logits, model(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_what_no_adapter_would_save_does_not_train(tmp_path, caplog):
    peft = pytest.importorskip("peft")
    TL().save_pretrained(tmp_path / "base")
    wrapped = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), peft.LoraConfig(target_modules=["q_proj"])
    )
    hf_posenc.patch(wrapped, LEARNED[1])
    assert "stays as it starts" in caplog.text
    assert not any(weight.requires_grad for name, weight in wrapped.named_parameters() if "posenc" in name)
    early = peft.get_peft_model(TL(), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["posenc"]))
    with pytest.raises(hf_posenc.UnsupportedMethodError, match="patch the model first"):
        hf_posenc.patch(early, LEARNED[1])
    assert hf_posenc.current(early) is None


@pytest.mark.parametrize("method", ["alibi", "nope", LEARNED[0]])
def test_compiled_equals_eager(method):
    model, ids = patched(TL(), method), tokens(1, 40)
    whole = model(ids, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(ids, use_cache=False).logits, whole, atol=1e-4, rtol=0)


def test_they_say_once_that_they_want_training(caplog):
    hf_posenc.patch(TL(), "alibi")
    assert sum("fine-tuned" in record.message for record in caplog.records) == 1
    caplog.clear()
    hf_posenc.patch(TL(), "yarn:factor=2")
    assert not caplog.records


@pytest.mark.parametrize(
    "text, match",
    [
        ("alibi:interpolate=0.5", "at least 1"), ("alibi:keep_rope=3", "true or false"),
        ("toeplitz", "needs max_distance"), ("toeplitz:max_distance=0", "at least 1"),
        ("toeplitz:max_distance=8,init=ones", "'alibi' or 'zero'"), ("t5_bias:num_buckets=7", "has to be even"),
        ("t5_bias:num_buckets=32,max_distance=16", "more than half"), ("rope", "rotation of its own"),
        ("alibi+yarn:factor=2", "do not combine"), ("rope+dynamic_ntk", "do not combine"), ("rope+nope", "give one"),
    ],
)  # fmt: skip
def test_wrong_arguments_say_what_is_right(text, match):
    model = TL()
    with pytest.raises((ValueError, TypeError), match=match):
        hf_posenc.patch(model, text)
    assert hf_posenc.current(model) is None and model.config.to_dict() == TL().config.to_dict()
