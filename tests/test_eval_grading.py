"""What counts as a right answer, by each scoring."""

import pytest

from eval.grading import SCORINGS, grade, grades


@pytest.mark.parametrize(
    ("answer", "first", "anywhere"),
    [(" 12345", 1, 1), ("12345.", 1, 1), (" **12345**", 1, 1), ("123456", 0, 1), ("012345", 0, 1), ("1234", 0, 0),
     ("1 12345", 0, 1), ("", 0, 0), ("12,345", 0, 0)],
)  # fmt: skip
def test_one_number(answer, first, anywhere):
    assert grade("first_number", answer, ["12345"]) == first
    assert grade("substring", answer, ["12345"]) == anywhere


@pytest.mark.parametrize(
    ("answer", "first", "anywhere"),
    [("11, 22, 33", 1, 1), ("33 and 11 and 22", 1, 1), ("11, 22", 2 / 3, 2 / 3), ("7, 11, 22, 33", 2 / 3, 1),
     ("112233", 0, 1), ("", 0, 0)],
)  # fmt: skip
def test_several_numbers(answer, first, anywhere):
    assert grade("first_number", answer, ["11", "22", "33"]) == pytest.approx(first)
    assert grade("substring", answer, ["11", "22", "33"]) == pytest.approx(anywhere)


def test_leading_zeros_and_letters():
    assert grade("first_number", " 01234", ["01234"]) == 1 and grade("first_number", "1234", ["01234"]) == 0
    assert grade("substring", "It is VORANDEL.", ["Vorandel"]) == 1


@pytest.mark.parametrize(("answer_ids", "expected"), [([7, 8], 1), ([7, 8, 9], 1), ([7], 0), ([9, 7, 8], 0), ([], 0)])
def test_exact_tokens(answer_ids, expected):
    assert grade("exact_tokens", "", ["1"], answer_ids, [7, 8]) == expected


def test_what_cannot_be_graded():
    with pytest.raises(ValueError, match="choose one of first_number, substring, exact_tokens"):
        grade("rouge", "1", ["1"])
    with pytest.raises(ValueError, match="needs the tokens"):
        grade("exact_tokens", "1", ["1"], [7])
    assert list(grades("1", ["1"], [7], [])) == ["first_number", "substring"]
    assert list(grades("1", ["1"], [7], [7])) == list(SCORINGS)
