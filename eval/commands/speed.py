"""`python -m eval speed`."""

import functools
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any

import torch
import typer

from eval import memory, models, processes, report
from eval.commands import Device, DType, Lengths, ModelName, PosEncs, Root, cells, console, identity, progress
from eval.results import Results
from eval.speed import PARTS, Cost, Measure, compare, reading, training


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = ("yarn:factor=2", "dynamic_ntk", "self_extend:group_size=4,window=1024"),
    lengths: Lengths = ("4096",),
    parts: Annotated[list[str], typer.Option(help=f"Of {', '.join(PARTS)}.")] = ("prefill,decode,memory",),
    rounds: Annotated[int, typer.Option(help="Times each encoding is timed, in turn with the others.", min=1)] = 5,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    results: Root = "results",
) -> None:
    """Time and memory of encodings against the unpatched model, in one run: medians of ratios.

    `--posenc none` shows how much of a ratio is noise.

    Example: python -m eval speed --posenc yarn:factor=2 --posenc dynamic_ntk --lengths 4096,16384 --rounds 3
    """
    wanted = _parts(parts)
    loaded, tokenizer = models.load(model, dtype, device)
    run(loaded, tokenizer, model, posenc, models.numbers(lengths), wanted, rounds=rounds, root=results)


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    lengths: Sequence[int],
    parts: Sequence[str],
    *,
    rounds: int = 5,
    root: str = "results",
) -> Results:
    """Costs of several encodings; those that one run measured together are filed together."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths {list(lengths)} should be one or more numbers of tokens, as in 4096,16384")
    names, trained = models.full_names(model, posencs, lengths), models.trained_length(model)
    device = models.input_device(model)
    parameters = {
        **identity(model, model_name, tokenizer),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
    }
    shown, key = ("model", "dtype", "device", "rounds"), ("posenc", "length", "part")
    if "memory" in parts and (reason := memory.why_not(device)):
        console.print(f"memory is left out: {reason}", soft_wrap=True)
        parts = [part for part in parts if part != "memory"]
    if processes.count() > 1:
        raise ValueError("speed is measured by one process at a time: start it without accelerate launch")
    results = Results(root, "speed", parameters, shown, key)
    with progress() as bar:
        for length in lengths:
            for together, (measure, turns) in _measures(model, model_name, rounds).items():
                asked = [part for part in together if part in parts]
                missing = [n for n in names if not all(results.has(posenc=n, length=length, part=p) for p in asked)]
                if missing:
                    task = bar.add_task(f"{', '.join(asked)} at {length:,}", total=turns * (1 + len(missing)))
                    tick = functools.partial(bar.advance, task)
                    try:
                        costs = compare(measure, missing, length, turns, tick)
                    except memory.TooLittle as error:  # the other parts stand
                        console.print(f"memory at {length:,} is left out: {error}", soft_wrap=True, markup=False)
                        continue
                    _file(results, [cost for cost in costs if cost.part in asked])
    results.complete()
    found = scores_of(results)
    results.write("scores.json", {"trained_length": trained, "scores": found})
    _show(results, [s for s in found if s["posenc"] in names and s["length"] in lengths and s["part"] in parts])
    return results


def _measures(model: Any, name: str, rounds: int) -> dict[tuple[str, ...], tuple[Measure, int]]:
    """How the parts that one measurement gives together are measured, and how often. Memory does not vary: once."""
    cuda = models.input_device(model).type == "cuda"
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {
        ("prefill", "decode"): (reading(model), rounds),
        ("train",): (training(model), rounds),
        ("memory",): (memory.on_cuda(model) if cuda else memory.in_child(name, dtype), 1),
    }


def _file(results: Results, costs: Sequence[Cost]) -> None:
    for cost in costs:
        if not results.has(posenc=cost.posenc, length=cost.length, part=cost.part):
            results.add(asdict(cost))


def scores_of(results: Results) -> list[dict[str, Any]]:
    """One dictionary per encoding, length and part of a folder."""
    return [
        Cost(**{field.name: sample[field.name] for field in fields(Cost)}).summary()
        for posenc, length in cells(results)
        for part in PARTS
        for sample in results.select(posenc=posenc, length=length, part=part)
    ]


def _show(results: Results, scores: list[dict[str, Any]]) -> None:
    config = results.config
    title = f"Cost, medians of up to {config['rounds']} rounds, {config['device']}, {config['threads']} CPU threads"
    console.print(report.cost_table(title, scores))
    if scores:
        report.plot_ratios(results.folder / "plot.png", scores)
    console.print(f"Samples, scores and plot.png in {results.folder}", soft_wrap=True, markup=False)


def _parts(texts: Sequence[str]) -> list[str]:
    given = [part.strip() for text in texts for part in text.split(",")]
    unknown = [part for part in given if part not in PARTS]
    if unknown:
        raise ValueError(f"part {unknown[0]!r} is unknown; choose of {', '.join(PARTS)}")
    return [part for part in PARTS if part in given]
