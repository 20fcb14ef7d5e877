"""Absolute positions, and every method on models that have a table of them: GPT-2, OPT and BERT."""

import copy
import inspect
import pickle

import pytest
import reference
import tiny
import torch
import transformers
from reading import greedy, padded, stepwise
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, StaticCache

import hf_posenc

BIASES = ["alibi", "alibi:learned_slopes=true", "toeplitz:max_distance=20", "t5_bias:num_buckets=8,max_distance=40"]
TURNED = ["rope", "rope:rope_theta=500+yarn:factor=4"]
MAPS = ["self_extend:group_size=3,window=10+rope", "rerope:window=8+rope+pi:factor=2"]
ABSOLUTE = ["sinusoidal", "learned:max_positions=300"]
METHODS = [*ABSOLUTE, "sinusoidal:base=100", "nope", *BIASES, *TURNED, *MAPS]
CAUSAL = ["gpt2", "opt", "bert_causal"]
FAMILIES = [*CAUSAL, "bert"]
PAIRS = [(family, method) for family in FAMILIES for method in METHODS]
OWN = [
    *[("gpt2", method) for method in [*ABSOLUTE, "nope", BIASES[1], BIASES[2], "rope", MAPS[0]]],
    *[("opt", method) for method in [*ABSOLUTE, "nope", BIASES[3], TURNED[1]]],
    *[("bert_causal", method) for method in [*ABSOLUTE, "alibi", MAPS[1]]],
    *[("bert", method) for method in [*ABSOLUTE, "nope", BIASES[2], BIASES[3], "rope"]],
    *[("llama", method) for method in ABSOLUTE],
]
STEPPED = [pair for pair in OWN if pair[0] != "bert"]
IDS = tiny.tokens(1, 90)
CUTS = [24, 9] + [1] * 57


def built(family: str, heads: int = 4, **overrides):
    """A tiny model of a family: 64 positions, `heads` heads of 16 dimensions."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "num_hidden_layers": 2, "num_attention_heads": heads, "hidden_size": 16 * heads}
    sizes |= {"max_position_embeddings": 64, "initializer_range": 0.2, "init_std": 0.2, "pad_token_id": 0}
    sizes |= {"bos_token_id": 1, "eos_token_id": None}
    sizes |= {"intermediate_size": 96, "ffn_dim": 96, "word_embed_proj_dim": 16 * heads}
    name, config = {
        "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config),
        "opt": ("OPTForCausalLM", transformers.OPTConfig),
        "bert": ("BertForMaskedLM", transformers.BertConfig),
        "bert_causal": ("BertLMHeadModel", transformers.BertConfig),
        "roberta": ("RobertaForMaskedLM", transformers.RobertaConfig),
        "llama": ("LlamaForCausalLM", transformers.LlamaConfig),
    }[family]
    drop = {name: 0.0 for name in tiny.parameters(config) if "dropout" in name or "pdrop" in name}
    known = tiny.parameters(config) | dict.fromkeys(config.attribute_map)
    values = {key: value for key, value in (sizes | drop | overrides).items() if key in known or key in overrides}
    model = getattr(transformers, name)(config(**values, **({"is_decoder": True} if "causal" in family else {})))
    return model.float().eval()


def stirred(model):
    """The same with what it learned somewhere, as after training."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "posenc" in name.split("."):
            parameter.data.copy_(0.1 * noise.exp() if name.endswith("slopes") else 0.5 * noise)
    return model


def patched(family: str, method: str, **overrides):
    return stirred(hf_posenc.patch(built(family, **overrides), method))


def table_of(model):
    return next(module for name, module in model.named_modules() if name.endswith(("wpe", "position_embeddings",
                                                                                   "embed_positions")))  # fmt: skip


@torch.no_grad()
def logits(model, ids=IDS, **more):
    cached = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    return model.eval()(ids, **cached, **more).logits


@pytest.fixture(autouse=True)
def _without_gradients(request):
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


# --- the formulas ----------------------------------------------------------------------------------------------------


