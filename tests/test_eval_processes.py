"""One results folder and several processes: shares under `accelerate launch`, locks, kills, full disks, bad files."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from test_eval_results import TEXT, build, characters, open_results, strip
from typer.testing import CliRunner

from eval import processes
from eval.__main__ import app

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build().save_pretrained(path)
    characters().save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


def passkey_arguments(folder, root):
    return ["passkey", "--model", folder, "--dtype", "float32", "--device", "cpu", "--lengths", "512",
            "--depths", "0.5,1", "--trials", "3", "--posenc", "none", "--posenc", "yarn:factor=8",
            "--results", root]  # fmt: skip


def samples_of(root):
    lines = [line for path in sorted(root.glob("*/samples*.jsonl")) for line in path.read_text().splitlines()]
    return sorted(map(strip, lines), key=lambda sample: (sample["posenc"], sample["depth"], sample["trial"]))


def scores_of(root):
    (path,) = root.glob("*/scores.json")
    return [{**score, "seconds": 0} for score in json.loads(path.read_text())["scores"]]


def test_two_processes_share_a_folder_and_score_as_one(folder, tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
              "-m", "eval"]  # fmt: skip
    arguments = list(map(str, passkey_arguments(folder, tmp_path / "two")))
    done = subprocess.run(
        [*launch, *arguments], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("Passkey, 2 depths") == 1  # one of them shows
    files = sorted(path.name for path in (tmp_path / "two").glob("*/samples*.jsonl"))
    assert files == ["samples-1.jsonl", "samples.jsonl"]
    sizes = [len(path.read_text().splitlines()) for path in (tmp_path / "two").glob("*/samples*.jsonl")]
    assert sorted(sizes) == [6, 6]
    arguments = list(map(str, passkey_arguments(folder, tmp_path / "one")))
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    one, two = samples_of(tmp_path / "one"), samples_of(tmp_path / "two")
    assert [sample["answer"] for sample in one] == [sample["answer"] for sample in two]
    for single, shared in zip(scores_of(tmp_path / "one"), scores_of(tmp_path / "two"), strict=True):
        assert single["log_prob"] == pytest.approx(shared["log_prob"], abs=1e-4)


def test_every_process_takes_its_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    shares = []
    for index in (0, 1):
        monkeypatch.setattr(processes, "index", lambda index=index: index)
        monkeypatch.setattr(processes, "on_main", lambda do: do())
        results = open_results(tmp_path)
        shares.append([number for number in range(5) if results.lacks(posenc="none", index=number)])
        assert shares[-1] == [number for number in range(5) if results.lacks(posenc="none", index=number)]
    assert shares == [[0, 2, 4], [1, 3]]
    results.add({"posenc": "none", "index": 1})
    assert (results.folder / "samples-1.jsonl").exists()


HOLDER = """
    import sys, time
    from eval.results import Results
    results = Results(sys.argv[1], "task", {"model": "m", "value": 1}, ("model",), ("posenc", "index"))
    for index in range(1000):
        results.add({"posenc": "none", "index": index})
        print(index, flush=True)
        time.sleep(0.02)
"""


def hold(root):
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(root)]
    return subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    holder = hold(tmp_path)
    try:
        assert [holder.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
        with pytest.raises(ValueError, match="another process"):
            open_results(tmp_path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    found = open_results(tmp_path)
    assert all(found.has(posenc="none", index=index) for index in range(3))


def test_a_folder_is_free_again_after_complete(tmp_path):
    results = open_results(tmp_path)
    results.complete()
    holder = hold(tmp_path)
    assert holder.stdout.readline() == "0\n"
    holder.kill()
    holder.wait()


def test_a_killed_evaluation_goes_on_to_the_same_scores(folder, tmp_path):
    arguments = list(map(str, passkey_arguments(folder, tmp_path / "killed")))
    command = [sys.executable, "-m", "eval", *arguments]
    child = subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.DEVNULL)
    for _ in range(1200):
        if any((tmp_path / "killed").glob("*/samples.jsonl")):
            break
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = samples_of(tmp_path / "killed")
    for root in ("killed", "whole"):
        arguments = list(map(str, passkey_arguments(folder, tmp_path / root)))
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert 1 <= len(before) <= 12
    killed, whole = samples_of(tmp_path / "killed"), samples_of(tmp_path / "whole")
    assert all(sample in killed for sample in before)
    assert [sample["answer"] for sample in killed] == [sample["answer"] for sample in whole]
    for found, expected in zip(scores_of(tmp_path / "killed"), scores_of(tmp_path / "whole"), strict=True):
        assert found["accuracy"] == expected["accuracy"]
        assert found["log_prob"] == pytest.approx(expected["log_prob"], abs=1e-5)


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    results = open_results(tmp_path)
    results.add({"posenc": "none", "index": 0})
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
        )
        with pytest.raises(ValueError, match=r"samples.jsonl.*No space left.*make room"):
            results.add({"posenc": "none", "index": 1})
    assert not results.has(posenc="none", index=1)
    with pytest.raises(ValueError, match=r"scores\.json"):
        monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        results.write("scores.json", {})
    assert not list(results.folder.glob(".scores*"))


@pytest.mark.parametrize("line", ['{"posenc": "none", "ind', "[1, 2]", '{"posenc": "none"}', "\0\0\0"])
def test_an_unreadable_line_is_named_and_kept(tmp_path, line):
    results = open_results(tmp_path)
    for index in range(2):
        results.add({"posenc": "none", "index": index})
    path = results.folder / "samples.jsonl"
    content = path.read_text().splitlines()
    path.write_text("\n".join([content[0], line, content[1]]) + "\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"samples.jsonl, line 2.*nothing was changed"):
        open_results(tmp_path)
    assert path.read_bytes() == before


def test_an_unreadable_config_is_named(tmp_path):
    path = open_results(tmp_path).folder / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        open_results(tmp_path)


def test_a_whole_line_without_its_end_is_kept(tmp_path):
    results = open_results(tmp_path)
    results.add({"posenc": "none", "index": 0})
    path = results.folder / "samples.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    again = open_results(tmp_path)
    assert again.has(posenc="none", index=0)
    again.add({"posenc": "none", "index": 1})
    assert len(open_results(tmp_path).samples) == 2
