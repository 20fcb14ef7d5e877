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


@pytest.mark.parametrize("model_type", QUICK)
def test_named_types(model_type):
    check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in ROWS if name not in {"type", *QUICK}])
def test_every_other_type(model_type):
    check(model_type)
