"""Key tokens of one tokenizer as tokens of another, by the characters that both read."""

import bisect
from dataclasses import dataclass
from typing import Any

import torch

from eval import models

Spans = list[tuple[int, int]]  # the first character of each token, and the one behind its last


@dataclass(frozen=True)
class Alignment:
    """A text as tokens of an evaluator, `theirs`, and of the evaluated model, `mine`."""

    theirs: Spans
    mine: Spans

    def covering(self, length: int) -> int:
        """How many of their tokens it takes to read all characters of my first `length` tokens."""
        end = self.mine[length - 1][1]
        return bisect.bisect_left(self.theirs, end, key=lambda span: span[0])

    def carry_over(self, keys: torch.Tensor) -> torch.Tensor:
        """My tokens, `(mine,)`, that share a character with a key token; `keys` are for their first tokens, `(n,)`."""
        read = torch.zeros(1 + max(self.theirs[-1][1], self.mine[-1][1]), dtype=torch.long)
        for index in keys.nonzero()[:, 0].tolist():
            begin, end = self.theirs[index]
            read[begin + 1 : end + 1] = 1
        before = read.cumsum(0)
        begins, ends = torch.tensor(self.mine).T
        return before[ends] > before[begins]


def align(theirs: Any, mine: Any, content: str) -> Alignment:
    """Two tokenizers' spans of a text.

    Raises:
        ValueError: a tokenizer that does not tell where its tokens lie.
    """
    return Alignment(_spans(theirs, content), _spans(mine, content))


def _spans(tokenizer: Any, content: str) -> Spans:
    """A BOS has no characters, so it is never a key token."""
    if not tokenizer.is_fast:
        raise ValueError("key tokens of another tokenizer are found by characters, which a slow tokenizer does not "
                         "tell: give an evaluator with the same tokenizer, or fast tokenizers")  # fmt: skip
    taken = tokenizer(content, add_special_tokens=False, return_offsets_mapping=True, verbose=False).offset_mapping
    return [(0, 0)] * len(models.encode(tokenizer, "")) + taken
