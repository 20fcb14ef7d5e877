"""Memory that a prefill needs at its peak, in bytes beyond what was there before it.

On CUDA it is what torch allocated, measured in place. On a CPU it is the growth of resident memory. There every
measurement has a process of its own, in which malloc gives back every larger block at once (memory kept for reuse
would hide part of the growth) and the kernel's high-water mark is reset between loading and reading, which Linux alone
can do.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from eval import models
from eval.speed import Measure, prefill, random_ids, warm_up

RESET = Path("/proc/self/clear_refs")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SMALLEST = 2**22  # bytes: the kernel counts pages in lots, up to half a MiB off


class TooLittle(ValueError):
    """What is asked for needs less memory than can be told from noise."""


def why_not(device: torch.device) -> str | None:
    """Why memory cannot be measured on this machine; None if it can."""
    if device.type == "cuda":
        return None
    if device.type != "cpu":
        return f"not measured on {device.type}"
    try:
        RESET.write_text("5")
    except OSError as error:
        return f"{RESET} is needed, which Linux alone has ({error.strerror})"
    return None


def lap() -> int | None:
    """Peak in bytes since the last call: of what torch holds on CUDA, or of the process on Linux; None elsewhere."""
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        peak = sum(torch.cuda.max_memory_allocated(device) for device in devices)
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        return peak
    try:
        peak = _resident("VmHWM")
        RESET.write_text("5")
    except OSError:
        return None
    return peak


def on_cuda(model: nn.Module) -> Measure:
    """Measures `memory` of a model on a GPU."""

    def measure(posenc: str, length: int) -> dict[str, float]:
        ids = random_ids(model, length)
        with models.applied(model, posenc), torch.no_grad():
            warm_up(model)
            before = torch.cuda.memory_allocated(ids.device)
            torch.cuda.reset_peak_memory_stats(ids.device)
            prefill(model, ids)
            return {"memory": torch.cuda.max_memory_allocated(ids.device) - before}

    return measure


def in_child(name: str, dtype: str) -> Measure:
    """Measures `memory` on a CPU, in a process that loads the model anew.

    Args:
        name: of the model, as `models.load` takes it.
    """

    def measure(posenc: str, length: int) -> dict[str, float]:
        command = [sys.executable, "-m", "eval.memory", name, dtype, posenc, str(length), str(torch.get_num_threads())]
        environment = {**os.environ, **MALLOC, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            reason = f"process ended with {done.returncode}: {done.stderr.strip()[-300:]}"
            raise ValueError(f"memory of {posenc} at {length} tokens cannot be measured, leave it out ({reason})")
        peak = int(done.stdout.split()[-1])
        if peak < SMALLEST:
            raise TooLittle(f"{length} tokens need too little memory to measure it: give longer lengths")
        return {"memory": peak}

    return measure


@torch.no_grad()
def main(name: str, dtype: str, posenc: str, length: str, threads: str) -> None:
    """Prints the bytes."""
    torch.set_num_threads(int(threads))
    model, _ = models.load(name, dtype, "cpu")
    with models.applied(model, posenc):
        ids = random_ids(model, int(length))
        warm_up(model)
        RESET.write_text("5")
        before = _resident("VmRSS")
        prefill(model, ids)
        print(_resident("VmHWM") - before)


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
