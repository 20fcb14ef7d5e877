"""What every kind of method promises: undo, isolation, copies, saving, adapters, gradients, and nothing half done."""

import copy
import logging
import pickle
import re
import subprocess
import sys
import threading

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hf_posenc
from hf_posenc import gguf, persistence, twin
from hf_posenc.registry import create

KINDS = ["yarn:factor=4", "ntk:factor=2", "partial_rope:fraction=0.5", "dynamic_ntk:granularity=1", "dynamic_yarn"]
MAPS = [
    "self_extend:group_size=3,window=10", "rerope:window=6", "leaky_rerope:window=7,scale=0.3",
    "dca:chunk_size=12,local_window=4", "string:shift=20,window=3", "logn",
    "self_extend:group_size=2,window=8,logn=True+yarn:factor=2",
]  # fmt: skip
ASIDE = [
    "irope:interval=2", "irope:interval=2,temperature=True,chunk=16+yarn:factor=2", "xpos:scale_base=8", "vo_rope",
    "layers:layers={0:'rerope:window=6+pi:factor=2',1:'nope'}", "layers:layers={0:'alibi'},default='dynamic_yarn'",
]  # fmt: skip
KINDS += [*MAPS, "alibi:interpolate=2", "nope", *ASIDE]
OWN = KINDS[2:]
IDS = tiny.tokens(1, 100)


@torch.no_grad()
def logits(model, ids=IDS):
    return model.eval()(ids, use_cache=False).logits


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_unpatch_leaves_nothing(kind):
    model, plain = tiny.TL(), tiny.TL()
    before, keys = {name: set(vars(module)) for name, module in model.named_modules()}, list(model.state_dict())
    hf_posenc.patch(model, kind)
    assert list(model.state_dict()) == keys
    assert not torch.equal(logits(model), logits(plain))
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model), logits(plain))
    assert model.config.to_dict() == plain.config.to_dict()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules())


def test_a_sibling_from_the_same_config_object_is_untouched(kind):
    config = tiny.TL().config
    torch.manual_seed(0)
    one, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    before, said = logits(other), config.to_dict()
    hf_posenc.patch(one, kind)
    assert torch.equal(logits(other), before) and other.config is config and config.to_dict() == said


def test_copies_and_pickles_are_independent(kind):
    model = hf_posenc.patch(tiny.TL(), kind)
    expected, plain = logits(model), logits(tiny.TL())
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(clone), expected)
        assert torch.equal(logits(hf_posenc.unpatch(clone)), plain)
    assert torch.equal(logits(model), expected)


def test_a_failed_patch_changes_nothing(kind, monkeypatch):
    def fail(*args):
        raise RuntimeError("late")

    for first in (
        None,
        "pi:factor=2",
        "dynamic_yarn",
        "rerope:window=9",
        "dca:chunk_size=30,local_window=9+pi:factor=2",
    ):
        model = tiny.TL()
        if first:
            hf_posenc.patch(model, first)
        before, config = logits(model), model.config
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="late"):
            patched.setattr(persistence, "record", fail)
            hf_posenc.patch(model, kind)
        assert torch.equal(logits(model), before) and model.config is config
        assert str(hf_posenc.current(model)) == str(first)


def test_nested_blocks_come_back_in_order():
    model = tiny.TL()
    plain = logits(model)
    with hf_posenc.patched(model, "pi", factor=2):
        inside = logits(model)
        with hf_posenc.patched(model, "dynamic_ntk"):
            assert str(hf_posenc.current(model)) == "dynamic_ntk"
        assert str(hf_posenc.current(model)) == "pi:factor=2" and torch.equal(logits(model), inside)
    assert hf_posenc.current(model) is None and torch.equal(logits(model), plain)


def test_transformers_itself_is_untouched(kind):
    from transformers.models.llama import modeling_llama

    before = [
        dict(vars(modeling_llama)),
        *(dict(vars(c)) for c in vars(modeling_llama).values() if isinstance(c, type)),
    ]
    logits(hf_posenc.patch(tiny.TL(), kind))
    after = [
        dict(vars(modeling_llama)),
        *(dict(vars(c)) for c in vars(modeling_llama).values() if isinstance(c, type)),
    ]
    cached = "_can_set_attn_implementation_cached_value"
    for was, now in zip(before, after, strict=True):
        assert {k: v for k, v in was.items() if k != cached} == {k: v for k, v in now.items() if k != cached}


def test_saved_and_loaded(kind, tmp_path):
    model = hf_posenc.patch(tiny.TL(), kind)
    model.save_pretrained(tmp_path)
    again = hf_posenc.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model)) and hf_posenc.current(again) == hf_posenc.current(model)
    assert torch.equal(logits(hf_posenc.unpatch(again)), logits(tiny.TL()))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    if kind in OWN:
        with pytest.raises(RuntimeError, match="restore"):
            logits(plain)
    else:
        assert torch.equal(logits(plain), logits(model))
    assert torch.equal(logits(hf_posenc.restore(plain)), logits(model))


