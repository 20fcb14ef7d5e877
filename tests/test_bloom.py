"""BLOOM: whatever stands in place of its ALiBi tensor gives the scores of the papers, however a text is read."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import reference
import torch
from reading import CACHE, greedy, padded, stepwise
from tiny import tiny_model, tokens
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BloomForCausalLM, BloomForSequenceClassification, StaticCache

import hf_posenc
from hf_posenc.registry import create

LENGTH, BASE = 32, 10000.0
WIDTH = {3: 48, 4: 64, 6: 96, 8: 64, 12: 96}
METHODS = [
    "alibi", "alibi:interpolate=4", "alibi:learned_slopes=True", "toeplitz:max_distance=16",
    "t5_bias:num_buckets=8,max_distance=20", "nope", "rope", "rope+yarn:factor=4",
    "self_extend:group_size=3,window=10+rope", "rerope:window=8+rope", "dca:chunk_size=12,local_window=4+rope",
    "logn+rope",
]  # fmt: skip
IDS = tokens(1, 40)


def bloom(heads: int = 4, **overrides) -> BloomForCausalLM:
    sizes = {"n_head": heads, "hidden_size": WIDTH[heads], "n_layer": 2, "seq_length": LENGTH}
    return tiny_model("bloom", **sizes | overrides)


def patched(method: str, heads: int = 4, **overrides) -> BloomForCausalLM:
    """With whatever is learned away from where it starts."""
    model = hf_posenc.patch(bloom(heads, **overrides), method)
    return shake(model)


@torch.no_grad()
def shake(model):
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if ".posenc." in name:
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model, ids=IDS, **more):
    return model.eval()(ids, use_cache=False, **more).logits


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


# --- the rule itself -------------------------------------------------------------------------------------------------


def expectation(model, method: str, heads: int) -> dict:
    """What the paper of a method says, for ``reference.bloom_logits``."""
    learned = {
        layer: next(block.self_attention.posenc.parameters()).double().tolist()
        for layer, block in enumerate(model.transformer.h)
        if hasattr(block.self_attention, "posenc")
    }
    slopes = reference.alibi_slopes(heads)
    frequencies = reference.rope(WIDTH[heads] // heads, BASE)
    yarn = reference.yarn(WIDTH[heads] // heads, BASE, 4, LENGTH)

    def mapped(distance, **parameters):
        return {"angle": reference.by_distance(frequencies, lambda i, j: distance(i, j, **parameters))}

    return {
        "alibi": {"bias": lambda layer, head, i, j: -slopes[head] * (i - j)},
        "alibi:interpolate=4": {"bias": lambda layer, head, i, j: -slopes[head] * (i - j) / 4},
        "alibi:learned_slopes=True": {"bias": lambda layer, head, i, j: -learned[layer][head] * (i - j)},
        "toeplitz:max_distance=16": {"bias": lambda layer, head, i, j: learned[layer][head][min(i - j, 15)]},
        "t5_bias:num_buckets=8,max_distance=20": {
            "bias": lambda layer, head, i, j: learned[layer][head][reference.t5_bucket(i - j, 8, 20, causal=True)]
        },
        "nope": {},
        "rope": {"angle": reference.by_frequencies(frequencies)},
        "rope+yarn:factor=4": {
            "angle": reference.by_frequencies(yarn), "scale": lambda i: reference.attention_factor(4) ** 2,
        },
        "self_extend:group_size=3,window=10+rope": mapped(reference.self_extend_distance, window=10, group=3),
        "rerope:window=8+rope": mapped(reference.rerope_distance, window=8),
        "dca:chunk_size=12,local_window=4+rope": mapped(reference.dca_distance, chunk=12, local=4),
        "logn+rope": {
            "angle": reference.by_frequencies(frequencies),
            "scale": lambda i: max(1.0, math.log(i + 1) / math.log(LENGTH)),
        },
    }[method]  # fmt: skip


@pytest.mark.parametrize("heads", [3, 6, 8, 12])
def test_equals_the_float64_rule(method, heads):
    model = patched(method, heads, apply_residual_connection_post_layernorm=heads == 6)
    expected = reference.bloom_logits(model, IDS[0], **expectation(model, method, heads))
    found = logits(model)[0].double()
    assert_close(found, expected, atol=1e-4, rtol=0)
    if method != "alibi":
        assert (found - logits(bloom(heads, apply_residual_connection_post_layernorm=heads == 6))[0]).abs().max() > 0.1


@pytest.mark.parametrize("heads", WIDTH)
def test_alibi_is_what_it_was_trained_with(heads):
    for method in ("alibi", "alibi:learned_slopes=True"):
        assert_close(logits(hf_posenc.patch(bloom(heads), method)), logits(bloom(heads)), atol=1e-5, rtol=0)


# --- ways to read ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_chunks_and_steps(method):
    model = patched(method)
    whole, cuts = logits(model), [24, 9] + [1] * 7
    for cache in (None, StaticCache(config=model.config, max_cache_len=50)):
        assert_close(stepwise(model, IDS, cuts, cache), whole, atol=1e-4, rtol=0)
    assert_close(stepwise(model, IDS, [10, 30], mask=torch.ones_like(IDS)), whole, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_mask_over_the_whole_buffer_of_a_static_cache(method):
    """That is what ``generate`` gives, also where several tokens come at once."""
    model, mask = patched(method), torch.zeros(1, 50, dtype=torch.long)
    cache, pieces = StaticCache(config=model.config, max_cache_len=50), []
    for start, stop in ((0, 10), (10, 30), (30, 40)):
        mask[:, :stop] = 1
        pieces.append(model(IDS[:, start:stop], attention_mask=mask, **{CACHE: cache}).logits)
    assert_close(torch.cat(pieces, dim=1), logits(model), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_rows_alone(method, side):
    model, rows = patched(method), [tokens(1, n, n)[0] for n in (37, 17, 5)]
    ids, mask = padded(rows, side)
    found = logits(model, ids, attention_mask=mask)
    for row, one, seen in zip(rows, found, mask.bool(), strict=True):
        assert_close(one[seen], logits(model, row[None])[0], atol=1e-4, rtol=0)
    other = torch.where(mask.bool(), ids, 7)
    assert torch.equal(logits(model, other, attention_mask=mask)[mask.bool()], found[mask.bool()])
    if side == "left":
        more = {"cache_implementation": "static", "disable_compile": True}
        for options in ({}, more):
            text = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **options)[:, -6:]
            for row, one in zip(rows, text, strict=True):
                assert torch.equal(one, greedy(model, row[None], 6)[0, -6:])


@torch.no_grad()
def test_beams(method):
    model, ids = patched(method), tokens(2, 12)
    options = {"attention_mask": torch.ones_like(ids), "num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    cached, plain = (model.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)


def test_later_tokens_change_nothing_earlier(method):
    model, other = patched(method), IDS.clone()
    other[0, -1] += 1
    assert torch.equal(logits(model, other)[:, :-1], logits(model)[:, :-1])


def test_every_query_has_a_share_of_one(method):
    model = patched(method)
    with torch.no_grad():
        (first, *_) = model(IDS, output_attentions=True).attentions
    assert first.shape == (1, 4, 40, 40)
    assert_close(first.sum(-1), torch.ones(1, 4, 40))


def test_a_cache_of_another_scheme_is_refused():
    model = bloom()
    cache = model(IDS, use_cache=True)[CACHE]
    hf_posenc.patch(model, "rope")
    with pytest.raises(RuntimeError, match="another encoding"):
        model(IDS[:, :1], **{CACHE: cache})


@torch.no_grad()
@pytest.mark.parametrize("method", ["alibi", "self_extend:group_size=3,window=10+rope"])
def test_compiled(method):
    model, counter = patched(method), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (40, 20, 25, 31):
        ids = tokens(1, length)
        assert_close(compiled(ids, use_cache=False).logits, logits(model, ids), atol=1e-5, rtol=0)
    assert counter.frame_count <= 3


# --- dtypes and gradients --------------------------------------------------------------------------------------------


@torch.no_grad()
def test_bfloat16_keeps_the_resolution_of_long_texts():
    """BLOOM's own bias is that of absolute positions in the dtype of the model."""
    ids = tokens(1, 1200)

    def shares(model):
        return model(ids, output_attentions=True, use_cache=False).attentions[0][0, :, -100:].float()

    expected = shares(bloom(n_layer=1))
    own, ours = (
        (shares(model.bfloat16()) - expected).abs().sum(-1).mean(-1)
        for model in (bloom(n_layer=1), patched("alibi", n_layer=1))
    )
    assert ours.max() < 0.02 < own.max() / 10


