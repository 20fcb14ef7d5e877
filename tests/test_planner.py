"""inspect and plan: golden wavelengths, every kind of model, and suggestions that can be carried out."""

import io
import json
import math
import re
from dataclasses import replace

import pytest
import reference
import tiny
import torch
from rich.console import Console
from transformers import (
    Cohere2Config,
    DeepseekV3Config,
    Gemma3Config,
    Gemma4Config,
    Glm4Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2VLConfig,
    Qwen3Config,
)

import hf_posenc
from hf_posenc.methods import (
    NTK,
    PI,
    STRING,
    DualChunk,
    DynamicNTK,
    DynamicYaRN,
    LeakyReRoPE,
    Llama3,
    LongRoPE,
    Method,
    PositionMap,
    ReRoPE,
    SelfExtend,
    YaRN,
)
from hf_posenc.planner import inspect, plan

MISTRAL = MistralConfig(head_dim=128, max_position_embeddings=32768, sliding_window=None)
QWEN3 = Qwen3Config(
    hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, head_dim=128, max_position_embeddings=40960,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
LLAMA31 = LlamaConfig(
    max_position_embeddings=131072,
    rope_parameters={
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)  # fmt: skip


def only(report):
    assert len(report.layer_types) == 1
    return report.layer_types[0]


@pytest.mark.parametrize(
    ("config", "context", "slow", "pairs"),
    [(MISTRAL, 32768, 4, 64), (QWEN3, 32768, 24, 64), (DeepseekV3Config(), 131072, 0, 32)],
)
def test_slow_pairs_of_known_models(config, context, slow, pairs):
    found = only(inspect(config, context))
    assert len(found.trained.lengths) == pairs
    assert len(found.trained.slow(context)) == slow
    assert found.trained.lengths[0] == pytest.approx(2 * math.pi)


def test_every_wavelength_by_the_formula():
    found = only(inspect(QWEN3))
    expected = [2 * math.pi * 1e6 ** (2 * pair / 128) for pair in range(64)]
    assert found.trained.lengths == pytest.approx(expected, rel=1e-5)
    assert found.trained.slow(32768) == list(range(40, 64))
    assert (found.theta, found.rotated, found.head_dim, found.trained_length) == (1e6, 128, 128, 40960)


def test_context_is_the_configured_length_by_default():
    assert inspect(MISTRAL).context_length == 32768


def test_partial_rotary_counts_the_turning_half_only():
    found = only(inspect(Glm4Config()))
    assert (found.rotated, found.head_dim, len(found.trained.lengths)) == (64, 128, 32)
    assert found.trained.lengths[-1] == pytest.approx(2 * math.pi * 1e4 ** (62 / 64), rel=1e-5)


def test_pairs_that_never_turn_are_not_slow():
    found = next(one for one in inspect(Gemma4Config()).layer_types if one.label == "full_attention")
    assert math.isinf(found.trained.lengths[-1])
    assert found.rotated < found.head_dim
    assert all(found.trained.lengths[pair] < math.inf for pair in found.trained.slow(1000))


def test_nested_frequencies_and_windows():
    report = inspect(Gemma3Config(), 131072, "yarn:factor=4")
    full, sliding = (
        next(one for one in report.layer_types if one.label == label)
        for label in ("full_attention", "sliding_attention")
    )
    assert (full.theta, sliding.theta) == (1e6, 1e4)
    assert (full.windowed, full.window, sliding.windowed, sliding.window) == (False, None, True, 4096)
    assert full.layers + sliding.layers == 26
    assert full.proposed.factor == pytest.approx(1.1386294)
    assert sliding.proposed is None
    assert any("look back at most 4096" in fact for fact in report.facts)


def test_position_axes():
    config = Qwen2VLConfig(
        text_config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
    )
    assert only(inspect(config)).sections == (16, 24, 24)


def test_layers_without_rotation_are_told():
    report = inspect(Cohere2Config())
    assert "10 of 40 layers carry no rotation" in report.facts[0]
    assert (only(report).layers, only(report).window) == (30, 4096)


@pytest.mark.parametrize(
    ("method", "last", "factor"),
    [
        ("pi:factor=4", 4, 1.0),
        ("ntk:factor=4", 4, 1.0),
        ("yarn:factor=4", 4, 1.1386294),
        ("ntk_by_parts:factor=4", 4, 1.0),
        ("llama3:factor=4", 4, 1.0),
        ("dynamic_yarn", 4, 1.1386294),
        ("dynamic_ntk", 4, 1.0),
    ],
)
def test_where_a_method_puts_the_slowest_pair(method, last, factor):
    found = only(inspect(MISTRAL, 4 * 32768, method))
    assert found.proposed.lengths[-1] / found.trained.lengths[-1] == pytest.approx(last, rel=1e-5)
    assert found.proposed.factor == pytest.approx(factor)
    # The fastest pair stays, but for PI, which slows all.
    assert found.proposed.lengths[0] / found.trained.lengths[0] == pytest.approx(4 if method[:2] == "pi" else 1)
    assert found.in_force == found.trained


def test_length_dependent_methods_leave_the_trained_length_alone():
    found = only(inspect(MISTRAL, 32768, "dynamic_yarn"))
    assert found.proposed.lengths == found.trained.lengths


def test_partial_rope_turns_fewer_pairs():
    assert len(only(inspect(MISTRAL, method="partial_rope:fraction=0.25")).proposed.lengths) == 16


def test_a_method_that_moves_positions_moves_no_frequency():
    class Moves(Method):
        name, traits = "moves", YaRN.traits

    assert only(inspect(MISTRAL, method=Moves())).proposed is None


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("self_extend:target_length=200", "group_size=4,window=16 moves .* up to 208 tokens; .* checkpoint's own"),
        ("rerope:window=6", "moves far tokens closer; frequencies are the checkpoint's own"),
        ("dca:chunk_size=12,local_window=4", "moves far tokens closer;"),
        ("string:shift=20,window=3", "up to 81 tokens"),
        ("logn", "makes queries grow"),
    ],
)
def test_a_position_map_leaves_the_frequencies_and_says_what_it_does(method, says):
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, **SCALINGS["yarn"]}
    for parameters in (None, scaled):
        model = tiny.TL(**({"rope_parameters": parameters} if parameters else {}))
        own = only(inspect(model)).in_force
        assert (own == only(inspect(model)).trained) == (parameters is None)
        for patched_first in (False, True):
            report = inspect(hf_posenc.patch(model, "pi:factor=8") if patched_first else model, 256, method)
            assert only(report).proposed == own
            (fact,) = report.facts
            assert re.search(says, fact)
        report = inspect(hf_posenc.patch(model, method), 256)
        assert (only(report).in_force, report.facts) == (own, (fact,))


