"""Effective lengths by hand, and Wilson's interval against the equation that it solves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.scores import RULES, effective_length, effective_lengths, wilson

FALLING = {4096: 96.0, 8192: 85.6, 16384: 81.7, 32768: 81.5, 65536: 20.0, 131072: 3.0}


@pytest.mark.parametrize(
    ("rule", "length"),
    [("ruler_85.6", 8192), ("nolima_85", 16384), ("yarn_80", 32768), ("pi_kmax_20", 65536)],
)
def test_rules_differ_on_the_same_scores(rule, length):
    assert effective_length(FALLING, rule) == length
    assert effective_length(dict(reversed(FALLING.items())), rule) == length
    assert effective_lengths(FALLING)[rule] == length


def test_a_gap_ends_k_max_only():
    scores = {1024: 90.0, 2048: 19.0, 4096: 90.0}
    assert effective_lengths(scores) == {"ruler_85.6": 4096, "nolima_85": 4096, "pi_kmax_20": 1024, "yarn_80": 4096}


def test_a_base_of_ones_own():
    scores = {250: 60.0, 1000: 90.0, 4000: 60.0}
    assert effective_length(scores, "nolima_85") == 4000
    assert effective_length(scores, "nolima_85", base=1000) == 1000


def test_nothing_is_good():
    assert effective_lengths({1024: 0.0, 2048: 0.0}) == dict.fromkeys(RULES)


@pytest.mark.parametrize(
    ("scores", "rule", "base", "words"),
    [({1024: 50.0}, "ruler", None, "ruler_85.6"), ({}, "yarn_80", None, "at least one"),
     ({1024: 101.0}, "yarn_80", None, "percentages"), ({1024: math.nan}, "yarn_80", None, "percentages"),
     ({1024: 50.0}, "nolima_85", 512, "1024")],
)  # fmt: skip
def test_wrong_input(scores, rule, base, words):
    with pytest.raises(ValueError, match=words):
        effective_length(scores, rule, base)


def test_wilson_interval():
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(10, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)


@given(
    st.integers(1, 500).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials))), st.floats(0.5, 4)
)
def test_both_ends_of_the_interval_are_z_deviations_away(counts, z):
    hits, trials = counts
    for end, edge in zip(wilson(hits, trials, z), (0, 1), strict=True):
        assert end == pytest.approx(edge, abs=1e-9) or (hits / trials - end) ** 2 == pytest.approx(
            z * z * end * (1 - end) / trials, rel=1e-6
        )


@pytest.mark.parametrize("counts", [(1, 0), (0, 0), (3, 2), (-1, 2)])
def test_wilson_of_nothing(counts):
    with pytest.raises(ValueError, match="at least one trial"):
        wilson(*counts)
