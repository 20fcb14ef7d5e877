"""Passkey retrieval: does a model find a number that was told once, somewhere in a long and dull text?

Prompts are sized in tokens of the model's own tokenizer: at least 0.97 · length, and never so long that the answer
would not fit. Nothing is cut: sentences are whole, and a length that cannot be met is an error. The number has a fixed
count of digits, the first not 0. It follows from seed, length, depth and trial alone, so all methods read the same.

An answer counts if the first digits that the model *generates* are the number, all of it and nothing more.
The idea is from landmark attention (arXiv 2305.16300); prompt and scoring are ours, sizes and depths are exact.
"""

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Cache

from eval.models import CACHE, encode

EXTRA_TOKENS = 5  # of the answer, beside the digits
FILL = 0.97
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
HEAD = "Somewhere in the notes below a pass key is written down. Find the pass key and keep it in mind.\n\n"
FILLER = (
    "A boat went down the river and nobody was in a hurry.",
    "The old clock in the hall was slow again.",
    "Two dogs slept in the shade of the wall.",
    "It had rained in the morning, and the road was still wet.",
    "Someone had left a basket of apples by the door.",
    "The wind moved the curtains a little.",
    "Later the baker closed his shop and walked home.",
)
SHORT_FILLER = ("All was quiet.", "So.")
KEY = "The pass key is {key}. Keep it in mind: {key} is the pass key."
QUESTION = "\n\nThat is the end of the notes. What was the pass key?\nThe pass key is"


@dataclass(frozen=True)
class Prompt:
    """One question. `key_position` counts the tokens before the key."""

    length: int
    depth: float
    trial: int
    key: str
    key_position: int
    ids: list[int]


@dataclass(frozen=True)
class Answer:
    """One scored answer; what goes into a results line."""

    length: int
    depth: float
    trial: int
    key: str
    key_position: int
    prompt_tokens: int
    answer: str
    correct: bool
    seconds: float


def passkey(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int],
    *,
    depths: Sequence[float] = DEPTHS,
    trials: int = 4,
    digits: int = 5,
    seed: int = 0,
    wanted: Callable[[int, float, int], bool] = lambda length, depth, trial: True,
) -> Iterator[Answer]:
    """Asks and scores one prompt after the other, greedily, with a model as it is: patch it before.

    Args:
        model: anything with transformers' `generate` and `device`.
        lengths: tokens of prompt and answer together.
        depths: where the key stands among the sentences: 0 before the first, 1 after the last.
        trials: prompts per length and depth.
        wanted: called with length, depth and trial; False leaves that prompt out (it is scored already).
    """
    for length in lengths:
        for depth in depths:
            for trial in range(trials):
                if wanted(length, depth, trial):
                    yield ask(model, tokenizer, build(tokenizer, length, depth, trial, digits=digits, seed=seed))


def build(tokenizer: Any, length: int, depth: float, trial: int = 0, *, digits: int = 5, seed: int = 0) -> Prompt:
    """A prompt that leaves room for the answer in `length` tokens.

    Raises:
        ValueError: `length` is too short, a depth outside [0, 1], or a tokenizer that loses the key.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth {depth} must lie in [0, 1]: 0 is the start of the text, 1 its end")
    if digits < 1:
        raise ValueError(f"digits must be at least 1, got {digits}")
    draw = random.Random(f"{seed} {length} {float(depth)} {trial}")
    key = str(draw.randrange(10 ** (digits - 1), 10**digits))
    begin = draw.randrange(len(FILLER))

    def text(counts: list[int]) -> str:
        sentences = [FILLER[(begin + index) % len(FILLER)] for index in range(counts[0])]
        for short, count in zip(SHORT_FILLER, counts[1:], strict=False):
            sentences += [short] * count
        sentences.insert(round(depth * len(sentences)), KEY.format(key=key))
        return HEAD + " ".join(sentences) + QUESTION

    def tokens(counts: list[int]) -> int:
        return len(encode(tokenizer, text(counts)))

    room = length - answer_tokens(digits)
    if room < tokens([0]):
        raise ValueError(f"length {length} is too short: the question takes {tokens([0])} tokens and its answer "
                         f"{answer_tokens(digits)}, without any filler")  # fmt: skip
    counts: list[int] = []
    for _ in (FILLER, *SHORT_FILLER):
        counts.append(_most(lambda count: tokens([*counts, count]), room))
    prompt = text(counts)
    ids = encode(tokenizer, prompt)
    if len(ids) < FILL * length:
        raise ValueError(f"length {length} is too short: beside {answer_tokens(digits)} tokens for the answer, whole "
                         f"sentences fill {len(ids)}, less than {FILL:.0%} of it; take a longer one")  # fmt: skip
    if key not in tokenizer.decode(ids):
        raise ValueError("the pass key does not survive this tokenizer, which has no tokens for its digits")
    return Prompt(length, depth, trial, key, len(encode(tokenizer, prompt[: prompt.index(key)])), ids)


def answer_tokens(digits: int) -> int:
    """Tokens that are generated: room for the digits, one by one, and a few around them."""
    return digits + EXTRA_TOKENS


def ask(model: Any, tokenizer: Any, prompt: Prompt, cache: Cache | None = None) -> Answer:
    """Lets the model continue a prompt; `generate` computes one row of logits in the prefill.

    Args:
        cache: the first tokens of the prompt, read already; the rest is read on top of them.
    """
    began = time.perf_counter()
    limit = answer_tokens(len(prompt.key))
    ids = torch.tensor([prompt.ids], device=model.device)
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=limit,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.eos_token_id,
        **({} if cache is None else {CACHE: cache}),
    )
    answer = tokenizer.decode(generated[0, len(prompt.ids) :][:limit], skip_special_tokens=True)
    fields = asdict(prompt)
    del fields["ids"]
    return Answer(
        **fields,
        prompt_tokens=len(prompt.ids),
        answer=answer,
        correct=is_correct(answer, prompt.key),
        seconds=round(time.perf_counter() - began, 2),
    )


def is_correct(answer: str, key: str) -> bool:
    """Whether the first run of digits in an answer is the key."""
    found = re.search(r"\d+", answer)
    return found is not None and found[0] == key


def wilson(correct: float, count: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927), which stays honest at 0 and at 100 %."""
    z = 1.959964
    centre = (correct + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(correct * (count - correct) / count + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def _most(size: Callable[[int], int], room: int) -> int:
    """The largest count whose size fits into `room`; `size(0)` does."""
    low, high = 0, 1
    while size(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= room else (low, middle)
    return low
