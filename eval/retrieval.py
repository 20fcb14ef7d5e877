"""Asks a model for what is hidden in its prompt: one mechanism for `passkey` and `needle`.

An answer is what the model *generates*, graded in several ways. Beside it stands how likely the model holds the right
answer to be, which moves long before answers turn right or wrong.
"""

import copy
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from transformers import Cache, DynamicCache

from eval.grading import grades
from eval.haystack import Prompt
from eval.likelihood import read_on
from eval.models import CACHE

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRIALS = 5


@dataclass(frozen=True)
class Answer:
    """One graded answer; what goes into a results line, and all that any grading needs.

    Attributes:
        truncated: tokens of the prompt that the model did not receive; must be 0.
        key_ids, answer_ids: tokens of the right answer and of what was generated.
        correct: the share that is right, 0 to 1, by every scoring.
        log_probs: in nats, of the right answer's tokens that hold values, each given all before it; None if they were
            not asked for.
    """

    length: int
    depth: float
    trial: int
    references: list[str]
    key_position: int
    prompt_tokens: int
    truncated: int
    key_ids: list[int]
    answer: str
    answer_ids: list[int]
    correct: dict[str, float]
    seconds: float
    log_probs: list[float] | None = None


def retrieve(
    model: Any,
    tokenizer: Any,
    build: Callable[[int, float, int], Prompt],
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    trials: int = TRIALS,
    *,
    log_probs: bool = False,
    share: bool = False,
    wanted: Callable[[int, float, int], bool] = lambda length, depth, trial: True,
) -> Iterator[Answer]:
    """Asks and grades one prompt after the other, greedily, with a model as it is: patch it before.

    Args:
        model: anything with transformers' `generate` and `device`; a transformers model for `log_probs` and `share`.
        build: makes the prompt of a length, a depth and a trial.
        lengths: tokens of prompt and answer together.
        trials: prompts per length and depth.
        log_probs: also scores the right answer, token by token, on a copy of the cache that the model answers from.
        share: prompts of one length, in the order of their depths, read what they have in common once, for the memory
            of one more cache. Five depths of five trials cost 1/1.8 of all tokens from 2,048 on, answers included,
            less with more trials, more with several needles in a short text. Only where `models.reads_in_pieces`.
        wanted: called with length, depth and trial; False leaves that prompt out (it is scored already).
    """
    for length in lengths:
        prompts = (
            build(length, depth, trial) for depth in depths for trial in range(trials) if wanted(length, depth, trial)
        )
        if share:
            yield from _ask_sharing(model, tokenizer, prompts, log_probs)
        else:
            yield from (ask(model, tokenizer, prompt, log_probs=log_probs) for prompt in prompts)


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
    ids = torch.tensor([prompt.ids], device=model.device)
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=prompt.room,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.eos_token_id,
        **({} if cache is None else {CACHE: cache}),
    )[0].tolist()
    answer_ids = generated[len(prompt.ids) :][: prompt.room]
    answer = tokenizer.decode(answer_ids, skip_special_tokens=True)
    return Answer(
        length=prompt.length,
        depth=prompt.depth,
        trial=prompt.trial,
        references=prompt.references,
        key_position=prompt.key_position,
        prompt_tokens=len(prompt.ids),
        truncated=len(prompt.ids) - _received(prompt, generated, cache),
        key_ids=prompt.key_ids,
        answer=answer,
        answer_ids=answer_ids,
        correct=grades(answer, prompt.references, answer_ids, prompt.key_ids),
        seconds=round(time.perf_counter() - began, 2),
        log_probs=found,
    )


def new_cache(model: Any) -> DynamicCache:
    """An empty cache of the layers that this model has."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def key_log_probs(model: Any, tokenizer: Any, prompt: Prompt, cache: Cache) -> list[float]:
    """Log-probabilities in nats of the right answer's tokens that hold values, after a prompt.

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


def _ask_sharing(model: Any, tokenizer: Any, prompts: Iterable[Prompt], log_probs: bool) -> Iterator[Answer]:
    """One cache grows with what all prompts still to come have in common; each is asked on a copy of it."""
    prompts = sorted(prompts, key=lambda prompt: prompt.depth)
    if not prompts:
        return
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


def _received(prompt: Prompt, generated: Sequence[int], cache: Cache | None) -> int:
    """Tokens of a prompt that the model took in: as it gives them back, and as its cache counts them.

    The cache also holds what was generated, but for the last token.
    """
    returned = _common(prompt.ids, generated)
    if cache is None:
        return returned
    return min(returned, cache.get_seq_length() - (len(generated) - len(prompt.ids) - 1))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two prompts start with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
