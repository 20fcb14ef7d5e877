"""A results folder: named from what was measured, added to and never overwritten.

    results/perplexity-smollm2-alice-sliding-3f2a9c01/
        config.json     every parameter, and what code it was run with
        samples.jsonl   one line per window or prompt, written as soon as it is scored
        scores.json     what follows from the samples
        manifest.json   of the last run: model, tokenizer, encodings, versions, hardware, checks
        plot.png

All encodings and lengths measured under the same parameters share a folder, and a second run scores only what is
missing. Other parameters, another model or text, or other code go to another folder. While one run scores, another on
the same folder is refused. Under `accelerate launch` every process but the first has a file of its own
(`samples-1.jsonl`), on a disk that all of them see.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import hf_posenc
from eval import memory, processes

PACKAGES = ("torch", "transformers")
MEASURING = ("memory.py", "speed.py")  # decide what a sample of the task `speed` is
SHOWING = (
    "__main__.py", "__init__.py", "compare.py", "demo.py", "fetch.py", "manifest.py", "page.py", "processes.py",
    "report.py", "results.py", "scores.py", "tasks.py",
)  # fmt: skip


class Results:
    """The folder of one configuration. Locked from here to `complete`, or to the end of the process.

    Args:
        root: folder of all results.
        task: `perplexity`, `passkey`, …
        parameters: everything that a sample's value depends on, except what is in `key`; must go into JSON.
        shown: names of the parameters that the folder's name shows, in order; a hash covers all.
        key: fields that tell one sample of this configuration from another.

    Raises:
        ValueError: another process works on the folder, or a file in it cannot be read or written.
    """

    def __init__(
        self, root: str | Path, task: str, parameters: dict[str, Any], shown: Iterable[str], key: Iterable[str]
    ) -> None:
        self.key = tuple(key)
        self.config = json.loads(json.dumps({"task": task, **parameters, "code": _code(task)}))
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:8]
        self.folder = Path(root) / "-".join([task, *(_slug(parameters[name]) for name in shown), digest])
        self._lock = FileLock(self.folder / ".lock", timeout=0, is_singleton=True, thread_local=False)
        processes.on_main(self._open)
        self.samples = dict(self._read())
        self._turns: dict[tuple[Any, ...], int] = {}
        memory.lap()
        processes.wait()  # nobody adds before all have read

    def has(self, **key: Any) -> bool:
        """Whether the sample of that key is scored already."""
        return self._key_of(key) in self.samples

    def lacks(self, **key: Any) -> bool:
        """Whether this process has to score the sample of that key.

        Processes take turns over the missing ones, so all of them must ask for all keys in the same order.
        """
        found = self._key_of(key)
        if found in self.samples:
            return False
        turn = self._turns.setdefault(found, len(self._turns))
        return turn % processes.count() == processes.index()

    def add(self, sample: dict[str, Any]) -> None:
        """Files one scored sample, on disk before this returns, with the peak of `memory` since the last one in bytes.

        Raises:
            ValueError: it cannot be written; what is on disk already stays.
        """
        sample = {**sample, "memory": memory.lap()}
        path = self._file_of(processes.index())
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sample) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _not_written(path, error) from error
        self.samples[self._key_of(sample)] = sample

    def complete(self) -> None:
        """Ends the scoring: from here on `samples` holds what all processes scored."""
        processes.wait()
        if processes.count() > 1:
            self.samples = dict(self._read())
        self._lock.release(force=True)

    def select(self, **fields: Any) -> list[dict[str, Any]]:
        """Samples whose fields have these values, in the order they were scored."""
        return [sample for sample in self.samples.values() if fields.items() <= sample.items()]

    def write(self, name: str, content: Any) -> None:
        """Writes a JSON file whose content follows from the samples; the first process alone does."""
        self.write_text(name, json.dumps(without_nan(content), indent=2) + "\n")

    def write_text(self, name: str, content: str) -> None:
        """Writes a file whole or not at all; the first process alone does."""
        if not processes.is_main():
            return
        unfinished = self.folder / f".{name}.{os.getpid()}"
        try:
            unfinished.write_text(content, encoding="utf-8")
            unfinished.replace(self.folder / name)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise _not_written(self.folder / name, error) from error

    def _key_of(self, sample: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(sample[name] for name in self.key)

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            for path in self._files():
                _mend(path)
        except Timeout:
            raise ValueError(
                f"another process is writing to {self.folder}: wait for it, or give other --results"
            ) from None
        except OSError as error:
            raise _not_written(self.folder, error) from error
        path = self.folder / "config.json"
        if not path.exists():
            self.write("config.json", self.config)
        elif _parsed(path, path.read_bytes()) != self.config:
            raise ValueError(f"{path} is of another configuration than its folder's name says: move the folder away")

    def _file_of(self, process: int) -> Path:
        return self.folder / ("samples.jsonl" if process == 0 else f"samples-{process}.jsonl")

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("samples*.jsonl"), key=lambda path: (len(path.name), path.name))

    def _read(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        for path in self._files():
            for number, line in enumerate(path.read_bytes().splitlines(), start=1):
                sample = _parsed(f"{path}, line {number},", line)
                if not isinstance(sample, dict) or not set(self.key) <= set(sample):
                    raise _not_read(f"{path}, line {number},", f"it lacks one of {', '.join(self.key)}")
                yield self._key_of(sample), sample


def without_nan(content: Any) -> Any:
    """What JSON can say: null in place of numbers that are infinite or none."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: without_nan(value) for key, value in content.items()}
    return [without_nan(value) for value in content] if isinstance(content, list | tuple) else content


def _mend(path: Path) -> None:
    """Takes off a last line cut short by a kill, or ends it, so that the next one starts on its own."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole == len(content):
        return
    try:
        json.loads(content[whole:])
    except ValueError:
        os.truncate(path, whole)
    else:
        with path.open("ab") as file:
            file.write(b"\n")


def _parsed(what: object, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise _not_read(what, error) from None


def _not_read(what: object, reason: object) -> ValueError:
    return ValueError(f"{what} cannot be read ({reason}): mend it, or move its folder away; nothing was changed")


def _not_written(path: Path, error: OSError) -> ValueError:
    return ValueError(f"cannot write {path}: {error.strerror}. What was scored before is kept: make room (or the "
                      "folder writable) and run the same command again")  # fmt: skip


def _code(task: str) -> dict[str, str]:
    """Versions of what computes, and a hash of our own sources: a number never outlives the code that made it."""
    here = Path(__file__).parent
    if task == "speed":
        own = [here / name for name in MEASURING]
    else:
        own = [path for path in here.rglob("*.py") if path.name not in (*MEASURING, *SHOWING)]
    sources = sorted([*Path(hf_posenc.__file__).parent.rglob("*.py"), *own])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return {**{package: importlib.metadata.version(package) for package in PACKAGES}, "hf_posenc": digest}


def _slug(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9_.=]+", "_", Path(value).name if isinstance(value, str) else str(value)).strip("_")[:40]