def expected(model, method: str, ids: torch.Tensor, trained: list[list[float]]) -> torch.Tensor:
    """By the naive double loop; `trained` is the table before the patch, its first row that of position 0."""
    name, _, arguments = method.partition(":")
    heads, width, length = model.config.num_attention_heads, len(trained[0]), len(ids)
    posenc = [module.posenc for module in model.modules() if "posenc" in dict(module.named_children())]
    frequencies = reference.rope(16, 10000.0)
    if name == "sinusoidal":
        base = 100.0 if "base" in arguments else 10000.0
        table = [reference.sinusoid(t, width, base) for t in range(length)]
        return reference.table_model_logits(model, ids, table)
    if name == "learned":
        return reference.table_model_logits(model, ids, reference.stretched(trained, 300))
    if name == "nope":
        return reference.table_model_logits(model, ids, None)
    if method in TURNED:
        factor = 1.0
        if "yarn" in method:
            frequencies, factor = reference.yarn(16, 500.0, 4, 64), reference.attention_factor(4)
        angle = reference.by_frequencies(frequencies)
        return reference.table_model_logits(model, ids, None, angle=angle, factor=factor)
    if method in MAPS:
        if "rerope" in method:
            frequencies, distance = (
                reference.pi(16, 10000.0, 2), reference.both_ways(lambda i, j: reference.rerope_distance(i, j, 8))
            )  # fmt: skip
        else:
            distance = reference.both_ways(lambda i, j: reference.self_extend_distance(i, j, 10, 3))
        angle = reference.by_distance(frequencies, distance)
        return reference.table_model_logits(model, ids, None, angle=angle)

    causal = model.config.model_type != "bert" or model.config.is_decoder
    slopes = reference.alibi_slopes(heads)

    def bias_of_layer(layer):
        def bias(head, i, j):
            if name == "alibi":
                return -(posenc[layer].slopes[head].item() if arguments else slopes[head]) * abs(i - j)
            table = posenc[layer].table[head].tolist()
            if name == "toeplitz":
                return table[min(i - j, 19)] if causal else table[min(max(i - j, -19), 19) + 19]
            return table[reference.t5_bucket(i - j, 8, 40, causal)]

        return bias

    return reference.table_model_logits(model, ids, None, bias_of_layer=bias_of_layer)


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_equal_to_the_formula(family, method):
    model = built(family, heads=3 if "t5" in method else 4)
    offset = 2 if family == "opt" else 0
    trained = table_of(model).weight.detach()[offset:].double().tolist()
    stirred(hf_posenc.patch(model, method))
    found = logits(model, IDS[:, :70])[0].double()
    assert_close(found, expected(model, method, IDS[0, :70], trained), atol=1e-4, rtol=0)


@pytest.mark.parametrize("heads", [3, 6, 8, 12])
@pytest.mark.parametrize("method", ["alibi", "rope", "sinusoidal"])
def test_every_number_of_heads(heads, method):
    model = built("gpt2", heads=heads)
    trained = model.transformer.wpe.weight.double().tolist()
    found = logits(hf_posenc.patch(model, method), IDS[:, :30])[0].double()
    assert_close(found, expected(model, method, IDS[0, :30], trained), atol=1e-4, rtol=0)


# --- however a text is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "method"), STEPPED)
def test_one_pass_is_chunks_is_decoding(family, method):
    """Beyond the trained length, with a growing and with a static cache."""
    model = patched(family, method)
    whole = logits(model)
    assert_close(stepwise(model, IDS, CUTS), whole, atol=1e-4, rtol=0)
    cache = StaticCache(config=model.config, max_cache_len=96)
    assert_close(stepwise(model, IDS, [24, 9, *[1] * 9], cache), whole[:, :42], atol=1e-4, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "method"), OWN)
def test_padding_changes_nothing(family, method, side):
    """Nor does what stands where there is padding."""
    model, rows = patched(family, method), [IDS[0, :40], IDS[0, 20:80], IDS[0, 3:20]]
    ids, mask = padded(rows, side)
    found = logits(model, ids, attention_mask=mask)
    for row, keep, text in zip(found, mask.bool(), rows, strict=True):
        assert_close(row[keep], logits(model, text[None])[0], atol=1e-4, rtol=0)
    other = logits(model, torch.where(mask.bool(), ids, 77), attention_mask=mask)
    assert torch.equal(other[mask.bool()], found[mask.bool()])


