"""SUPPORT.md is what the survey measures now."""

from pathlib import Path

import pytest
import support

PAGE = Path(__file__).parents[1].joinpath("SUPPORT.md").read_text()
ROWS = {
    cells[0].strip("| "): cells for cells in (line.split(" | ") for line in PAGE.splitlines() if line.startswith("| "))
}
QUICK = ["llama", "gemma3_text", "gpt_neox", "glm", "deepseek_v3", "qwen2_vl", "falcon", "hunyuan_v1_dense", "phi3"]


def check(model_type: str) -> None:
    row = support.measure(model_type)
    assert row.frequency.split()[0] == ROWS[model_type][2].split()[0], row
    assert row.attention.split()[0] == ROWS[model_type][3].split()[0], row
    assert row.maps.split()[0] == ROWS[model_type][4].split()[0], row
    assert row.others.split(";")[0] == ROWS[model_type][5].rstrip("| ").split(";")[0], row


UNROTATED = {
    cells[0].removeprefix("- "): cells
    for cells in (line.split(" | ") for line in PAGE.splitlines() if line.startswith("- ") and " | " in line)
}
QUICK_UNROTATED = ["gpt2", "opt", "bert", "bloom", "t5"]


def check_unrotated(model_type: str) -> None:
    found = support.measure_unrotated(model_type)
    assert found[1] == UNROTATED[model_type][1]
    assert found[2].split(";")[0] == UNROTATED[model_type][2].split(";")[0]


@pytest.mark.parametrize("model_type", QUICK_UNROTATED)
def test_named_types_without_a_rotation(model_type):
    check_unrotated(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in UNROTATED if name not in {"**type**", *QUICK_UNROTATED}])
def test_every_other_type_without_a_rotation(model_type):
    check_unrotated(model_type)


@pytest.mark.parametrize("model_type", QUICK)
def test_named_types(model_type):
    check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in ROWS if name not in {"type", *QUICK}])
def test_every_other_type(model_type):
    check(model_type)
