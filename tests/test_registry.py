"""Names and strings of methods: what is printed is what was given, and what is wrong says what would be right."""

import math
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_posenc
from hf_posenc.methods import FrequencyMethod, Stack
from hf_posenc.registry import create, join, parse, registered

positive = st.floats(1e-6, 1e9)
factors = st.one_of(st.integers(1, 10**6), st.floats(1, 1e9))
extension = st.one_of(
    st.fixed_dictionaries({"factor": factors}), st.fixed_dictionaries({"target_length": st.integers(1, 10**9)})
)
granularity = st.fixed_dictionaries({}, optional={"granularity": st.integers(1, 10**6)})
lists = st.lists(positive, min_size=1, max_size=6)
tokens = st.integers(1, 10**9)
logn = st.fixed_dictionaries({}, optional={"logn": st.booleans()})
truncate = st.fixed_dictionaries({}, optional={"truncate": st.booleans()})


@st.composite
def ramps(draw):
    slow = draw(positive)
    return {"beta_slow": slow, "beta_fast": draw(st.floats(slow, 1e10))}


def merged(*parts):
    return st.tuples(*parts).map(lambda values: {key: value for part in values for key, value in part.items()})


@st.composite
def bands(draw):
    low = draw(st.floats(1e-3, 1e3))
    return {"low_freq_factor": low, "high_freq_factor": draw(st.floats(low * 1.001, 1e6))}


def members():
    """Methods for single layers, among them strings full of commas, colons and plus signs."""
    return st.sampled_from(
        [
            "nope", "yarn:factor=4,beta_fast=16", "longrope:short_factor=[1,2],long_factor=[3,4]",
            "alibi:keep_rope=True", "self_extend:group_size=2,window=8,logn=True+yarn:factor=2", "xpos:gamma=1e+2", 
            "vo_rope+pi:factor=2",
        ]
    ).map(create)  # fmt: skip


