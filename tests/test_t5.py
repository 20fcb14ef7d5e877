"""T5 and its kin: every method against the double loop, however a text is read, and what stays of it on disk."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import reference
import torch
from reading import CACHE, padded
from torch.testing import assert_close
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    LongT5Config,
    LongT5ForConditionalGeneration,
    StaticCache,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
)

import hf_posenc
from hf_posenc.families import locate
from hf_posenc.registry import create

BUCKETS, LONGEST, LENGTH = 8, 20, 64
BIASES = ["alibi", "alibi:interpolate=4", "alibi:learned_slopes=true", "toeplitz:max_distance=9"]
TABLES = [
    "t5_bias:num_buckets=8,max_distance=40",
    "t5_bias:num_buckets=8,max_distance=20,interpolate=3",
    "t5_bias:num_buckets=16,max_distance=40",
    "t5_bias:num_buckets=4,max_distance=12,interpolate=2",
]
TURNING = ["rope", "rope+yarn:factor=4", "logn+rope", "logn+rope+yarn:factor=2"]
MAPS = {
    "self_extend:group_size=3,window=10+rope": lambda i, j: reference.self_extend_distance(i, j, 10, 3),
    "rerope:window=8+rope": lambda i, j: reference.rerope_distance(i, j, 8),
    "leaky_rerope:window=7,scale=0.3+rope": lambda i, j: reference.leaky_rerope_distance(i, j, 7, 0.3),
    "string:shift=20,window=3+rope": lambda i, j: reference.string_distance(i, j, 20, 3),
}
METHODS = [*BIASES, *TABLES, "nope", *TURNING, *MAPS]
FEW = ["alibi", "toeplitz:max_distance=9", TABLES[3], "nope", "rope", "logn+rope+yarn:factor=2", next(iter(MAPS))]
LEARNED = ["alibi:learned_slopes=true", "toeplitz:max_distance=9"]
PLAIN = [TABLES[0], TABLES[2]]
SOURCE, TARGET = (torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(s)) for s in (1, 2))
CUTS = [24, 9] + [1] * 7
# Earlier releases show the queries of its decoder later tokens where there is no mask.
UMT5 = pytest.param("umt5", marks=pytest.mark.skipif(not hasattr(UMT5Config(), "scale_decoder_outputs"), reason="old"))


def tiny(kind: str = "t5", cls=None, heads: int = 3, **more):
    """A model whose logits depend on positions."""
    sizes = {
        "vocab_size": 128, "d_model": 48, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": heads, "relative_attention_num_buckets": BUCKETS, "relative_attention_max_distance": LONGEST,
        "n_positions": LENGTH, "eos_token_id": None, "decoder_start_token_id": 0, "dropout_rate": 0.0,
    }  # fmt: skip
    if kind == "switch_transformers":
        sizes |= {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        sizes |= {"expert_capacity": 64}
    config = CONFIG_MAPPING[kind](**sizes | more)
    model = (cls or AutoModelForSeq2SeqLM._model_mapping[type(config)])(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 2.0 if "relative_attention_bias" in name else 0.2, generator=generator)
    return model


def patched(model, method):
    """With learned parameters somewhere, as after training."""
    hf_posenc.patch(model, method)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "posenc" in name:
            parameter.data *= 1 + torch.rand(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def logits(model, source=SOURCE, target=TARGET, **more):
    return model(input_ids=source, decoder_input_ids=target, use_cache=False, **more).logits


@torch.no_grad()
def stepwise(model, cache=None, source=SOURCE, target=TARGET, mask=None):
    encoded, start, pieces = model.get_encoder()(source), 0, []
    for count in CUTS:
        stop = start + count
        more = {} if mask is None else {"decoder_attention_mask": mask[:, :stop]}
        out = model(
            encoder_outputs=encoded, decoder_input_ids=target[:, start:stop], use_cache=True, **{CACHE: cache}, **more
        )
        cache, start = out[CACHE], stop
        pieces.append(out.logits)
    return torch.cat(pieces, dim=1)


# --- the double loop -------------------------------------------------------------------------------------------------


def table_of(model, decoder: bool, layer: int) -> torch.Tensor:
    weights = model.state_dict()
    stack = "decoder" if decoder else "encoder"
    own = f"{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
    return weights.get(own, weights[own.replace(f"block.{layer}", "block.0")]).double()


def buckets_bias(model, buckets: int = BUCKETS, longest: int = LONGEST, interpolate: float = 1.0):
    """The trained tables of an unpatched ``model``, resized by the rule where their number changes."""

    def side(decoder, layer, head, later):
        trained = table_of(model, decoder, layer)[:, head].tolist()
        if not decoder:
            trained = trained[len(trained) // 2 :] if later else trained[: len(trained) // 2]
        wanted = buckets if decoder else buckets // 2
        return trained if len(trained) == wanted else reference.t5_resized(trained, LONGEST, wanted, longest)

    made: dict = {}

    def bias(decoder, layer, head, i, j):
        later = not decoder and j > i
        name = (decoder, layer, head, later)
        if name not in made:
            made[name] = side(*name)
        count = buckets if decoder else buckets // 2
        return made[name][reference.t5_bucket(abs(i - j), count, longest, True, interpolate)]

    return bias


def alibi_bias(heads, factor=1.0):
    slopes = reference.alibi_slopes(heads)
    return lambda decoder, layer, head, i, j: -slopes[head] / factor * abs(i - j)


def learned_bias(model):
    """From what stands on the ``posenc`` modules."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def bias(decoder, layer, head, i, j):
        base = f"{'decoder' if decoder else 'encoder'}.block.{layer}.layer.0.SelfAttention.posenc"
        if f"{base}.slopes" in weights:
            return -float(weights[f"{base}.slopes"][head]) * abs(i - j)
        clipped = max(-8, min(8, i - j))
        return float(weights[f"{base}.table"][head, clipped if decoder else clipped + 8])

    return bias


