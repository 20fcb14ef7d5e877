"""Fetching without a network: what is kept, what is refused, and R's lazy-load format on bytes made here."""

import gzip
import hashlib
import io
import struct
import subprocess
import tarfile
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eval import data, packages, report
from eval.__main__ import app
from eval.commands import fetch
from eval.rdata import read_strings


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_POSENC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def archive(content):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("Brotli-1.1.0/tests/testdata/story.txt")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def registry(monkeypatch):
    """pip that delivers `archive`, as long as one of the options is in `works_with`."""
    state = {"archive": archive(b"preface\r\nOnce upon\r\na time\r\n\x1a"), "works_with": "--no-binary", "calls": []}

    def run(command, cwd, **options):
        state["calls"].append(command)
        if state["works_with"] not in command:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")
        (Path(cwd) / data.BROTLI.file).write_bytes(state["archive"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packages.subprocess, "run", run)
    sha256 = hashlib.sha256(state["archive"]).hexdigest()
    package = data.Package(data.BROTLI.requirement, data.BROTLI.file, sha256, data.BROTLI.attempts)
    monkeypatch.setattr(data, "BROTLI", package)
    content = hashlib.sha256(b"preface\r\nOnce upon\r\na time\r\n\x1a").hexdigest()
    monkeypatch.setitem(data.TEXTS, "story", data.Text("brotli", "story.txt", content, start=9))
    return state


def test_a_text_is_fetched_once(registry):
    assert data.text("story") == "Once upon\na time\n" == data.text("story")
    assert len(registry["calls"]) == 1


def test_the_second_way_of_downloading(registry):
    registry["works_with"] = "--no-build-isolation"
    assert data.text("story") == "Once upon\na time\n"
    assert len(registry["calls"]) == 2


def test_offline_is_said(registry, cache):
    registry["works_with"] = "nothing"
    with pytest.raises(ValueError, match=r"registry must be reachable(.|\n)*No matching distribution"):
        data.text("story")
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_another_release_is_refused_and_not_kept(registry, cache):
    registry["archive"] = archive(b"preface\r\nsomething else")
    with pytest.raises(ValueError, match="sha256"):
        data.text("story")
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.fixture
def debian(monkeypatch):
    """apt-get that delivers a package with two files of documentation."""
    files = {"library/re.rst.txt": b"re\n==\n", "about.rst.txt": b"About\n"}

    def run(command, cwd, **options):
        if command[0] == "apt-get":
            (Path(cwd) / "python3.11-doc_3.11_all.deb").write_bytes(b"")
        for name, content in files.items() if command[0] == "dpkg" else ():
            path = Path(cwd) / "tree/usr/share/doc/python3.11/html/_sources" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packages.subprocess, "run", run)
    monkeypatch.setattr(packages.shutil, "which", lambda name: name)
    sha256 = hashlib.sha256(b"About\nre\n==\n").hexdigest()
    monkeypatch.setitem(data.TEXTS, "python_docs", data.Text("python", "html/_sources", sha256))
    return files


def test_a_text_of_many_files(debian):
    assert data.text("python_docs") == "About\nre\n==\n"
    expected = {"python_docs/about.rst.txt": "About\n", "python_docs/library/re.rst.txt": "re\n==\n"}
    debian.clear()  # from here on out of the cache
    assert data.documents("python_docs") == expected
    assert data.documents("python_docs", 1) == dict(list(expected.items())[:1])


def test_another_release_of_many_files_is_refused_and_not_kept(debian, cache):
    debian["about.rst.txt"] = b"Changed\n"
    with pytest.raises(ValueError, match="sha256"):
        data.documents("python_docs")
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_without_apt_it_is_said_what_to_do(monkeypatch):
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"Debian package python3\.11-doc; without apt-get use --text FOLDER"):
        data.text("python_docs")