def test_a_stack_shows_the_frequencies_of_its_base():
    report = inspect(tiny.TL(), 256, "rerope:window=6+yarn:factor=4")
    assert only(report).proposed == only(inspect(tiny.TL(), 256, "yarn:factor=4")).proposed
    assert report.facts == ("rerope:window=6 moves far tokens closer; frequencies are those of yarn:factor=4.",)
    model = hf_posenc.patch(tiny.TL(), "rerope:window=6+yarn:factor=4")
    assert only(inspect(model, 256)).in_force == only(report).proposed


def test_the_checkpoint_s_own_scaling_is_in_force_but_not_trained():
    found = only(inspect(LLAMA31))
    assert found.rope_type == "llama3"
    assert found.trained_length == 8192
    assert found.in_force.lengths[-1] / found.trained.lengths[-1] == pytest.approx(8, rel=1e-5)
    assert found.in_force.lengths[0] == pytest.approx(found.trained.lengths[0])


@pytest.mark.parametrize("method", ["yarn:factor=4", "ntk:factor=4", "dynamic_yarn"])
def test_a_patched_model_shows_both(method):
    model = tiny.TL()
    before = only(inspect(model))
    hf_posenc.patch(model, method)
    report = inspect(model, 256)
    found = only(report)
    assert report.in_force == method
    assert found.trained == before.trained
    assert found.trained_length == 64
    assert found.in_force == only(inspect(tiny.TL(), 256, method)).proposed != found.trained
    hf_posenc.unpatch(model)
    assert inspect(model) == inspect(tiny.TL())


def test_a_loaded_model_shows_the_frequencies_it_really_has():
    model = tiny.TL().to(torch.bfloat16)
    found = only(inspect(model))
    assert found.in_force.lengths != found.trained.lengths
    assert found.in_force.lengths == pytest.approx(found.trained.lengths, rel=1e-2)


@pytest.mark.parametrize("kind", ["model", "config", "folder", "patched folder"])
def test_every_kind_of_source(kind, tmp_path):
    model = tiny.TL()
    expected = only(inspect(model))
    if kind == "patched folder":
        hf_posenc.patch(model, "dynamic_ntk")
    model.save_pretrained(tmp_path)
    report = inspect({"model": model, "config": model.config}.get(kind, tmp_path))
    assert only(report).trained == expected.trained
    assert report.in_force == ("dynamic_ntk" if kind == "patched folder" else None)