PARAMETERS = {
    "pi": extension,
    "ntk": extension,
    "abf": st.fixed_dictionaries({"rope_theta": st.one_of(st.integers(2, 10**9), st.floats(1.001, 1e12))}),
    "ntk_by_parts": merged(extension, ramps(), truncate),
    "yarn": merged(
        extension,
        ramps(),
        truncate,
        st.fixed_dictionaries(
            {}, optional={"attention_factor": positive, "mscale": positive, "mscale_all_dim": positive}
        ),
    ),
    "dynamic_ntk": merged(st.fixed_dictionaries({}, optional={"factor": factors}), granularity),
    "dynamic_yarn": merged(ramps(), granularity),
    "llama3": merged(extension, bands()),
    "longrope": st.fixed_dictionaries(
        {},
        optional={
            "short_factor": lists,
            "long_factor": lists,
            "attention_factor": positive,
            "switch": st.sampled_from(["causal", "stock", "long"]),
            "factor": factors,
        },
    ),
    "partial_rope": st.fixed_dictionaries({"fraction": st.floats(0, 1, exclude_min=True)}),
    "self_extend": merged(
        st.one_of(
            st.fixed_dictionaries({"group_size": tokens, "window": tokens}),
            st.fixed_dictionaries({"target_length": tokens}, optional={"group_size": tokens, "window": tokens}),
        ),
        logn,
    ),
    "rerope": merged(st.fixed_dictionaries({"window": tokens}), logn),
    "leaky_rerope": merged(
        st.fixed_dictionaries({"window": tokens, "scale": st.floats(0, 1, exclude_min=True, exclude_max=True)}), logn
    ),
    "dca": merged(st.fixed_dictionaries({"chunk_size": tokens, "local_window": tokens}), logn),
    "string": merged(
        st.integers(0, 10**6).flatmap(
            lambda window: st.fixed_dictionaries(
                {"shift": st.integers(max(window, 1), 10**9), "window": st.just(window)}
            )
        ),
        logn,
    ),
    "logn": st.just({}),
    "nope": st.just({}),
    "alibi": st.fixed_dictionaries(
        {}, optional={"interpolate": factors, "learned_slopes": st.booleans(), "keep_rope": st.booleans()}
    ),
    "toeplitz": st.fixed_dictionaries({"max_distance": tokens}, optional={"init": st.sampled_from(["alibi", "zero"])}),
    "t5_bias": st.integers(2, 1000).flatmap(
        lambda half: st.fixed_dictionaries(
            {"num_buckets": st.just(2 * half), "max_distance": st.integers(half + 1, 10**6)},
            optional={"interpolate": factors},
        )
    ),
    "rope": st.fixed_dictionaries({}, optional={"rope_theta": st.floats(1.5, 1e9)}),
    "sinusoidal": st.fixed_dictionaries({}, optional={"base": st.floats(1.5, 1e9)}),
    "learned": st.fixed_dictionaries(
        {"max_positions": tokens},
        optional={"interpolation": st.sampled_from(["linear", "cubic", "copy"]), "keep_head": st.booleans()},
    ),
    "xpos": st.fixed_dictionaries({}, optional={"gamma": positive, "scale_base": st.floats(1, 1e6)}),
    "vo_rope": st.just({}),
    "irope": st.fixed_dictionaries({}, optional={"interval": tokens, "temperature": st.booleans(), "chunk": tokens}),
    "layers": st.fixed_dictionaries(
        {"layers": st.dictionaries(st.integers(0, 200), members(), min_size=1, max_size=4)},
        optional={"default": members()},
    ),
}
CLASSES = {
    "pi": hf_posenc.PI, "ntk": hf_posenc.NTK, "abf": hf_posenc.ABF, "ntk_by_parts": hf_posenc.NTKByParts,
    "yarn": hf_posenc.YaRN, "dynamic_ntk": hf_posenc.DynamicNTK, "dynamic_yarn": hf_posenc.DynamicYaRN,
    "llama3": hf_posenc.Llama3, "longrope": hf_posenc.LongRoPE, "partial_rope": hf_posenc.PartialRoPE,
    "self_extend": hf_posenc.SelfExtend, "rerope": hf_posenc.ReRoPE, "leaky_rerope": hf_posenc.LeakyReRoPE,
    "dca": hf_posenc.DualChunk, "string": hf_posenc.STRING, "logn": hf_posenc.LogN, "nope": hf_posenc.NoPE,
    "alibi": hf_posenc.ALiBi, "toeplitz": hf_posenc.Toeplitz, "t5_bias": hf_posenc.T5Bias, "rope": hf_posenc.RoPE,
    "sinusoidal": hf_posenc.Sinusoidal, "learned": hf_posenc.LearnedPositions,
    "xpos": hf_posenc.XPos, "vo_rope": hf_posenc.VORoPE, "irope": hf_posenc.IRoPE, "layers": hf_posenc.PerLayer,
}  # fmt: skip


def test_names_classes_and_files():
    assert list(registered()) == sorted(registered()) == hf_posenc.methods()
    for name, method in registered().items():
        assert CLASSES[name] is method
        assert method.name == name
        assert method.__module__ == f"hf_posenc.methods.{name}"
        assert method.__name__ in hf_posenc.__all__
        assert re.search(r"arXiv|kexue\.fm/archives/\d", sys.modules[method.__module__].__doc__)


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_method_prints_the_string_that_rebuilds_it(name, data):
    parameters = data.draw(PARAMETERS[name])
    method = create(name, **parameters)
    assert isinstance(method, CLASSES[name])
    assert parse(str(method)) == method
    assert str(parse(str(method))) == str(method)
    assert hash(parse(str(method))) == hash(method)
    for key, value in parameters.items():
        assert getattr(method, key) == (tuple(value) if isinstance(value, list) else value)
    # Spaces and the class in place of the name change nothing.
    spaced = str(method).replace(",", " , ").replace(":", " : ", 1).replace("=", " = ")
    assert parse(f" {spaced} ") == method
    assert create(CLASSES[name], **parameters) == method == create(method)


