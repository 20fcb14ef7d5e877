"""What `patch` promises about the object it is given: only that object changes, all of it comes back, and nothing is
half done."""

import copy
import inspect
import io
import json
import logging
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from tiny import TL, tiny_model, tokens
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import hf_posenc
from hf_posenc.journal import Journal

IDS = tokens(2, 96)
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
METHODS = {
    "pi": "pi:factor=4",
    "ntk": "ntk:factor=4",
    "abf": "abf:rope_theta=500000",
    "ntk_by_parts": "ntk_by_parts:factor=4",
    "yarn": "yarn:factor=4",
    "llama3": "llama3:factor=4",
    "dynamic_ntk": "dynamic_ntk",
    "dynamic_yarn": "dynamic_yarn",
    "partial_rope": "partial_rope:fraction=0.5",
    **{
        f"longrope-{switch}": hf_posenc.LongRoPE(
            [1.0 + k / 9 for k in range(8)], [1.0 + k for k in range(8)], None, switch, 4
        )
        for switch in ("causal", "long", "stock")
    },
}
# One method that changes tables and one that runs inside attention.
KINDS = ["yarn:factor=4", "dynamic_ntk:factor=2"]
FAMILIES = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "nemotron", "granite_swa", "qwen2_vl", "llama4_text"]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def logits(model) -> torch.Tensor:
    return model(IDS).logits


def anatomy(model: nn.Module, configs: bool = True) -> dict:
    """Everything about a model that patching could touch: modules, attributes, hooks, buffers, configurations."""
    found: dict = {"implementation": model.config._attn_implementation, "config": model.config.to_dict()}
    for name, module in model.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, int | float | str | bool | None | torch.dtype)
        }
        hooks = {key: len(value) for key, value in vars(module).items() if "hooks" in key and isinstance(value, dict)}
        found[name] = (type(module), id(module), sorted(vars(module)), plain, hooks)
        if configs:
            found[name] += (id(vars(module).get("config")),)
    found["state"] = list(model.state_dict())
    found["buffers"] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found


def assert_same_anatomy(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    for name in first.keys() - {"buffers"}:
        assert first[name] == second[name], name
    assert first["buffers"].keys() == second["buffers"].keys()
    for name, buffer in first["buffers"].items():
        assert torch.equal(buffer, second["buffers"][name]), name


# --- patch and unpatch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_patch_and_unpatch(method):
    model = TL()
    before, stock = anatomy(model, configs=False), logits(model)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert hf_posenc.current(model) is None
    assert hf_posenc.patch(model, method) is model
    assert str(hf_posenc.current(model)).startswith(str(method).partition(":")[0])
    assert (logits(model) - stock).abs().max() > 1e-2
    assert model.state_dict().keys() == state.keys()
    assert str(method).partition(",")[0].partition(":")[0] in repr(model)
    assert hf_posenc.unpatch(model) is model
    assert torch.equal(logits(model), stock)
    assert hf_posenc.current(model) is None
    assert_same_anatomy(anatomy(model, configs=False), before)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in state.items())
    with pytest.raises(ValueError, match="No scheme"):
        hf_posenc.unpatch(model)


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back(family, method):
    model = tiny_model(family)
    stock = logits(model)
    model.generate(IDS[:, :10], max_new_tokens=2, do_sample=False)  # Qwen2-VL keeps an attribute from it
    before = anatomy(model, configs=False)
    for _ in range(2):
        hf_posenc.patch(model, method)
        assert not torch.equal(logits(model), stock)
        model.generate(IDS[:, :10], max_new_tokens=2, do_sample=False)
        hf_posenc.unpatch(model)
    assert torch.equal(logits(model), stock)
    after = anatomy(model, configs=False)
    assert_same_anatomy(after, before)