def test_low_precision_is_near(method):
    for dtype, near in ((torch.bfloat16, 0.2), (torch.float16, 0.03)):
        before, after = (
            patched(method, n_layer=1).to(dtype),
            shake(hf_posenc.patch(bloom(n_layer=1).to(dtype), method)),
        )
        found = logits(before)
        assert found.dtype == dtype and (found.float() - logits(patched(method, n_layer=1))).abs().mean() < near
        if "posenc" not in str(list(before.state_dict())):
            assert torch.equal(logits(after), found)


@pytest.mark.filterwarnings("ignore")
def test_gradients_with_checkpointing(method):
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = patched(method).train()
        if options:
            model.gradient_checkpointing_enable(options)
        first, second = tokens(1, 40, 1), tokens(2, 30, 2)
        # Two forwards before one backward: a recomputation must not see the other's positions.
        (model(first, labels=first).loss + model(second, labels=second).loss).backward()
        assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() <= 1e-5 * gradients[0].norm()


# --- what every patch promises ---------------------------------------------------------------------------------------


def test_unpatch_leaves_nothing(method):
    model, plain = bloom(), bloom()
    before, keys = {name: set(vars(module)) for name, module in model.named_modules()}, list(model.state_dict())
    hf_posenc.patch(model, method)
    logits(model)
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model), logits(plain))
    assert list(model.state_dict()) == keys and model.config.to_dict() == plain.config.to_dict()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules())