def test_a_scheme_only_the_configuration_knows_is_replaced(tmp_path):
    hf_posenc.patch(tiny.TL(), "ntk:factor=2").save_pretrained(tmp_path)
    loaded = hf_posenc.patch(AutoModelForCausalLM.from_pretrained(tmp_path), "ntk:factor=4")
    assert torch.equal(logits(loaded), logits(hf_posenc.patch(tiny.TL(), "ntk:factor=4")))
    assert torch.equal(logits(hf_posenc.unpatch(loaded)), logits(tiny.TL()))


@pytest.mark.parametrize("method", ["dynamic_ntk", MAPS[1], MAPS[-1], ASIDE[0]])
def test_a_plain_load_of_an_own_scheme_stops(method, tmp_path):
    hf_posenc.patch(tiny.TL(), method).save_pretrained(tmp_path)
    code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode and "hf_posenc" in run.stderr


@pytest.mark.parametrize("kind", ["yarn:factor=4", "dynamic_ntk:granularity=1", MAPS[0], MAPS[-1], *ASIDE[::2]])
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_adapters_bring_their_scheme(kind, patch_first, tmp_path):
    peft = pytest.importorskip("peft")
    tiny.TL().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    if patch_first:
        model = peft.get_peft_model(hf_posenc.patch(base, kind), config)
    else:
        model = hf_posenc.patch(peft.get_peft_model(base, config), kind)
    expected = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(hf_posenc.patch(tiny.TL(), kind)))
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "hf_posenc.json").exists()
    again = hf_posenc.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(again), expected, atol=1e-6, rtol=0)
    assert str(hf_posenc.current(again)) == kind
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(hf_posenc.from_pretrained(tmp_path / "merged")), expected, atol=1e-4, rtol=0)
    hf_posenc.patch(tiny.TL(max_position_embeddings=128), "pi:factor=2").save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="base model it was trained on"):
        hf_posenc.from_pretrained(tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["llama", "nemotron"])
def test_gradients_with_checkpointing(model_type):
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = hf_posenc.patch(tiny.tiny_model(model_type), "dynamic_ntk:granularity=8").train()
        if options:
            model.gradient_checkpointing_enable(options)
        first, second = tiny.tokens(1, 96, 1), tiny.tokens(2, 80, 2)
        # Two forwards before one backward: a recomputation must not see the other's positions.
        (model(first, labels=first).loss + model(second, labels=second).loss).backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() <= 1e-5 * gradients[0].norm()


def test_a_cast_before_or_after_is_the_same(kind):
    before = hf_posenc.patch(tiny.TL().to(torch.bfloat16), kind)
    after = hf_posenc.patch(tiny.TL(), kind).to(torch.bfloat16)
    assert torch.equal(logits(before), logits(after))


@pytest.mark.parametrize("kind", OWN[1:])
def test_a_backend_chosen_later_keeps_the_scheme(kind):
    model = hf_posenc.patch(tiny.TL(), kind)
    expected = logits(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=0)
    assert model(IDS, output_attentions=True).attentions[0].shape == (1, 4, 100, 100)


@pytest.mark.parametrize("kind", ["dynamic_ntk:granularity=8", MAPS[0], MAPS[3], MAPS[-1]])
def test_a_given_mask_keeps_every_key_it_shows(kind):
    """A prefix that sees itself in both directions crosses the segments of a method inside attention."""
    mask = torch.full((100, 100), torch.finfo(torch.float32).min).triu(1)
    mask[:90, :90] = 0
    found = []
    for implementation in ("sdpa", "eager"):
        model = tiny.TL()
        model.set_attn_implementation(implementation)
        hf_posenc.patch(model, kind)
        with torch.no_grad():
            found.append(model(IDS, attention_mask=mask[None, None], use_cache=False).logits)
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


def test_a_forward_in_another_thread_is_not_the_probes():
    model = hf_posenc.patch(tiny.TL(), "dynamic_ntk")
    expected, inside, answers = logits(model), threading.Event(), []

    def forward():
        inside.wait(10)
        answers.append(logits(model))

    class Gate(twin.Probe):
        """Lets the other thread run while this one probes."""

        def attend(self, *args, **kwargs):
            inside.set()
            other.join(10)
            return super().attend(*args, **kwargs)

    other = threading.Thread(target=forward)
    other.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(twin, "Probe", Gate)
        hf_posenc.patch(tiny.TL(), "dynamic_ntk")
    assert len(answers) == 1 and torch.equal(answers[0], expected)