def test_the_original_precision_comes_back():
    """A model cast before the patch has rounded frequencies; unpatched, it has them again."""
    model = TL().to(torch.bfloat16)
    stock = logits(model)
    for method in KINDS:
        hf_posenc.patch(model, method)
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        hf_posenc.unpatch(model)
        assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
        assert torch.equal(logits(model), stock)


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", [*KINDS, "ntk:factor=3", "dynamic_yarn"])
def test_a_second_patch_replaces_the_first(first, second):
    model, direct = TL(), hf_posenc.patch(TL(), second)
    before, stock = anatomy(model, configs=False), logits(model)
    hf_posenc.patch(hf_posenc.patch(model, first), second)
    assert torch.equal(logits(model), logits(direct))
    assert model.config.to_dict() == direct.config.to_dict()
    assert str(hf_posenc.current(model)) == second
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model), stock)
    assert_same_anatomy(anatomy(model, configs=False), before)


def test_class_instance_and_string_are_the_same():
    expected = logits(hf_posenc.patch(TL(), "yarn:factor=4,beta_fast=16"))
    for given, parameters in (
        ("yarn", {"factor": 4, "beta_fast": 16}),
        ("yarn:factor=4", {"beta_fast": 16}),
        (hf_posenc.YaRN, {"factor": 4, "beta_fast": 16}),
        (hf_posenc.YaRN(factor=4, beta_fast=16), {}),
    ):
        model = hf_posenc.patch(TL(), given, **parameters)
        assert torch.equal(logits(model), expected)
        assert hf_posenc.current(model) == hf_posenc.YaRN(factor=4, beta_fast=16)


def test_training_mode_and_devices_follow():
    model = TL().train()
    hf_posenc.patch(model, "yarn:factor=4")
    assert model.model.rotary_emb.training
    model.eval()
    assert not any(module.training for module in model.modules())
    hf_posenc.unpatch(model)
    assert not any(module.training for module in model.modules())


def test_no_weight_is_touched_on_a_meta_model():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, hidden_size=4096, vocab_size=10))
    for method in KINDS:
        hf_posenc.patch(model, method)
        assert all(weight.is_meta for weight in model.parameters())
        assert model.config.max_position_embeddings in (8192, 4096)
        hf_posenc.unpatch(model)


def test_one_info_line_says_what_changed(caplog):
    with caplog.at_level(logging.INFO, logger="hf_posenc"):
        hf_posenc.patch(TL(), "yarn:factor=4")
    (record,) = [record for record in caplog.records if record.name.startswith("hf_posenc")]
    text = record.getMessage()
    assert all(word in text for word in ("LlamaForCausalLM", "yarn:factor=4", "64", "256"))


def test_tokenizer_follows():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), model_max_length=64
    )
    model = hf_posenc.patch(TL(), "yarn", factor=4, tokenizer=tokenizer)
    assert tokenizer.model_max_length == 256
    hf_posenc.patch(model, "dynamic_ntk", tokenizer=tokenizer)
    assert tokenizer.model_max_length == 64
    hf_posenc.patch(model, "pi", target_length=100, tokenizer=tokenizer)
    assert tokenizer.model_max_length == 100
    hf_posenc.unpatch(model)
    assert tokenizer.model_max_length == 64
    with hf_posenc.patched(model, "pi:factor=2", tokenizer=tokenizer):
        assert tokenizer.model_max_length == 128
    assert tokenizer.model_max_length == 64


# --- other models and transformers itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", KINDS)
def test_a_sibling_of_the_same_config_object(method):
    config = TL().config
    torch.manual_seed(0)
    first, second = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    assert first.config is second.config is config
    before, stock, written = anatomy(second), logits(second), copy.deepcopy(config.to_dict())
    hf_posenc.patch(first, method)
    assert first.config is not config
    assert all(module.config is first.config for module in first.modules() if "config" in vars(module))
    logits(first)
    assert torch.equal(logits(second), stock)
    assert_same_anatomy(anatomy(second), before)
    assert config.to_dict() == written
    assert config._attn_implementation == "sdpa"
    third = LlamaForCausalLM(config).eval()
    third.load_state_dict(second.state_dict())
    assert torch.equal(logits(third), stock)


