"""T5's task: spans of the text are replaced by sentinels, and the decoder writes what was there (arXiv 1910.10683).

15 % of the tokens are hidden in spans of 3 on average; a text with more spans than sentinels gets longer spans.
"""

import itertools
import random
from typing import Any

import torch

DENSITY, SPAN = 0.15, 3


def sentinels_of(tokenizer: Any) -> list[int]:
    """Ids of `<extra_id_0>`, `<extra_id_1>` …, in this order.

    Raises:
        ValueError: the tokenizer has none.
    """
    known = tokenizer.get_vocab()
    found = [f"<extra_id_{number}>" for number in range(len(known))]
    ids = []
    for token in found:
        if token not in known:
            break
        ids.append(known[token])
    if len(ids) < 2:
        raise ValueError("the tokenizer has no sentinels <extra_id_0>, <extra_id_1> …, by which T5 learns from text")
    return ids


def hide_spans(ids: torch.Tensor, sentinels: list[int], end: int, draw: random.Random) -> dict[str, torch.Tensor]:
    """What the encoder reads and what the decoder has to write, of a text of two tokens or more.

    Args:
        ids: `(tokens,)`; tokens of the text are never dropped, only moved to the labels.
        end: closes the labels.
    """
    hidden = min(max(1, round(len(ids) * DENSITY)), len(ids) - 1)
    count = min(max(1, round(hidden / SPAN)), len(sentinels) - 1, hidden, len(ids) - hidden)
    sizes, gaps = _parts(hidden, count, draw), _parts(len(ids) - hidden, count, draw)
    read, written, place = [], [], 0
    for number, (gap, size) in enumerate(zip(gaps, sizes, strict=True)):
        mark = ids.new_tensor([sentinels[number]])
        read += [ids[place : place + gap], mark]
        written += [mark, ids[place + gap : place + gap + size]]
        place += gap + size
    labels = torch.cat([*written, ids.new_tensor([sentinels[count], end])])
    text = torch.cat([*read, ids[place:]])
    return {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": labels}


def _parts(total: int, count: int, draw: random.Random) -> list[int]:
    """A whole number as the sum of `count` positive ones, all sums alike."""
    cuts = [0, *sorted(draw.sample(range(1, total), count - 1)), total]
    return [stop - start for start, stop in itertools.pairwise(cuts)]
