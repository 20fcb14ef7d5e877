"""The subcommands, from options to a results folder: score what it lacks, file each sample at once, show all."""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eval import models, processes
from eval.manifest import write_manifest
from eval.results import Results

console = Console()

ModelName = Annotated[str, typer.Option("--model", help="Model folder, adapter folder, hub id, or smollm2.")]
PosEncs = Annotated[
    list[str],
    typer.Option("--posenc", help="none, or a method as in yarn:factor=2. Repeat to compare; the first is the base."),
]
Lengths = Annotated[list[str], typer.Option("--lengths", help="Tokens, as in 2048,4096. May be repeated.")]
DType = Annotated[str, typer.Option(help=f"One of {', '.join(models.DTYPES)}.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …; split: one model over all GPUs.")]
Check = Annotated[
    int,
    typer.Option(
        "--check",
        min=0,
        help="Tokens on which cached generation is compared with one forward, for the manifest; 0: none.",
    ),
]
CHECK = 1024
Root = Annotated[str, typer.Option("--results", help="Folder of all results.")]


def progress() -> Progress:
    """A bar per encoding and length, with the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not processes.is_main())


def identity(model: Any, name: str, tokenizer: Any) -> dict[str, Any]:
    """What makes samples of one run comparable with those of another."""
    return {
        "model": name,
        "weights": models.fingerprint(model),
        "tokenizer": models.tokenizer_hash(tokenizer),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": models.input_device(model).type,
        "attention": models.attention(model),
    }


def file_manifest(
    results: Results, model: Any, tokenizer: Any, posencs: Sequence[str], lengths: Sequence[int], check: int,
    tasks: Sequence[Results] = (),
) -> dict[str, Any]:  # fmt: skip
    """Writes a run's manifest, and says where its check failed."""
    names = models.full_names(model, posencs)
    manifest = write_manifest(results, model, tokenizer, names, length=max(lengths), check=check, tasks=tasks)
    for encoding in manifest["encodings"]:
        if not encoding.get("cache", {"agrees": True})["agrees"]:
            console.print(
                f"[red]{encoding['posenc']} generates otherwise than it scores:[/] see cache in manifest.json"
            )
    return manifest


def cells(results: Results) -> list[tuple[str, int]]:
    """Encodings in the order they were measured, lengths in ascending order."""
    posencs = dict.fromkeys(sample["posenc"] for sample in results.samples.values())
    lengths = sorted({sample["length"] for sample in results.samples.values()})
    return [(posenc, length) for posenc in posencs for length in lengths]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