def test_different_schemes_at_once():
    """Interleaved calls of four models, one of them untouched."""
    schemes = [None, "yarn:factor=4", "dynamic_ntk:granularity=1", "dynamic_yarn", "partial_rope:fraction=0.5"]
    alone = []
    for scheme in schemes:
        model = TL()
        alone.append(logits(hf_posenc.patch(model, scheme) if scheme else model))
    config = TL().config
    models = []
    for scheme in schemes:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        models.append(hf_posenc.patch(model, scheme) if scheme else model)
    caches: list = [None] * len(models)
    pieces: list = [[] for _ in models]
    for start, stop in ((0, 40), (40, 60), (60, 61), (61, 96)):
        for index, model in enumerate(models):
            out = model(IDS[:, start:stop], use_cache=True, **{CACHE: caches[index]})
            caches[index] = out[CACHE]
            pieces[index].append(out.logits)
    for index, expected in enumerate(alone):
        assert_close(torch.cat(pieces[index], dim=1), expected, atol=1e-4, rtol=0)


GLOBALS = """
import copy
import torch, transformers
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers import modeling_rope_utils, modeling_utils, cache_utils, masking_utils
from transformers.models.llama import modeling_llama
from transformers.models.gemma3 import modeling_gemma3
from transformers.integrations import sdpa_attention

SPACES = [modeling_llama, modeling_gemma3, modeling_rope_utils, modeling_utils, cache_utils, masking_utils]
SPACES += [sdpa_attention]
SPACES += [value for space in list(SPACES) for value in vars(space).values() if isinstance(value, type)]
SPACES += [torch.nn.Module, torch.nn.functional]

def snapshot():
    found = {}
    for space in SPACES:
        for name, value in list(vars(space).items()):
            if name not in ("_abc_impl", "__warningregistry__"):
                found[str(space), name] = id(value)
    for table in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping,
                  modeling_rope_utils.ROPE_INIT_FUNCTIONS):
        for name, value in table.items():
            found[id(table), name] = id(value)
    return found

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, max_position_embeddings=16)
ids = torch.arange(3, 40)[None]
# transformers itself adds some attributes on first use.
copy.deepcopy(LlamaForCausalLM(config)).generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
before = snapshot()
import hf_posenc
for method in ("yarn:factor=4", "dynamic_ntk", "partial_rope:fraction=0.5"):
    model = LlamaForCausalLM(config)
    hf_posenc.patch(model, method)
    model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    model(ids, labels=ids).loss.backward()
    hf_posenc.unpatch(model)
after = snapshot()
changed = {key for key in before if after.get(key) != before[key]}
added = {key[1] for key in after.keys() - before.keys()}
print(sorted(map(str, changed)), sorted(added))
"""


def test_nothing_of_transformers_is_rebound():
    """In a process of its own, so that the import of hf_posenc is seen too."""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GLOBALS],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout
    changed, added = (eval(part) for part in out.strip().replace("] [", "]|[").split("|"))
    assert changed == []
    assert [name for name in added if not name.startswith("hf_posenc")] == []
    assert "hf_posenc" in added


def test_the_journal_goes_back_last_in_first_out():
    """An attribute that was set twice, a child swapped twice and one that was not there; then all of it again."""
    owner = nn.Module()
    owner.child, owner.number = nn.Linear(1, 1), 1
    first, children = owner.child, [nn.Linear(1, 1), nn.Linear(1, 1)]
    journal = Journal()
    for turn in range(2):
        journal.set(owner, "number", turn + 2)
        journal.set(owner, "absent", turn)
        journal.swap(owner, "child", children[turn])
    journal.forget(owner, "number")
    for _ in range(2):
        assert (owner.absent, owner.child) == (1, children[1])
        assert not hasattr(owner, "number")
        journal.revert()
        assert (owner.number, owner.child) == (1, first)
        assert not hasattr(owner, "absent")
        journal.replay()
    journal.rollback(1)
    assert (owner.number, owner.child) == (2, first)


# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("family", ["llama", "nemotron", "gemma3_text"])
def test_deep_copies_are_independent(family, method):
    model = tiny_model(family)
    stock = logits(model)
    patched = logits(hf_posenc.patch(model, method))
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), patched)
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model), stock)
    assert torch.equal(logits(twin), patched)
    assert hf_posenc.current(model) is None
    hf_posenc.patch(model, "pi:factor=2")
    assert torch.equal(logits(twin), patched)
    third = copy.deepcopy(twin)
    hf_posenc.unpatch(twin)
    assert torch.equal(logits(twin), stock)
    assert torch.equal(logits(third), patched)
    assert not any("_hf_posenc" in name for module in twin.modules() for name in vars(module))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in twin.modules())


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("family", ["llama", "nemotron", "gemma3_text"])
def test_pickles(family, method):
    model = tiny_model(family)
    stock = logits(model)
    patched = logits(hf_posenc.patch(model, method))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(loaded), patched)
        assert hf_posenc.current(loaded) == hf_posenc.current(model)
        hf_posenc.unpatch(loaded)
        assert torch.equal(logits(loaded), stock)
        assert torch.equal(logits(hf_posenc.patch(loaded, method)), patched)
    assert torch.equal(logits(model), patched)


# --- the context manager ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [None, *KINDS])
@pytest.mark.parametrize("inner", KINDS)
def test_patched_comes_back(outer, inner):
    model = TL()
    if outer:
        hf_posenc.patch(model, outer)
    before, expected, method = anatomy(model, configs=bool(outer)), logits(model), hf_posenc.current(model)
    other = logits(hf_posenc.patch(TL(), inner))
    with hf_posenc.patched(model, inner) as same:
        assert same is model
        assert torch.equal(logits(model), other)
        with hf_posenc.patched(model, "pi", factor=3):
            assert str(hf_posenc.current(model)) == "pi:factor=3"
        assert torch.equal(logits(model), other)
    assert torch.equal(logits(model), expected)
    assert hf_posenc.current(model) is method
    assert_same_anatomy(anatomy(model, configs=bool(outer)), before)
    with pytest.raises(ZeroDivisionError), hf_posenc.patched(model, inner):
        raise ZeroDivisionError
    assert torch.equal(logits(model), expected)
    with hf_posenc.patched(model, inner):
        hf_posenc.unpatch(model)
    assert torch.equal(logits(model), expected)
    with hf_posenc.patched(model, inner):
        hf_posenc.patch(model, "ntk:factor=2")
    assert torch.equal(logits(model), expected)
    assert hf_posenc.current(model) is method
    if outer:
        hf_posenc.unpatch(model)
    assert torch.equal(logits(model), logits(TL()))


# --- failures leave no trace -----------------------------------------------------------------------------------------

REFUSED = [
    ("yarn", {"factor": 0.5}, ValueError, "factor"),
    ("yarn", {"target_length": 32}, ValueError, "32.*64"),
    ("longrope", {"short_factor": [1.0], "long_factor": [1.0]}, ValueError, "8 pairs"),
    ("partial_rope", {"fraction": 0.01}, ValueError, "fraction"),
    ("nothing", {}, ValueError, "Unknown method"),
]


@pytest.mark.parametrize("outer", [None, *KINDS])
@pytest.mark.parametrize(("method", "parameters", "error", "text"), REFUSED)
def test_a_refusal_changes_nothing(outer, method, parameters, error, text):
    model = TL()
    if outer:
        hf_posenc.patch(model, outer)
    before, expected, in_force = anatomy(model), logits(model), hf_posenc.current(model)
    with pytest.raises(error, match=text):
        hf_posenc.patch(model, method, **parameters)
    with pytest.raises(error, match=text), hf_posenc.patched(model, method, **parameters):
        pass
    assert_same_anatomy(anatomy(model), before)
    assert torch.equal(logits(model), expected)
    assert hf_posenc.current(model) is in_force