def test_a_sibling_from_the_same_config_object_is_untouched(method):
    config = bloom().config
    torch.manual_seed(0)
    one, other = BloomForCausalLM(config).eval(), BloomForCausalLM(config).eval()
    before, said = logits(other), config.to_dict()
    hf_posenc.patch(one, method)
    assert torch.equal(logits(other), before) and other.config is config and config.to_dict() == said


def test_copies_and_pickles_are_independent(method):
    model = patched(method)
    expected = logits(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(clone), expected)
        assert torch.equal(logits(hf_posenc.unpatch(clone)), logits(bloom()))
    assert torch.equal(logits(model), expected)


def test_saved_and_loaded(method, tmp_path):
    model = patched(method)
    model.save_pretrained(tmp_path)
    again = hf_posenc.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model)) and hf_posenc.current(again) == hf_posenc.current(model)
    hf_posenc.unpatch(again)
    assert torch.equal(logits(again), logits(bloom()))
    assert not {"max_position_embeddings", "experts_implementation", "hf_posenc"} & again.config.to_dict().keys()
    for options in ({}, {"attn_implementation": "eager"}):
        with pytest.raises(ValueError, match="hf_posenc"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **options)


def test_a_plain_load_without_the_package_stops(tmp_path):
    hf_posenc.patch(bloom(), "alibi:interpolate=4").save_pretrained(tmp_path)
    load = f"A.from_pretrained({str(tmp_path)!r}, attn_implementation='eager')"
    code = f"from transformers import AutoModelForCausalLM as A; {load}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode and "hf_posenc" in run.stderr


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_adapters_bring_their_scheme(method, patch_first, tmp_path):
    peft = pytest.importorskip("peft")
    bloom().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    saved = ["posenc"] if method.startswith(("alibi:learned", "toeplitz", "t5_bias")) and patch_first else None
    config = peft.LoraConfig(
        r=4, target_modules=["query_key_value"], init_lora_weights=False, modules_to_save=saved, task_type="CAUSAL_LM"
    )
    if patch_first:
        model = shake(peft.get_peft_model(hf_posenc.patch(base, method), config))
    else:
        model = hf_posenc.patch(peft.get_peft_model(base, config), method)
    expected = logits(model)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 0.1
    model.save_pretrained(tmp_path / "adapter")
    again = hf_posenc.from_pretrained(tmp_path / "adapter")
    assert_close(logits(again), expected, atol=1e-6, rtol=0)
    assert hf_posenc.current(again) == create(method)
    model.train()(IDS, labels=IDS).loss.backward()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert trained and all(weight.grad.any() for weight in trained)