def expected(plain, model, method):
    """Of ``model``, whose weights are those of ``plain``, under ``method``."""
    name = method.partition(":")[0]
    if name == "t5_bias":
        chosen = create(method)
        rule = {"bias": buckets_bias(plain, chosen.num_buckets, chosen.max_distance, chosen.interpolate)}
    elif method in LEARNED:
        rule = {"bias": learned_bias(model)}
    elif name == "alibi":
        rule = {"bias": alibi_bias(plain.config.num_heads, 4.0 if "interpolate" in method else 1.0)}
    elif name == "nope":
        rule = {}
    elif method in MAPS:
        rule = {"angle": reference.by_distance(reference.rope(16), reference.both_ways(MAPS[method]))}
    else:
        factor = float(method.partition("factor=")[2] or 1)
        turning = reference.yarn(16, 10000.0, factor, LENGTH) if factor > 1 else reference.rope(16)
        reads, gain = factor * LENGTH, reference.attention_factor(factor) ** 2
        level = (lambda i: max(1.0, math.log(i + 1) / math.log(reads))) if name == "logn" else (lambda i: 1.0)
        rule = {"angle": reference.by_frequencies(turning), "scale": lambda i: gain * level(i)}
    return reference.t5_logits(plain, SOURCE[0], TARGET[0], **rule)


@pytest.mark.parametrize("method", METHODS)
def test_the_double_loop(method):
    plain = tiny()
    model = patched(tiny(), method)
    assert_close(logits(model)[0].double(), expected(plain, model, method), atol=1e-4, rtol=0)
    assert (logits(model) - logits(plain)).abs().max() > 1e-2 or method == "t5_bias:num_buckets=8,max_distance=20"