@pytest.mark.parametrize("outer", [None, *KINDS])
@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize(
    "place", ["api.read_ropes", "rotary._install", "twin.align_settings", "attention.install", "persistence.record"]
)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_failure_half_way_changes_nothing(monkeypatch, family, place, inner, outer):
    """Whatever breaks, an interrupt included, the model is as before."""
    model = tiny_model(family)
    stock = logits(model)
    if outer:
        hf_posenc.patch(model, outer)
    before, expected, in_force = anatomy(model), logits(model), hf_posenc.current(model)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(f"hf_posenc.{place}", interrupt)
        if place != "attention.install" or inner.startswith("dynamic"):
            with pytest.raises(KeyboardInterrupt):
                hf_posenc.patch(model, inner)
    assert_same_anatomy(anatomy(model), before)
    assert torch.equal(logits(model), expected)
    assert hf_posenc.current(model) is in_force
    if outer:
        hf_posenc.unpatch(model)
    assert torch.equal(logits(model), stock)


def test_a_wrong_tokenizer_changes_nothing():
    model = TL()
    before = anatomy(model)
    with pytest.raises((TypeError, AttributeError)):
        hf_posenc.patch(model, "yarn", factor=4, tokenizer="meta-llama")
    assert_same_anatomy(anatomy(model), before)


# --- backends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", KINDS)
def test_a_backend_chosen_after_the_patch_keeps_the_scheme(method):
    model = TL()
    stock = logits(model)
    expected = logits(hf_posenc.patch(model, method))
    model.set_attn_implementation("eager")
    assert_close(logits(model), expected, atol=1e-4, rtol=0)
    assert model(IDS, output_attentions=True).attentions[0].shape == (2, 4, 96, 96)
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model), expected)
    model.set_attn_implementation("eager")
    hf_posenc.unpatch(model)
    assert model.config._attn_implementation == "eager"
    assert_close(logits(model), stock, atol=1e-4, rtol=0)
    assert model(IDS, output_attentions=True).attentions[0].shape == (2, 4, 96, 96)


@pytest.mark.parametrize("how", ["refused", "patched", "replaced"])
@pytest.mark.parametrize("run", [False, True])
def test_a_backend_chosen_after_the_patch_survives_more_patching(how, run):
    """The choice is neither lost nor mixed with masks of the former backend when a scheme comes back."""
    model = TL()
    expected = logits(hf_posenc.patch(model, "dynamic_ntk"))
    model.set_attn_implementation("eager")
    if run:
        logits(model)
    if how == "refused":
        with pytest.raises(ValueError, match="pairs"):
            hf_posenc.patch(model, "longrope", short_factor=[1.0], long_factor=[1.0])
    elif how == "patched":
        with hf_posenc.patched(model, "dynamic_yarn"):
            logits(model)
    else:
        hf_posenc.patch(hf_posenc.patch(model, "yarn:factor=2"), "dynamic_ntk")
    assert_close(logits(model), expected, atol=1e-4, rtol=0)
    assert model(IDS, output_attentions=True).attentions[0].shape == (2, 4, 96, 96)
    mask = torch.ones(2, 96, dtype=torch.long)
    mask[0, :30] = 0
    sdpa = hf_posenc.patch(TL(), "dynamic_ntk")(IDS, attention_mask=mask).logits
    assert_close(model(IDS, attention_mask=mask).logits[:, 30:], sdpa[:, 30:], atol=1e-4, rtol=0)


def test_a_backend_that_cannot_carry_the_scheme():
    model = hf_posenc.patch(TL(), "dynamic_ntk")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(hf_posenc.UnsupportedMethodError, match=r"flex_attention.*set_attn_implementation\('sdpa'\)"):
        logits(model)
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model), logits(hf_posenc.patch(TL(), "dynamic_ntk")))
    before = TL(attn_implementation="flex_attention")
    with pytest.raises(hf_posenc.UnsupportedMethodError, match="flex_attention"):
        hf_posenc.patch(before, "dynamic_ntk")
    hf_posenc.patch(before, "yarn:factor=2")