MAPS = [name for name, method in CLASSES.items() if getattr(method, "over_frequencies", False) and name != "rope"]
BASES = [name for name, method in CLASSES.items() if issubclass(method, FrequencyMethod)]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data(), top=st.sampled_from(MAPS), base=st.sampled_from(BASES))
def test_a_stack_prints_the_string_that_rebuilds_it(data, top, base):
    """In either order, with the position map first."""
    one, other = (create(name, **data.draw(PARAMETERS[name])) for name in (top, base))
    if not other.is_fixed:
        with pytest.raises(ValueError, match="the same frequencies for every query"):
            parse(f"{one}+{other}")
        return
    method = Stack(one, other)
    assert str(method) == f"{one}+{other}"
    assert parse(f"{one}+{other}") == parse(f"{other} + {one}") == join(other, one) == create(method) == method
    assert hash(parse(str(method))) == hash(method)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yarn:factor=4", hf_posenc.YaRN(factor=4)),
        ("yarn:factor=4.0", hf_posenc.YaRN(factor=4)),
        ("yarn:factor=1e1,truncate=False", hf_posenc.YaRN(factor=10, truncate=False)),
        ("yarn:factor=4,truncate=true,mscale=none", hf_posenc.YaRN(factor=4)),
        ("dynamic_ntk", hf_posenc.DynamicNTK()),
        ("dynamic_ntk:", hf_posenc.DynamicNTK()),
        ("longrope:short_factor=[1,1.5],long_factor=[2, 3.5],switch=long",
         hf_posenc.LongRoPE(short_factor=(1, 1.5), long_factor=(2, 3.5), switch="long")),
        ("longrope:switch='stock'", hf_posenc.LongRoPE(switch="stock")),
        ("self_extend:group_size=4,window=1024", hf_posenc.SelfExtend(4, 1024)),
        ("rerope:window=6,logn=true+pi:factor=1e1",
         Stack(hf_posenc.ReRoPE(6, logn=True), hf_posenc.PI(factor=10))),
        ("layers:layers={0:'nope', 3:'yarn:factor=4,beta_fast=16'},default=alibi",
         hf_posenc.PerLayer({3: hf_posenc.YaRN(factor=4, beta_fast=16), 0: "nope"}, default="alibi")),
        ("irope:interval=4+yarn:factor=4", Stack(hf_posenc.IRoPE(), hf_posenc.YaRN(factor=4))),
    ],
)  # fmt: skip
def test_strings(text, expected):
    assert parse(text) == expected


def test_printed_forms():
    assert str(hf_posenc.YaRN(factor=4)) == "yarn:factor=4"
    assert str(hf_posenc.YaRN(target_length=8192, beta_fast=32.0)) == "yarn:target_length=8192"
    assert str(hf_posenc.YaRN(factor=1.1, truncate=False)) == "yarn:factor=1.1,truncate=False"
    assert str(hf_posenc.DynamicNTK()) == "dynamic_ntk"
    assert str(hf_posenc.LongRoPE((1.0, 1.5), (2, 3))) == "longrope:short_factor=[1,1.5],long_factor=[2,3]"