def test_fetching_lists_what_is_kept(registry, cache, monkeypatch):
    def convert(folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(data, "_convert_smollm2", convert)
    story = fetch.fetch("story")
    assert (story.size, story.sha256) == (29, data.TEXTS["story"].sha256) and story.path.read_bytes()[:7] == b"preface"
    model = fetch.fetch("smollm2")
    assert (model.size, model.sha256) == (9, hashlib.sha256(b"weights").hexdigest()) and model.path.is_dir()
    done = CliRunner().invoke(app, ["fetch", "story", "python_topics", "story"])
    lines = done.output.splitlines()
    assert len(lines) == 2 and lines[0].split() == ["story", "29", "bytes", story.sha256, str(story.path)]
    story.path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="has changed since it was fetched: remove it"):
        fetch.fetch("story")
    unknown = CliRunner().invoke(app, ["fetch", "stories"])
    assert isinstance(unknown.exception, ValueError) and "choose from smollm2, alice" in str(unknown.exception)


def test_files_and_unknown_names(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("naïve\n", encoding="utf-8")
    assert data.text(str(path)) == "naïve\n"
    assert data.text("python_topics").count("\n\n") > 100
    with pytest.raises(ValueError, match="paradise_lost"):
        data.text("paradise_found")


def test_an_interrupted_conversion_leaves_nothing(cache, monkeypatch):
    def interrupted(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "_convert_smollm2", interrupted)
    with pytest.raises(KeyboardInterrupt):
        data.smollm2()
    assert not [path for path in cache.rglob("*") if path.is_file()]

    def whole(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(data, "_convert_smollm2", whole)
    folder = data.smollm2()
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    monkeypatch.setattr(data, "_convert_smollm2", interrupted)
    assert data.smollm2() == folder


def number(value):
    return struct.pack(">i", value)


def string(text):
    return number(0x40009) + number(len(text.encode())) + text.encode()


def strings(*texts):
    return number(16) + number(len(texts)) + b"".join(map(string, texts))


def names(*texts):
    return number(0x402) + number(1) + string("names") + strings(*texts) + number(254)


HEADER = {2: b"X\n" + number(2) + number(0) + number(0), 3: b"X\n" + number(3) + 2 * number(0) + number(5) + b"UTF-8"}


@pytest.mark.parametrize("version", HEADER)
def test_r_lazy_load_database(tmp_path, version):
    header, records, places = HEADER[version], b"", []
    for value in (strings("Chapter é", "", "The end"), number(14) + number(1) + struct.pack(">d", 2.5)):
        packed = zlib.compress(header + value)
        record = struct.pack(">I", len(packed)) + packed
        places.append((len(records), len(record)))
        records += record
    ranges = b"".join(number(13) + number(2) + number(start) + number(size) for start, size in places)
    variables = number(19 | 1 << 9) + number(2) + ranges + names("novel", "constant")
    index = number(19 | 1 << 9) + number(1) + variables + names("variables")
    (tmp_path / "Rdata.rdx").write_bytes(gzip.compress(header + index))
    (tmp_path / "Rdata.rdb").write_bytes(records)
    assert read_strings(tmp_path / "Rdata") == {"novel": ["Chapter é", "", "The end"]}


def test_bands_are_joined_by_their_tokens():
    bands = [{"low": 10 * k, "high": 10 * k + 10, "tokens": k, "loss": float(k) if k else None} for k in range(4)]
    curves = {"none": bands, "yarn": [{**band, "loss": band["loss"] and 2 * band["loss"]} for band in bands]}
    table = report.band_table("loss", curves, trained=20, columns=2)
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["none", "yarn"], ["1.000", "[red]2.000"], ["2.600", "[red]5.200"]]
    assert ["beyond" in str(column.header) or "yellow" in str(column.header) for column in table.columns] == [
        False, False, True,
    ]  # fmt: skip


def test_changes_are_against_the_first_row():
    scores = [
        {"posenc": posenc, "length": length, "text": str(value), "value": value}
        for posenc, length, value in [("none", 64, 10.0), ("none", 128, 90.0), ("pi", 64, 12.0), ("pi", 128, 9.0)]
    ]
    table = report.length_table("t", scores, "value", 64, "lower")
    assert [list(column.cells) for column in table.columns] == [
        ["none", "pi"], ["10.0", "12.0 [red]+20.0%[/]"], ["90.0", "9.0 [green]-90.0%[/]"],
    ]  # fmt: skip
    assert "beyond" in str(table.columns[2].header) and "beyond" not in str(table.columns[1].header)