# --- wrong arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pi", "ntk", "ntk_by_parts", "yarn", "llama3", "dynamic_ntk"])
@pytest.mark.parametrize(
    ("factor", "error"),
    [(0, ValueError), (-2, ValueError), (0.99, ValueError), (math.nan, ValueError), (math.inf, ValueError),
     ("4", TypeError), (True, TypeError), ([4], TypeError)],
)  # fmt: skip
def test_wrong_factors(method, factor, error):
    with pytest.raises(error, match="factor"):
        hf_posenc.patch(TL(), method, factor=factor)


@pytest.mark.parametrize(
    ("method", "parameters", "error", "text"),
    [
        ("yarn", {}, ValueError, "factor.*target_length"),
        ("yarn", {"factor": 2, "target_length": 128}, ValueError, "either"),
        ("yarn", {"target_length": 100.5}, TypeError, "whole number"),
        ("yarn", {"target_length": -5}, ValueError, "at least 1"),
        ("yarn", {"factor": 2, "beta_fast": 1, "beta_slow": 2}, ValueError, "beta_fast"),
        ("yarn", {"factor": 2, "beta_slow": 0}, ValueError, "beta_slow"),
        ("yarn", {"factor": 2, "truncate": 1}, TypeError, "truncate"),
        ("yarn", {"factor": 2, "attention_factor": 0}, ValueError, "attention_factor"),
        ("yarn", {"factor": 2, "window": 5}, ValueError, "Unknown parameter.*window.*Available.*beta_fast"),
        ("yarn", {"fator": 2}, ValueError, "Did you mean 'factor'"),
        ("abf", {}, ValueError, "rope_theta"),
        ("abf", {"rope_theta": 1}, ValueError, "rope_theta"),
        ("llama3", {"factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}, ValueError, "high_freq_factor"),
        ("dynamic_ntk", {"granularity": 0}, ValueError, "granularity"),
        ("dynamic_ntk", {"granularity": 2.5}, TypeError, "granularity"),
        ("dynamic_yarn", {"granularity": -1}, ValueError, "granularity"),
        ("longrope", {"switch": "never"}, ValueError, "switch"),
        ("longrope", {"short_factor": "1,2"}, TypeError, "short_factor"),
        ("longrope", {"long_factor": [1.0, math.nan]}, ValueError, "long_factor"),
        ("longrope", {}, ValueError, "short_factor"),
        ("yarm", {"factor": 2}, ValueError, "Did you mean 'yarn'"),
        ("YaRN", {"factor": 2}, ValueError, "Did you mean 'yarn'"),
        ("linear", {"factor": 2}, ValueError, "Did you mean 'pi'"),
        ("zzz", {}, ValueError, "Available: abf, alibi, dca"),
        (hf_posenc.YaRN(factor=2), {"factor": 4}, TypeError, "already built"),
        (4, {}, TypeError, "yarn:factor=4"),
        (None, {}, TypeError, "yarn:factor=4"),
        (dict, {}, TypeError, "yarn:factor=4"),
    ],
)  # fmt: skip
def test_wrong_arguments_say_what_is_right(method, parameters, error, text):
    model = TL()
    with pytest.raises(error, match=text):
        hf_posenc.patch(model, method, **parameters)
    assert hf_posenc.current(model) is None


@pytest.mark.parametrize(
    "given", ["meta-llama", None, TL().config, {}, torch.zeros(2), nn.Linear(2, 2), nn.ModuleList()]
)
def test_what_is_no_model(given):
    for call in (lambda: hf_posenc.patch(given, "yarn", factor=2), lambda: hf_posenc.unpatch(given),
                 lambda: hf_posenc.current(given), lambda: hf_posenc.restore(given)):  # fmt: skip
        with pytest.raises(TypeError, match="transformers model"):
            call()


def t5():
    return T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=128))