@pytest.mark.parametrize(
    ("text", "parameters", "says"),
    [
        ("", {}, r"Unknown method: ''.*Available: abf"),
        (":factor=2", {}, "Unknown method"),
        ("yarm:factor=2", {}, "Did you mean 'yarn'"),
        ("YARN:factor=2", {}, "Did you mean 'yarn'"),
        ("ntk-by-parts:factor=2", {}, "Did you mean 'ntk_by_parts'"),
        ("dynamic", {}, "Did you mean 'dynamic_ntk'"),
        ("yarn", {}, "factor.*target_length"),
        ("yarn:factor", {}, "'factor' in .* is not key=value"),
        ("yarn:=4", {}, "is not key=value"),
        ("yarn:factor=4,", {}, "is not key=value"),
        ("yarn:factor=4,factor=8", {}, "factor stands twice"),
        ("yarn:factor=4", {"factor": 8}, "factor stands both"),
        ("yarn:faktor=4", {}, "Did you mean 'factor'"),
        ("yarn:factor=4,window=8", {}, "Available: factor, target_length, beta_fast"),
        ("yarn:factor=nan", {}, "factor"),
        ("yarn:factor=-1", {}, "at least 1"),
        ("yarn+pi", {}, "factor.*target_length"),
        ("yarn:factor=4+pi:factor=2", {}, r"yarn \+ pi do not combine: give one, or one of dca, .*over one"),
        ("yarn:factor=4+dynamic_ntk:factor=2", {}, r"yarn \+ dynamic_ntk do not combine"),
        ("rerope:window=6+dynamic_ntk", {}, r"rerope \+ dynamic_ntk do not combine"),
        ("rerope:window=6+logn", {}, r"rerope \+ logn do not combine"),
        ("logn+rerope:window=6+pi:factor=2", {}, r"logn \+ rerope \+ pi do not combine"),
        ("rerope:window=6+", {}, "whole number"),
        ("rerope:window=6+longrope:factor=2", {}, "the same frequencies for every query.*switch='long'"),
        ("rerope:window=6+pi:factor=2", {"window": 8}, "window stands both"),
        ("rerope", {}, "needs window, as in 'rerope:window="),
        ("self_extend:window=6", {}, "group_size and window, or target_length"),
        ("dca:chunk_size=6", {}, "needs local_window"),
        ("string:shift=4,window=5", {}, "at most its shift"),
        ("leaky_rerope:window=4,scale=1", {}, "below 1"),
        ("layers:layers={}", {}, "index: method"),
        ("layers:layers=nope", {}, "index: method"),
        ("layers:layers={'a':'nope'}", {}, "counts layers from 0"),
        ("layers:layers={0:'yarm:factor=2'}", {}, "Did you mean 'yarn'"),
        ("layers:layers={0:'sinusoidal'}", {}, "for a whole model"),
        ("layers:layers={0:'rope+yarn:factor=2'}", {}, "for a whole model"),
        ("layers:layers={0:'irope'}", {}, "a table of layers itself"),
        ("layers:layers={0:'longrope:factor=2,switch=stock'}", {}, "takes no single ones"),
        ("irope:interval=0", {}, "at least 1"),
        ("irope+longrope:factor=2", {}, "the same frequencies for every query"),
        ("xpos+vo_rope", {}, "do not combine"),
        ("rope+xpos", {}, "needs them turned"),
        ("xpos:gamma=0", {}, "above 0"),
        ("abf", {}, "needs rope_theta, as in 'abf:rope_theta="),
        ("partial_rope:fraction=0", {}, "above 0"),
        ("partial_rope:fraction=1.01", {}, "at most 1"),
    ],
)  # fmt: skip
def test_wrong_strings(text, parameters, says):
    with pytest.raises((ValueError, TypeError), match=says):
        parse(text, **parameters)


@pytest.mark.parametrize(
    "text", ["yarn:factor=four", "yarn:factor='4'", "yarn:factor=[4]", "dynamic_ntk:granularity=1.5"]
)
def test_wrong_types_in_strings(text):
    with pytest.raises(TypeError, match="number"):
        parse(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text(alphabet="yarn_pidtk:=,+[]. 0123456789'\"-e", max_size=40))
def test_any_text_is_a_method_or_a_clear_refusal(text):
    try:
        method = parse(text)
    except (ValueError, TypeError) as error:
        assert len(str(error)) > 20
        assert type(error) in (ValueError, TypeError)
    else:
        assert parse(str(method)) == method


def test_methods_are_frozen_and_hashable():
    method = hf_posenc.YaRN(factor=4)
    with pytest.raises(AttributeError):
        method.factor = 8
    assert {method: 1}[hf_posenc.YaRN(factor=4.0)] == 1
    assert math.isfinite(hash(hf_posenc.LongRoPE([1, 2], [3, 4])))
