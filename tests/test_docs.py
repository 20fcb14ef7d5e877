"""The registry, its files, the README and SUPPORT.md tell the same story."""

import re
from pathlib import Path

import pytest

import hf_posenc
from hf_posenc.registry import registered

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", list(registered()))
def test_a_method_has_a_file_a_public_class_and_a_readme_row(name):
    method = registered()[name]
    assert (ROOT / "hf_posenc" / "methods" / f"{name}.py").exists()
    assert getattr(hf_posenc, method.__name__) is method
    rows = [line for line in README.splitlines() if line.startswith(f"| `{name}` | `{method.__name__}` |")]
    assert len(rows) == 1


@pytest.mark.parametrize("name", list(registered()))
def test_a_method_file_opens_with_its_source(name):
    text = (ROOT / "hf_posenc" / "methods" / f"{name}.py").read_text()
    docstring = " ".join(text.split('"""')[1].split())
    assert re.search(r"arXiv \d{4}\.\d{4,5}|\b20\d\d\b", docstring) and "erified against" in " ".join(
        docstring.split()
    )


def test_the_readme_names_no_method_that_is_not_there():
    named = {line.split("`")[1] for line in README.splitlines() if re.match(r"\| `\w+` \| `\w+` \|", line)}
    assert named == set(registered())


def test_every_public_name_is_in_the_readme():
    for name in hf_posenc.__all__:
        assert name in README, name


def test_the_readme_starts_with_a_command_and_a_result():
    lines = README.splitlines()
    assert any("hf_posenc.patch(" in line for line in lines[:20])
    assert len(lines) <= 220


def test_support_page_counts_what_it_lists():
    page = (ROOT / "SUPPORT.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "encoding" not in line]
    frequency = sum(cells[2].startswith("ok") for cells in rows)
    attention = sum(cells[3].startswith("ok") for cells in rows)
    assert f"{len(rows)} types: frequency methods {frequency} ok" in page
    maps = sum(cells[4].startswith("ok") for cells in rows)
    assert f"dynamic methods {attention} ok" in page and f"position maps {maps} ok" in page
    assert frequency >= 103 and attention >= 100 and maps >= 100


def test_the_evaluation_page_has_every_command():
    from eval.__main__ import app

    page = (ROOT / "eval" / "README.md").read_text()
    named = set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))
    assert named == {command.name for command in app.registered_commands}


@pytest.mark.parametrize("folder", ["configs", "launch"])
def test_the_page_of_recipes_has_every_file_and_no_other(folder):
    page = (ROOT / "recipes" / "README.md").read_text()
    table = page.split(f"| `{folder}/` |")[1].split("\n\n")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(path.stem for path in (ROOT / "recipes" / folder).glob("*.yaml"))
    assert len(page.splitlines()) <= 120