# --- what is offered and refused -------------------------------------------------------------------------------------


def test_what_fits():
    names = hf_posenc.methods(bloom())
    assert {"alibi", "nope", "rope", "t5_bias", "toeplitz"} <= set(names) and not {"yarn", "self_extend"} & set(names)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("yarn:factor=4", "has ALiBi and no rotation"),
        ("self_extend:group_size=4,window=8", "has ALiBi and no rotation"),
        ("alibi:keep_rope=true", "no rotation to keep"),
    ],
)
def test_what_does_not_fit_says_why(method, reason):
    model = bloom()
    with pytest.raises(hf_posenc.UnsupportedMethodError, match=f"{reason}.*It can take"):
        hf_posenc.patch(model, method)
    assert torch.equal(logits(model), logits(bloom())) and hf_posenc.current(model) is None


def test_there_are_no_frequencies_to_look_at():
    for look in (lambda: hf_posenc.inspect(bloom()), lambda: hf_posenc.plan(bloom(), 4096)):
        with pytest.raises(hf_posenc.UnsupportedMethodError, match="has ALiBi and no rotary module"):
            look()
    with pytest.raises(hf_posenc.UnsupportedMethodError):
        hf_posenc.inspect(hf_posenc.patch(bloom(), "rope").config)


@pytest.mark.parametrize("given", [{"model_type": "falcon", "alibi": True}, {"model_type": "mpt"}])
@pytest.mark.parametrize("method", ["alibi", "pi:factor=2"])
def test_attention_that_adds_alibi_elsewhere_is_refused(given, method):
    """Falcon builds a rotary module even where it adds ALiBi and never calls it."""
    model = tiny_model(**given)
    assert hf_posenc.methods(model) == []
    with pytest.raises(hf_posenc.UnsupportedMethodError, match="None of the methods"):
        hf_posenc.patch(model, method)


def test_the_trained_length():
    """``seq_length`` where the configuration has it; all released checkpoints were trained on 2048 tokens."""
    for given, length in ((bloom(), 4 * LENGTH), (bloom(seq_length=None), 4 * 2048)):
        hf_posenc.patch(given, "rope+yarn:factor=4")
        assert given.config.max_position_embeddings == length
        assert "max_position_embeddings" not in hf_posenc.unpatch(given).config.to_dict()


def test_other_heads():
    model = tiny_model("bloom", n_layer=2)
    classifier = BloomForSequenceClassification(model.config).eval()
    before = classifier(IDS).logits
    changed = hf_posenc.patch(classifier, "nope")(IDS).logits
    assert not torch.allclose(changed, before)
    assert torch.equal(hf_posenc.unpatch(classifier)(IDS).logits, before)


def test_one_method_after_another():
    model = patched("rope")
    hf_posenc.patch(model, "alibi")
    assert_close(logits(model), logits(bloom()), atol=1e-5, rtol=0)
    with hf_posenc.patched(model, "nope"):
        assert torch.equal(logits(model), logits(patched("nope")))
    assert_close(logits(model), logits(bloom()), atol=1e-5, rtol=0)


def test_its_own_encoding_wants_no_training(caplog):
    hf_posenc.patch(tiny_model("bloom"), "alibi:interpolate=2")
    assert not caplog.records
    hf_posenc.patch(tiny_model("bloom"), "toeplitz:max_distance=9")
    assert "fine-tuned" in caplog.text