@pytest.mark.parametrize(
    ("kind", "heads", "more"),
    [
        ("mt5", 6, {}),
        pytest.param("umt5", 8, {}, marks=UMT5.marks),
        ("t5", 12, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ],
)
@pytest.mark.parametrize("method", [None, "alibi", TABLES[2], "rope+yarn:factor=4"])
def test_the_double_loop_of_its_kin(kind, heads, more, method):
    plain = tiny(kind, heads=heads, **more)
    model = tiny(kind, heads=heads, **more)
    if method:
        patched(model, method)
    reference_method = method or "t5_bias:num_buckets=8,max_distance=20"
    # Those that do not scale down what the decoder gives have logits 7 times as large.
    unit = 1.0 if kind == "umt5" else plain.config.d_model**0.5
    found = logits(model)[0].double() / unit
    assert_close(found, expected(plain, model, reference_method) / unit, atol=1e-4, rtol=0)


# --- however it is read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_one_pass_is_pieces_is_a_static_cache(method):
    model = patched(tiny(), method)
    whole = logits(model)
    assert_close(stepwise(model), whole, atol=1e-4, rtol=0)
    static = EncoderDecoderCache(StaticCache(model.config, max_cache_len=48), DynamicCache())
    assert_close(stepwise(model, static), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [UMT5, "switch_transformers"])
@pytest.mark.parametrize("method", FEW)
def test_kin_in_pieces(kind, method):
    model = patched(tiny(kind), method)
    assert_close(stepwise(model), logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", METHODS)
def test_padded_rows_are_rows_alone(method, side):
    model = patched(tiny(), method)
    sources, mask = padded([SOURCE[0], SOURCE[0, :23]], side)
    targets, target_mask = padded([TARGET[0], TARGET[0, 5:30]], side)
    both = logits(model, sources, targets, attention_mask=mask, decoder_attention_mask=target_mask)
    for row, (source, target) in enumerate([(SOURCE, TARGET), (SOURCE[:, :23], TARGET[:, 5:30])]):
        alone = logits(model, source, target)
        assert_close(both[row][target_mask[row].bool()], alone[0], atol=1e-4, rtol=0)
    noisy = sources.masked_fill(mask == 0, 77), targets.masked_fill(target_mask == 0, 77)
    again = logits(model, *noisy, attention_mask=mask, decoder_attention_mask=target_mask)
    assert torch.equal(again[target_mask.bool()], both[target_mask.bool()])


@pytest.mark.parametrize("method", FEW)
def test_generate_with_padding_and_a_prompt(method):
    """Rows of sources and of decoder prompts padded on the left, with both caches and beams, equal rows alone."""
    model = patched(tiny(), method)
    sources, mask = padded([SOURCE[0], SOURCE[0, :23]], "left")
    prompts = torch.cat([torch.zeros(2, 1, dtype=torch.long), padded([TARGET[0, :9], TARGET[0, :6]], "left")[0]], 1)
    prompt_mask = torch.ones_like(prompts)
    prompts[1, :4] = torch.tensor([0, 0, 0, 0])
    prompt_mask[1, :3] = 0
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    alone = [
        model.generate(SOURCE, decoder_input_ids=prompts[:1], use_cache=False, num_beams=3, **given),
        model.generate(SOURCE[:, :23], decoder_input_ids=prompts[1:, 3:], use_cache=False, num_beams=3, **given),
    ]
    for cache in (None, "static"):
        found = model.generate(
            sources, attention_mask=mask, decoder_input_ids=prompts, decoder_attention_mask=prompt_mask, num_beams=3,
            cache_implementation=cache, **given,
        )  # fmt: skip
        assert torch.equal(found[:1], alone[0]), cache
        assert torch.equal(found[1:, 3:], alone[1]), cache


@pytest.mark.parametrize("method", METHODS)
def test_only_the_encoder_looks_ahead(method):
    model = patched(tiny(), method)
    source, target = SOURCE.clone(), TARGET.clone()
    source[0, -1] = target[0, -1] = 7
    assert torch.equal(logits(model, SOURCE, target)[:, :-1], logits(model)[:, :-1])
    assert not torch.equal(logits(model, source, TARGET)[:, 0], logits(model)[:, 0])


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_near(method):
    model = patched(tiny(), method)
    exact = logits(model)
    assert (logits(model.bfloat16()).float() - exact).abs().mean() < 0.1 * exact.abs().mean()


@pytest.mark.parametrize("method", FEW)
def test_a_backend_chosen_later_keeps_the_scheme(method):
    model = patched(tiny(), method)
    plain, whole = tiny(), logits(model)
    for part in (model, model.encoder, model.decoder):  # before 5.24 the whole does not reach its parts
        part.set_attn_implementation("eager")
    assert_close(logits(model), whole, atol=1e-4, rtol=0)
    assert_close(stepwise(model), whole, atol=1e-4, rtol=0)
    out = model(input_ids=SOURCE, decoder_input_ids=TARGET, output_attentions=True)
    assert [weights.shape for weights in (*out.encoder_attentions, *out.decoder_attentions)] == [(1, 3, 40, 40)] * 4
    hf_posenc.unpatch(model)
    assert {model.encoder.config._attn_implementation, model.decoder.config._attn_implementation} == {"eager"}
    for part in (plain, plain.encoder, plain.decoder):
        part.set_attn_implementation("eager")
    if method not in LEARNED:
        assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_flow_under_checkpointing_too(method):
    found = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = patched(tiny(), method).train()
        if options:
            # Renamed in 5.24; PEFT asks for the old name there too.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable(options)
        model(input_ids=SOURCE, labels=TARGET).loss.backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    learned = [name for name, _ in model.named_parameters() if "posenc" in name]
    silent = [name for name, _ in model.named_parameters() if "relative_attention_bias" in name]
    assert len(learned) == (4 if method in LEARNED else 0)
    missing = {name for name, _ in model.named_parameters()} - found[0].keys()
    assert missing == (set() if method in TABLES else set(silent))
    assert all(found[0][name].abs().max() > 0 for name in learned)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in other.items():
            assert_close(gradient, found[0][name], atol=1e-5, rtol=1e-4)


# --- taken back, copied, kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_unpatch_leaves_nothing(method):
    model, plain = tiny(), tiny()
    before, keys = {name: set(vars(module)) for name, module in model.named_modules()}, list(model.state_dict())
    hf_posenc.patch(model, method)
    assert (list(model.state_dict()) == keys) == (method not in LEARNED)
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model), logits(plain))
    for one, other in zip((model, model.encoder, model.decoder), (plain, plain.encoder, plain.decoder), strict=True):
        assert one.config.to_dict() == other.config.to_dict()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert list(model.state_dict()) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules())


