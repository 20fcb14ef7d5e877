"""Absolute positions, and every method on models that have a table of them: GPT-2, OPT and BERT."""

import copy
import inspect
import pickle

import pytest
import reference
import tiny
import torch
import transformers
from reading import CACHE, greedy, padded, stepwise
from torch import nn
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
PAIRS = [(family, method) for family in FAMILIES for method in METHODS if family != "bert" or method not in MAPS]
OWN = [*PAIRS, ("llama", "sinusoidal"), ("llama", "learned:max_positions=300")]
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
    known = tiny.parameters(config) | {target: None for target in config.attribute_map}
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
    with torch.set_grad_enabled("gradient" in request.node.name or "train" in request.node.name):
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
            angle = reference.by_distance(reference.pi(16, 10000.0, 2), lambda i, j: reference.rerope_distance(i, j, 8))
        else:
            angle = reference.by_distance(frequencies, lambda i, j: reference.self_extend_distance(i, j, 10, 3))
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