def test_a_gguf_model_is_made_plain(tmp_path):
    model = tiny.TL()
    with pytest.raises(ValueError, match="not loaded from a GGUF"):
        gguf.to_plain(model)
    model.is_quantized, model.quantization_method, model.hf_quantizer = True, "gguf", None
    model.config.quantization_config = {"quant_method": "gguf"}
    gguf.to_plain(model).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(plain), logits(tiny.TL())) and not hasattr(plain.config, "quantization_config")
    model.quantization_method = "gguf"
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="still packed"):
        gguf.to_plain(model)


def test_a_shift_beyond_the_trained_length_is_told_and_reaches_no_farther(caplog):
    model = hf_posenc.patch(tiny.TL(), "string:shift=100,window=3")
    assert "shift=100 of 'string' reaches distances beyond the 64 tokens" in caplog.text
    assert model.config.max_position_embeddings == 64


WRONG = {
    "yarn:factor=0.5": "at least 1",
    "yarn:factor=-1": "at least 1",
    "yarn:factor=abc": "is a number",
    "yarn": "factor",
    "yarm:factor=2": "Did you mean 'yarn'",
    "linear:factor=2": "Did you mean 'pi'",
    "yarn:factr=2": "Did you mean 'factor'",
    "yarn:factor=2,target_length=256": "either",
    "pi:target_length=10": "below the 64",
    "dynamic_ntk:granularity=0": "at least 1",
    "partial_rope:fraction=0": "above 0",
    "longrope": "short_factor",
    "longrope:short_factor=[1],long_factor=[1]": "8 pairs",
    "abf:rope_theta=1": "above 1",
    "yarn:factor=2+pi:factor=2": "give one",
    "self_extend": "target_length",
    "self_extend:target_length=100,window=64": "no far distance",
    "dca:chunk_size=60,local_window=5": "beyond the 64",
    "rerope:window=6+dca:chunk_size=6,local_window=4": "give one",
    "rerope:window=6+dynamic_yarn": "give one",
    "dca:chunk_size=60,local_window=5+pi:target_length=10": "below the 64",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_say_what_to_do(text, caplog):
    model = tiny.TL()
    with pytest.raises((ValueError, TypeError), match=WRONG[text].replace("[", r"\[")):
        hf_posenc.patch(model, text)
    assert hf_posenc.current(model) is None
    assert not caplog.records


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "4", None])
def test_wrong_factors(value):
    with pytest.raises((ValueError, TypeError)):
        hf_posenc.patch(tiny.TL(), "yarn", factor=value)


@pytest.mark.parametrize("method", ["dynamic_ntk", "rerope:window=6", "rerope:window=6+yarn:factor=2"])
@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "falcon", "hunyuan_v1_dense"])
def test_a_family_that_cannot_take_a_method_is_told_what_it_can(model_type, method):
    name = re.escape(create(method).name)
    with pytest.raises(hf_posenc.UnsupportedMethodError, match=rf"'{name}' cannot be put on .*(It can take|None of)"):
        hf_posenc.patch(tiny.tiny_model(model_type), method)


@pytest.mark.parametrize(
    ("method", "length", "capacity"),
    [
        ("self_extend:group_size=2,window=32", 96, 96),
        ("self_extend:group_size=2,window=32+yarn:factor=2", 224, 224),
        ("leaky_rerope:window=32,scale=0.5+pi:factor=2", 224, 224),
        ("rerope:window=6+yarn:factor=2", 128, None),
        ("dca:chunk_size=12,local_window=4+pi:factor=2", 128, None),
        ("logn+yarn:factor=2", 128, None),
        ("rerope:window=6", 64, None),
        ("string:shift=20,window=3", 81, 81),
    ],
)
def test_a_capacity_is_that_of_the_method(method, length, capacity, caplog, monkeypatch):
    """A stack counts from the length its base reaches, and is without limit where its position map is."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = hf_posenc.patch(tiny.TL(), method)
    assert model.config.max_position_embeddings == length
    logits(model, tiny.tokens(1, capacity or 260))
    assert not caplog.records  # nor does transformers speak of a factor that does not fit the length
    if capacity:
        logits(model, tiny.tokens(1, capacity + 1))
        (record,) = caplog.records
        assert f"reads {capacity} tokens" in record.getMessage()


def test_not_a_model():
    with pytest.raises(TypeError):
        hf_posenc.patch(torch.nn.Linear(2, 2), "yarn", factor=2)
    with pytest.raises(TypeError):
        hf_posenc.patch("meta-llama/Llama-3.2-1B", "yarn", factor=2)
    with pytest.raises(ValueError, match="No scheme"):
        hf_posenc.unpatch(tiny.TL())