@pytest.mark.parametrize(
    "name", ["gemma3_text", "granite_swa", "glm", "deepseek_v3", "qwen2_vl", "gpt_oss", "cohere2"]
)
def test_families_loaded_and_configured_alike(name):
    model = tiny.tiny_model(name)
    loaded, configured = inspect(model), inspect(model.config)
    assert loaded.layer_types == configured.layer_types
    if name != "cohere2":
        hf_posenc.patch(model, "pi:factor=2")
        assert [one.trained for one in inspect(model).layer_types] == [one.trained for one in loaded.layer_types]


def test_report_as_json_table_and_plot(tmp_path):
    report = inspect(Gemma3Config(), 131072, "yarn:factor=4")
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["layer_types"][0]["proposed"]["attention_factor"] == pytest.approx(1.1386294)
    assert {one["label"] for one in plain["layer_types"]} == {"full_attention", "sliding_attention"}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    assert "35 of 128" in text
    assert "yarn:factor=4" in text
    assert "6.28" in text
    report.plot(tmp_path / "waves.png")
    assert (tmp_path / "waves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    json.dumps(inspect(Gemma4Config()).to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((MISTRAL, 0), ValueError, "at least 1"),
        ((MISTRAL, 1.5), TypeError, "whole number"),
        ((MISTRAL, 4096, "yarn:factor=0.5"), ValueError, "at least 1"),
        ((MISTRAL, 4096, "yrn"), ValueError, "Did you mean 'yarn'"),
        ((MISTRAL, 4096, "dca:chunk_size=32768,local_window=1"), ValueError, "beyond the 32768 tokens"),
        ((MISTRAL, 4096, "self_extend:target_length=50000,group_size=1"), ValueError, "give larger groups"),
        ((MISTRAL, 4096, "yarn:target_length=100"), ValueError, "below the 32768 tokens"),
        ((GPT2Config(),), ValueError, "no rotary module"),
        ((3,), TypeError, "hub id"),
        (("/no/such/folder",), OSError, "no folder /no/such/folder"),
    ],
)
def test_inspect_refuses(arguments, error, text):
    with pytest.raises(error, match=text):
        inspect(*arguments)


def classes(suggestions):
    return [type(one.method) for one in suggestions]


def test_moderate_factor_without_training():
    found = plan(MISTRAL, 4 * 32768)
    maps = [YaRN, ReRoPE, SelfExtend, DynamicYaRN, DynamicNTK, LeakyReRoPE, DualChunk]
    assert classes(found) == [*maps, NTK, PI, Llama3]
    assert [one.needs_training for one in found] == [False] * 8 + [True, True]
    assert found[0].command == "yarn:factor=4"
    assert all(one.reason.endswith(".") for one in found)


def test_large_factors_put_the_methods_first_that_spare_short_texts():
    found = plan(MISTRAL, 16 * 32768)
    assert classes(found)[:4] == [ReRoPE, SelfExtend, DynamicYaRN, DynamicNTK]
    (yarn,) = [one for one in found if type(one.method) is YaRN]
    assert "tune it" in yarn.reason and found.index(yarn) == 6


def test_a_target_that_is_no_multiple_is_named_itself():
    assert plan(MISTRAL, 50000)[0].command == "yarn:target_length=50000"


@pytest.mark.parametrize("target", [1, 8192, 131072])
def test_within_reach_nothing_is_needed(target):
    (found,) = plan(LLAMA31, target)
    assert found.method is None
    assert found.command == ""
    assert "131072" in found.reason


def test_a_scaled_checkpoint_counts_from_its_original_length_and_keeps_its_kind():
    found = plan(LLAMA31, 262144)
    assert found[0].command == "llama3:factor=32"
    for one in found[1:]:
        does = "keeps" if isinstance(one.method, PositionMap) else "replaces"
        assert f"{does} the llama3 scaling" in one.reason
    # Their short texts would be read by frequencies that the checkpoint was tuned away from.
    assert not {DynamicYaRN, DynamicNTK} & set(classes(found))


def test_shape_of_a_carried_yarn_is_kept():
    config = LlamaConfig(
        max_position_embeddings=16384,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096,
            "beta_fast": 16.0, "truncate": False,
        },
    )  # fmt: skip
    assert plan(config, 32768)[0].command == "yarn:factor=8,beta_fast=16,truncate=False"


def test_a_linear_factor_of_unknown_origin_is_warned_of():
    config = LlamaConfig(
        max_position_embeddings=4096, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    )
    found = plan(config, 8192)[0]
    assert found.command == "pi:factor=8"
    assert "Caution: max_position_embeddings=4096" in found.reason


@pytest.mark.parametrize("config", [MistralConfig(sliding_window=4096), Cohere2Config()])
def test_windowed_rotations_need_nothing(config):
    (found,) = plan(config, 10**6)
    assert found.method is None
    assert "look back at most 4096 tokens" in found.reason


