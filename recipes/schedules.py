"""Which blocks are read in which step, under which encoding.

`plain`       blocks of one length.
`curriculum`  one length after the other, the model patched anew for each (`posenc: yarn:target_length={length}`).
`mixed`       several lengths by their shares; all blocks of a step have one length, on every process.
`pose`        short blocks at positions that cover a long target (PoSE, arXiv 2309.10400): a block is cut in two at a
              place drawn uniformly, and its second part moved on by a skip drawn uniformly from 0 to target − length.

A sample follows from the seed and its number alone: a resumed run, or one on other processes, reads the same.
"""

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

import hf_posenc
from recipes.data import Blocks

Sample = dict[str, torch.Tensor]
Form = Callable[[Sample, random.Random], Sample]


@dataclass(frozen=True)
class Stage:
    """Steps that read blocks of one length under one encoding."""

    blocks: Blocks
    posenc: str
    steps: int


class Schedule(Dataset):
    """The samples of a whole run in the order of reading; step s reads numbers s · per_step … (s + 1) · per_step − 1.

    A stage reads its blocks in an order drawn anew each time it has read them all.

    Args:
        per_step: rows of an optimizer step, of all processes together.
        form: makes what the model reads from a row of a block.
        mixed: the steps of the stages are shuffled instead of following one another.
    """

    def __init__(self, stages: Sequence[Stage], per_step: int, form: Form, seed: int, mixed: bool = False) -> None:
        self.stages, self.per_step, self.form, self.seed = list(stages), per_step, form, seed
        self.order = [index for index, stage in enumerate(stages) for _ in range(stage.steps)]
        if mixed:
            random.Random(f"order {seed}").shuffle(self.order)
        counts = [0] * len(stages)
        self._before = []  # steps of the same stage before each step
        for index in self.order:
            self._before.append(counts[index])
            counts[index] += 1

    def __len__(self) -> int:
        return len(self.order) * self.per_step

    def __getitem__(self, number: int) -> Sample:
        blocks, index = self._place(number)
        return self.form(blocks[index], random.Random(f"{self.seed} {number}"))

    def count_tokens(self) -> int:
        """Tokens of text that the whole run reads."""
        places = map(self._place, range(len(self)))
        return sum(len(piece) for blocks, index in places for piece in blocks.rows[index])

    def _place(self, number: int) -> tuple[Blocks, int]:
        """Where a sample comes from."""
        step, row = divmod(number, self.per_step)
        stage = self.order[step]
        blocks = self.stages[stage].blocks
        turn, place = divmod(self._before[step] * self.per_step + row, len(blocks))
        return blocks, self._drawn(stage, turn)[place]

    def at(self, step: int) -> Stage:
        """The stage of a step."""
        return self.stages[self.order[step]]

    @functools.lru_cache(maxsize=8)  # noqa: B019 (lives as long as the run)
    def _drawn(self, stage: int, turn: int) -> list[int]:
        order = list(range(len(self.stages[stage].blocks)))
        random.Random(f"{self.seed} {stage} {turn}").shuffle(order)
        return order


def steps_of(
    blocks: Sequence[int], shares: Sequence[float], per_step: int, epochs: float, max_steps: int
) -> list[int]:
    """Steps of each stage.

    Args:
        blocks: of each stage, in all.
        shares: of each stage; they need not sum to 1.
        max_steps: of all; if not positive, every stage reads its share of its blocks `epochs` times.
    """
    shares = [share / sum(shares) for share in shares]
    if max_steps <= 0:
        return [math.ceil(epochs * share * count / per_step) for share, count in zip(shares, blocks, strict=True)]
    steps = [int(max_steps * share) for share in shares]
    rest = sorted(range(len(shares)), key=lambda stage: steps[stage] - max_steps * shares[stage])
    for stage in rest[: max_steps - sum(steps)]:
        steps[stage] += 1
    if 0 in steps:
        raise ValueError(f"max_steps {max_steps} leaves a length without a step: give more, or other shares")
    return steps


def skip_positions(row: Sample, target_length: int, draw: random.Random) -> Sample:
    """A row `(tokens,)` at positions up to `target_length`: increasing, with one gap."""
    length = len(row["input_ids"])
    positions = torch.arange(length)
    if 1 < length < target_length:
        positions[draw.randint(1, length - 1) :] += draw.randint(0, target_length - length)
    return {**row, "position_ids": positions, "attention_mask": torch.ones_like(positions)}


class Repatch(TrainerCallback):
    """Puts a stage's encoding on the model before its first step, also where a run is resumed."""

    def __init__(self, schedule: Schedule, posenc: str) -> None:
        self.schedule, self.posenc = schedule, posenc

    def on_step_begin(self, args, state, control, model=None, **others) -> None:
        wanted = self.schedule.at(state.global_step).posenc
        if wanted != self.posenc:
            hf_posenc.patch(model, wanted)
            self.posenc = wanted