@pytest.mark.parametrize(
    ("build", "method", "alternatives"),
    [
        (lambda: tiny_model("falcon"), "dynamic_ntk", ["yarn", "pi"]),
        (lambda: tiny_model("hunyuan_v1_dense"), "dynamic_yarn", ["yarn", "pi"]),
        (lambda: tiny_model("gpt2"), "yarn:factor=2", []),
        (lambda: tiny_model("bloom"), "dynamic_ntk", []),
        (lambda: tiny_model("opt"), "pi:factor=2", []),
        (t5, "yarn:factor=2", []),
    ],
    ids=["falcon", "hunyuan", "gpt2", "bloom", "opt", "t5"],
)
def test_a_method_that_a_family_cannot_take(build, method, alternatives):
    """Both are named, with what would fit; the model still works."""
    model = build().eval()
    before = anatomy(model)
    with pytest.raises(hf_posenc.UnsupportedMethodError) as error:
        hf_posenc.patch(model, method)
    assert_same_anatomy(anatomy(model), before)
    text = str(error.value)
    assert method.partition(":")[0] in text
    assert type(model).__name__ in text
    possible = hf_posenc.methods(model)
    assert set(alternatives) <= set(possible)
    assert method.partition(":")[0] not in possible
    for name in alternatives:
        assert name in text
        hf_posenc.unpatch(hf_posenc.patch(model, name, factor=2))


def test_methods_lists_what_a_model_can_take():
    everything = hf_posenc.methods()
    assert everything == sorted(everything)
    assert {"abf", "dynamic_ntk", "dynamic_yarn", "llama3", "longrope", "ntk", "ntk_by_parts", "pi", "yarn"} <= set(
        everything
    )
    assert "dynamic_ntk" in hf_posenc.methods(TL())
    model = tiny_model("falcon")
    assert "yarn" in hf_posenc.methods(model)
    assert "dynamic_ntk" not in hf_posenc.methods(model)


# --- wrappers --------------------------------------------------------------------------------------------------------


def adapted(model, kind: str = "lora", seed: int = 11):
    pytest.importorskip("peft")
    from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

    torch.manual_seed(seed)
    config = {
        "lora": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        "prefix": PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        "prompt": PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    }[kind]
    return get_peft_model(model, config).eval()


@pytest.mark.parametrize("method", KINDS)
def test_peft_from_outside_and_inside(method):
    """The wrapper and the model inside show the same scheme, whichever is patched or unpatched."""
    wrapped = adapted(TL())
    stock = logits(wrapped)
    hf_posenc.patch(wrapped, method)
    assert hf_posenc.current(wrapped) is hf_posenc.current(wrapped.get_base_model()) is not None
    expected = logits(wrapped)
    assert torch.equal(logits(adapted(hf_posenc.patch(TL(), method))), expected)
    hf_posenc.unpatch(wrapped.get_base_model())
    assert torch.equal(logits(wrapped), stock)
    hf_posenc.patch(wrapped.get_base_model(), method)
    assert torch.equal(logits(wrapped), expected)
    hf_posenc.unpatch(wrapped)
    assert torch.equal(logits(wrapped), stock)


def test_prefix_tuning_is_refused():
    """Its learned keys stand in the cache as if turned already: fine for tables, refused inside attention."""
    wrapped = adapted(TL(), "prefix")
    hf_posenc.patch(wrapped, "yarn:factor=4")
    before = hf_posenc.current(wrapped)
    for model in (wrapped, adapted(TL(), "prefix")):
        with pytest.raises(hf_posenc.UnsupportedMethodError, match=r"dynamic_ntk.*prefix tuning"):
            hf_posenc.patch(model, "dynamic_ntk")
    assert hf_posenc.current(wrapped) is before


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_prefix_tuning():
    """Put on after the patch: refused as long as a method acts in attention."""
    model = TL()
    for method in ("dynamic_ntk", "partial_rope:fraction=0.5"):
        hf_posenc.patch(model, method)
        with pytest.raises(hf_posenc.UnsupportedMethodError, match=f"{method}.*prefix tuning"):
            adapted(model, "prefix")
    hf_posenc.patch(model, "pi:factor=2")
    assert torch.equal(
        logits(adapted(model, "prefix")), logits(hf_posenc.patch(adapted(TL(), "prefix"), "pi:factor=2"))
    )
    hf_posenc.unpatch(model)
    assert torch.equal(logits(adapted(model, "prefix")), logits(adapted(TL(), "prefix")))