def test_a_scheme_in_force_is_left_out_of_account():
    model = tiny.TL()
    expected = plan(model, 128)
    hf_posenc.patch(model, "pi:factor=8")
    assert plan(model, 128) == expected
    assert expected[0].command == "yarn:factor=2"


SCALED_LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MAPS = {
    SelfExtend: (reference.self_extend_distance, ("window", "group_size")),
    ReRoPE: (reference.rerope_distance, ("window",)),
    LeakyReRoPE: (reference.leaky_rerope_distance, ("window", "scale")),
    DualChunk: (reference.dca_distance, ("chunk_size", "local_window")),
    STRING: (reference.string_distance, ("shift", "window")),
}


def check_reaches(model, suggestion, target):
    """It can be put on, and if it moves tokens, none is farther than the model was trained for."""
    hf_posenc.patch(model, suggestion.command)
    filled = (
        replace(suggestion.method, **SCALED_LISTS) if isinstance(suggestion.method, LongRoPE) else suggestion.method
    )
    assert hf_posenc.current(model) == filled
    length = model.config.get_text_config().max_position_embeddings
    assert type(suggestion.method) in (DynamicYaRN, DynamicNTK, ReRoPE, DualChunk) or length >= target
    hf_posenc.unpatch(model)
    if type(suggestion.method) in MAPS:
        distance, names = MAPS[type(suggestion.method)]
        numbers = [getattr(suggestion.method, name) for name in names]
        reached = max(distance(i, j, *numbers) for i in range(target) for j in range(i + 1))
        assert reached <= model.config.get_text_config().max_position_embeddings


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "deepseek_v3", "phi3", "falcon", "qwen2_vl", "hunyuan_v1_dense"]
)
def test_every_suggestion_can_be_carried_out(name):
    model = tiny.tiny_model(name)
    found = plan(model, 160)
    assert found[0].method is not None
    for one in found:
        check_reaches(model, one, 160)


@pytest.mark.parametrize("target", [65, 80, 92, 96, 128, 129, 300])
def test_every_suggestion_reaches_its_target(target):
    model = tiny.TL()
    found = plan(model, target)
    assert ({SelfExtend, ReRoPE, LeakyReRoPE, DualChunk} | ({STRING} if target < 93 else set())) == {
        kind for kind in classes(found) if kind in MAPS
    }
    for one in found:
        check_reaches(model, one, target)
        capacity = f"reads (64 - 16) x {getattr(one.method, 'group_size', 0)} + 16 = "
        assert not isinstance(one.method, SelfExtend) or capacity in one.reason


@pytest.mark.parametrize("length", range(1, 6))
def test_lengths_too_short_for_a_map(length):
    model = tiny.TL(max_position_embeddings=length)
    for one in plan(model, 7):
        check_reaches(model, one, 7)


SCALINGS = {
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 2.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0
    },
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 2.0, "original_max_position_embeddings": 32, **SCALED_LISTS
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_scaled_checkpoint_is_offered_what_it_takes(kind):
    """Position maps count from the length that it reads, and fit no scaling that changes with each call."""
    model = tiny.TL(rope_parameters={"rope_type": kind, "rope_theta": 1e4, **SCALINGS[kind]})
    found = plan(model, 128)
    able = hf_posenc.methods(model)
    for one in found:
        assert one.method.name in able
        check_reaches(model, one, 128)
    fixed = kind not in ("dynamic", "longrope")
    assert (SelfExtend in classes(found)) == (ReRoPE in classes(found)) == ("string" in able) == fixed
    if not fixed:
        hf_posenc.patch(model, "dynamic_yarn")
        assert hf_posenc.methods(model) == able
        with pytest.raises(hf_posenc.UnsupportedMethodError, match="over a fixed one"):
            hf_posenc.patch(model, "rerope:window=8")
        hf_posenc.patch(model, "rerope:window=8+yarn:factor=4")


def test_a_method_file_can_speak_for_itself(monkeypatch):
    def suggest(cls, rope, target_length):
        return 1, cls(target_length=target_length), f"from {rope.length}"

    monkeypatch.setattr(PI, "suggest", classmethod(suggest), raising=False)
    found = plan(MISTRAL, 50000)[0]
    assert (found.command, found.reason) == ("pi:target_length=50000", "from 32768")


@pytest.mark.parametrize(
    ("target", "error"), [(0, ValueError), (-1, ValueError), (4096.0, TypeError), (True, TypeError)]
)
def test_plan_refuses(target, error):
    with pytest.raises(error, match="target_length"):
        plan(MISTRAL, target)
