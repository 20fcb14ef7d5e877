"""Effective lengths by hand, Wilson's interval against the equation that it solves, the bootstrap by its coverage."""

import itertools
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import scores as module
from eval.scores import RULES, blocks, effective_length, effective_lengths, paired_bootstrap, wilson

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


def test_the_bootstrap_covers_the_true_difference_as_often_as_it_says():
    draw, inside, runs = numpy.random.default_rng(0), 0, 600
    for run in range(runs):
        common, mine, base = draw.normal(0, 5, 40), draw.normal(0.3, 1, 40), draw.exponential(1, 40)
        _, low, high = paired_bootstrap(common + mine, common + base, resamples=1000, seed=run)
        inside += low <= 0.3 - 1 <= high
    assert 0.92 <= inside / runs <= 0.97


@pytest.mark.parametrize(("units", "stated"), [(5, 0.88), (10, 0.92)])
def test_of_few_units_it_covers_less_as_documented(units, stated):
    draw, inside, runs = numpy.random.default_rng(0), 0, 1000
    for run in range(runs):
        _, low, high = paired_bootstrap(draw.normal(size=units), numpy.zeros(units), resamples=500, seed=run)
        inside += low <= 0 <= high
    assert inside / runs == pytest.approx(stated, abs=0.03)


def test_the_bootstrap_against_every_possible_resample():
    differences = [0.0, 1.0, 5.0]
    means = [sum(drawn) / 3 for drawn in itertools.product(differences, repeat=3)]
    expected = [2 + math.sqrt(3 / 2) * (numpy.quantile(means, end) - 2) for end in (0.1, 0.9)]
    found = paired_bootstrap([1, 2, 6], [1, 1, 1], resamples=200_000, confidence=0.8)
    assert found == pytest.approx((2, *expected), abs=1e-9)


def test_what_both_share_does_not_widen_the_interval():
    draw = numpy.random.default_rng(0)
    base, change = draw.normal(0, 100, 50), draw.normal(0, 1, 50)
    _, low, high = paired_bootstrap(base + change, base)
    assert 0.3 < high - low < 0.8
    assert paired_bootstrap(base, base + change)[0] == -paired_bootstrap(base + change, base)[0]


def test_the_seed_and_nothing_else_decides(monkeypatch):
    mine, base = numpy.arange(30.0) ** 1.5, numpy.zeros(30)
    known = paired_bootstrap(mine, base)
    assert paired_bootstrap(mine, base) == known != paired_bootstrap(mine, base, seed=1)
    monkeypatch.setattr(module, "DRAWN_AT_ONCE", 100)
    assert paired_bootstrap(mine, base) == pytest.approx(known, rel=1e-12)


def test_the_bootstrap_of_nothing_to_resample():
    assert paired_bootstrap([3.0], [1.0]) == (2.0, None, None)
    assert paired_bootstrap([1.1, 0.1], [1.0, 0.0]) == pytest.approx((0.1, 0.1, 0.1), abs=1e-12)
    assert paired_bootstrap([2.0] * 7, [2.0] * 7) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("mine", "base", "options", "words"),
    [([1.0, 2.0], [1.0], {}, "do not pair"), ([], [], {}, "do not pair"), ([[1.0]], [[1.0]], {}, "do not pair"),
     ([1.0, math.nan], [1.0, 1.0], {}, "not a number"), ([1.0, math.inf], [1.0, math.inf], {}, "not a number"),
     ([1.0], [1.0], {"resamples": 0}, "resamples=0"), ([1.0], [1.0], {"confidence": 95}, "confidence=95")],
)  # fmt: skip
def test_scores_that_do_not_pair(mine, base, options, words):
    with pytest.raises(ValueError, match=words):
        paired_bootstrap(mine, base, **options)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=60).flatmap(
    lambda losses: st.tuples(st.just(losses), st.integers(1, len(losses)))))  # fmt: skip
def test_blocks_hold_every_token_in_order(case):
    losses, size = case
    found, rest = blocks(losses, size), list(losses)
    assert len(found) == len(losses) // size
    sizes = [len(losses) // len(found) + (index < len(losses) % len(found)) for index in range(len(found))]
    assert sum(sizes) == len(losses) and min(sizes) >= size
    for mean, length in zip(found, sizes, strict=True):
        assert mean == pytest.approx(sum(rest[:length]) / length, abs=1e-9)
        del rest[:length]


def test_blocks_widen_the_interval_of_tokens_that_hang_together():
    draw = numpy.random.default_rng(0)
    losses = numpy.convolve(draw.normal(size=4000), numpy.ones(50) / 50, "same")
    widths = [high - low for _, low, high in (
        paired_bootstrap(units, 0 * units, resamples=1000) for units in (losses, blocks(losses, 200)))]  # fmt: skip
    assert widths[1] > 4 * widths[0]


@pytest.mark.parametrize(("losses", "size"), [([1.0], 0), ([1.0, 2.0], 3), ([], 1)])
def test_blocks_of_nothing(losses, size):
    with pytest.raises(ValueError, match="give a size"):
        blocks(losses, size)


def test_weights_count_in_the_estimate_and_in_its_interval():
    mine, weights = [0.0] * 8 + [2.0] * 6, [256] * 8 + [5] * 6
    mean, low, high = paired_bootstrap(mine, [0.0] * 14, weights=weights)
    assert mean == pytest.approx(60 / 2078) and low < mean < high < 0.1
    alike = paired_bootstrap(mine, [0.0] * 14, weights=[3] * 14)
    assert alike == pytest.approx(paired_bootstrap(mine, [0.0] * 14))
    for wrong in ([1] * 13, [0] + [1] * 13):
        with pytest.raises(ValueError, match="weights"):
            paired_bootstrap(mine, [0.0] * 14, weights=wrong)