@pytest.mark.parametrize(("family", "method"), STEPPED)
def test_generate(family, method):
    model = patched(family, method)
    ids, mask = padded([IDS[0, :40], IDS[0, :59]], "left")
    settings = {"max_new_tokens": 12, "do_sample": False}
    found = model.generate(ids, attention_mask=mask, **settings)[:, 59:]
    for row, text in zip(found, (IDS[:, :40], IDS[:, :59]), strict=True):
        assert torch.equal(row, greedy(model, text, 12)[0, text.shape[1] :])
    beams = [model.generate(IDS[:, :50], num_beams=3, use_cache=cached, **settings) for cached in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize(("family", "method"), OWN)
def test_embeddings_in_place_of_tokens(family, method):
    model = patched(family, method)
    vectors = model.get_input_embeddings()(IDS)
    assert_close(model(inputs_embeds=vectors).logits, logits(model), atol=1e-6, rtol=0)
    # Nothing waits for the next call of the embeddings.
    logits(model)
    assert torch.equal(model.get_input_embeddings()(IDS), vectors)


@pytest.mark.parametrize(("family", "method"), STEPPED)
def test_later_tokens_never_reach_back(family, method):
    model, ids = patched(family, method), IDS.clone()
    ids[0, -1] = 5
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert torch.equal(logits(model, ids)[:, :-1], logits(model)[:, :-1])


@pytest.mark.parametrize("method", ["sinusoidal", "alibi", "rope", "learned:max_positions=300"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_documents(family, method):
    """OPT, unpatched as well, sees one document from another."""
    if family == "llama" and method == "rope":
        pytest.skip("it has one")
    model = patched(family, method)
    places = torch.cat((torch.arange(30), torch.arange(40)))[None]
    found = logits(model, IDS[:, :70], position_ids=places)
    assert_close(found[:, 30:], logits(model, IDS[:, 30:70]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["sinusoidal", "learned:max_positions=300", "rope", "alibi"])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_four_times_the_trained_length(family, method):
    model, ids = patched(family, method), tiny.tokens(1, 256)
    found = logits(model, ids)
    assert found.isfinite().all() and not torch.equal(found[:, 100], logits(model, ids.roll(1, 1))[:, 101])
    if family == "bert":
        assert torch.equal(logits(model, ids, token_type_ids=torch.zeros_like(ids)), found)
        assert not torch.equal(logits(model, ids, token_type_ids=torch.ones_like(ids)), found)


@pytest.mark.parametrize(("family", "method"), OWN)
def test_bfloat16_is_near(family, method):
    model = patched(family, method)
    found, exact = logits(model.to(torch.bfloat16)).float(), logits(model.float())
    assert (found - exact).norm() < 0.05 * exact.norm()


# --- in place, and back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "method"), OWN)
def test_unpatch_leaves_nothing(family, method):
    model = built(family)
    plain, before = logits(model, IDS[:, :60]), {name: set(vars(module)) for name, module in model.named_modules()}
    config, state = model.config.to_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stirred(hf_posenc.patch(model, method))
    logits(model)
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model, IDS[:, :60]), plain) and model.config.to_dict() == config
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules())
    for old, new in ((state, model.state_dict()), (buffers, dict(model.named_buffers()))):
        assert list(old) == list(new) and all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize(("family", "method"), OWN)
def test_siblings_copies_and_pickles(family, method):
    config = built(family).config
    cls = type(built(family))
    one, other = cls(config).eval(), cls(config).eval()
    plain, trained = logits(other, IDS[:, :60]), logits(one, IDS[:, :60])
    stirred(hf_posenc.patch(one, method))
    found = logits(one)
    assert torch.equal(logits(other, IDS[:, :60]), plain) and other.config is config
    for clone in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(logits(clone), found)
        assert torch.equal(logits(hf_posenc.unpatch(clone), IDS[:, :60]), trained)
    assert torch.equal(logits(one), found)


@pytest.mark.parametrize(("family", "method"), OWN)
def test_saved_and_loaded(family, method, tmp_path):
    model = patched(family, method)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    again = hf_posenc.from_pretrained(tmp_path)
    assert torch.equal(logits(again), expected) and hf_posenc.current(again) == hf_posenc.current(model)
    assert_close(logits(hf_posenc.unpatch(again), IDS[:, :60]), logits(built(family), IDS[:, :60]), atol=1e-4, rtol=0)
    if method.startswith("learned") and family != "llama":
        plain = type(model).from_pretrained(tmp_path)
        assert torch.equal(logits(plain), expected)
        return
    with pytest.raises((RuntimeError, ValueError)):  # a table of another shape, or the first forward
        logits(type(model).from_pretrained(tmp_path), IDS[:, :60])


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}])
@pytest.mark.parametrize(("family", "method"), [pair for pair in OWN if pair[0] in ("gpt2", "bert", "llama")])
def test_gradients(family, method, checkpointing):
    """Two forwards before one backward, against finite differences of what is learned and of the embeddings."""
    model = patched(family, method).train().double()
    if checkpointing:
        model.gradient_checkpointing_enable(checkpointing)
    first, second = IDS, tiny.tokens(2, 40, 2)
    loss = model(first).logits.pow(2).mean() + model(second).logits.pow(2).mean()
    loss.backward()
    learned = [p for name, p in model.named_parameters() if "posenc" in name or p is table_weight(model, method)]
    assert learned or "slopes" not in method
    for parameter in [*learned[:1], model.get_input_embeddings().weight]:
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        slope, step, values = (parameter.grad * direction).sum(), 1e-3, []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step * direction)
                values.append(model(first).logits.pow(2).mean() + model(second).logits.pow(2).mean())
                parameter.sub_(sign * step * direction)
        assert_close(slope, (values[0] - values[1]) / (2 * step), rtol=1e-2, atol=1e-4)