def test_a_table_comes_back_in_the_dtype_of_the_model():
    model = hf_posenc.patch(tiny(), TABLES[2]).bfloat16()
    assert torch.equal(logits(hf_posenc.unpatch(model)), logits(tiny().bfloat16()))


@pytest.mark.parametrize("method", FEW)
def test_siblings_and_copies(method):
    config = tiny().config
    one, other = T5ForConditionalGeneration(config).eval(), T5ForConditionalGeneration(config).eval()
    before, said = logits(other), config.to_dict()
    hf_posenc.patch(one, method)
    assert torch.equal(logits(other), before) and other.config is config and config.to_dict() == said
    model = patched(tiny(), method)
    whole = logits(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(clone), whole)
        assert torch.equal(logits(hf_posenc.unpatch(clone)), logits(tiny()))
    assert torch.equal(logits(model), whole)


@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded(method, tmp_path):
    model = patched(tiny(), method)
    model.save_pretrained(tmp_path)
    again = hf_posenc.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model)) and hf_posenc.current(again) == hf_posenc.current(model)
    if method in PLAIN:
        plain = T5ForConditionalGeneration.from_pretrained(tmp_path)
        assert torch.equal(logits(plain), logits(model))
        assert torch.equal(logits(hf_posenc.restore(plain)), logits(model))
    else:
        with pytest.raises(ValueError, match="hf_posenc"):
            T5ForConditionalGeneration.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(hf_posenc.from_pretrained(tmp_path / "again")), logits(model))
    hf_posenc.unpatch(again)
    assert (
        not {"hf_posenc", "attn_implementation", "experts_implementation", "max_position_embeddings"}
        & again.config.to_dict().keys()
    )
    if "num_buckets" not in method or "num_buckets=8" in method:
        assert torch.equal(logits(again), logits(tiny()))
        assert again.config.relative_attention_max_distance == LONGEST


def test_a_new_number_of_buckets_is_the_models_own_after_a_reload(tmp_path):
    model = hf_posenc.patch(tiny(), TABLES[2])
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.add_(0.3 * torch.randn(16, 3))
    model.save_pretrained(tmp_path)
    again = hf_posenc.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model)), "the trained table, not one resized again"
    assert torch.equal(logits(hf_posenc.unpatch(again)), logits(model))
    assert again.config.relative_attention_num_buckets == 16
    assert torch.equal(logits(hf_posenc.unpatch(model)), logits(tiny()))


def test_a_plain_load_of_an_own_scheme_stops(tmp_path):
    hf_posenc.patch(tiny(), TABLES[1]).save_pretrained(tmp_path)
    code = f"from transformers import T5ForConditionalGeneration as T; T.from_pretrained({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode and "hf_posenc" in run.stderr


def test_exported(tmp_path):
    model = hf_posenc.patch(tiny(), TABLES[2])
    hf_posenc.export(model, tmp_path)
    assert torch.equal(logits(T5ForConditionalGeneration.from_pretrained(tmp_path)), logits(model))
    for target in ("vllm", "llama.cpp"):
        with pytest.raises(ValueError, match="no rotary module"):
            hf_posenc.export(model, tmp_path, target=target)
    with pytest.raises(ValueError, match="at run time"):
        hf_posenc.export(hf_posenc.patch(tiny(), "alibi"), tmp_path)


