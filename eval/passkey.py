"""Passkey retrieval: does a model find a number that was told once, somewhere in a long and dull text?

Prompts are sized in tokens of the model's own tokenizer: at least 0.97 · length, and never so long that the answer
would not fit. Nothing is cut: sentences are whole, and a length that cannot be met is an error. The number has a fixed
count of digits, the first not 0. It follows from seed, length, depth and trial alone, so all methods read the same.
The filler follows from seed and length alone: prompts of one length differ only from their keys on, and what they have
in common before can be read once for all of them.

An answer counts if the first digits that the model *generates* are the number, all of it and nothing more. Beside the
hit stands how likely the model holds the number's digits to be, which moves long before answers turn right or wrong.
The idea is from landmark attention (arXiv 2305.16300); prompt and scoring are ours, sizes and depths are exact.
"""

import copy
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from transformers import Cache, DynamicCache

from eval.likelihood import read_on
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
    """One question. `key_position` counts the tokens before the key.

    `key_ids` are the right answer, as tokens after the prompt; none where a tokenizer joins it with the question.
    """

    length: int
    depth: float
    trial: int
    key: str
    key_position: int
    ids: list[int]
    key_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """One scored answer; what goes into a results line.

    `log_probs` are of the key's tokens that hold digits, each given all before it; None if they were not asked for.
    """

    length: int
    depth: float
    trial: int
    key: str
    key_position: int
    prompt_tokens: int
    answer: str
    correct: bool
    seconds: float
    log_probs: list[float] | None = None


def passkey(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int],
    *,
    depths: Sequence[float] = DEPTHS,
    trials: int = 4,
    digits: int = 5,
    seed: int = 0,
    log_probs: bool = False,
    share: bool = False,
    wanted: Callable[[int, float, int], bool] = lambda length, depth, trial: True,
) -> Iterator[Answer]:
    """Asks and scores one prompt after the other, greedily, with a model as it is: patch it before.

    Args:
        model: anything with transformers' `generate` and `device`; a transformers model for `log_probs` and `share`.
        lengths: tokens of prompt and answer together.
        depths: where the key stands among the sentences: 0 before the first, 1 after the last.
        trials: prompts per length and depth.
        log_probs: also scores the right answer, token by token, on a copy of the cache that the model answers from.
        share: prompts of one length, in the order of their depths, read what they have in common once, for the memory
            of one more cache. Five depths cost 1/1.8 of all tokens with 4 trials, 1/1.96 with 20, more with fewer.
            Only where `models.reads_in_pieces`.
        wanted: called with length, depth and trial; False leaves that prompt out (it is scored already).
    """
    for length in lengths:
        prompts = (
            build(tokenizer, length, depth, trial, digits=digits, seed=seed)
            for depth in depths
            for trial in range(trials)
            if wanted(length, depth, trial)
        )
        if share:
            yield from _ask_sharing(model, tokenizer, list(prompts), log_probs)
        else:
            yield from (ask(model, tokenizer, prompt, log_probs=log_probs) for prompt in prompts)


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
    begin = random.Random(f"{seed} {length}").randrange(len(FILLER))

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
    before = len(encode(tokenizer, prompt[: prompt.index(key)]))
    answered = encode(tokenizer, f"{prompt} {key}")
    return Prompt(length, depth, trial, key, before, ids, answered[len(ids) :] if answered[: len(ids)] == ids else [])


def answer_tokens(digits: int) -> int:
    """Tokens that are generated: room for the digits, one by one, and a few around them."""
    return digits + EXTRA_TOKENS


def ask(model: Any, tokenizer: Any, prompt: Prompt, cache: Cache | None = None, *, log_probs: bool = False) -> Answer:
    """Lets the model continue a prompt; `generate` computes one row of logits in the prefill.

    Args:
        cache: the first tokens of the prompt, read already; the rest is read on top of them.
        log_probs: also scores the right answer, on a copy of the cache.
    """
    began = time.perf_counter()
    found = None
    if log_probs:
        cache = new_cache(model) if cache is None else cache
        read = cache.get_seq_length()
        if read < len(prompt.ids) - 1:
            read_on(model, prompt.ids[read:-1], cache)
        found = key_log_probs(model, tokenizer, prompt, copy.deepcopy(cache))
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
    del fields["ids"], fields["key_ids"]
    return Answer(
        **fields,
        prompt_tokens=len(prompt.ids),
        answer=answer,
        correct=is_correct(answer, prompt.key),
        seconds=round(time.perf_counter() - began, 2),
        log_probs=found,
    )


def new_cache(model: Any) -> DynamicCache:
    """An empty cache of the layers that this model has."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def key_log_probs(model: Any, tokenizer: Any, prompt: Prompt, cache: Cache) -> list[float]:
    """Log-probabilities in nats of the key's tokens that hold digits, as the answer to a prompt.

    Args:
        cache: all tokens of the prompt but the last; what is read here is added to it.
    """
    if not prompt.key_ids:
        raise ValueError("the right answer has no tokens of its own after this prompt, so it has no log-probability")
    logits = read_on(model, [prompt.ids[-1], *prompt.key_ids[:-1]], cache, keep=len(prompt.key_ids))
    targets = torch.tensor(prompt.key_ids, device=logits.device)[:, None]
    found = logits.float().log_softmax(-1).gather(1, targets)[:, 0].tolist()
    pairs = zip(prompt.key_ids, found, strict=True)
    return [round(number, 5) for token, number in pairs if re.search(r"\d", tokenizer.decode([token]))]


def _ask_sharing(model: Any, tokenizer: Any, prompts: list[Prompt], log_probs: bool) -> Iterator[Answer]:
    """One cache grows with what all prompts still to come have in common; each is asked on a copy of it."""
    if not prompts:
        return
    prompts = sorted(prompts, key=lambda prompt: prompt.depth)
    common = [len(prompt.ids) - 1 for prompt in prompts]  # one token is left to `generate`
    for index, (prompt, following) in reversed(list(enumerate(pairwise(prompts)))):
        common[index] = min(common[index], common[index + 1], _common(prompt.ids, following.ids))
    cache = new_cache(model)
    for index, prompt in enumerate(prompts):
        began = time.perf_counter()
        read = cache.get_seq_length()
        if read < common[index]:
            read_on(model, prompt.ids[read : common[index]], cache)
        own = copy.deepcopy(cache) if index + 1 < len(prompts) else cache
        answer = ask(model, tokenizer, prompt, own, log_probs=log_probs)
        yield replace(answer, seconds=round(time.perf_counter() - began, 2))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two prompts start with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def is_correct(answer: str, key: str) -> bool:
    """Whether the first run of digits in an answer is the key."""
    found = re.search(r"\d+", answer)
    return found is not None and found[0] == key


def _most(size: Callable[[int], int], room: int) -> int:
    """The largest count whose size fits into `room`; `size(0)` does."""
    low, high = 0, 1
    while size(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= room else (low, middle)
    return low