def test_prompt_tuning():
    first, second = adapted(hf_posenc.patch(TL(), "dynamic_ntk"), "prompt"), adapted(TL(), "prompt")
    hf_posenc.patch(second, "dynamic_ntk")
    assert torch.equal(logits(first), logits(second))
    assert (logits(first) - logits(adapted(TL(), "prompt"))).abs().max() > 0.1


def test_the_inner_model():
    """Patched through `model.model`, and the whole model afterwards."""
    model = TL()
    stock = logits(model)
    hf_posenc.patch(model, "dynamic_ntk")
    assert hf_posenc.current(model.model) is hf_posenc.current(model)
    with pytest.raises(ValueError, match="unpatch"):
        hf_posenc.patch(model.model, "yarn:factor=2")
    hf_posenc.unpatch(model.model)
    assert torch.equal(logits(model), stock)
    assert hf_posenc.current(model) is None
    inner = TL().model
    expected = inner(IDS).last_hidden_state
    hf_posenc.patch(inner, "dynamic_ntk")
    assert (inner(IDS).last_hidden_state - expected).abs().max() > 0.1
    assert torch.equal(hf_posenc.unpatch(inner)(IDS).last_hidden_state, expected)


def test_attention_that_the_probe_does_not_reach():
    """Attention to images shares the configuration of the text, and stays as it is."""
    model = tiny_model("mllama_text_model")
    for layer in model.model.layers:
        if hasattr(layer, "cross_attn_attn_gate"):
            layer.cross_attn_attn_gate.fill_(1.0)
    images = {
        "cross_attention_states": torch.randn(2, 10, 64),
        "cross_attention_mask": torch.zeros(2, 1, 96, 10),
        "full_text_row_masked_out_mask": torch.ones(2, 1, 96, 1),
    }
    stock = model(IDS, **images).logits
    assert (stock - logits(model)).abs().max() > 0.1
    hf_posenc.patch(model, "dynamic_ntk:granularity=1")
    assert_close(model(IDS, **images).logits[:, :64], stock[:, :64], atol=1e-5, rtol=0)
    assert (model(IDS, **images).logits - stock).abs().max() > 0.1


def test_torch_compile_wrapper_and_module_wrapper():
    for wrap in (lambda model: torch.compile(model, backend="eager"), lambda model: nn.ModuleDict({"model": model})):
        model = TL()
        outside = wrap(model)
        hf_posenc.patch(outside, "dynamic_ntk")
        assert torch.equal(logits(model), logits(hf_posenc.patch(TL(), "dynamic_ntk")))
        hf_posenc.unpatch(outside)
        assert torch.equal(logits(model), logits(TL()))


def test_two_text_models_in_one_module():
    """The first is patched, the other is not touched."""
    both = nn.ModuleList([TL(), TL()])
    stock = logits(both[1])
    hf_posenc.patch(both, "yarn:factor=4")
    assert torch.equal(logits(both[1]), stock)


def test_json_of_the_configuration():
    model = hf_posenc.patch(TL(), "dynamic_ntk:factor=2")
    written = json.loads(model.config.to_json_string())
    assert written["hf_posenc"]["method"] == "dynamic_ntk:factor=2"
    assert written["max_position_embeddings"] == 128
    assert written["attn_implementation"] == "hf_posenc"
    hf_posenc.patch(model, "yarn:factor=2")
    written = json.loads(model.config.to_json_string())
    assert "attn_implementation" not in written
    assert written["rope_parameters"]["rope_type"] == "yarn"