def table_weight(model, method):
    return table_of(model).weight if method.startswith("learned") and model.config.model_type != "llama" else None


# --- a trained table, stretched --------------------------------------------------------------------------------------

TABLES = ["gpt2", "opt", "bert", "bert_causal", "roberta"]
SHAPES = ["linear", "cubic", "copy", "linear,keep_head=true"]


def head_of(family: str) -> int:
    """Rows before that of position 0."""
    return {"opt": 2, "roberta": 1}.get(family, 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", TABLES)
def test_stretched_tables(family, shape):
    model, head = built(family), head_of(family)
    old = table_of(model).weight.detach().clone()
    length = len(old) - head
    hf_posenc.patch(model, f"learned:max_positions={2 * length + 5},interpolation={shape}")
    new = table_of(model).weight.detach()
    kind, keep = shape.split(",")[0], "keep" in shape
    rows = reference.stretched(old[head:].double().tolist(), 2 * length + 5, kind, keep)
    assert torch.equal(new[:head], old[:head])
    assert_close(new[head:].double(), torch.tensor(rows, dtype=torch.float64), atol=1e-6, rtol=0)
    if keep or kind == "copy":
        assert torch.equal(new[: len(old)], old)
    assert model.config.max_position_embeddings == len(new) - (2 if family == "opt" else 0)
    assert table_of(model).num_embeddings == len(new)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", TABLES)
def test_its_own_length_changes_nothing(family, shape):
    model = built(family)
    plain, length = logits(model, IDS[:, :60]), len(table_of(model).weight) - head_of(family)
    hf_posenc.patch(model, f"learned:max_positions={length},interpolation={shape}")
    assert torch.equal(logits(model, IDS[:, :60]), plain)


@pytest.mark.parametrize(
    ("family", "shape"), [*[("gpt2", shape) for shape in SHAPES], *[(family, SHAPES[0]) for family in TABLES[1:]]]
)
def test_a_trained_stretched_table_is_kept(family, shape, tmp_path):
    """It is a plain model, comes back as it was trained, never stretched twice, and gives the table of the length
    before when it is taken off: the trained one where nothing was trained further."""
    method = f"learned:max_positions=200,interpolation={shape}"
    trained = built(family)
    hf_posenc.patch(trained, method).save_pretrained(tmp_path / "untouched")
    back = hf_posenc.unpatch(hf_posenc.from_pretrained(tmp_path / "untouched"))
    assert_close(table_of(back).weight, table_of(built(family)).weight, atol=1e-5, rtol=0)
    assert back.config.max_position_embeddings == built(family).config.max_position_embeddings
    assert_close(logits(back, IDS[:, :60]), logits(built(family), IDS[:, :60]), atol=1e-4, rtol=0)

    with torch.enable_grad():
        trained(IDS, labels=IDS).loss.backward()
    weight = table_of(trained).weight
    assert weight.grad.abs().sum() > 0
    weight -= weight.grad
    expected = logits(trained)
    trained.save_pretrained(tmp_path / "trained")
    plain = type(trained).from_pretrained(tmp_path / "trained")
    assert torch.equal(logits(plain), expected) and hf_posenc.current(plain) is None
    for again in (hf_posenc.from_pretrained(tmp_path / "trained"), hf_posenc.restore(plain)):
        assert torch.equal(logits(again), expected) and str(hf_posenc.current(again)) == str(
            hf_posenc.current(trained)
        )
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(hf_posenc.from_pretrained(tmp_path / "again")), expected)
    hf_posenc.unpatch(trained)
    assert torch.equal(table_of(trained).weight, table_of(built(family)).weight)