def test_another_scheme_over_a_saved_one(tmp_path):
    hf_posenc.patch(tiny(), TABLES[0]).save_pretrained(tmp_path)
    model = hf_posenc.patch(T5ForConditionalGeneration.from_pretrained(tmp_path), TABLES[2])
    assert torch.equal(logits(model), logits(hf_posenc.patch(tiny(), TABLES[2])))
    assert torch.equal(logits(hf_posenc.unpatch(model)), logits(tiny()))
    again = hf_posenc.patch(hf_posenc.patch(tiny(), TABLES[2]), TABLES[0])
    assert torch.equal(logits(again), logits(hf_posenc.patch(tiny(), TABLES[0])))


def test_the_length_it_reads(tmp_path):
    """Counted from ``n_positions`` where the configuration has it; T5 and its kin were trained on 512 or more."""
    for kind, length in (("t5", 512), ("mt5", 1024)):
        assert locate(tiny(kind)).native.trained_length == LENGTH
        assert locate(tiny(kind, n_positions=None)).native.trained_length == length
    model, reads = hf_posenc.patch(tiny(), "rope+yarn:factor=4"), 4 * LENGTH
    assert {part.config.max_position_embeddings for part in (model, model.encoder, model.decoder)} == {reads}
    model.save_pretrained(tmp_path)
    again = hf_posenc.from_pretrained(tmp_path)
    assert again.config.max_position_embeddings == reads
    for one in (model, again):
        hf_posenc.unpatch(one)
        parts = (one, one.encoder, one.decoder)
        assert not any("max_position_embeddings" in part.config.to_dict() for part in parts)


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("method", ["toeplitz:max_distance=9", TABLES[1], TABLES[2], "nope", "rope+yarn:factor=4"])
@pytest.mark.filterwarnings("ignore")
def test_adapters_bring_their_scheme(method, patch_first, tmp_path):
    peft = pytest.importorskip("peft")
    tiny().save_pretrained(tmp_path / "base")
    base = T5ForConditionalGeneration.from_pretrained(tmp_path / "base")
    learned = patch_first and method in LEARNED
    config = peft.LoraConfig(
        r=4, target_modules=["q", "v"], init_lora_weights=False, modules_to_save=["posenc"] if learned else None
    )
    if patch_first:
        model = peft.get_peft_model(hf_posenc.patch(base, method), config)
    else:
        model = hf_posenc.patch(peft.get_peft_model(base, config), method)
    if learned:
        wrapped = [name for name, weight in model.named_parameters() if "posenc.modules_to_save" in name]
        assert len(wrapped) == 4
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in wrapped:
                    weight.mul_(1.5)
    whole = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(hf_posenc.patch(tiny(), method)))
    model.train()
    model(input_ids=SOURCE, labels=TARGET).loss.backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "lora_" in name)
    model.eval().save_pretrained(tmp_path / "adapter")
    again = hf_posenc.from_pretrained(tmp_path / "adapter")
    assert_close(logits(again), whole, atol=1e-6, rtol=0)
    assert hf_posenc.current(again) == create(method)


# --- buckets ---------------------------------------------------------------------------------------------------------


def test_its_own_numbers_change_nothing(caplog):
    for kind in ("t5", "umt5"):
        model = tiny(kind, relative_attention_num_buckets=32, relative_attention_max_distance=128)
        before = logits(model)
        hf_posenc.patch(model, "t5_bias")
        assert torch.equal(logits(model), before)
    assert "trained" not in caplog.text, "nothing has to be learned"


def test_divided_by_one_is_the_models_own():
    """The replacement of the model's function, bit for bit, over all distances."""
    from hf_posenc.t5 import Divided

    model = tiny()
    for stack, causal in ((model.encoder, False), (model.decoder, True)):
        attention = stack.block[0].layer[0].SelfAttention
        for buckets, longest in ((32, 128), (8, 20), (64, 1000)):
            ahead = torch.arange(-1500, 1500)
            chosen = create(f"t5_bias:num_buckets={buckets},max_distance={longest}")
            own = attention._relative_position_bucket(ahead, not causal, buckets, longest)
            assert torch.equal(Divided(chosen, causal)(ahead), own)


