"""A results folder: named from what was measured, added to and never overwritten.

    results/perplexity-smollm2-alice-sliding-3f2a9c01/
        config.json     every parameter, and what code it was run with
        samples.jsonl   one line per window or prompt, written as soon as it is scored
        scores.json     what follows from the samples
        plot.png

All encodings and lengths measured under the same parameters share a folder, and a second run scores only what is
missing. Other parameters, another model or text, or other code go to another folder.
"""

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hf_posenc

PACKAGES = ("torch", "transformers")
SCORING = (
    "harness.py",
    "likelihood.py",
    "passkey.py",
    "perplexity.py",
    "ruler.py",
    "ruler_qa.py",
    "ruler_tasks.py",
)  # of this package; what else it does leaves samples alone
MEASURING = ("memory.py", "speed.py")  # for the task `speed`


class Results:
    """The folder of one configuration.

    Args:
        root: folder of all results.
        task: `perplexity`, `passkey`, …
        parameters: everything that a sample's value depends on, except what is in `key`; must go into JSON.
        shown: names of the parameters that the folder's name shows, in order; a hash covers all.
        key: fields that tell one sample of this configuration from another.
    """

    def __init__(
        self, root: str | Path, task: str, parameters: dict[str, Any], shown: Iterable[str], key: Iterable[str]
    ) -> None:
        self.key = tuple(key)
        self.config = json.loads(json.dumps({"task": task, **parameters, "code": _code(task)}))
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:8]
        self.folder = Path(root) / "-".join([task, *(_slug(parameters[name]) for name in shown), digest])
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.folder / "samples.jsonl"
        self._check_config()
        self.samples = {self._key_of(sample): sample for sample in self._read()}

    def has(self, **key: Any) -> bool:
        """Whether the sample of that key is scored already."""
        return self._key_of(key) in self.samples

    def lacks(self, **key: Any) -> bool:
        """Whether this process has to score the sample of that key."""
        return not self.has(**key)

    def complete(self) -> None:
        """Ends the scoring: from here on `samples` holds what all processes scored."""

    def add(self, sample: dict[str, Any]) -> None:
        """Files one scored sample, on disk before this returns."""
        self.samples[self._key_of(sample)] = sample
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(sample) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def select(self, **fields: Any) -> list[dict[str, Any]]:
        """Samples whose fields have these values, in the order they were scored."""
        return [sample for sample in self.samples.values() if fields.items() <= sample.items()]

    def write(self, name: str, content: Any) -> None:
        """Writes a JSON file whose content follows from the samples."""
        unfinished = self.folder / f".{name}.{os.getpid()}"
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(self.folder / name)

    def _key_of(self, sample: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(sample[name] for name in self.key)

    def _check_config(self) -> None:
        path = self.folder / "config.json"
        if not path.exists():
            self.write("config.json", self.config)
        elif json.loads(path.read_text(encoding="utf-8")) != self.config:
            raise ValueError(f"{path} is of another configuration than its folder's name says: move the folder away")

    def _read(self) -> list[dict[str, Any]]:
        """Samples on disk. A line cut short by a kill is taken off, so that the next one starts on its own line."""
        if not self._file.exists():
            return []
        content = self._file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self._file, whole)
        return [json.loads(line) for line in content[:whole].splitlines()]


def _code(task: str) -> dict[str, str]:
    """Versions of what computes, and a hash of our own sources: a number never outlives the code that made it."""
    here, own = Path(__file__).parent, MEASURING if task == "speed" else SCORING
    sources = sorted([*Path(hf_posenc.__file__).parent.rglob("*.py"), *(here / name for name in own)])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return {**{package: importlib.metadata.version(package) for package in PACKAGES}, "hf_posenc": digest}


def _slug(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9_.=]+", "_", Path(value).name if isinstance(value, str) else str(value)).strip("_")[:40]
