"""Several processes, as `accelerate launch -m eval …` starts them: each scores its share of one results folder.

A command is the same for one process and for many. Every process loads the model onto a device of its own; the first
alone writes what follows from all samples, and shows it. On a machine without accelerators, `--multi_gpu
--num_processes 2` gives two processes on the CPU (gloo); accelerate's `--cpu` gives one, whatever the number.
"""

import functools
from collections.abc import Callable
from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env

LONGEST_WAIT = timedelta(days=30)  # for the slowest process: else the first to finish is ended after ten minutes


@functools.cache
def state() -> PartialState:
    """Which process this is, of how many, and its device."""
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    return PartialState(cpu=on_cpu, timeout=LONGEST_WAIT)


def index() -> int:
    return state().process_index


def count() -> int:
    return state().num_processes


def device() -> str:
    """Of this process: its accelerator, else the CPU."""
    found = state().device
    return "cpu" if found.type == "cpu" else str(found)


def is_main() -> bool:
    return state().is_main_process


def wait() -> None:
    """Until every process is here."""
    state().wait_for_everyone()


def on_main(do: Callable[[], object]) -> None:
    """Runs something in the first process while the others wait; a `ValueError` there is raised in all."""
    error: ValueError | None = None
    if is_main():
        try:
            do()
        except ValueError as raised:
            error = raised
    if count() > 1:
        message = [None if error is None else str(error)]
        broadcast_object_list(message)
        if message[0] is not None and error is None:
            error = ValueError(message[0])
    if error is not None:
        raise error