def test_new_buckets_keep_what_they_can():
    from hf_posenc.t5 import resized

    trained = torch.randn(8, 3)
    assert torch.equal(resized(trained, 8, 20, 8, 20), trained)
    # Every whole distance up to 20 has a bucket of its own: nothing is lost.
    fine = resized(trained, 8, 20, 42, 43)
    assert torch.equal(fine[:21], trained[[reference.t5_bucket(D, 8, 20, True) for D in range(21)]])
    for buckets, longest in ((4, 20), (6, 9), (16, 40), (16, 10), (64, 100)):
        found = resized(trained, 8, 20, buckets, longest)
        for head in range(3):
            wanted = reference.t5_resized(trained[:, head].tolist(), 20, buckets, longest)
            assert_close(found[:, head], torch.tensor(wanted), atol=1e-6, rtol=0)


def test_a_far_reach_takes_no_memory():
    model = hf_posenc.patch(tiny(), "t5_bias:num_buckets=64,max_distance=1000000000")
    assert model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.shape == (64, 3)


# --- what is touched, and what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", FEW)
def test_cross_attention_is_never_touched(method):
    model = patched(tiny(), method)
    for block in model.decoder.block:
        cross = block.layer[1].EncDecAttention
        layer = vars(cross).get("_hf_posenc")
        assert layer is None or layer.plan.source is None
        assert "posenc" not in cross._modules and "compute_bias" not in vars(cross)


@pytest.mark.parametrize("method", [*FEW, TABLES[2]])
def test_an_encoder_alone(method, tmp_path):
    whole, model = tiny(), tiny(cls=T5EncoderModel)
    model.load_state_dict(whole.state_dict(), strict=False)
    patched(whole, method), patched(model, method)
    for name, weight in model.named_parameters():
        weight.data = whole.get_parameter(name).data
    mask = torch.ones_like(SOURCE)
    mask[0, :9] = 0
    with torch.no_grad():
        found = [m(SOURCE, attention_mask=mask).last_hidden_state for m in (model, whole.encoder)]
        assert torch.equal(*found)
        model.save_pretrained(tmp_path)
        again = hf_posenc.from_pretrained(tmp_path)
        assert torch.equal(again(SOURCE, attention_mask=mask).last_hidden_state, found[0])
        hf_posenc.unpatch(model)
        assert torch.equal(model(SOURCE).last_hidden_state, tiny().encoder(SOURCE).last_hidden_state)


def test_what_it_can_take_and_what_not():
    model = tiny()
    assert {"alibi", "nope", "rope", "t5_bias", "toeplitz"} <= set(hf_posenc.methods(model))
    assert not {"yarn", "self_extend", "dynamic_ntk"} & set(hf_posenc.methods(model))
    before = logits(model)
    for method in ("yarn:factor=2", "rerope:window=8", "dynamic_ntk", "alibi:keep_rope=true", "rope+dynamic_ntk"):
        with pytest.raises(ValueError, match=r"relative buckets|no rotation|fixed factor"):
            hf_posenc.patch(model, method)
    assert torch.equal(logits(model), before) and hf_posenc.current(model) is None
    for look in (hf_posenc.inspect, lambda given: hf_posenc.plan(given, target_length=2048)):
        for given in (model, model.config):
            with pytest.raises(hf_posenc.UnsupportedMethodError, match=r"relative buckets.*t5_bias:max_distance"):
                look(given)


def test_kin_that_do_not_fit_are_told_why():
    model = LongT5ForConditionalGeneration(
        LongT5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    assert hf_posenc.methods(model) == []
    with pytest.raises(hf_posenc.UnsupportedMethodError, match="attends in blocks"):
        hf_posenc.patch(model, "nope")


def test_a_failed_patch_changes_nothing(monkeypatch):
    from hf_posenc import persistence

    def fail(*args):
        raise RuntimeError("late")

    for method in FEW:
        model = hf_posenc.patch(tiny(), TABLES[0])
        before, config = logits(model), model.decoder.config
        with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="late"):
            broken.setattr(persistence, "record", fail)
            hf_posenc.patch(model, method)
        assert torch.equal(logits(model), before) and model.decoder.config is config
        assert str(hf_posenc.current(model)) == TABLES[0]


@pytest.mark.parametrize("method", ["dca:chunk_size=12,local_window=4+rope"])
def test_blocks_of_earlier_tokens_are_refused_since_the_encoder_looks_ahead(method):
    model = tiny()
    before, names = logits(model), {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(hf_posenc.UnsupportedMethodError, match="looks at later ones"):
        hf_posenc.patch(model, method)
    assert torch.equal(logits(model), before)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == names