def test_a_table_known_to_the_configuration_is_replaced(tmp_path):
    hf_posenc.patch(built("gpt2"), "learned:max_positions=150").save_pretrained(tmp_path)
    for method in ("learned:max_positions=100", "sinusoidal", "rope"):
        for again in (hf_posenc.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
            hf_posenc.patch(again, method)
            expected = logits(hf_posenc.patch(built("gpt2"), method))
            assert_close(logits(again), expected, atol=1e-4, rtol=0)
            assert again.config.n_positions == (100 if "learned" in method else 64)
            assert_close(
                logits(hf_posenc.unpatch(again), IDS[:, :60]), logits(built("gpt2"), IDS[:, :60]), atol=1e-4, rtol=0
            )


def test_dtypes_and_frozen_tables_stay():
    model = built("gpt2").to(torch.bfloat16)
    model.transformer.wpe.weight.requires_grad_(False)
    hf_posenc.patch(model, "learned:max_positions=100")
    assert model.transformer.wpe.weight.dtype == torch.bfloat16 and not model.transformer.wpe.weight.requires_grad
    assert hf_posenc.patch(tiny.TL().to(torch.bfloat16), "learned:max_positions=9").model.posenc.weight.dtype == (
        torch.bfloat16
    )


def test_the_tokenizer_follows():
    class Tokenizer:
        model_max_length = 64

    for family in ("gpt2", "roberta", "llama"):
        tokenizer = Tokenizer()
        hf_posenc.patch(built(family), "learned:max_positions=100", tokenizer=tokenizer)
        assert tokenizer.model_max_length == 100
    model = hf_posenc.patch(built("roberta"), "rope+yarn:factor=4", tokenizer=tokenizer)
    assert tokenizer.model_max_length == 4 * 63 and model.config.max_position_embeddings == 4 * 63


@pytest.mark.parametrize(
    ("family", "method", "says"),
    [
        ("gpt2", "learned:max_positions=63", "below the 64 positions"),
        ("gpt2", "learned:max_positions=0", "at least 1"),
        ("gpt2", "learned", "needs max_positions"),
        ("gpt2", "learned:max_positions=90,interpolation=nearest", "linear, cubic, copy"),
        ("gpt2", "learned:max_positions=90,keep_head=3", "true or false"),
        ("gpt2", "sinusoidal:base=1", "above 1"),
        ("gpt2", "sinusoidal+rope", "do not combine"),
        ("bert", "dca:chunk_size=12,local_window=4+rope", "looks at later ones.*It can take: .*rope"),
        ("gpt2", "pi:factor=2", "rope.yarn"),
    ],
)
def test_what_is_refused_says_why(family, method, says):
    model = built(family)
    plain = logits(model, IDS[:, :60])
    with pytest.raises((ValueError, TypeError), match=says):
        hf_posenc.patch(model, method)
    assert hf_posenc.current(model) is None and torch.equal(logits(model, IDS[:, :60]), plain)


def test_a_text_beyond_a_new_table_is_told():
    model = hf_posenc.patch(tiny.TL(), "learned:max_positions=50")
    logits(model, IDS[:, :50])
    with pytest.raises(ValueError, match=r"position 50, and the table .* has 50 rows: patch with a larger"):
        logits(model, IDS[:, :51])


# --- other families --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("roberta", "RobertaForMaskedLM"), ("xlm-roberta", "XLMRobertaForCausalLM"), ("electra", "ElectraForMaskedLM"),
        ("albert", "AlbertForMaskedLM"), ("biogpt", "BioGptForCausalLM"), ("gpt_bigcode", "GPTBigCodeForCausalLM"),
        ("bart", "BartForCausalLM"), ("mobilebert", "MobileBertForMaskedLM"), ("layoutlm", "LayoutLMForMaskedLM"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["sinusoidal", "learned:max_positions=150", "alibi", "rope"])
def test_other_families_with_tables(model_type, name, method):
    config = tiny.text_config(model_type, transformers.CONFIG_MAPPING[model_type], {"num_hidden_layers": 2})
    if "CausalLM" in name:
        config.is_decoder = True
    model = getattr(transformers, name)(config).float().eval()
    plain = logits(model, IDS[:, :60])
    hf_posenc.patch(model, method)
    assert not torch.equal(logits(model, IDS[:, :60]), plain)
    assert logits(model, tiny.tokens(1, 140)).isfinite().all()
    ids, mask = padded([IDS[0, :40], IDS[0, :60]], "left")
    # BART counts places, not tokens, in its own table, patched or not.
    if not (model_type == "bart" and "learned" in method):
        found = logits(model, ids, attention_mask=mask)
        assert_close(found[0, 20:], logits(model, IDS[:, :40])[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(logits(hf_posenc.unpatch(model), IDS[:, :60]), plain)


@pytest.mark.parametrize(
    ("model_type", "name", "method", "says"),
    [
        ("bart", "BartForConditionalGeneration", "alibi", "table of positions in its encoder and one in its decoder"),
        ("roformer", "RoFormerForMaskedLM", "sinusoidal", "does more with its table"),
        ("prophetnet", "ProphetNetForCausalLM", "nope", "does more with its table"),
        ("fnet", "FNetForMaskedLM", "sinusoidal", "nor positions of a kind known here"),
        ("gpt_neo", "GPTNeoForCausalLM", "alibi", "attention interface; methods outside of it.*nope"),
        ("big_bird", "BigBirdForMaskedLM", "rope", "attention interface; methods outside of it.*sinusoidal"),
    ],
)
def test_other_families_are_refused_with_the_reason(model_type, name, method, says):
    config = tiny.text_config(model_type, transformers.CONFIG_MAPPING[model_type], {})
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    with pytest.raises(hf_posenc.UnsupportedMethodError, match=says):
        hf_posenc.patch(model, method)


# --- adapters --------------------------------------------------------------------------------------------------------

ADAPTED = [
    ("gpt2", "learned:max_positions=150", "wpe"), ("opt", "learned:max_positions=150", "embed_positions"),
    ("llama", "learned:max_positions=150", "posenc"), ("gpt2", "sinusoidal", None), ("gpt2", "alibi", None),
    ("opt", "rope", None), ("gpt2", "toeplitz:max_distance=20", "posenc"), ("gpt2", "nope", None),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize(("family", "method", "saved"), ADAPTED)
def test_adapters(family, method, saved, patch_first, tmp_path):
    """What is learned trains under the adapter, is saved with it, and the base stays."""
    peft = pytest.importorskip("peft")
    built(family).save_pretrained(tmp_path / "base")
    base = type(built(family)).from_pretrained(tmp_path / "base")
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]
    settings = {"r": 4, "target_modules": targets, "init_lora_weights": False, "fan_in_fan_out": family == "gpt2"}
    config = peft.LoraConfig(**settings, modules_to_save=[saved] if saved else None)
    if patch_first:
        model = peft.get_peft_model(hf_posenc.patch(base, method), config)
    elif saved == "posenc":
        pytest.skip("not there yet")
    else:
        model = hf_posenc.patch(peft.get_peft_model(base, config), method)
    with torch.enable_grad():
        model(input_ids=IDS, labels=IDS).loss.backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.grad is not None}
    assert all(weight.grad.abs().sum() > 0 for weight in trained.values())
    if saved:
        assert any(saved in name.split(".") for name in trained)
    for weight in trained.values():
        weight -= 0.1 * weight.grad
    expected = logits(model)
    with model.disable_adapter():
        assert_close(logits(model), logits(hf_posenc.patch(built(family), method)), atol=1e-6, rtol=0)
    model.save_pretrained(tmp_path / "adapter")
    again = hf_posenc.from_pretrained(tmp_path / "adapter")
    assert_close(logits(again), expected, atol=1e-5, rtol=0)
    assert str(hf_posenc.current(again)) == method
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_close(logits(hf_posenc.from_pretrained(tmp_path / "merged")), expected, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_over_a_base_saved_with_a_stretched_table(tmp_path):
    """The table of the base, trained since, is the one under the adapter."""
    peft = pytest.importorskip("peft")
    base = hf_posenc.patch(built("gpt2"), "learned:max_positions=150")
    base.transformer.wpe.weight.mul_(1.5)
    base.save_pretrained(tmp_path / "base")
    model = hf_posenc.from_pretrained(tmp_path / "base")
    settings = {"target_modules": ["c_attn"], "init_lora_weights": False, "fan_in_fan_out": True}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    model.save_pretrained(tmp_path / "adapter")
    again = hf_posenc.from_pretrained(tmp_path / "adapter")
    assert_close(logits(again), logits(model), atol=1e-5, rtol=0)
    assert str(hf_posenc.current(again)) == "learned:max_positions=150"


@pytest.mark.parametrize("method", ["sinusoidal", "learned:max_positions=128"])
def test_token_embeddings_may_be_replaced(method):
    """Resizing puts another module in their place."""
    model, ids = hf_posenc.patch(tiny.TL(), method), IDS[:, :60]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "posenc" in name:
                weight.normal_(generator=torch.Generator().manual_seed(0))
        expected = model(ids).logits
        old = model.get_input_embeddings()
        model.set_input_embeddings(torch.nn.Embedding.from_pretrained(old.weight.clone()))
        assert torch.equal(model(ids).logits, expected)
        replaced = model.get_input_embeddings()
        hf_posenc.unpatch(model)
        assert not replaced._forward_hooks and not old._forward_hooks
        assert torch.equal(model(ids).logits, tiny.TL()(ids).logits)


def test_a_forward_that_fails_leaves_no_vectors_behind():
    model = hf_posenc.patch(tiny.TL(), "sinusoidal")
    model(IDS[:, :10])  # the embeddings add from now on
    plain = model.get_input_embeddings()(IDS[:, :10])
    with pytest.raises(IndexError):
        model(IDS[:, :10] + 1000)
    assert torch.equal(model.get_input_embeddings()(IDS[:, :10]), plain)


@pytest.mark.parametrize(("family", "able"), [("roformer", []), ("prophetnet", ["learned"])])
def test_a_table_that_does_more_is_left_where_it_is(family, able):
    model = tiny.tiny_model(family)
    assert hf_posenc.methods(model) == able
    for method in ("nope", "sinusoidal", "learned:max_positions=128"):
        if method.partition(":")[0] not in able:
            with pytest.raises(hf_posenc.UnsupportedMethodError, match="does more with its table"):
                hf_posenc.patch(model, method)
